"""Delayed scaling: the scale of a tensor is known before the tensor is (arXiv 2209.05433, 2.2).

    S = the power of two at or above 2^margin max(h) / MAX      h: the amaxes of the last 16 steps

TransformerEngine's recipe, with powers of two (scaling.py) and a margin. The kernel that writes the
codes takes the amax of what it reads, for later steps; nothing looks for it beforehand.

What outgrows its scale saturates, so there is room for growth above the largest amax remembered:
a factor of 2^margin, and up to 2 more from rounding S up. What the room costs is at the other end.
E5M2 has 30 binades of normal numbers, the lowest far below what a sum notices: 3 of them are free.
E4M3 has 15, and gradients spread over most of them: it gives up 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from coatlm.fp8.formats import E4M3, E5M2, Fp8Format
from coatlm.fp8.scaling import power_of_two_ref

MARGINS = {E5M2: 3, E4M3: 1}  # binades


class Slot(NamedTuple):
    """What a quantising kernel is told of a tensor's scale, and where it leaves the amax."""

    scale: Tensor | None = None  # fp32 []; None: that of the tensor itself
    amax: Tensor | None = None  # fp32 [], to be raised; None: nobody asks


@dataclass(frozen=True)
class DelayedScaling:
    """Scales of tensors from their last amaxes. The history is fp32[..., length], newest first."""

    fmt: Fp8Format
    length: int = 16  # steps remembered

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length={self.length}: at least 1 step")

    def scale(self, history: Tensor) -> Tensor:
        """fp32[...]; 1 where nothing but zeros was seen."""
        return power_of_two_ref(history.amax(-1), self.fmt, margin=MARGINS[self.fmt])

    def push_(self, history: Tensor, amax: Tensor) -> Tensor:
        """Put a step's amax[...] into the history in place. Returns, on the device, whether it is.

        One amax that is not finite keeps them all out: it would spoil the next `length` steps, the
        others may come of it, and its codes have made the step one that is skipped.
        """
        finite = amax.isfinite().all()
        newer = torch.cat([amax[..., None], history[..., :-1]], -1)
        history.copy_(torch.where(finite, newer, history))
        return finite
