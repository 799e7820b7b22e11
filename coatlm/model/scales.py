"""Delayed scales of the gradients that enter the GEMMs of a pipeline stage's FP8 layers.

A layer has four such gradients; fp8/delayed.py has the rule of a scale. All microbatches of a step
use the scales fixed before it, and raise the amaxes. After the step, for the whole stage at once:

    amax[L, 4] = max over the ranks that hold the stage      one all-reduce over tp, cp and dp
    history[L, 4, 16] <- amax                                unless one of them is not finite
    scale[L, 4] from history

Ranks share scales, so those of sequence parallelism have nothing to agree on in backward.

Scales and amaxes keep their memory: CUDA graphs of microbatches see what is written there. Scales
lie 16 bytes apart, as products take them (fp8/gemm.py).

While there is no history the gradients are scaled by their own amax, as without delay, and that is
remembered: the first step of a run, and as many as have NaN or Inf. Only such a step is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.fp8 import gemm
from coatlm.fp8.delayed import DelayedScaling, Slot
from coatlm.fp8.formats import Fp8Format

GRADIENTS = ("fc2_grad", "fc1_grad", "proj_grad", "qkv_grad")

Saved = dict[str, dict[str, list[float]]]  # layer -> gradient -> amaxes, newest first: JSON


class Scales(Protocol):
    """Where a layer asks for the scale of one of GRADIENTS."""

    def slot(self, name: str) -> Slot: ...


class Scaled(Protocol):
    """A layer that does."""

    scales: Scales


class CurrentScales:
    """Every gradient by its own amax (COAT, arXiv 2410.19313, section 5: just in time)."""

    def slot(self, name: str) -> Slot:
        """None but its own."""
        return Slot()


class _LayerScales:
    """A layer's part of its stage's scales."""

    def __init__(self, stage: DelayedScales, scale: Tensor, amax: Tensor) -> None:
        self.stage = stage
        slots = zip(GRADIENTS, scale, amax, strict=True)
        self.slots = {name: Slot(*tensors) for name, *tensors in slots}

    def slot(self, name: str) -> Slot:
        """The scale fixed before the step, once there is one."""
        slot = self.slots[name]
        return slot._replace(scale=None) if self.stage.calibrating else slot


class DelayedScales:
    """Those of the layers of this rank's stage, by number in the whole model."""

    def __init__(
        self,
        layers: Mapping[int, Scaled],
        fmt: Fp8Format,
        *,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`group`: the ranks that hold the same stage; None: this one alone."""
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
        """A step is over. All ranks of the group call it."""
        if not self.numbers:
            return
        if self.group is not None:  # NaN > Inf > numbers, as integers
            dist.all_reduce(self.amax.view(torch.int32), dist.ReduceOp.MAX, group=self.group)
        taken = self.rule.push_(self.history, self.amax)
        self.scale.copy_(self.rule.scale(self.history))
        self.amax.zero_()
        if self.calibrating:
            self.calibrating = not bool(taken)

    def state(self) -> Saved:
        """The histories as values of JSON, which hold fp32 exactly. Waits for the device."""
        return {
            str(number): dict(zip(GRADIENTS, rows, strict=True))
            for number, rows in zip(self.numbers, self.history.tolist(), strict=True)
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take up histories of whichever layers; calibrate again without those of one, or any."""
        empty = dict.fromkeys(GRADIENTS, [0.0] * self.rule.length)
        found = [saved.get(str(number), empty) for number in self.numbers]
        if found:
            rows = [[layer[name] for name in GRADIENTS] for layer in found]
            self.history.copy_(torch.tensor(rows))
            self.scale.copy_(self.rule.scale(self.history))
        self.amax.zero_()
        missing = any(layer is empty for layer in found)
        self.calibrating = missing or (bool(found) and not bool(self.history.any()))
