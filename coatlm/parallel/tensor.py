"""Tensor- and sequence-parallel collectives of the FP8 flow, used inside its autograd functions.

Under sequence parallelism each rank of the group holds some of the tokens between the linears.
Before a column-parallel linear the tokens are all-gathered; after a row-parallel one the ranks'
partial sums are reduce-scattered. An all-gather sends an operand in FP8 where possible:

    forward     codes of the linear's input, with their row-wise or block-wise scales; under
                tensor-wise scaling the ranks first all-reduce the largest scale
    backward    codes of gradients and of the same inputs, if the operand has tensor-wise scaling;
                saved codes of inputs with their scales

If wgrad's operands have scales along the tokens, dgrad and wgrad need different codes of a
gradient, and the scales of wgrad are not those of forward. Then backward all-gathers BF16 and every
rank quantizes all tokens: two all-gathers of a gradient in FP8 would send the bytes of one in BF16.

With `sums` = "fp8" a reduce-scatter is an all-to-all of E4M3 codes, with one fp32 scale per 1 x 128
elements of a token. Each rank casts its partial sums once, sends those of rank r's tokens to rank
r, which decodes them and adds them in fp32, and then its own, which it does not round; the sum is
rounded once to the dtype of x. That is 1.031 bytes per element instead of 2 (`fp8.payload`).

Collectives are asynchronous: each method that starts one returns a function that waits for it. The
collectives of a group run in the order in which they are issued, so one that is needed early must
not be issued behind one that is needed late. With `chunks` > 1 GEMMs are split, so that they
overlap with the collective that they need or that needs them (coatlm/model/flow_gemms.py).

The input of a split GEMM is gathered rank by rank, and the GEMM of a piece runs while later pieces
travel. In step d of R - 1, rank r sends its rows to rank r - d and receives those of rank r + d,
both modulo R. So each rank sends and receives one piece at a time, and all steps together move the
bytes of one all-gather. Broadcasts by one rank after the other would take R steps, in one of which
a rank receives nothing. All-gathers of some rows of every rank would leave the rows of a GEMM in R
places. All steps are issued at once, on the group's high-priority stream, which runs them in order
without the host; where a GEMM fills the device, the kernel of the next step gets the first
multiprocessors that become free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.config import TpCommReduce
from coatlm.fp8.formats import ALIGNMENT, E4M3
from coatlm.fp8.payload import pack, unpack
from coatlm.fp8.payload_layout import Layout, Own
from coatlm.fp8.qtensor import TENSOR, QTensor
from coatlm.parallel.collectives import (
    Pending,
    Several,
    all_gather_single,
    reduce_scatter_single,
    swap,
)

T = TypeVar("T")
Wait = Callable[[], Tensor]  # waits for a collective and returns its result
# some rows of an operand; what waits for them and returns the operand, with these rows in it
RowPiece = tuple[slice, Callable[[], QTensor]]


@dataclass(frozen=True)
class TensorParallel:
    """The tensor-parallel group of a layer's linears, with the collectives over it."""

    group: dist.ProcessGroup
    sequence_parallel: bool = False
    chunks: int = 1  # of columns, each with a GEMM and a sum over the ranks of its own
    sums: TpCommReduce = "bf16"  # what reduce-scatters send: x as it is, or codes

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def scattered(self) -> bool:
        """Whether tokens between linears are sharded over the group."""
        return self.sequence_parallel and self.size > 1

    def gather_rows(self, x: QTensor) -> Callable[[], QTensor]:
        """Start to all-gather this rank's rows [T/tp, K] to those of all ranks [T, K], in order.

        Scales are tensor-wise (and equal on all ranks), row-wise, or block-wise within a row.
        """
        if not self.scattered:
            return lambda: x
        codes = self._gather(x.codes.view(torch.uint8))
        scale = (lambda: x.scale) if x.granularity == TENSOR else self._gather(x.scale)
        return lambda: QTensor(codes().view(x.fmt.dtype), scale(), x.granularity, x.fmt)

    def gather_pieces(self, x: QTensor) -> list[RowPiece]:
        """Start to gather rows as `gather_rows` does; they arrive in the pieces of `row_pieces`."""
        own, *others = self.row_pieces(x.shape[0])
        if not others:
            return [(own, self.gather_rows(x))]
        scale = x.scale
        if x.granularity != TENSOR:
            scale = scale.new_empty(scale.shape[0] * self.size, *scale.shape[1:])
        codes = x.codes.new_empty(x.shape[0] * self.size, x.shape[1])
        whole = QTensor(codes, scale, x.granularity, x.fmt)
        sent = _parts(x)
        steps = [
            _result(self._pass_rows(sent, _parts(whole.rows(piece)), step), whole)
            for step, piece in enumerate(others, 1)
        ]
        for source, target in zip(sent, _parts(whole.rows(own)), strict=True):
            target.copy_(source)
        return [(own, lambda: whole), *zip(others, steps, strict=True)]

    def gather_values(self, x: Tensor) -> Wait:
        """Start to all-gather the rows of a tensor that is not quantized."""
        return self._gather(x) if self.scattered else lambda: x

    def row_pieces(self, rows: int) -> list[slice]:
        """The T rows of a gathered operand, one rank's per piece, in the order of their arrival.

        `rows`: of this rank, T/tp, which come first, and then those of the ranks behind it. All in
        one piece where GEMMs are not split, or where a piece would begin at an address that GEMMs
        do not take: cuBLASLt's choice of algorithms assumes 256 bytes, and codes have a multiple of
        16 columns.
        """
        if not self.scattered or self.chunks == 1 or rows % ALIGNMENT:
            return [slice(0, rows * (self.size if self.scattered else 1))]
        order = [(self.group.rank() + step) % self.size for step in range(self.size)]
        return [slice(rank * rows, (rank + 1) * rows) for rank in order]

    def shared_scale(self, scale: Tensor) -> Tensor:
        """The largest scale of all ranks, for tensor-wise scaling of rows to be all-gathered."""
        if not self.scattered:
            return scale
        bits = scale.view(torch.int32).clone()  # NaN > Inf > numbers, as integers
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=self.group)
        return bits.view(torch.float32)

    def sum_partial(self, x: Tensor) -> Wait:
        """Start to sum the partial sums x[T, K] over the ranks.

        The result is [T, K], or under sequence parallelism this rank's rows [T/tp, K]. With codes
        K is a multiple of 128, and x must not change before the wait.
        """
        if self.size == 1:
            return lambda: x
        if not self.scattered:
            return _result(dist.all_reduce(x, group=self.group, async_op=True), x)
        if self.sums == "fp8":
            return self._exchange(x)
        out = x.new_empty(x.shape[0] // self.size, x.shape[1])
        return _result(reduce_scatter_single(out, x, group=self.group, async_op=True), out)

    def sum_columns(self, compute: Callable[[slice], Tensor], width: int) -> Wait:
        """`sum_partial` of x[T, width], of which `compute` returns some columns.

        The sum of each of the `chunks` of columns runs while the next chunk is computed.
        """
        if self.chunks == 1:
            return self.sum_partial(compute(slice(0, width)))
        size = width // self.chunks
        sums = [
            self.sum_partial(compute(slice(first, first + size))) for first in range(0, width, size)
        ]

        def wait() -> Tensor:
            first = sums[0]()
            out = first.new_empty(len(first), width)
            for columns, part in zip(out.split(size, 1), sums, strict=True):
                columns.copy_(part())
            return out

        return wait

    def _exchange(self, x: Tensor) -> Wait:
        """Start to sum the rows of x[T, K] that belong to this rank, by an all-to-all of codes."""
        rank = self.group.rank()
        x_RAP = x.view(self.size, 1, -1)  # P values of the tokens of rank r; A = 1
        layout = Layout(x_RAP.shape[2], E4M3, scaled=True)
        sent = layout.empty(self.size, 1, device=x.device)
        pack(x_RAP, sent, layout=layout, skip=rank)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        assert work is not None
        own, out = x_RAP[rank, None], x.new_empty(x.shape[0] // self.size, x.shape[1])

        def wait() -> Tensor:
            work.wait()
            y = out.view(own.shape)
            unpack(received[:, None], y, layout=layout, own=Own(own, rank))
            return out

        return wait

    def _pass_rows(self, sent: list[Tensor], received: list[Tensor], step: int) -> Several:
        """Start to send to the rank `step` before this one and to receive from that behind it."""
        before, behind = ((self.group.rank() + way * step) % self.size for way in (-1, 1))
        pairs = zip(sent, received, strict=True)
        return Several([swap(*pair, to=before, source=behind, group=self.group) for pair in pairs])

    def _gather(self, x: Tensor) -> Wait:
        out, x = x.new_empty(x.shape[0] * self.size, *x.shape[1:]), x.contiguous()
        return _result(all_gather_single(out, x, group=self.group, async_op=True), out)


def _parts(x: QTensor) -> list[Tensor]:
    """What travels of an operand: its codes as bytes, and the scales of its rows."""
    codes = x.codes.view(torch.uint8)
    return [codes] if x.granularity == TENSOR else [codes, x.scale.contiguous()]


def _result(work: Pending | None, out: T) -> Callable[[], T]:
    assert work is not None

    def wait() -> T:
        work.wait()
        return out

    return wait
