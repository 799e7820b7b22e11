"""train.update=backward: the weights of a bucket are updated once its gradients are complete.

`ZeroOptimizer.step` needs all gradients, for the norm that clips them. Here a bucket is updated by
the norm of the step before, while backward goes on (`grad_release`):

    clip(t) = min(1, clip_grad / norm(t - 1))       norm(t): of the gradients of step t, unclipped

The norm, summed up from bucket to bucket, is complete after the step, and is part of a checkpoint.
A step without a norm before it, the first of a run, runs forward and backward twice: once to
measure its own norm and once to update, so that it is clipped as a plain step is. If that norm is
not finite the step ends there, and nothing has changed.

A NaN or an infinity among the gradients of a bucket skips the update of this bucket and of all that
follow in this step; earlier ones, nearer to the loss, have been updated. All ranks that have a part
or a copy of a bucket agree on that by an all-reduce of one number. Such a step does not count as an
update, and the norm before it clips the next one too. The device decides all of this; the host
waits for it only in a step that may have to run twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.parallel.buckets import Bucket
from coatlm.parallel.collectives import all_reduce
from coatlm.parallel.finalize_grads import (
    clip_coefficient,
    dense_norms,
    partial_parameters,
    sum_partial_gradients,
)
from coatlm.parallel.fp8lm_scaling import adjust_automatic_scales
from coatlm.parallel.grad_release import GradRelease
from coatlm.parallel.zero import ZeroOptimizer, counted


class BackwardOptimizer(ZeroOptimizer):
    """Updates each bucket in backward; see the module's docstring.

    `chunks` are constructed with `update_in_backward`, the AdamW of `make_optimizer` with
    `by_shard`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        device = self.buckets[0].weights.device
        self.shard_of = {bucket: i for i, bucket in enumerate(self.owned)}
        self.norms = torch.zeros(len(self.counted), device=device)  # of `counted`, in this step
        self.parts: dict[Bucket, tuple[list[Tensor], Tensor]] = {}  # counted gradients, their norms
        at = 0
        for bucket in self.buckets:
            found = counted(bucket, self.regions[bucket])
            parts = [part for part in found if isinstance(part, Tensor)]  # none is one-byte
            self.parts[bucket] = (parts, self.norms[at : at + len(parts)])
            at += len(parts)
        self.partial = self._partial_gradients()
        self.previous_norm = torch.full((), torch.nan, device=device)
        self.measured = not self.clip_grad  # there is a previous norm, or none is needed
        self.coefficient = torch.ones((), device=device)  # NaN: skip the buckets that follow
        self.updating = False
        for chunk in self.chunks:
            assert isinstance(chunk.grads, GradRelease)
            chunk.grads.use = self._use

    def begin(self) -> None:
        """Set the clip coefficient of the next backward pass."""
        self.coefficient = torch.ones_like(self.previous_norm)
        if self.clip_grad and self.measured:
            self.coefficient = clip_coefficient(self.previous_norm, self.clip_grad)
        self.updating = False

    def step(
        self,
        *,
        accepts: Callable[[Tensor], Tensor] | None = None,
        observe: Callable[[Tensor], None] | None = None,
        enter: Callable[[str | None], None] = lambda phase: None,
    ) -> Tensor:
        """End a step, whose backward pass has updated weights and states. Returns its norm.

        If `repeats` is then set, there was no norm to clip by: nothing has changed, the norm is
        known now, and `begin` and the passes of the step have to run once more.
        """
        assert accepts is None and observe is None, "these need all gradients before the update"
        enter("update")
        for chunk in self.chunks:
            chunk.finish_grad_sync()
        total = self.norms.square().sum()
        all_reduce(total, self.norm_group)
        norm = total.sqrt()
        self.applied = norm.isfinite()
        previous = torch.where(norm.isfinite(), norm, self.previous_norm)
        self.previous_norm.copy_(previous)
        self.repeats = False
        if not self.measured:
            self.measured = self.repeats = bool(norm.isfinite())
            if self.repeats:
                self._discard_counts()
                return norm
        else:
            self.optimizer.count_update(self.coefficient)
        adjust_automatic_scales(self.chunks, self.groups)
        for chunk in self.chunks:
            chunk.start_param_sync()
        enter(None)
        return norm

    def norm_to_save(self) -> float | None:
        """The norm that clips the next step; None if there is none. Waits for the device."""
        norm = float(self.previous_norm)
        return norm if norm < torch.inf else None

    def restore_norm(self, saved: float | None) -> None:
        """Restore what `norm_to_save` returned; after None the next step measures its own."""
        self.previous_norm.fill_(torch.nan if saved is None else saved)
        self.measured = saved is not None or not self.clip_grad

    def _use(self, bucket: Bucket) -> None:
        """Measure the complete gradients of a bucket, and update its shard on this rank."""
        sum_partial_gradients(self.partial.get(bucket, ()), self.groups.tp)
        parts, norms = self.parts[bucket]
        if parts:
            norms.copy_(dense_norms(parts))
        if not self.measured:
            return
        bad = norms.square().sum().isfinite().logical_not().float()
        all_reduce(bad, self.norm_group, dist.ReduceOp.MAX)
        self.coefficient = torch.where(bad > 0, torch.nan, self.coefficient)
        if not self.updating:
            self.updating = True
            self.before_update()
        if bucket in self.shard_of:
            self.optimizer.update_shard(self.shard_of[bucket], self.coefficient)

    def _partial_gradients(self) -> dict[Bucket, list[Tensor]]:
        """By bucket, gradients of this rank's shard that tensor-parallel ranks have to sum."""
        found: dict[Bucket, list[Tensor]] = {}
        if self.groups.tp.size() == 1:
            return found
        for chunk in self.chunks:
            for param in partial_parameters(chunk):
                bucket = chunk.bucket_of[param]
                part = bucket.summed(param)
                if isinstance(part, Tensor) and len(part):
                    found.setdefault(bucket, []).append(part)
        return found

    def _discard_counts(self) -> None:
        """Forget the saturated sums of a pass that is repeated, which would count them again."""
        for bucket in self.buckets:
            bucket.tensors.saturated.zero_()
