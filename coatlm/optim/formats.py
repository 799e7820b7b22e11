"""Storage formats of the optimizer for the moments m and v and for the weight.

A moment format decodes a state to fp32, encodes fp32, and computes a step of an exponential moving
average; a weight format decodes, encodes, and adds an update to the weight. No format writes in
place: `AdamW` writes the results of all formats, so that skipping a step is one `where`.

A state is a dict of flat tensors by suffix: "" is the moment or the master itself; ".scale", ".k"
and others are what decoding needs besides. A tensor has one entry for each of n elements, or for
each of n / 128 blocks of consecutive elements. FP8 codes are stored as uint8, which every
collective, comparison and file format supports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from coatlm.fp8.expand import Expanded, Expansion, expand_dequantize, expand_quantize
from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.optim import collage

SMALLEST_SCALE = 2.0**-126  # smallest normal fp32: the scale of an all-zero tensor

State = Mapping[str, Tensor]  # suffix -> flat tensor
Stored = dict[str, Tensor]


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


class WeightFormat(Protocol):
    """The storage format of the bits of a weight that the model's own tensor does not hold."""

    kind: ClassVar[str]

    def initial(self, weight: Tensor) -> Stored:
        """The state with which `decode` gives the weight as the model has it."""

    def decode(self, weight: Tensor, state: State) -> Tensor:
        """The weight at its full precision, fp32[n]; may be the stored tensor, not a copy."""

    def encode(self, master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Stored]:
        """The model's weight, of type `dtype`, and the state for a weight of fp32[n]."""

    def add(self, weight: Tensor, state: State, update: Tensor) -> tuple[Tensor, Stored]:
        """weight + update for update fp32[n]: the model's new weight, and the state to store."""


# --- moments ------------------------------------------------------------------------------------


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
    changes. Where x is only a part of a parameter, `least` is the scale of the whole.
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
    bits = x.clamp(min=SMALLEST_SCALE).view(torch.int32)
    return ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)


# --- weights ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Master:
    """An fp32 master weight. A weight that is fp32 itself needs no state."""

    kind: ClassVar[str] = "master"

    def initial(self, weight: Tensor) -> Stored:
        return {} if weight.dtype == torch.float32 else {"": weight.float()}

    def decode(self, weight: Tensor, state: State) -> Tensor:
        return state.get("", weight)

    def encode(self, master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Stored]:
        return (master, {}) if dtype == torch.float32 else (nearest_bf16(master), {"": master})

    def add(self, weight: Tensor, state: State, update: Tensor) -> tuple[Tensor, Stored]:
        return self.encode(self.decode(weight, state) + update, weight.dtype)


@dataclass(frozen=True)
class Remainder:
    """The master's low bits as an integer: master = BF16 weight (16 bits) and `bits` bits more.

    With bits=16 the two are the fp32 master exactly; with bits=8 the master is rounded to 24 bits.
    """

    kind: ClassVar[str] = "remainder"
    bits: int

    @property
    def shift(self) -> int:
        """The number of low bits of fp32 that are not stored."""
        return 16 - self.bits

    @property
    def dtype(self) -> torch.dtype:
        return torch.int16 if self.bits == 16 else torch.int8

    def initial(self, weight: Tensor) -> Stored:
        return {".remainder": torch.zeros_like(weight, dtype=self.dtype)}

    def decode(self, weight: Tensor, state: State) -> Tensor:
        # a negative remainder means that the weight was rounded up: adding it undoes that
        high = weight.view(torch.int16).int() << 16
        return (high + (state[".remainder"].int() << self.shift)).view(torch.float32)

    def encode(self, master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Stored]:
        rounded = _round_bits(master, self.shift)
        low = ((rounded << 16) >> (16 + self.shift)).to(self.dtype)
        return nearest_bf16(rounded.view(torch.float32)), {".remainder": low}

    def add(self, weight: Tensor, state: State, update: Tensor) -> tuple[Tensor, Stored]:
        return self.encode(self.decode(weight, state) + update, weight.dtype)


@dataclass(frozen=True)
class TensorScaledMaster:
    """FP8-LM: a master weight with tensor-wise scaling, FP16 in the paper's optimizer."""

    kind: ClassVar[str] = "scaled"
    scaled: TensorScaled = TensorScaled(torch.float16)

    @property
    def fp8(self) -> bool:
        return self.scaled.fp8

    @property
    def max(self) -> float:
        return self.scaled.max

    def initial(self, weight: Tensor) -> Stored:
        return self.scaled.encode(weight.float())

    def decode(self, weight: Tensor, state: State) -> Tensor:
        return self.scaled.decode(state)

    def encode(self, master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Stored]:
        return nearest_bf16(master), self.scaled.encode(master)

    def add(self, weight: Tensor, state: State, update: Tensor) -> tuple[Tensor, Stored]:
        return self.encode(self.decode(weight, state) + update, weight.dtype)

    def at_least(self, scale: Tensor) -> TensorScaledMaster:
        """The format whose scales are at least `scale`, fp32 []."""
        return TensorScaledMaster(self.scaled.at_least(scale))


@dataclass(frozen=True)
class Direct:
    """No state: the new weight is bf16(w + bf16(update))."""

    kind: ClassVar[str] = "direct"

    def initial(self, weight: Tensor) -> Stored:
        return {}

    def decode(self, weight: Tensor, state: State) -> Tensor:
        return weight.float()

    def encode(self, master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Stored]:
        return nearest_bf16(master), {}

    def add(self, weight: Tensor, state: State, update: Tensor) -> tuple[Tensor, Stored]:
        return weight + update.bfloat16(), {}


@dataclass(frozen=True)
class Kahan:
    """Kahan summation: the rounding error of an update is stored and added to the next one."""

    kind: ClassVar[str] = "kahan"

    def initial(self, weight: Tensor) -> Stored:
        return {".compensation": torch.zeros_like(weight)}

    def decode(self, weight: Tensor, state: State) -> Tensor:
        return weight.float() + state[".compensation"].float()

    def encode(self, master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Stored]:
        high, low = _halves(master)
        return high, {".compensation": low}

    def add(self, weight: Tensor, state: State, update: Tensor) -> tuple[Tensor, Stored]:
        total = update.bfloat16() + state[".compensation"]
        new = weight + total
        return new, {".compensation": total - (new - weight)}


@dataclass(frozen=True)
class Pair:
    """Collage: the weight is the high half of a BF16 pair; the low half is the state."""

    kind: ClassVar[str] = "pair"

    def initial(self, weight: Tensor) -> Stored:
        return {".low": torch.zeros_like(weight)}

    def decode(self, weight: Tensor, state: State) -> Tensor:
        return weight.float() + state[".low"].float()

    def encode(self, master: Tensor, dtype: torch.dtype) -> tuple[Tensor, Stored]:
        high, low = _halves(master)
        return high, {".low": low}

    def add(self, weight: Tensor, state: State, update: Tensor) -> tuple[Tensor, Stored]:
        high, low = collage.grow(weight, state[".low"], update.bfloat16())
        return high, {".low": low}


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 x as two BF16 numbers: the nearest, and the nearest to what is left."""
    high = nearest_bf16(x)
    return high, (x - high.float()).bfloat16()


def nearest_bf16(x: Tensor) -> Tensor:
    """Round fp32 x to the nearest BF16 number, ties away from zero.

    With ties to even, 2^16 + 1 masters would round to each even weight, one more than a remainder
    of 16 bits can distinguish. The other recipes round the same way, so that weights of different
    recipes can be compared.
    """
    return (_round_bits(x, 16) >> 16).to(torch.int16).view(torch.bfloat16)


def _round_bits(x: Tensor, bits: int) -> Tensor:
    """The int32 bits of fp32 x, rounded to a multiple of 2^bits: to nearest, ties away from zero.

    Without the clamp the NaN of NVIDIA GPUs, 0x7FFFFFFF, would overflow and become zero.
    """
    half = (1 << bits) >> 1
    raw = x.view(torch.int32).clamp(max=0x7FFFFFFF - half)
    return (raw + half) & -(1 << bits)
