"""Storage formats of the optimizer for the bits of a weight that the model's own tensor lacks.

A weight format decodes a weight and its state to fp32, encodes fp32, and adds an update to the
weight. States are those of `moment_formats`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from coatlm.optim import collage
from coatlm.optim.moment_formats import State, Stored, TensorScaled


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
    scaled: TensorScaled = field(default_factory=lambda: TensorScaled(torch.float16))

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
