"""Storage formats of the optimizer for the moments m and v.

A moment format decodes a state to fp32, encodes fp32, and computes a step of an exponential moving
average. No format writes in place: `AdamW` writes the results of all formats, so that skipping a
step is one `where`.

A state is a dict of flat tensors by suffix: "" is the moment or the master itself; ".scale", ".k"
and others are what decoding needs besides. A tensor has one entry for each of n elements, or for
each of n / 128 blocks of consecutive elements. FP8 codes are stored as uint8, which every
collective, comparison and file format supports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from coatlm.fp8.expand import Expanded, Expansion, expand_dequantize, expand_quantize
from coatlm.fp8.formats import SCALE_BLOCK, SMALLEST
from coatlm.optim import collage

State = Mapping[str, Tensor]  # suffix -> flat tensor
Stored = dict[str, Tensor]


class Proposal(NamedTuple):
    """The result of a step for a range of elements, before it is written."""

    update: Tensor  # fp32, to be added to the weights
    weight: Tensor  # in the model's dtype
    states: Stored


def named_state(states: Mapping[str, Tensor], name: str) -> Stored:
    """The tensors of the state `name`, by suffix, out of those of all states."""
    parts = [key.partition(".") for key in states]
    return {dot + rest: states[key + dot + rest] for key, dot, rest in parts if key == name}


class MomentFormat(Protocol):
    """The storage format of m or v; kernels branch on `kind`."""

    kind: ClassVar[str]

    def zeros(self, n: int, device: torch.device) -> Stored:
        """The state of a moment of n zeros."""

    def decode(self, state: State) -> Tensor:
        """The moment, fp32[n]."""

    def encode(self, x: Tensor) -> Stored:
        """The state of the moment x, fp32[n], rounded to nearest; n is a multiple of 128."""

    def ema(self, state: State, x: Tensor, beta: float) -> tuple[Tensor, Stored]:
        """beta * state + (1 - beta) * x for x fp32[n]: its fp32 value before rounding, which the
        current update uses, and the state to store.
        """


@dataclass(frozen=True)
class Fp32:
    """The moment in fp32."""

    kind: ClassVar[str] = "fp32"

    def zeros(self, n: int, device: torch.device) -> Stored:
        return {"": torch.zeros(n, device=device)}

    def decode(self, state: State) -> Tensor:
        return state[""]

    def encode(self, x: Tensor) -> Stored:
        return {"": x}

    def ema(self, state: State, x: Tensor, beta: float) -> tuple[Tensor, Stored]:
        moment = beta * state[""] + (1 - beta) * x
        return moment, {"": moment}


@dataclass(frozen=True)
class Bf16:
    """The moment in BF16, arithmetic too: bf16(bf16(beta m) + bf16((1 - beta) x)).

    The update uses the rounded moment.
    """

    kind: ClassVar[str] = "bf16"

    def zeros(self, n: int, device: torch.device) -> Stored:
        return {"": torch.zeros(n, dtype=torch.bfloat16, device=device)}

    def decode(self, state: State) -> Tensor:
        return state[""].float()

    def encode(self, x: Tensor) -> Stored:
        return {"": x.bfloat16()}

    def ema(self, state: State, x: Tensor, beta: float) -> tuple[Tensor, Stored]:
        moment = (beta * state[""].float()).bfloat16() + ((1 - beta) * x).bfloat16()
        return moment.float(), {"": moment}


@dataclass(frozen=True)
class Bf16Pair:
    """The moment as a BF16 pair: v of Collage-plus (Collage section 4.2).

    Each step is `grow(mul(moment, beta), bf16((1 - beta) x))`. beta is a pair as well: 0.999 rounds
    to 1 in BF16, and the average would never decay.
    """

    kind: ClassVar[str] = "pair"

    def zeros(self, n: int, device: torch.device) -> Stored:
        return {s: torch.zeros(n, dtype=torch.bfloat16, device=device) for s in ("", ".low")}

    def decode(self, state: State) -> Tensor:
        return state[""].float() + state[".low"].float()

    def encode(self, x: Tensor) -> Stored:
        high = x.bfloat16()
        return {"": high, ".low": (x - high.float()).bfloat16()}

    def ema(self, state: State, x: Tensor, beta: float) -> tuple[Tensor, Stored]:
        factor = [state[""].new_tensor(part) for part in collage.bf16_pair(beta)]
        decayed = collage.mul(state[""], state[".low"], factor[0], factor[1])
        high, low = collage.grow(*decayed, ((1 - beta) * x).bfloat16())
        stored = {"": high, ".low": low}
        return self.decode(stored), stored


@dataclass(frozen=True)
class ExpandedFp8:
    """COAT's expanded FP8: a code per element, k and log2(scale) per block (`fp8.expand`)."""

    kind: ClassVar[str] = "expanded"
    how: Expansion

    def zeros(self, n: int, device: torch.device) -> Stored:
        return {
            "": torch.zeros(n, dtype=torch.uint8, device=device),
            ".k": torch.zeros(n // SCALE_BLOCK, dtype=torch.uint8, device=device),
            ".scale": torch.zeros(n // SCALE_BLOCK, device=device),
        }

    def decode(self, state: State) -> Tensor:
        codes = state[""].view(self.how.fmt.dtype)
        return expand_dequantize(Expanded(codes, state[".k"], state[".scale"]), self.how)

    def encode(self, x: Tensor) -> Stored:
        codes, k, scale = expand_quantize(x, self.how)
        return {"": codes.view(torch.uint8), ".k": k, ".scale": scale}

    def ema(self, state: State, x: Tensor, beta: float) -> tuple[Tensor, Stored]:
        moment = beta * self.decode(state) + (1 - beta) * x
        return moment, self.encode(moment)


@dataclass(frozen=True)
class TensorScaled:
    """FP8-LM: codes with tensor-wise scaling; the scale is stored once per block.

    The scale is a power of two, so that a representable value keeps its bits when the scale
    changes. Where `encode` gets a part of a parameter, `least` is the scale of the whole.
    """

    kind: ClassVar[str] = "scaled"
    dtype: torch.dtype  # float8_e4m3fn or float16
    least: Tensor | None = None  # fp32 []

    @property
    def fp8(self) -> bool:
        return self.dtype.itemsize == 1

    @property
    def max(self) -> float:
        return torch.finfo(self.dtype).max

    def zeros(self, n: int, device: torch.device) -> Stored:
        code = torch.zeros(n, dtype=self.dtype, device=device)
        return _code_and_scale(code, torch.ones(n // SCALE_BLOCK, device=device))

    def decode(self, state: State) -> Tensor:
        code = state[""].view(self.dtype) if self.fp8 else state[""]
        return code.float() * state[".scale"].repeat_interleave(SCALE_BLOCK)

    def encode(self, x: Tensor) -> Stored:
        """Codes and scales; max|x| / scale is in (MAX / 2, MAX] of the format, without `least`."""
        scale = _power_of_two_above(x.abs().amax() / self.max)
        if self.least is not None:
            scale = torch.maximum(scale, self.least)
        return _code_and_scale((x / scale).to(self.dtype), scale.expand(x.numel() // SCALE_BLOCK))

    def ema(self, state: State, x: Tensor, beta: float) -> tuple[Tensor, Stored]:
        moment = beta * self.decode(state) + (1 - beta) * x
        return moment, self.encode(moment)

    def at_least(self, scale: Tensor) -> TensorScaled:
        """The format whose scales are at least `scale`, fp32 []."""
        return replace(self, least=scale)


def _code_and_scale(code: Tensor, scale: Tensor) -> Stored:
    return {"": code.view(torch.uint8) if code.itemsize == 1 else code, ".scale": scale}


def _power_of_two_above(x: Tensor) -> Tensor:
    """The smallest normal power of two >= x, exact."""
    bits = x.clamp(min=SMALLEST).view(torch.int32)
    return ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)
