"""From each rank's gradients to the gradients of the global batch, and their norm.

Three sums make a gradient whole: over data and context parallel ranks (the flat buckets), over
tensor-parallel ranks for weights that every rank holds but only part of the work has touched
(norms under sequence parallelism, norms of queries and keys), and over the first and last stage
for tied embeddings. The global norm counts every logical gradient once:
`norm = sqrt(sum_i g_i^2)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from coatlm.parallel.buffers import FlatModel
from coatlm.parallel.groups import Groups


def finalize_gradients(chunks: Sequence[FlatModel], groups: Groups) -> None:
    """Complete every gradient after the last backward pass of a step."""
    for chunk in chunks:
        chunk.finish_grad_sync()
    _sum_over_tensor_parallel(chunks, groups)
    _sum_tied_embeddings(chunks, groups)


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
    grads = [
        param.main_grad
        for chunk in chunks
        for name, param in chunk.module.named_parameters()
        if getattr(param, "sequence_parallel", False)
        or "q_layernorm" in name
        or "k_layernorm" in name
    ]
    if not grads:
        return
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat, group=groups.tp)
    for grad, summed in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
        grad.copy_(summed)


def _sum_tied_embeddings(chunks: Sequence[FlatModel], groups: Groups) -> None:
    if groups.pp.size() == 1 or groups.embedding is None:
        return
    model = chunks[0 if groups.first_stage else -1].module
    if not model.share_embeddings_and_output_weights:
        return
    weight = model.shared_embedding_or_output_weight()
    dist.all_reduce(weight.main_grad, group=groups.embedding)
