"""From each rank's gradients to the gradients of the global batch, and their norm.

Three sums make a gradient whole: over data and context parallel ranks (the flat buckets), over
tensor-parallel ranks for weights that every rank holds but only part of the work has touched
(norms under sequence parallelism, norms of queries and keys), and over the first and last stage
for tied embeddings. The global norm counts every logical gradient once:
`norm = sqrt(sum_i g_i^2)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from coatlm.parallel.buckets import Bucket
from coatlm.parallel.buffers import FlatModel
from coatlm.parallel.groups import Groups
from coatlm.parallel.wire import adjust_mu


class TensorParallelSums(NamedTuple):
    """Sizes of what a rank sums over its tensor-parallel group once per step."""

    gradients: int  # elements that it owns of gradients of which every rank holds a partial sum
    mus: int  # tensors whose automatic scales the ranks agree on


def tensor_parallel_sums(chunks: Sequence[FlatModel], groups: Groups) -> TensorParallelSums:
    """What `finalize_gradients` will sum over the tensor-parallel group."""
    if groups.tp.size() == 1:
        return TensorParallelSums(0, 0)
    automatic = [chunk for chunk in chunks if chunk.wire.automatic and groups.dp_cp.size() > 1]
    return TensorParallelSums(
        gradients=sum(part.numel() for part in _partial_gradients(chunks)),
        mus=sum(len(bucket.tensors.mu) for chunk in automatic for bucket in chunk.buckets),
    )


def finalize_gradients(chunks: Sequence[FlatModel], groups: Groups) -> None:
    """Complete every gradient after the last backward pass of a step."""
    for chunk in chunks:
        chunk.finish_grad_sync()
    _sum_over_tensor_parallel(chunks, groups)
    _sum_tied_embeddings(chunks, groups)
    _adjust_automatic_scales(chunks, groups)


def grad_norm(parts: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Global L2 norm, fp32 on the device; NaN or Inf if any value is.

    `parts` are this rank's gradients, such that the ranks of `group` hold each logical value once.
    """
    total = torch.zeros((), dtype=torch.float32, device=device)
    if parts:
        norms = torch._foreach_norm(list(parts), 2, dtype=torch.float32)
        total = torch.stack(norms).square().sum()
    dist.all_reduce(total, group=group)
    return total.sqrt()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Factor for every gradient: min(1, max_norm / norm), and NaN where the norm is not finite.

    `max_norm=0` does not clip. The optimizer skips the step on NaN, so nothing asks the host.
    """
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
    return torch.where(torch.isfinite(norm), factor, torch.nan)


def _sum_over_tensor_parallel(chunks: Sequence[FlatModel], groups: Groups) -> None:
    if groups.tp.size() == 1:
        return
    parts = _partial_gradients(chunks)
    if not parts:
        return
    flat = _flatten_dense_tensors(parts)
    dist.all_reduce(flat, group=groups.tp)
    for part, summed in zip(parts, _unflatten_dense_tensors(flat, parts), strict=True):
        part.copy_(summed)


def _partial_gradients(chunks: Sequence[FlatModel]) -> list[Tensor]:
    """The owned parts of gradients that each tensor-parallel rank has of some tokens or heads."""
    parts = [
        chunk.bucket_of[param].summed(param)
        for chunk in chunks
        for name, param in chunk.module.named_parameters()
        if getattr(param, "sequence_parallel", False)
        or "q_layernorm" in name
        or "k_layernorm" in name
    ]
    return [part for part in parts if len(part)]  # ranks of a group own the same parts


def _sum_tied_embeddings(chunks: Sequence[FlatModel], groups: Groups) -> None:
    found = _tied_embedding(chunks, groups)
    if found is not None:
        bucket, weight = found
        part = bucket.summed(weight)
        if len(part):  # or on neither of the two stages
            dist.all_reduce(part, group=groups.embedding)


def _tied_embedding(
    chunks: Sequence[FlatModel], groups: Groups
) -> tuple[Bucket, nn.Parameter] | None:
    """The weight that this rank's stage shares with another one, and its bucket."""
    if groups.pp.size() == 1 or groups.embedding is None:
        return None
    chunk = chunks[0 if groups.first_stage else -1]
    if not chunk.module.share_embeddings_and_output_weights:
        return None
    weight = chunk.module.shared_embedding_or_output_weight()
    return chunk.bucket_of[weight], weight


def _adjust_automatic_scales(chunks: Sequence[FlatModel], groups: Groups) -> None:
    """FP8-LM's mu of every tensor, agreed on by all ranks that hold a part or a copy of it."""
    buckets = [b for chunk in chunks if chunk.wire.automatic for b in chunk.buckets]
    if not buckets or groups.dp_cp.size() == 1:
        return
    tensors = [bucket.tensors for bucket in buckets]
    counts = torch.cat([each.saturated for each in tensors])
    nonfinite = torch.cat([each.nonfinite for each in tensors]).int()
    if chunks[0].sharded:
        dist.all_reduce(counts, group=groups.dp_cp)
    if groups.tp.size() > 1:
        dist.all_reduce(counts, group=groups.tp)
        dist.all_reduce(nonfinite, dist.ReduceOp.MAX, group=groups.tp)
    tied = _tied_embedding(chunks, groups)
    if tied is not None:  # alone in its bucket
        at = sum(len(each.mu) for each in tensors[: buckets.index(tied[0])])
        dist.all_reduce(counts[at : at + 1], dist.ReduceOp.MAX, group=groups.embedding)
        dist.all_reduce(nonfinite[at : at + 1], dist.ReduceOp.MAX, group=groups.embedding)
    # ZeRO stage 2 sums a bucket in every microbatch, and all of these sums have been counted
    sums = [bucket.tensors.values * max(bucket.sums, 1) for bucket in buckets]
    adjust_mu(tensors, counts.float() / (torch.cat(sums) * groups.tp.size()), nonfinite.bool())
