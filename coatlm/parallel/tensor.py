"""Tensor- and sequence-parallel collectives of the FP8 flow, used inside its autograd functions.

Under sequence parallelism each rank of the group holds some of the tokens between the linears.
Before a column-parallel linear the tokens are all-gathered; after a row-parallel one the ranks'
partial sums are reduce-scattered. An all-gather sends an operand in FP8 where possible:

    forward     codes of the linear's input, with their row-wise or block-wise scales; under
                tensor-wise scaling the ranks first all-reduce the largest scale
    backward    codes of gradients and of the same inputs, if the operand has tensor-wise scaling;
                saved codes of inputs with their scales

If wgrad's operands have scales along the tokens, dgrad and wgrad need different codes of a
gradient, and the scales of wgrad are not those of forward. Then backward gathers BF16 and every
rank quantizes all tokens: two FP8 gathers of a gradient would send as many bytes as one in BF16.
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
    """The tensor-parallel group of a layer's linears, with the collectives over it."""

    group: dist.ProcessGroup
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def scattered(self) -> bool:
        """Whether tokens between linears are sharded over the group."""
        return self.sequence_parallel and self.size > 1

    def gather_rows(self, x: QTensor) -> QTensor:
        """All-gather this rank's rows [T/tp, K] to those of all ranks [T, K], in rank order.

        Scales are tensor-wise (and equal on all ranks), row-wise, or block-wise within a row.
        """
        if not self.scattered:
            return x
        scale = x.scale if x.granularity == TENSOR else self._gather(x.scale)
        codes = self._gather(x.codes.view(torch.uint8)).view(x.fmt.dtype)
        return QTensor(codes, scale, x.granularity, x.fmt)

    def gather_values(self, x: Tensor) -> Tensor:
        """All-gather the rows of a tensor that is not quantized."""
        return self._gather(x) if self.scattered else x

    def shared_scale(self, scale: Tensor) -> Tensor:
        """The largest scale of all ranks, for tensor-wise scaling of rows to be gathered."""
        if not self.scattered:
            return scale
        bits = scale.view(torch.int32).clone()  # NaN > Inf > numbers, as integers
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=self.group)
        return bits.view(torch.float32)

    def sum_partial(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to sum the partial sums x[T, K] over the ranks, asynchronously.

        Returns a function that waits for the sum and returns it: [T, K], or under sequence
        parallelism this rank's rows [T/tp, K].
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
