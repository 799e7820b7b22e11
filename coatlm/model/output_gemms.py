"""The output layer's GEMMs for a chunk of the vocabulary: in BF16, or with FP8 operands.

    logits[T, C]   = hidden[T, H] @ weight[C, H]^T            sums over H
    dhidden[T, H] += dlogits[T, C] @ weight[C, H]             sums over C
    dweight[C, H]  = dlogits[T, C]^T @ hidden[T, H]           sums over T

In FP8 each operand is quantized along the axis that its GEMM sums over (fp8/operand.py), with
power-of-two scales:

    operands                        formats       a scale per
    hidden, weight                  E4M3, E4M3    token, vocabulary entry
    d, weight^T                     E4M3, E4M3    microbatch, weight
    d^T, (hidden - mean)^T          E4M3, E4M3    microbatch, hidden channel

`fp8` takes all three GEMMs in FP8. `int8` takes those of backward in FP8 and computes logits from
hidden states and weights in rotated INT8, with an fp32 scale per token and entry and exact sums
(fp8/int8.py): a third of the rounding errors. `fp8-gradients` computes logits in BF16, so that the
loss of given weights is that of a BF16 output layer.

d is dlogits, with 0 for labels. Its codes are E4M3 under every recipe, with one scale for all of a
microbatch, which is known before them, and rounded stochastically (logits_quantize.py), with noise
that is advanced at the end of each backward pass. So are the codes of weight^T: rounded to nearest,
they would err alike in each microbatch, and the gradients of all layers with them, by 5 % of their
mean in a small model (tools/study_rounding.py). The codes of a chunk of the weight are computed at
each use, so that no copy of the weight is held.

The gradient of a label's logit, g = dlogits[t, label], is about as large as those of the token's
other entries together. It has no code: the end of the backward pass adds its products in fp32, of
BF16 rows, so that neither operand is rounded.

    dhidden[t] += g[t] weight[label[t]]         dweight[label[t]] += g[t] hidden[t]

The GEMMs of backward never use fast accumulation (fp8/gemm.py): a sum of 14 bits that contains a
large term drops the terms of improbable entries, which are many. wgrad sums over tokens, and takes
hidden states without their mean over the T tokens:

    dweight[C, H] = d^T (hidden - mean) + (sum_T d) mean^T       mean[H] in BF16

The second term is a product of two vectors in fp32, of gradients that are not rounded. Hidden
states of a trained model have much in common, and the rounding of this part to FP8 would exceed
that of the rest. Besides, even promoted sums lose a part of their small terms. Along the mean every
product has the sign of its gradient, so that what they lose would add up: all logits would drift
upwards (docs/results/convergence.md).

Shapes: T tokens, H hidden, V vocabulary entries on this rank, C of them in a chunk. A chunk whose C
is no multiple of 16 is padded for the GEMMs: weights with zeros, logits with -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from coatlm.config.model import Precision
from coatlm.config.recipes import ROWS
from coatlm.fp8.formats import ALIGNMENT, E4M3
from coatlm.fp8.gemm import matmul
from coatlm.fp8.norm_quantize import quantize_rows
from coatlm.fp8.operand import emit_transposed
from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.scaling import power_of_two_ref
from coatlm.fp8.transpose import quantize_transposed
from coatlm.kernels.indexed_rows import add_gathered_, add_scattered_
from coatlm.kernels.outer_product import add_outer_
from coatlm.model.logits_quantize import TokenTerms, of_chunk, quantize_logits_grad
from coatlm.model.loss_kernels import logits_grad_, logits_grad_ref
from coatlm.model.rounding import LayerNoise


class OutputGemms(Protocol):
    """The GEMMs of one forward or backward pass; `rows` are those of the weight in a chunk."""

    def logits_(self, rows: slice, out_TC: Tensor) -> Tensor:
        """Write the logits of a chunk to `out`, and return it."""
        ...

    def backward_(
        self,
        rows: slice,
        logits_TC: Tensor,
        terms: TokenTerms,
        first: int,
        *,
        dhidden: Tensor | None,
        dweight: Tensor | None,
        accumulate: bool,
    ) -> None:
        """Add to dhidden, fp32 [T, H]. Write dweight, [C, H], or add to it with `accumulate`.

        `first` is the entry of the whole vocabulary at which the chunk begins. The logits may be
        overwritten.
        """
        ...

    def end_backward_(
        self, terms: TokenTerms, first: int, *, dhidden: Tensor | None, dweight: Tensor | None
    ) -> None:
        """End the backward pass, after its last chunk: add what no chunk has to the gradients.

        dweight is that of the whole weight, [V, H], whose first row is the entry `first`.
        """
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
        logits_TC: Tensor,
        terms: TokenTerms,
        first: int,
        *,
        dhidden: Tensor | None,
        dweight: Tensor | None,
        accumulate: bool,
    ) -> None:
        gradient = logits_grad_ if logits_TC.is_cuda else logits_grad_ref
        d_TC = gradient(logits_TC, *terms.arguments(first))
        if dhidden is not None:
            _add_gemm_(dhidden, d_TC, self.weight[rows])
        if dweight is None:
            return
        if accumulate:
            _add_gemm_(dweight, d_TC.t(), self.hidden)
        else:
            torch.mm(d_TC.t(), self.hidden, out=dweight)

    def end_backward_(
        self, terms: TokenTerms, first: int, *, dhidden: Tensor | None, dweight: Tensor | None
    ) -> None:
        """Nothing is left to add."""


def _add_gemm_(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b; where dtypes differ, a @ b is not rounded before it is added."""
    if into.dtype == a.dtype:
        into.addmm_(a, b)
    elif into.is_cuda and into.dtype == torch.float32:
        torch.addmm(into, a, b, out_dtype=torch.float32, out=into)
    else:
        into.add_(a.float() @ b.float())


class Fp8GradientGemms(PlainGemms):
    """dgrad and wgrad of FP8 operands, logits in BF16.

    `noise`: of the rounding of gradients of logits (its first row) and of the weight (its second);
    backward needs it, forward does not. Raises ValueError unless hidden and weight are BF16 and H
    is a multiple of 16.
    """

    def __init__(
        self, hidden_TH: Tensor, weight_VH: Tensor, *, noise: LayerNoise | None = None
    ) -> None:
        for name, x in (("hidden", hidden_TH), ("weight", weight_VH)):
            if x.dtype != torch.bfloat16 or x.shape[1] % ALIGNMENT:
                raise ValueError(
                    f"{name} is {x.dtype} with rows of {x.shape[1]} elements: GEMMs in FP8 take "
                    f"torch.bfloat16 and multiples of {ALIGNMENT}"
                )
        super().__init__(hidden_TH.detach().contiguous(), weight_VH.detach().contiguous())
        self.noise = noise

    @cached_property
    def _mean(self) -> Tensor:
        return self.hidden.mean(0, dtype=torch.float32).to(self.hidden.dtype)

    @cached_property
    def _codes_about_mean_t(self) -> QTensor:
        return emit_transposed(self.hidden - self._mean, ROWS)

    @cached_property
    def _weight_scale(self) -> Tensor:
        smallest, largest = torch.aminmax(self.weight)
        return power_of_two_ref(torch.maximum(largest, -smallest).float(), E4M3)

    def backward_(
        self,
        rows: slice,
        logits_TC: Tensor,
        terms: TokenTerms,
        first: int,
        *,
        dhidden: Tensor | None,
        dweight: Tensor | None,
        accumulate: bool,
    ) -> None:
        assert self.noise is not None
        # before the codes of the gradients, so that hidden - mean is not held beside them
        hidden_t = None if dweight is None else self._codes_about_mean_t
        direct, transposed, sums = quantize_logits_grad(
            logits_TC,
            terms,
            first,
            self.noise.noise[0],
            direct=dhidden is not None,
            transposed=dweight is not None,
        )
        if direct is not None:
            noise = of_chunk(self.noise.noise[1], first)
            weight_t = quantize_transposed(self.weight[rows], self._weight_scale, noise=noise)
            matmul(direct, weight_t, out=dhidden, fast=False)
        if dweight is None:
            return
        assert transposed is not None and sums is not None and hidden_t is not None
        own = replace(transposed, codes=transposed.codes[: len(dweight)])
        matmul(own, hidden_t, out=dweight, accumulate=accumulate, fast=False)
        add_outer_(dweight, sums[: len(dweight)], self._mean)

    def end_backward_(
        self, terms: TokenTerms, first: int, *, dhidden: Tensor | None, dweight: Tensor | None
    ) -> None:
        assert self.noise is not None
        self.noise.advance_()
        rows = terms.label_rows(first, len(self.weight))
        if dhidden is not None:
            add_gathered_(dhidden, terms.label_grad, self.weight, rows)
        if dweight is not None:
            add_scattered_(dweight, terms.label_grad, self.hidden, rows)


class Fp8Gemms(Fp8GradientGemms):
    """All three GEMMs of FP8 operands; `fast`: fast accumulation in the GEMM of logits."""

    rotated = False  # whether logits are of rotated INT8 operands

    def __init__(
        self,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        *,
        noise: LayerNoise | None = None,
        fast: bool = True,
    ) -> None:
        super().__init__(hidden_TH, weight_VH, noise=noise)
        self.fast = fast

    @cached_property
    def _hidden_codes(self) -> QTensor:
        return quantize_rows(self.hidden, rotated=self.rotated)

    def logits_(self, rows: slice, out_TC: Tensor) -> Tensor:
        weight = self.weight[rows]
        beyond = -len(weight) % ALIGNMENT
        padded = F.pad(weight, (0, 0, 0, beyond)) if beyond else weight
        codes = quantize_rows(padded, rotated=self.rotated)
        hidden = self._hidden_codes
        if not beyond:
            return matmul(hidden, codes, out=out_TC, accumulate=False, fast=self.fast)
        return out_TC.copy_(matmul(hidden, codes, fast=self.fast)[:, : len(weight)])


class Int8Gemms(Fp8Gemms):
    """Logits of rotated INT8 operands, whose sums are exact; GEMMs of backward of FP8 operands."""

    rotated = True


FP8_GEMMS: dict[str, type[Fp8GradientGemms]] = {
    "fp8-gradients": Fp8GradientGemms,
    "fp8": Fp8Gemms,
    "int8": Int8Gemms,
}


class Fp8Output:
    """Makes the GEMMs of an FP8 output layer; they share its noise, which `GradientNoise` sets."""

    def __init__(self, make: Callable[..., Fp8GradientGemms]) -> None:
        self.make = make
        self.noise: LayerNoise | None = None

    def __call__(self, hidden_TH: Tensor, weight_VH: Tensor) -> OutputGemms:
        return self.make(hidden_TH, weight_VH, noise=self.noise)


def output_gemms(precision: Precision) -> MakeGemms:
    """The GEMMs that `precision.output_layer` names."""
    if precision.output_layer == "bf16":
        return PlainGemms
    if precision.output_layer == "fp8":
        return Fp8Output(partial(Fp8Gemms, fast="forward" in precision.fast_accumulation))
    return Fp8Output(FP8_GEMMS[precision.output_layer])
