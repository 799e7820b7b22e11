"""Delayed scales of the gradients that enter the GEMMs of a pipeline stage's FP8 layers.

A layer has four such gradients; fp8/delayed.py defines the scale. All microbatches of a step use
the scales that were fixed before the step, and accumulate each amax as a running maximum. After the
step, for the whole stage at once:

    amax[L, 4] = max over the ranks that hold the stage      one all-reduce over tp, cp and dp
    history[L, 4, 16] <- amax                                unless an amax is not finite
    scale[L, 4] from history

Ranks use the same scales, so sequence parallelism needs no all-reduce of amaxes in backward.

Scales and amaxes keep their addresses, so that replays of a CUDA graph read the newest scales.
Scales are 16 bytes apart, the alignment that GEMMs need (fp8/gemm.py).

Without a history gradients have current scaling, and their amaxes are recorded: in the first step
of a run, and in further steps until one has finite amaxes. Only after such a calibrating step does
the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.fp8.delayed import DelayedScaling, ScaleSlot
from coatlm.fp8.formats import ALIGNMENT, Fp8Format
from coatlm.parallel.collectives import all_reduce

GRADIENTS = ("fc2_grad", "fc1_grad", "proj_grad", "qkv_grad")

Histories = dict[str, dict[str, list[float]]]  # layer -> gradient -> amaxes, newest first


class Scales(Protocol):
    """The source of the scales of a layer's GRADIENTS."""

    def slot(self, name: str) -> ScaleSlot: ...


class Scaled(Protocol):
    """A layer that takes the scales of its gradients from `scales`."""

    scales: Scales


class CurrentScales:
    """Every gradient is scaled by its own amax (COAT, arXiv 2410.19313, section 5)."""

    def slot(self, name: str) -> ScaleSlot:
        """An empty slot: the scale is computed from the gradient."""
        return ScaleSlot()


class _LayerScales:
    """The scales of one layer, views of those of its stage."""

    def __init__(self, stage: DelayedScales, scale: Tensor, amax: Tensor) -> None:
        self.stage = stage
        slots = zip(GRADIENTS, scale, amax, strict=True)
        self.slots = {name: ScaleSlot(*tensors) for name, *tensors in slots}

    def slot(self, name: str) -> ScaleSlot:
        """The scale fixed before the step (None while calibrating) and the tensor for the amax."""
        slot = self.slots[name]
        return slot._replace(scale=None) if self.stage.calibrating else slot


class DelayedScales:
    """Delayed scales of the layers of this rank's stage, keyed by layer number in the model."""

    def __init__(
        self,
        layers: Mapping[int, Scaled],
        fmt: Fp8Format,
        *,
        device: torch.device,
        margin: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`group`: the ranks that hold the same stage; None means this rank alone."""
        self.numbers, self.group = sorted(layers), group
        self.rule = DelayedScaling(fmt, margin=margin)
        shape = (len(layers), len(GRADIENTS))
        self.history = torch.zeros(*shape, self.rule.length, device=device)
        self.scale = torch.ones(*shape, ALIGNMENT // 4, device=device)[..., 0]
        self.amax = torch.zeros(shape, device=device)
        self.calibrating = bool(layers)
        for number, scale, amax in zip(self.numbers, self.scale, self.amax, strict=True):
            layers[number].scales = _LayerScales(self, scale, amax)

    @torch.no_grad()
    def update_(self, applied: Tensor | None = None) -> None:
        """Set the scales of the next step from this step's amaxes. All ranks of `group` call it.

        Nothing changes where `applied`, bool [], is False: the step is skipped, as a spike or
        because a gradient is not finite.
        """
        if not self.numbers:
            return
        if self.group is not None:  # NaN > Inf > numbers, as integers
            all_reduce(self.amax.view(torch.int32), self.group, dist.ReduceOp.MAX)
        amax = self.amax if applied is None else torch.where(applied, self.amax, torch.nan)
        taken = self.rule.push_(self.history, amax)
        self.scale.copy_(self.rule.scale(self.history))
        self.amax.zero_()
        if self.calibrating:
            self.calibrating = not bool(taken)

    def state(self) -> Histories:
        """The histories as JSON values, which represent fp32 exactly. Syncs with the device."""
        return {
            str(number): dict(zip(GRADIENTS, rows, strict=True))
            for number, rows in zip(self.numbers, self.history.tolist(), strict=True)
        }

    def restore(self, saved: Mapping[str, Any], *, idle: Collection[int] = ()) -> None:
        """Load the histories of this stage's layers; calibrate again where a layer has none.

        The layers `idle` compute in BF16 and need none.
        """
        empty = dict.fromkeys(GRADIENTS, [0.0] * self.rule.length)
        found = [saved.get(str(number), empty) for number in self.numbers]
        if found:
            rows = [[layer[name] for name in GRADIENTS] for layer in found]
            self.history.copy_(torch.tensor(rows))
            self.scale.copy_(self.rule.scale(self.history))
        self.amax.zero_()
        empty_layers = [not any(map(any, layer.values())) for layer in found]
        self.calibrating = any(
            missing and number not in idle
            for number, missing in zip(self.numbers, empty_layers, strict=True)
        )
