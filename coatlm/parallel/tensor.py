"""Tensor- and sequence-parallel collectives of the FP8 flow, outside autograd.

Under sequence parallelism each of the group's ranks holds a run of the tokens between the linears.
Before a column-parallel linear the tokens are gathered; after a row-parallel one the ranks' partial
products are summed and scattered. What is gathered is FP8 already (`wire="fp8"`): the codes travel,
with the scale of each row, or with one scale that the ranks agree on. `wire="bf16"` sends the
decoded values and finds the same codes again, for comparison: every scale is a power of two, so
both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.fp8.qtensor import ROW, QTensor

Wire = Literal["fp8", "bf16"]


@dataclass(frozen=True)
class TensorParallel:
    """How one layer's linears are split."""

    group: dist.ProcessGroup
    sequence_parallel: bool = False
    wire: Wire = "fp8"

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def scattered(self) -> bool:
        """Tokens between linears are spread over the group."""
        return self.sequence_parallel and self.size > 1

    def gather_rows(self, x: QTensor) -> QTensor:
        """This rank's rows [T/tp, K] -> those of all ranks [T, K], in rank order."""
        if not self.scattered:
            return x
        scale = x.scale
        if x.granularity == ROW:
            scale = self._gather(x.scale)
        if self.wire == "fp8":
            codes = self._gather(x.codes.view(torch.uint8)).view(x.fmt.dtype)
        else:
            decoded = self._gather(x.dequantize(torch.bfloat16))
            codes = x.fmt.encode(decoded.float() / scale)
        return QTensor(codes, scale, x.granularity, x.fmt)

    def shared_scale(self, scale: Tensor) -> Tensor:
        """The largest of the ranks' tensor scales, where their rows will be gathered."""
        if not self.scattered:
            return scale
        bits = scale.view(torch.int32).clone()  # NaN > Inf > numbers, as integers
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=self.group)
        return bits.view(torch.float32)

    def sum_partial(self, x: Tensor) -> Callable[[], Tensor]:
        """Start summing partial products [T, K] over the ranks; call the result for the sum.

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
