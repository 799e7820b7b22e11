"""What context-parallel ranks exchange so that every query meets its keys.

Shapes: R ranks, S tokens of this rank, T = R S tokens of a sample, B samples, N query heads, G key
and value heads, D elements per head; n and g of these heads after an exchange.

All-to-all over heads (DeepSpeed-Ulysses, arXiv 2309.14509, section 3). Rank r holds the tokens
r S to (r + 1) S - 1, with all heads, and attends with its share of the heads to all tokens:

    q [S, B, N, D] -> [T, B, N / R, D],  k and v [S, B, G, D] -> [T, B, G / R, D]
    attention of whole sequences, as without context parallelism
    o [T, B, N / R, D] -> [S, B, N, D]

A rank sends (R - 1) / R of its tensors, once in forward and once in backward, whatever R is. The
heads are exchanged in PARTS: while a part is attended to, the next one arrives and the output of
the one before is sent back. Backward runs the same steps in reverse order, so that it overlaps as
much.

All-gather. Rank r holds the chunks r and 2 R - 1 - r of 2 R (zigzag) and gathers the keys and
values of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from coatlm.megatron import tensor_parallel

PARTS = 2  # of a rank's heads


class _Flight:
    """An all-to-all of equal parts along the first dimension, between its start and its end."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.work: dist.Work | None = None

    def start(self, x_RX: Tensor) -> Tensor:
        received_RX = torch.empty_like(x_RX, memory_format=torch.contiguous_format)
        self.work = dist.all_to_all_single(
            received_RX, x_RX.contiguous(), group=self.group, async_op=True
        )
        return received_RX

    def wait(self) -> None:
        assert self.work is not None
        self.work.wait()
        self.work = None


class _Started(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RX: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.start(x_RX)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_RX: Tensor) -> tuple[Tensor, None]:
        ctx.flight.wait()
        return dx_RX, None


class _Finished(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received_RX: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        flight.wait()
        return received_RX.view_as(received_RX)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dreceived_RX: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.start(dreceived_RX), None


def exchange(x_RX: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start to send x[r] to rank r. Returns a function that waits, and returns what was received.

    Differentiable: in backward the gradient's all-to-all starts where forward waited, and is waited
    for where forward started, so that it overlaps with the backward pass of the same operations.
    """
    flight = _Flight(group)
    received_RX = _Started.apply(x_RX, flight)

    def finish() -> Tensor:
        waited_RX: Tensor = _Finished.apply(received_RX, flight)
        return waited_RX

    return finish


def head_parts(kv_heads: int) -> int:
    """The number of parts in which a rank attends with its `kv_heads` key and value heads."""
    return PARTS if kv_heads % PARTS == 0 else 1


def attend_with_own_heads(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    group: dist.ProcessGroup,
) -> Tensor:
    """`attend(q_TBnD, k_TBgD, v_TBgD)`, attention of whole samples, for all heads: [S, B, N, D].

    Each rank attends with N / R and G / R heads, which R has to divide. It holds one chunk of the
    samples, in the order of ranks. Differentiable in q, k and v.
    """
    ranks = group.size()
    parts = head_parts(k_SBGD.shape[2] // ranks)
    shares = [x.unflatten(2, (ranks, parts, -1)).unbind(3) for x in (q_SBND, k_SBGD, v_SBGD)]
    arriving = [
        [exchange(x_SBRnD.movedim(2, 0), group) for x_SBRnD in part]
        for part in zip(*shares, strict=True)
    ]
    returning = []
    for part in arriving:
        o_TBnD = attend(*(finish().flatten(0, 1) for finish in part))
        returning.append(exchange(o_TBnD.unflatten(0, (ranks, -1)), group))
    outputs = [finish().movedim(0, 2) for finish in returning]
    return torch.stack(outputs, dim=3).flatten(2, 4)


def gather_zigzag(x_SB: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather the two chunks of each rank, [S, B, ...] -> [T, B, ...] in sequence order.

    In backward the gradients are reduce-scattered: each rank receives those of its own chunks.
    """
    gathered = tensor_parallel.gather_from_sequence_parallel_region(
        x_SB.contiguous(), tensor_parallel_output_grad=True, group=group
    )
    size = group.size()
    chunks = gathered.unflatten(0, (2 * size, -1)).unbind()
    held = [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]
    order = sorted(range(2 * size), key=held.__getitem__)
    # indexing a tensor with a list would synchronize with the GPU
    return torch.cat([chunks[i] for i in order])
