"""Delayed scaling: the scale of a tensor is known before the tensor is (arXiv 2209.05433, 2.2).

    S = the power of two at or above 2^margin max(h) / MAX      h: the amaxes of the last 16 steps

This is TransformerEngine's recipe, with powers of two (scaling.py) and a margin. The kernel that
writes the codes also finds the amax of what it reads, for later steps; no pass over the tensor
looks for it beforehand.

A value that outgrows its scale saturates, so there is room for growth above the largest amax of the
history: a factor of 2^margin, and up to 2 more from rounding S up. The room costs small values.
E5M2 has 30 binades of normal numbers, the lowest far below what changes a sum: 3 of them are free.
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


class ScaleSlot(NamedTuple):
    """The scale that a quantizing kernel reads, and where it writes the amax."""

    scale: Tensor | None = None  # fp32 []; None: current scaling
    amax: Tensor | None = None  # fp32 [], to be raised; None: it is not recorded


@dataclass(frozen=True)
class DelayedScaling:
    """Scales of tensors from their last amaxes. A history is fp32[..., length], newest first."""

    fmt: Fp8Format
    length: int = 16  # steps remembered
    margin: int | None = None  # binades; None: those of MARGINS

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length={self.length}: at least 1 step")

    def scale(self, history: Tensor) -> Tensor:
        """The scales, fp32[...]; 1 where the history is all zero."""
        margin = MARGINS[self.fmt] if self.margin is None else self.margin
        return power_of_two_ref(history.amax(-1), self.fmt, margin=margin)

    def push_(self, history: Tensor, amax: Tensor) -> Tensor:
        """Push a step's amax[...] into the history. Returns whether it did, bool [] on the device.

        If one amax is not finite, none is pushed: it would spoil the next `length` steps, and the
        others may be caused by it. Its codes are NaN, so the step's update is skipped.
        """
        finite = amax.isfinite().all()
        newer = torch.cat([amax[..., None], history[..., :-1]], -1)
        history.copy_(torch.where(finite, newer, history))
        return finite
