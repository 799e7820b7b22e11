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

Keys and values can be sent as FP8 codes with a scale per block of elements of a head
(coatlm/fp8/kv_bytes.py). All ranks, the sender too, then attend to the decoded keys and values.
Backward treats the rounding as the identity (the straight-through estimator): gradients of decoded
tensors, which are sent as they are, are those of the exact ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from coatlm.fp8.kv_bytes import decode_to_save, encode
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

    def send(self, x_RX: Tensor) -> Tensor:
        """Start the exchange in forward. Returns a placeholder, the argument of `receive`."""
        return self.start(x_RX)

    def receive(self, received_RX: Tensor) -> Tensor:
        """Wait in forward, for the result of `send`."""
        self.wait()
        return received_RX.view_as(received_RX)


class _CodeFlight(_Flight):
    """An all-to-all that sends FP8 codes in forward, with a scale per `size` elements."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        super().__init__(group)
        self.size = size
        self.bytes: Tensor | None = None

    def send(self, x_RX: Tensor) -> Tensor:
        self.bytes = self.start(encode(x_RX, self.size))
        return x_RX.new_empty(1).expand(x_RX.shape)  # has no memory of its own

    def receive(self, received_RX: Tensor) -> Tensor:
        self.wait()
        bytes_RX, self.bytes = self.bytes, None
        assert bytes_RX is not None
        return decode_to_save(bytes_RX, received_RX.shape[-1], received_RX.dtype)


class _Started(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RX: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.send(x_RX)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_RX: Tensor) -> tuple[Tensor, None]:
        ctx.flight.wait()
        return dx_RX, None


class _Finished(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received_RX: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.receive(received_RX)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dreceived_RX: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.start(dreceived_RX), None


def exchange(
    x_RX: Tensor, group: dist.ProcessGroup, *, block_size: int | None = None
) -> Callable[[], Tensor]:
    """Start to send x[r] to rank r. Returns a function that waits, and returns what was received.

    `block_size`: send x in FP8 with a scale per so many elements, and its gradient as it is.
    Differentiable: in backward the gradient's all-to-all starts where forward waited, and is waited
    for where forward started, so that it overlaps with the backward pass of the same operations.
    """
    flight = _Flight(group) if block_size is None else _CodeFlight(group, block_size)
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
    *,
    block_size: int | None = None,
) -> Tensor:
    """`attend(q_TBnD, k_TBgD, v_TBgD)`, attention of whole samples, for all heads: [S, B, N, D].

    Each rank attends with N / R and G / R heads, which R has to divide. It holds one chunk of the
    samples, in the order of ranks. Differentiable in q, k and v. `block_size`: send k and v in FP8
    with a scale per so many elements.
    """
    ranks = group.size()
    parts = head_parts(k_SBGD.shape[2] // ranks)
    shares = [x.unflatten(2, (ranks, parts, -1)).unbind(3) for x in (q_SBND, k_SBGD, v_SBGD)]
    formats = (None, block_size, block_size)  # of q, k and v
    arriving = [
        [
            exchange(x_SBRnD.movedim(2, 0), group, block_size=size)
            for x_SBRnD, size in zip(part, formats, strict=True)
        ]
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
    chunks = gathered.unflatten(0, (2 * group.size(), -1)).unbind()
    held = _held_chunks(group.size())
    order = sorted(range(len(held)), key=held.__getitem__)
    # indexing a tensor with a list would synchronize with the GPU
    return torch.cat([chunks[i] for i in order])


def gather_zigzag_codes(x_SBGD: Tensor, group: dist.ProcessGroup, *, block_size: int) -> Tensor:
    """`gather_zigzag` of keys or values in FP8, with a scale per `block_size` elements, decoded.

    Gradients are reduce-scattered in the dtype of x, as those of `gather_zigzag` are.
    """
    gathered_TBGD: Tensor = _GatheredCodes.apply(x_SBGD, group, block_size)
    return gathered_TBGD


class _GatheredCodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SBGD: Tensor, group: dist.ProcessGroup, block_size: int) -> Tensor:
        ctx.group = group
        bytes_TBGX = gather_zigzag(encode(x_SBGD, block_size), group)
        return decode_to_save(bytes_TBGX, x_SBGD.shape[-1], x_SBGD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_TBGD: Tensor) -> tuple[Tensor, None, None]:
        held = _held_chunks(ctx.group.size())
        chunks = dx_TBGD.unflatten(0, (len(held), -1)).unbind()
        summed = tensor_parallel.reduce_scatter_to_sequence_parallel_region(
            torch.cat([chunks[i] for i in held]), group=ctx.group
        )
        return summed, None, None


def _held_chunks(ranks: int) -> list[int]:
    """The chunks of a sample, in the order of the ranks that hold them."""
    return [chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]
