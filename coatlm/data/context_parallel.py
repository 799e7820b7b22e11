"""Microbatches under context parallelism: the positions of each rank."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from coatlm.data.batches import Microbatch


def zigzag_positions(seq_len: int, cp_rank: int, cp_size: int) -> Tensor:
    """The positions [seq_len / cp_size] of a context-parallel rank: chunks r and 2n-1-r of 2n.

    A causal query attends to all earlier positions; an early and a late chunk balance the work.
    """
    if seq_len % (2 * cp_size):
        raise ValueError(f"seq_len={seq_len} is not a multiple of 2*cp_size={2 * cp_size}")
    chunks = torch.arange(seq_len).view(2 * cp_size, -1)
    return torch.cat((chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]))


def rank_positions(seq_len: int, cp_rank: int, cp_size: int, *, zigzag: bool) -> Tensor:
    """The positions [seq_len / cp_size] of a context-parallel rank, in its order.

    Ranks that exchange heads hold one chunk each; otherwise the chunks are those of `zigzag`.
    """
    if zigzag:
        return zigzag_positions(seq_len, cp_rank, cp_size)
    if seq_len % cp_size:
        raise ValueError(f"seq_len={seq_len} is not a multiple of cp_size={cp_size}")
    return torch.arange(seq_len).view(cp_size, -1)[cp_rank]


@cache
def _positions_on(
    device: torch.device, seq_len: int, cp_rank: int, cp_size: int, zigzag: bool
) -> Tensor:
    """`rank_positions` on a device: copied once, as a copy for each batch may wait for the GPU."""
    return rank_positions(seq_len, cp_rank, cp_size, zigzag=zigzag).to(device)


def cp_slice(batch: Microbatch, cp_rank: int, cp_size: int, *, zigzag: bool) -> Microbatch:
    """Shard a microbatch over context-parallel ranks, all but its document_bounds."""
    if cp_size == 1:
        return batch
    tokens = batch["tokens"]
    at = _positions_on(tokens.device, tokens.shape[1], cp_rank, cp_size, zigzag)
    return Microbatch(
        tokens=tokens.index_select(1, at),
        labels=batch["labels"].index_select(1, at),
        loss_mask=batch["loss_mask"].index_select(1, at),
        document_bounds=batch["document_bounds"],
    )
