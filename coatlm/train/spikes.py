"""Detect spikes of loss and gradient norm, whose updates are skipped.

    spike  <=>  x > mean(W) + sigma * std(W)   where x is the loss or the gradient norm

W are the values of the last `window` finite steps, each clamped to the limit that applied to it:
a single spike hardly changes the mean, while a lasting higher level raises the limit step by step.
There are no spikes before the window is full.

The decision is made on the device, without synchronization. Values may differ between ranks in the
last bit of a sum, so their maximum over all ranks is used: every rank then has the same window and
makes the same decision.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.parallel.collectives import all_reduce


class SpikeGuard:
    """The window of recent values, and whether the last step was a spike.

    `group` contains all ranks; None means a single process.
    """

    def __init__(
        self,
        sigma: float,
        window: int,
        *,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not sigma > 0.0:
            raise ValueError(f"sigma={sigma}: must be > 0")
        if window < 2:
            raise ValueError(f"window={window}: a standard deviation needs at least 2 steps")
        self.sigma, self.group = sigma, group
        self.values_2W = torch.zeros(2, window, dtype=torch.float32, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # finite steps seen
        self.spike = torch.zeros((), dtype=torch.bool, device=device)  # the last step was one

    def accepts(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Whether to apply the update: a bool on the device, equal on all ranks.

        Call it once per step.
        """
        value_2 = torch.stack([loss, norm]).float()
        if self.group is not None:
            all_reduce(value_2, self.group, dist.ReduceOp.MAX)
        window = self.values_2W.shape[1]
        full, finite = self.count >= window, value_2.isfinite().all()
        history_2W = self.values_2W.double()
        deviation_2 = history_2W.std(dim=1, correction=0)
        limit_2 = (history_2W.mean(dim=1) + self.sigma * deviation_2).float()
        self.spike.copy_(full & finite & (value_2 > limit_2).any())
        entry_2 = torch.where(full, value_2.minimum(limit_2), value_2)
        place = (self.count % window).view(1)
        kept_2 = self.values_2W.index_select(1, place)[:, 0]
        self.values_2W.index_copy_(1, place, torch.where(finite, entry_2, kept_2)[:, None])
        self.count += finite
        return ~self.spike

    def state(self) -> dict[str, Any]:
        """The window as JSON values, which represent fp32 exactly. Waits for the device."""
        return {"values": self.values_2W.tolist(), "count": int(self.count)}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore what `state` returned; None or a window of another length clears the window."""
        if state is None or len(state["values"][0]) != self.values_2W.shape[1]:
            self.values_2W.zero_()
            self.count.zero_()
            return
        self.values_2W.copy_(torch.tensor(state["values"]))
        self.count.fill_(state["count"])
