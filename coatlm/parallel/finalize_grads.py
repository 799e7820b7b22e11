"""Complete the gradients of the global batch from those of each rank, and compute their norm.

A gradient is complete after up to three sums: over data- and context-parallel ranks (the flat
buckets); over tensor-parallel ranks, for replicated weights whose gradient each rank has computed
from its part of the tokens or heads (norms under sequence parallelism, norms of queries and keys);
and over the first and last pipeline stage, for tied embeddings. The global norm counts every
logical gradient once: `norm = sqrt(sum_i g_i^2)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from coatlm.fp8.accumulate import BlockFp8
from coatlm.parallel.collectives import all_reduce
from coatlm.parallel.flat_model import FlatModel, tied_embedding
from coatlm.parallel.fp8lm_scaling import adjust_automatic_scales
from coatlm.parallel.groups import Groups


class TensorParallelSums(NamedTuple):
    """Sizes of the all-reduces over the tensor-parallel group once per step."""

    gradients: int  # elements of partial gradients that this rank owns
    mus: int  # tensors whose FP8-LM factor mu is adjusted


def tensor_parallel_sums(chunks: Sequence[FlatModel], groups: Groups) -> TensorParallelSums:
    """The sizes of the all-reduces of `finalize_gradients` over the tensor-parallel group."""
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
    adjust_automatic_scales(chunks, groups)


def grad_norm(
    parts: Sequence[Tensor | BlockFp8], group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """The global L2 norm, fp32 on the device; NaN or Inf if any gradient is.

    `parts` are gradients of this rank. Over all ranks of `group` each logical gradient occurs once.
    """
    total = torch.zeros((), dtype=torch.float32, device=device)
    dense = [part for part in parts if isinstance(part, Tensor)]
    if dense:
        total = dense_norms(dense).square().sum()
    one_byte = [part.square_sum() for part in parts if isinstance(part, BlockFp8)]
    if one_byte:
        total = total + torch.stack(one_byte).sum()
    all_reduce(total, group)
    return total.sqrt()


def dense_norms(parts: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each of N tensors, fp32 [N]. They do not depend on the other tensors."""
    return torch.stack(torch._foreach_norm(list(parts), 2, dtype=torch.float32))


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor for all gradients: min(1, max_norm / norm), or NaN if the norm is not finite.

    `max_norm=0` does not clip. The optimizer skips a step whose factor is NaN, on the device: the
    host does not synchronize.
    """
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
    return torch.where(torch.isfinite(norm), factor, torch.nan)


def _sum_over_tensor_parallel(chunks: Sequence[FlatModel], groups: Groups) -> None:
    if groups.tp.size() == 1:
        return
    sum_partial_gradients(_partial_gradients(chunks), groups.tp)


def sum_partial_gradients(parts: Sequence[Tensor | BlockFp8], group: dist.ProcessGroup) -> None:
    """Sum `parts` over a tensor-parallel group, in place and in one all-reduce; none is empty."""
    if not parts:
        return
    values = [_dense(part) for part in parts]
    flat = _flatten_dense_tensors(values)
    dist.all_reduce(flat, group=group)
    for part, summed in zip(parts, _unflatten_dense_tensors(flat, values), strict=True):
        part.copy_(summed)


def _dense(part: Tensor | BlockFp8) -> Tensor:
    """A gradient, as it is or decoded to fp32."""
    return part if isinstance(part, Tensor) else part.float()


def _partial_gradients(chunks: Sequence[FlatModel]) -> list[Tensor | BlockFp8]:
    """This rank's shards of gradients that are sums over only its own tokens or heads."""
    parts = [chunk.bucket_of[p].summed(p) for chunk in chunks for p in partial_parameters(chunk)]
    return [part for part in parts if len(part)]  # all ranks of `tp` own the same shards


def partial_parameters(chunk: FlatModel) -> list[nn.Parameter]:
    """The parameters whose gradient on a tensor-parallel rank is of its own tokens or heads."""
    return [
        param
        for name, param in chunk.module.named_parameters()
        if getattr(param, "sequence_parallel", False)
        or "q_layernorm" in name
        or "k_layernorm" in name
    ]


def _sum_tied_embeddings(chunks: Sequence[FlatModel], groups: Groups) -> None:
    found = tied_embedding(chunks, groups)
    if found is not None:
        bucket, weight = found
        part = bucket.summed(weight)
        if len(part):  # both stages shard it in the same way
            values = _dense(part)
            dist.all_reduce(values, group=groups.embedding)
            if values is not part:
                part.copy_(values)
