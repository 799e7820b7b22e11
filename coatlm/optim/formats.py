"""How the optimizer stores m, v and the weight: one class a format, all functional.

A moment format turns stored tensors into fp32 and takes one step of an exponential moving average;
a weight format adds an update to what it stores. Neither writes in place: `AdamW` does that once,
for all formats, so that skipping a step is one `where`.

A state is a dict from a suffix to a flat tensor: "" is the moment or the master itself, ".scale"
and the like are what decoding needs. n elements have n // 128 groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

GROUP = 128  # consecutive elements that share what is stored once a group

State = Mapping[str, Tensor]  # suffix -> flat tensor


class MomentFormat(Protocol):
    """Storage of m or of v; x is g for m and g * g for v, in fp32."""

    def zeros(self, n: int, device: torch.device) -> dict[str, Tensor]:
        """The state of n zeros."""

    def decode(self, state: State) -> Tensor:
        """fp32[n]."""

    def ema(self, state: State, x: Tensor, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
        """beta * state + (1 - beta) * x: the fp32 value for this step, and what is stored."""


class WeightFormat(Protocol):
    """Storage of the weight that the model does not hold itself."""

    def split(self, weight: Tensor) -> dict[str, Tensor]:
        """The state that belongs to a weight nobody has updated yet."""

    def decode(self, weight: Tensor, state: State) -> Tensor:
        """fp32[n]: the weight with all the precision that is stored."""

    def add(
        self, weight: Tensor, state: State, update: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """weight + update (fp32): the new weight in its own dtype, and the new state."""


@dataclass(frozen=True)
class Plain:
    """A moment as one float tensor, rounded to nearest when stored."""

    dtype: torch.dtype

    def zeros(self, n: int, device: torch.device) -> dict[str, Tensor]:
        return {"": torch.zeros(n, dtype=self.dtype, device=device)}

    def decode(self, state: State) -> Tensor:
        return state[""].float()

    def ema(self, state: State, x: Tensor, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
        moment = beta * self.decode(state) + (1 - beta) * x
        return moment, {"": moment.to(self.dtype)}


@dataclass(frozen=True)
class StrictBf16:
    """A moment in BF16 arithmetic: bf16(bf16(beta * m) + (1 - beta) * x), and used as stored."""

    def zeros(self, n: int, device: torch.device) -> dict[str, Tensor]:
        return {"": torch.zeros(n, dtype=torch.bfloat16, device=device)}

    def decode(self, state: State) -> Tensor:
        return state[""].float()

    def ema(self, state: State, x: Tensor, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
        decayed = (beta * self.decode(state)).bfloat16().float()
        moment = (decayed + (1 - beta) * x).bfloat16()
        return moment.float(), {"": moment}


@dataclass(frozen=True)
class Master:
    """An fp32 master; an fp32 weight is its own. A BF16 weight is the master rounded to nearest."""

    def split(self, weight: Tensor) -> dict[str, Tensor]:
        return {} if weight.dtype == torch.float32 else {"": weight.float()}

    def decode(self, weight: Tensor, state: State) -> Tensor:
        return state.get("", weight)

    def add(
        self, weight: Tensor, state: State, update: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        master = self.decode(weight, state) + update
        return master.to(weight.dtype), {"": master} if state else {}


@dataclass(frozen=True)
class Direct:
    """The weight as the model holds it and nothing else: w + round(update), rounded again."""

    def split(self, weight: Tensor) -> dict[str, Tensor]:
        return {}

    def decode(self, weight: Tensor, state: State) -> Tensor:
        return weight.float()

    def add(
        self, weight: Tensor, state: State, update: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return weight + update.to(weight.dtype), {}
