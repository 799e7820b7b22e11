"""How the optimizer stores m, v and the weight: one class a format, all of them values.

A moment format decodes what is stored to fp32 and takes one step of an exponential moving average;
a weight format adds an update to what is stored. None writes in place: `AdamW` does that once, for
all formats, so that skipping a step is one `where`.

A state is a dict of flat tensors by suffix: "" is the moment or the master itself, ".scale" and
others are what decoding needs besides. A tensor has an entry for each of n elements, or for each of
n / 128 groups. FP8 codes are uint8, which every collective, comparison and file format takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from coatlm.fp8.expand import Expanded as ExpandedState
from coatlm.fp8.expand import Expansion, expand_dequantize, expand_quantize
from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.optim import expansion

SMALLEST_SCALE = 2.0**-126  # smallest normal fp32: the scale of an all-zero tensor

State = Mapping[str, Tensor]  # suffix -> flat tensor
Stored = dict[str, Tensor]


class MomentFormat(Protocol):
    """Storage of m or v; `kind` is its name in kernels."""

    kind: ClassVar[str]

    def zeros(self, n: int, device: torch.device) -> Stored:
        """The state of n zeros."""

    def decode(self, state: State) -> Tensor:
        """fp32[n]."""

    def ema(self, state: State, x: Tensor, beta: float) -> tuple[Tensor, Stored]:
        """beta * state + (1 - beta) * x for x fp32[n]: the fp32 value to use now, and to store."""


class WeightFormat(Protocol):
    """Storage of what is known of a weight beyond the tensor that the model computes with."""

    kind: ClassVar[str]

    def split(self, weight: Tensor) -> Stored:
        """The state of a weight of which nothing more is known."""

    def decode(self, weight: Tensor, state: State) -> Tensor:
        """fp32[n], as precisely as it is known; may be the very tensor that is stored."""

    def add(self, weight: Tensor, state: State, update: Tensor) -> tuple[Tensor, Stored]:
        """weight + update, for update fp32[n]: the model's weight, and the state."""


# --- moments ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fp32:
    """The moment itself."""

    kind: ClassVar[str] = "fp32"

    def zeros(self, n: int, device: torch.device) -> Stored:
        return {"": torch.zeros(n, device=device)}

    def decode(self, state: State) -> Tensor:
        return state[""]

    def ema(self, state: State, x: Tensor, beta: float) -> tuple[Tensor, Stored]:
        moment = beta * state[""] + (1 - beta) * x
        return moment, {"": moment}


@dataclass(frozen=True)
class Bf16:
    """BF16 throughout: bf16(bf16(beta m) + bf16((1 - beta) x)), used as it is stored."""

    kind: ClassVar[str] = "bf16"

    def zeros(self, n: int, device: torch.device) -> Stored:
        return {"": torch.zeros(n, dtype=torch.bfloat16, device=device)}

    def decode(self, state: State) -> Tensor:
        return state[""].float()

    def ema(self, state: State, x: Tensor, beta: float) -> tuple[Tensor, Stored]:
        moment = (beta * state[""].float()).bfloat16() + ((1 - beta) * x).bfloat16()
        return moment.float(), {"": moment}


@dataclass(frozen=True)
class Bf16Pair:
    """Collage-plus: a BF16 pair times a BF16 pair, grown by a BF16 number (Collage section 4.2).

    beta needs its low half too: 0.999 alone rounds to 1 in BF16, and the average would never decay.
    """

    kind: ClassVar[str] = "pair"

    def zeros(self, n: int, device: torch.device) -> Stored:
        return {s: torch.zeros(n, dtype=torch.bfloat16, device=device) for s in ("", ".low")}

    def decode(self, state: State) -> Tensor:
        return state[""].float() + state[".low"].float()

    def ema(self, state: State, x: Tensor, beta: float) -> tuple[Tensor, Stored]:
        factor = [state[""].new_tensor(part) for part in expansion.split(beta)]
        decayed = expansion.mul(state[""], state[".low"], factor[0], factor[1])
        high, low = expansion.grow(*decayed, ((1 - beta) * x).bfloat16())
        stored = {"": high, ".low": low}
        return self.decode(stored), stored


@dataclass(frozen=True)
class Expanded:
    """COAT: FP8 codes, k and log2 of a scale for each group (`fp8.expand`)."""

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
        return expand_dequantize(ExpandedState(codes, state[".k"], state[".scale"]), self.how)

    def encode(self, x: Tensor) -> Stored:
        codes, k, scale = expand_quantize(x, self.how)
        return {"": codes.view(torch.uint8), ".k": k, ".scale": scale}

    def ema(self, state: State, x: Tensor, beta: float) -> tuple[Tensor, Stored]:
        moment = beta * self.decode(state) + (1 - beta) * x
        return moment, self.encode(moment)


@dataclass(frozen=True)
class TensorScaled:
    """FP8-LM: a code times one power of two for the whole tensor, repeated for each group.

    x is a whole parameter, or this rank's part of it. A power of two changes no significand, so a
    value whose scale moves keeps its bits.
    """

    kind: ClassVar[str] = "scaled"
    dtype: torch.dtype  # float8_e4m3fn or float16

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
        """Codes and scales; the largest magnitude lands in the upper half of the format's range."""
        scale = _power_of_two_above(x.abs().amax() / self.max)
        return _code_and_scale((x / scale).to(self.dtype), scale.expand(x.numel() // SCALE_BLOCK))

    def ema(self, state: State, x: Tensor, beta: float) -> tuple[Tensor, Stored]:
        moment = beta * self.decode(state) + (1 - beta) * x
        return moment, self.encode(moment)


def _code_and_scale(code: Tensor, scale: Tensor) -> Stored:
    return {"": code.view(torch.uint8) if code.itemsize == 1 else code, ".scale": scale}


def _power_of_two_above(x: Tensor) -> Tensor:
    """The smallest normal power of two that is not below x, exactly."""
    bits = x.clamp(min=SMALLEST_SCALE).view(torch.int32)
    return ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)


# --- weights ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Master:
    """An fp32 master; an fp32 weight is its own."""

    kind: ClassVar[str] = "master"

    def split(self, weight: Tensor) -> Stored:
        return {} if weight.dtype == torch.float32 else {"": weight.float()}

    def decode(self, weight: Tensor, state: State) -> Tensor:
        return state.get("", weight)

    def add(self, weight: Tensor, state: State, update: Tensor) -> tuple[Tensor, Stored]:
        master = self.decode(weight, state) + update
        return (nearest_bf16(master), {"": master}) if state else (master, {})


@dataclass(frozen=True)
class Remainder:
    """What a master of 16 + `bits` bits has beyond its BF16 weight: the low ones, as an integer.

    With 16 bits the two together are the fp32 master exactly; with 8 it is rounded to 24 bits.
    """

    kind: ClassVar[str] = "remainder"
    bits: int

    @property
    def shift(self) -> int:
        """Bits of fp32 that are not stored."""
        return 16 - self.bits

    def split(self, weight: Tensor) -> Stored:
        dtype = torch.int16 if self.bits == 16 else torch.int8
        return {".remainder": torch.zeros_like(weight, dtype=dtype)}

    def decode(self, weight: Tensor, state: State) -> Tensor:
        # where the remainder is negative it rounded the weight up, and is taken off again
        high = weight.view(torch.int16).int() << 16
        return (high + (state[".remainder"].int() << self.shift)).view(torch.float32)

    def add(self, weight: Tensor, state: State, update: Tensor) -> tuple[Tensor, Stored]:
        master = _round_bits(self.decode(weight, state) + update, self.shift)
        low = ((master << 16) >> (16 + self.shift)).to(state[".remainder"].dtype)
        return nearest_bf16(master.view(torch.float32)), {".remainder": low}


MASTER16 = TensorScaled(torch.float16)


@dataclass(frozen=True)
class TensorScaledMaster:
    """FP8-LM: an FP16 master with a scale for the whole tensor."""

    kind: ClassVar[str] = "scaled"
    fp8: ClassVar[bool] = MASTER16.fp8
    max: ClassVar[float] = MASTER16.max

    def split(self, weight: Tensor) -> Stored:
        return MASTER16.encode(weight.float())

    def decode(self, weight: Tensor, state: State) -> Tensor:
        return MASTER16.decode(state)

    def add(self, weight: Tensor, state: State, update: Tensor) -> tuple[Tensor, Stored]:
        master = self.decode(weight, state) + update
        return nearest_bf16(master), MASTER16.encode(master)


@dataclass(frozen=True)
class Direct:
    """Nothing but the BF16 weight: w + bf16(update), rounded."""

    kind: ClassVar[str] = "direct"

    def split(self, weight: Tensor) -> Stored:
        return {}

    def decode(self, weight: Tensor, state: State) -> Tensor:
        return weight.float()

    def add(self, weight: Tensor, state: State, update: Tensor) -> tuple[Tensor, Stored]:
        return weight + update.bfloat16(), {}


@dataclass(frozen=True)
class Kahan:
    """Compensated summation: what rounding took from the last update is added to the next."""

    kind: ClassVar[str] = "kahan"

    def split(self, weight: Tensor) -> Stored:
        return {".compensation": torch.zeros_like(weight)}

    def decode(self, weight: Tensor, state: State) -> Tensor:
        return weight.float() + state[".compensation"].float()

    def add(self, weight: Tensor, state: State, update: Tensor) -> tuple[Tensor, Stored]:
        total = update.bfloat16() + state[".compensation"]
        new = weight + total
        return new, {".compensation": total - (new - weight)}


@dataclass(frozen=True)
class Pair:
    """Collage: the weight is the high half of a BF16 pair."""

    kind: ClassVar[str] = "grown"

    def split(self, weight: Tensor) -> Stored:
        return {".low": torch.zeros_like(weight)}

    def decode(self, weight: Tensor, state: State) -> Tensor:
        return weight.float() + state[".low"].float()

    def add(self, weight: Tensor, state: State, update: Tensor) -> tuple[Tensor, Stored]:
        high, low = expansion.grow(weight, state[".low"], update.bfloat16())
        return high, {".low": low}


def nearest_bf16(x: Tensor) -> Tensor:
    """fp32 -> BF16, to nearest, ties away from zero.

    Ties to even would have 2^16 + 1 masters round to an even weight, one more than 16 bits of
    remainder can tell apart. The other recipes round likewise, so that weights can be compared.
    """
    return (_round_bits(x, 16) >> 16).to(torch.int16).view(torch.bfloat16)


def _round_bits(x: Tensor, bits: int) -> Tensor:
    """int32 bits of fp32 x, rounded to nearest (ties away from zero) to a multiple of 2^bits.

    The bound keeps a NaN of all ones, which is what NVIDIA GPUs make, from wrapping to zero.
    """
    half = (1 << bits) >> 1
    raw = x.view(torch.int32).clamp(max=0x7FFFFFFF - half)
    return (raw + half) & -(1 << bits)
