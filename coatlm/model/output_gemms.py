"""The output layer's GEMMs for a chunk of the vocabulary: in BF16, or with FP8 operands.

    logits[T, C]   = hidden[T, H] @ weight[C, H]^T            sums over H
    dhidden[T, H] += dlogits[T, C] @ weight[C, H]             sums over C
    dweight[C, H]  = dlogits[T, C]^T @ hidden[T, H]           sums over T

In FP8 each operand is quantized along the axis that its GEMM sums over (fp8/operand.py), with a
power-of-two scale per row of the operand:

    operand                         format    a scale per
    hidden, weight                  E4M3      token, vocabulary entry
    dlogits, weight^T               E5M2 E4M3 token, hidden channel of the chunk
    dlogits^T, hidden^T             E5M2 E4M3 vocabulary entry, hidden channel

Gradients are E5M2 under every recipe. Relative to that of a label, up to 1, the gradients of the
other logits are probabilities, which begin near 1 / V and fall from there. E4M3 rounds them to zero
below about 2^-18, E5M2 below 2^-32. The codes of a chunk of the weight are computed at each use, so
that no copy of the weight is held.

Shapes: T tokens, H hidden, V vocabulary entries on this rank, C of them in a chunk. A chunk whose C
is no multiple of 16 is padded with zeros for the GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property, partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from coatlm.config.model import Precision
from coatlm.config.recipes import FAST, ROWS, GemmName
from coatlm.fp8.gemm import ALIGNMENT, matmul
from coatlm.fp8.norm_quantize import quantize_rows
from coatlm.fp8.operand import emit, emit_transposed
from coatlm.fp8.qtensor import QTensor

GRADIENT = replace(ROWS, fmt="e5m2")


class OutputGemms(Protocol):
    """The GEMMs of one forward or backward pass; `rows` are those of the weight in a chunk."""

    def logits_(self, rows: slice, out_TC: Tensor) -> Tensor:
        """Write the logits of a chunk to `out`, and return it."""
        ...

    def backward_(
        self,
        rows: slice,
        d_TC: Tensor,
        *,
        dhidden: Tensor | None,
        dweight: Tensor | None,
        accumulate: bool,
    ) -> None:
        """Add to dhidden, fp32 [T, H], and write or with `accumulate` add to dweight, [C, H]."""
        ...


MakeGemms = Callable[[Tensor, Tensor], OutputGemms]  # of hidden [T, H] and weight [V, H]


class PlainGemms:
    """GEMMs in the dtype of hidden and weight."""

    def __init__(self, hidden_TH: Tensor, weight_VH: Tensor) -> None:
        self.hidden, self.weight = hidden_TH, weight_VH

    def logits_(self, rows: slice, out_TC: Tensor) -> Tensor:
        return torch.mm(self.hidden, self.weight[rows].t(), out=out_TC)

    def backward_(
        self,
        rows: slice,
        d_TC: Tensor,
        *,
        dhidden: Tensor | None,
        dweight: Tensor | None,
        accumulate: bool,
    ) -> None:
        if dhidden is not None:
            _add_gemm_(dhidden, d_TC, self.weight[rows])
        if dweight is None:
            return
        if accumulate:
            _add_gemm_(dweight, d_TC.t(), self.hidden)
        else:
            torch.mm(d_TC.t(), self.hidden, out=dweight)


def _add_gemm_(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b; where dtypes differ, a @ b is not rounded before it is added."""
    if into.dtype == a.dtype:
        into.addmm_(a, b)
    elif into.is_cuda and into.dtype == torch.float32:
        torch.addmm(into, a, b, out_dtype=torch.float32, out=into)
    else:
        into.add_(a.float() @ b.float())


class Fp8Gemms:
    """GEMMs of FP8 operands, from hidden and weight in BF16; `fast`: see fp8/gemm.py.

    Raises ValueError unless both are BF16 and H is a multiple of 16.
    """

    def __init__(
        self,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        *,
        fast: Collection[GemmName] = FAST,
    ) -> None:
        for name, x in (("hidden", hidden_TH), ("weight", weight_VH)):
            if x.dtype != torch.bfloat16 or x.shape[1] % ALIGNMENT:
                raise ValueError(
                    f"{name} is {x.dtype} with rows of {x.shape[1]} elements: GEMMs in FP8 take "
                    f"torch.bfloat16 and multiples of {ALIGNMENT}"
                )
        self.hidden, self.weight, self.fast = hidden_TH.detach(), weight_VH.detach(), fast

    @cached_property
    def _hidden_codes(self) -> QTensor:
        return quantize_rows(self.hidden)

    @cached_property
    def _hidden_codes_t(self) -> QTensor:
        return emit_transposed(self.hidden, ROWS)

    def logits_(self, rows: slice, out_TC: Tensor) -> Tensor:
        weight = self.weight[rows]
        beyond = -len(weight) % ALIGNMENT
        codes = quantize_rows(F.pad(weight, (0, 0, 0, beyond)) if beyond else weight)
        fast = "forward" in self.fast
        if not beyond:
            return matmul(self._hidden_codes, codes, out=out_TC, accumulate=False, fast=fast)
        return out_TC.copy_(matmul(self._hidden_codes, codes, fast=fast)[:, : len(weight)])

    def backward_(
        self,
        rows: slice,
        d_TC: Tensor,
        *,
        dhidden: Tensor | None,
        dweight: Tensor | None,
        accumulate: bool,
    ) -> None:
        count = d_TC.shape[1]
        if count % ALIGNMENT:
            d_TC = F.pad(d_TC, (0, -count % ALIGNMENT))
        direct, transposed = emit(
            d_TC,
            direct=None if dhidden is None else GRADIENT,
            transposed=None if dweight is None else GRADIENT,
        )
        if direct is not None:
            weight_t = emit_transposed(self.weight[rows], ROWS)
            matmul(direct, weight_t, out=dhidden, fast="dgrad" in self.fast)
        if transposed is not None:
            codes, scale = transposed.codes[:count], transposed.scale[:count]
            own = replace(transposed, codes=codes, scale=scale)
            fast = "wgrad" in self.fast
            matmul(own, self._hidden_codes_t, out=dweight, accumulate=accumulate, fast=fast)


def output_gemms(precision: Precision) -> MakeGemms:
    """The GEMMs that `precision.output_layer` names."""
    if precision.output_layer == "bf16":
        return PlainGemms
    return partial(Fp8Gemms, fast=precision.fast_accumulation)
