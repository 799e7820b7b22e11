"""Delayed scales of the gradients that enter the GEMMs of a pipeline stage's FP8 layers.

A layer has four such gradients; fp8/delayed.py has the rule of a scale. All microbatches of a step
use the scales fixed before it, and raise the amaxes. After the step, for the whole stage at once:

    amax[L, 4] = max over the ranks that hold the stage      one all-reduce over tp, cp and dp
    history[L, 4, 16] <- amax                                unless one of them is not finite
    scale[L, 4] from history

Ranks use the same scales, so sequence parallelism needs no all-reduce of amaxes in backward.

Scales and amaxes keep their addresses, so that replays of a CUDA graph read the newest scales.
Scales lie 16 bytes apart, as GEMMs take them (fp8/gemm.py).

Without a history gradients are scaled by their own amax, as with current scaling, and that amax is
recorded: in the first step of a run, and in further ones as long as a step has NaN or Inf. Only
after such a step does the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.fp8 import gemm
from coatlm.fp8.delayed import DelayedScaling, ScaleSlot
from coatlm.fp8.formats import Fp8Format

GRADIENTS = ("fc2_grad", "fc1_grad", "proj_grad", "qkv_grad")

Histories = dict[str, dict[str, list[float]]]  # layer -> gradient -> amaxes, newest first


class Scales(Protocol):
    """The source of the scales of a layer's GRADIENTS."""

    def slot(self, name: str) -> ScaleSlot: ...


class Scaled(Protocol):
    """A layer that asks for scales."""

    scales: Scales


class CurrentScales:
    """Every gradient is scaled by its own amax (COAT, arXiv 2410.19313, section 5)."""

    def slot(self, name: str) -> ScaleSlot:
        """No scale is given and no amax is recorded."""
        return ScaleSlot()


class _LayerScales:
    """The scales of one layer, views of those of its stage."""

    def __init__(self, stage: DelayedScales, scale: Tensor, amax: Tensor) -> None:
        self.stage = stage
        slots = zip(GRADIENTS, scale, amax, strict=True)
        self.slots = {name: ScaleSlot(*tensors) for name, *tensors in slots}

    def slot(self, name: str) -> ScaleSlot:
        """The scale fixed before the step, unless there is no history, and where the amax goes."""
        slot = self.slots[name]
        return slot._replace(scale=None) if self.stage.calibrating else slot


class DelayedScales:
    """Delayed scales of the layers of this rank's stage, by their number in the whole model."""

    def __init__(
        self,
        layers: Mapping[int, Scaled],
        fmt: Fp8Format,
        *,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`group`: the ranks that hold the same stage; None means this rank alone."""
        self.numbers, self.rule, self.group = sorted(layers), DelayedScaling(fmt), group
        shape = (len(layers), len(GRADIENTS))
        self.history = torch.zeros(*shape, self.rule.length, device=device)
        self.scale = torch.ones(*shape, gemm.ALIGNMENT // 4, device=device)[..., 0]
        self.amax = torch.zeros(shape, device=device)
        self.calibrating = bool(layers)
        for number, scale, amax in zip(self.numbers, self.scale, self.amax, strict=True):
            layers[number].scales = _LayerScales(self, scale, amax)

    @torch.no_grad()
    def update_(self) -> None:
        """Fix the scales of the next step from this one's amaxes. All ranks of the group call."""
        if not self.numbers:
            return
        if self.group is not None:  # NaN > Inf > numbers, as integers
            dist.all_reduce(self.amax.view(torch.int32), dist.ReduceOp.MAX, group=self.group)
        taken = self.rule.push_(self.history, self.amax)
        self.scale.copy_(self.rule.scale(self.history))
        self.amax.zero_()
        if self.calibrating:
            self.calibrating = not bool(taken)

    def state(self) -> Histories:
        """The histories as JSON values, which hold fp32 exactly. Syncs with the device."""
        return {
            str(number): dict(zip(GRADIENTS, rows, strict=True))
            for number, rows in zip(self.numbers, self.history.tolist(), strict=True)
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Load the histories of this stage's layers; calibrate again where a layer has none."""
        empty = dict.fromkeys(GRADIENTS, [0.0] * self.rule.length)
        found = [saved.get(str(number), empty) for number in self.numbers]
        if found:
            rows = [[layer[name] for name in GRADIENTS] for layer in found]
            self.history.copy_(torch.tensor(rows))
            self.scale.copy_(self.rule.scale(self.history))
        self.amax.zero_()
        missing = any(layer is empty for layer in found)
        self.calibrating = missing or (bool(found) and not bool(self.history.any()))
