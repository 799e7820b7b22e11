"""Tensor- and sequence-parallel collectives of the FP8 flow, outside autograd.

Under sequence parallelism each rank of the group holds a run of the tokens between the linears.
Before a column-parallel linear the tokens are all-gathered; after a row-parallel one the ranks'
partial sums are reduce-scattered. An all-gather carries an operand in FP8 where it can:

    forward     codes of the linear's input, with the scale of each row or block of a row; or with
                one scale, the largest of all ranks, on which they agree by an all-reduce
    backward    codes of gradients and of the same inputs, where the operand has one scale

Where wgrad takes scales along the tokens, dgrad and wgrad need different codes of a gradient, and
the scales of wgrad are not those of forward. Then backward gathers BF16 and every rank quantizes
all tokens: for a gradient two FP8 gathers would move as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.fp8.qtensor import TENSOR, QTensor


@dataclass(frozen=True)
class TensorParallel:
    """How one layer's linears are split."""

    group: dist.ProcessGroup
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def scattered(self) -> bool:
        """Tokens between linears are spread over the group."""
        return self.sequence_parallel and self.size > 1

    def gather_rows(self, x: QTensor) -> QTensor:
        """This rank's rows [T/tp, K] -> those of all ranks [T, K], in rank order.

        Scales are per tensor, and the same on all ranks, or in blocks of one row.
        """
        if not self.scattered:
            return x
        scale = x.scale if x.granularity == TENSOR else self._gather(x.scale)
        codes = self._gather(x.codes.view(torch.uint8)).view(x.fmt.dtype)
        return QTensor(codes, scale, x.granularity, x.fmt)

    def gather_values(self, x: Tensor) -> Tensor:
        """As `gather_rows`, of values that are not quantized."""
        return self._gather(x) if self.scattered else x

    def shared_scale(self, scale: Tensor) -> Tensor:
        """The largest scale of all ranks, where rows with one scale will be gathered."""
        if not self.scattered:
            return scale
        bits = scale.view(torch.int32).clone()  # NaN > Inf > numbers, as integers
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=self.group)
        return bits.view(torch.float32)

    def sum_partial(self, x: Tensor) -> Callable[[], Tensor]:
        """Start summing partial sums x[T, K] over the ranks; call the result for the sum.

        It is [T, K], or this rank's rows of it under sequence parallelism.
        """
        if self.size == 1:
            return lambda: x
        if not self.scattered:
            work = dist.all_reduce(x, group=self.group, async_op=True)
            out = x
        else:
            out = x.new_empty(x.shape[0] // self.size, x.shape[1])
            work = dist.reduce_scatter_tensor(out, x, group=self.group, async_op=True)
        assert work is not None

        def wait() -> Tensor:
            work.wait()
            return out

        return wait

    def _gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0] * self.size, *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=self.group)
        return out
