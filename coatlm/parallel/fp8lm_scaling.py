"""FP8-LM's automatic scaling of FP8 gradient sums (arXiv 2310.18313, section 3.1).

NCCL's sum in FP8 saturates where the sum of the ranks' codes exceeds +-MAX. Codes are therefore
cast(mu s g), with a factor mu <= 1 per tensor. mu starts at 1 / ranks, with which no sum saturates,
and is multiplied by old ranks / new ranks when a run resumes on another number of them.
After each step,

    mu <- mu / 2          if more than 1e-5 of the tensor's sums are +-MAX (`SATURATED`)
    mu <- mu 2^(1/1000)   otherwise, up to 1 (`GROWTH`)

The counts of saturated sums are reduced over the ranks that have a part or a copy of the tensor, so
all ranks compute the same mu. This happens on the device, without synchronization.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.parallel.flat_model import FlatModel, tied_embedding
from coatlm.parallel.groups import Groups
from coatlm.parallel.wire import Tensors

SATURATED = 1e-5  # fraction of sums at +-MAX above which mu is halved
GROWTH = 2.0 ** (1 / 1000)  # factor on mu per step otherwise
SMALLEST_MU = 2.0**-20


def adjust_mu(tensors: Sequence[Tensors], saturated: Tensor, nonfinite: Tensor) -> None:
    """Set mu of the tensors of all buckets for the next step, and reset the counts.

    `saturated` fp32 [all T] is the fraction of each tensor's sums at +-MAX; `nonfinite` bool
    [all T] is True where a sum was NaN or Inf. Both are the same on all ranks. A step with a
    nonfinite sum is skipped, so these tensors keep their mu.
    """
    mu = torch.cat([each.mu for each in tensors])
    adjusted = torch.where(saturated > SATURATED, mu / 2, mu * GROWTH).clamp(SMALLEST_MU, 1.0)
    adjusted = torch.where(nonfinite, mu, adjusted)
    sizes = [len(each.mu) for each in tensors]
    torch._foreach_copy_([each.mu for each in tensors], adjusted.split(sizes))
    torch._foreach_zero_([each.saturated for each in tensors])
    torch._foreach_zero_([each.nonfinite for each in tensors])


def adjust_automatic_scales(chunks: Sequence[FlatModel], groups: Groups) -> None:
    """Adjust mu of every tensor after a step; equal on all ranks with a part or a copy of it."""
    buckets = [b for chunk in chunks if chunk.wire.automatic for b in chunk.buckets]
    if not buckets or groups.dp_cp.size() == 1:
        return
    tensors = [bucket.tensors for bucket in buckets]
    counts = torch.cat([each.saturated for each in tensors])
    nonfinite = torch.cat([each.nonfinite for each in tensors]).int()
    if chunks[0].sharded:
        dist.all_reduce(counts, group=groups.dp_cp)
    if tensors[0].amax is not None:  # delayed: a rank has amaxes of its own values only
        dist.all_reduce(nonfinite, dist.ReduceOp.MAX, group=groups.dp_cp)
    if groups.tp.size() > 1:
        dist.all_reduce(counts, group=groups.tp)
        dist.all_reduce(nonfinite, dist.ReduceOp.MAX, group=groups.tp)
    tied = tied_embedding(chunks, groups)
    if tied is not None:  # alone in its bucket
        at = sum(len(each.mu) for each in tensors[: buckets.index(tied[0])])
        dist.all_reduce(counts[at : at + 1], dist.ReduceOp.MAX, group=groups.embedding)
        dist.all_reduce(nonfinite[at : at + 1], dist.ReduceOp.MAX, group=groups.embedding)
    # ZeRO stage 2 reduces a bucket in every microbatch, and counts the saturated sums of each
    sums = [bucket.tensors.values * max(bucket.sums, 1) for bucket in buckets]
    adjust_mu(tensors, counts.float() / (torch.cat(sums) * groups.tp.size()), nonfinite.bool())
