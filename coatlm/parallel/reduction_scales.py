"""Delayed scales that all ranks share: of fp8-nccl, and of fp8-a2a by tensor or bucket.

With current scaling a bucket is read once more, for its amaxes, and its exchange waits until these
are all-reduced. With delayed scaling the scales S of T tensors are fixed before the step. The
kernel that writes codes also finds the amaxes, and one all-reduce after the step covers all
buckets:

    code = cast(mu g / S)           saturated where g has outgrown S; only fp8-nccl has a mu
    amax[T] = max |g|               over what any rank has encoded in this step; NaN > Inf > numbers
    history[T, 16] <- amax          unless the step is skipped
    S[T] = the power of two at or above 2 max(history) / MAX                        (fp8/delayed.py)

The amaxes of gradients vary: in 70 steps of configs/quickstart.yaml one of nine was more than twice
that of the step before, and one of 200 more than twice the largest of the 16 steps before.

In fp8-a2a a gradient that has outgrown its scale is clipped in that step alone, since the next
scale knows its amax. In fp8-nccl sums at +-MAX also halve mu, which is then a further margin and
doubles within 1000 steps. A tensor whose gradients were zero throughout the history has S = 1. A
NaN or an infinity spoils its block and the norm: the step is skipped. A step that is skipped, as a
spike too, changes no history.

Without a history, scales are current, and the amaxes are recorded: in the first step of a run, in
further steps until one is not skipped, and after a checkpoint that lacks a tensor's history.
Only after such a calibrating step does the host wait for the device. A history belongs to a
parameter and is equal on all ranks that have a part or a copy of it, so a run resumes with the same
scales, in another layout too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.fp8.delayed import DelayedScaling
from coatlm.fp8.formats import E4M3
from coatlm.parallel.buckets import Bucket
from coatlm.parallel.collectives import Comm
from coatlm.parallel.flat_model import FlatModel, tied_embedding
from coatlm.parallel.groups import Groups


class ReductionScales:
    """The delayed scales of all buckets of `chunks`.

    `keys` gives the names of a bucket's parameters in checkpoints. `per_bucket`: the tensors of a
    bucket share one scale.
    """

    def __init__(
        self,
        chunks: Sequence[FlatModel],
        groups: Groups,
        *,
        keys: Callable[[Bucket], Sequence[str]],
        per_bucket: bool,
    ) -> None:
        buckets = [bucket for chunk in chunks for bucket in chunk.buckets]
        self.tensors = [bucket.tensors for bucket in buckets]
        self.sizes = [len(each.mu) for each in self.tensors]
        self.keys = [key for bucket in buckets for key in keys(bucket)]
        self.rule = DelayedScaling(E4M3)
        device = self.tensors[0].mu.device
        self.history = torch.zeros(len(self.keys), self.rule.length, device=device)
        self.scales = [torch.ones_like(each.mu) for each in self.tensors]
        for each in self.tensors:
            each.amax = torch.zeros_like(each.mu, dtype=torch.int32)
        self.bucket_of: Tensor | None = None  # int64 [all T]
        if per_bucket:
            self.bucket_of = torch.repeat_interleave(torch.tensor(self.sizes)).to(device)
        traffic = chunks[0].traffic
        self.comms = [Comm(groups.dp_cp, traffic, "grad")]
        if groups.tp.size() > 1:
            self.comms.append(Comm(groups.tp, traffic, "tp"))
        self.groups, self.tied = groups, slice(0)  # the tied embedding among all tensors
        if (tied := tied_embedding(chunks, groups)) is not None:  # alone in its bucket
            at = sum(self.sizes[: buckets.index(tied[0])])
            self.tied = slice(at, at + 1)
        self.calibrating = True

    @torch.no_grad()
    def update_(self, applied: Tensor) -> None:
        """Set the scales of the next step. `applied`, bool []: whether the last was not skipped.

        A collective call of all ranks.
        """
        bits = torch.cat([each.amax for each in self.tensors if each.amax is not None])
        for comm in self.comms:
            comm.all_reduce(bits, dist.ReduceOp.MAX).wait()
        if len(bits[self.tied]):
            dist.all_reduce(bits[self.tied], dist.ReduceOp.MAX, group=self.groups.embedding)
        amax = torch.where(applied, bits.view(torch.float32), torch.nan)
        taken = self.rule.push_(self.history, amax)
        torch._foreach_zero_([each.amax for each in self.tensors if each.amax is not None])
        if not self.calibrating or bool(taken):
            self._set_scales()

    def state(self) -> dict[str, list[float]]:
        """The history of each parameter of the model, newest first; none while calibrating.

        JSON represents the values exactly. A collective call, which syncs with the device.
        """
        mine = {} if self.calibrating else dict(zip(self.keys, self.history.tolist(), strict=True))
        reports = [mine] * self.groups.control.size()
        dist.all_gather_object(reports, mine, group=self.groups.control)
        return {key: history for report in reports for key, history in report.items()}

    def restore(self, saved: Mapping[str, Sequence[float]]) -> None:
        """Load the histories of this rank's parameters; calibrate again if one has none."""
        found = [saved[key] for key in self.keys if key in saved]
        self.calibrating = len(found) < len(self.keys)
        if self.calibrating:
            self.history.zero_()
            for each in self.tensors:
                each.scale = None
            return
        self.history.copy_(torch.tensor(found))
        self._set_scales()

    def _set_scales(self) -> None:
        """Set the scales by the histories; they keep their addresses, for CUDA graphs."""
        largest = self.history.amax(-1)
        if self.bucket_of is not None:
            of_buckets = largest.new_zeros(len(self.sizes))
            largest = of_buckets.scatter_reduce(0, self.bucket_of, largest, "amax")[self.bucket_of]
        scale = self.rule.scale(largest[:, None])
        torch._foreach_copy_(self.scales, scale.split(self.sizes))
        for each, own in zip(self.tensors, self.scales, strict=True):
            each.scale = own
        self.calibrating = False
