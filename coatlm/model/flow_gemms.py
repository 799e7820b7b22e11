"""The GEMMs of one FP8 layer, with operands as its recipe says, gathered over tensor parallelism.

The two autograd functions of a layer (flow.py) share one `Flow`. fp8/producers.py computes the
operands, by fused kernels where there are any. This module decides which scales forward saves for
backward, and what is all-gathered and in which format:

    operand of wgrad                 scales of forward  all-gathered in backward (sequence parallel)
    activation, scaling "forward"    saved              codes with one scale
    activation, scaling "current"    not saved          BF16, or saved codes with their scales
    gradient, tensor-wise            -                  codes
    gradient, finer granularity      -                  BF16

Collectives overlap with GEMMs as follows; the third column needs `TensorParallel.chunks` > 1:

    collective                      overlaps with                     and, if GEMMs are split, with
    all-gather of a norm output     before qkv: the cast of W         forward GEMMs of earlier rows
    reduce-scatter of y, forward    after proj: the cast of fc1's W   the GEMMs of later columns
    all-gather of a gradient        the cast of W^T                   dgrad of earlier rows
    all-gather of a norm output     dgrad                             dgrad
      for wgrad
    reduce-scatter of dx, backward  wgrad                             wgrad

An operand that `FlowRecipe.bf16` names enters its GEMM in BF16, and so does one whose tensor is in
`Flow.bf16_tensors` (bf16_tensors.py). Its codes are computed as well, because other operands take
their scales, so each of those is the same as without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coatlm.config.operands import Operand
from coatlm.config.recipes import (
    ATTENTION,
    OF_FORWARD,
    ROWS,
    AttentionName,
    FlowRecipe,
    GemmName,
    OperandName,
)
from coatlm.fp8 import producers
from coatlm.fp8.gemm import Plans, matmul, matmul_bf16
from coatlm.fp8.operand import emit_direct, emit_transposed, padded
from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.transpose import Codes, quantize_direct, quantize_transposed, transpose_codes
from coatlm.model.bf16_tensors import INPUTS, LinearName, format_saved, tensor_of
from coatlm.model.numerics import Probe, RowSource
from coatlm.model.rounding import LayerNoise
from coatlm.model.scales import CurrentScales, Scales
from coatlm.parallel.tensor import RowPiece, TensorParallel, Wait

OPERAND_OF: dict[str, OperandName] = {  # the end of a tensor's name in the probe -> its operand
    "input": "forward.activation",
    "output": "forward.activation",
    "weight": "forward.weight",
    "grad": "dgrad.gradient",
}

GemmInput = QTensor | Tensor  # an operand: FP8 codes, or BF16
Values = Callable[[], Tensor]  # computes an operand in BF16, where one is needed


class Gradient(NamedTuple):
    """dy as the operands of dgrad [T, K] and wgrad [K, T']."""

    direct: GemmInput
    transposed: GemmInput


class Fp8Weight(NamedTuple):
    """A weight matrix in FP8, in the layouts that the GEMMs of forward and dgrad take."""

    direct: QTensor  # [out, in]
    transposed: QTensor  # [in, out]


class Flow:
    """The recipe, tensor-parallel layout, cached FP8 weights and GEMMs of one layer."""

    def __init__(
        self, recipe: FlowRecipe, parallel: TensorParallel, eps: float, plans: Plans | None = None
    ) -> None:
        """`plans`: GEMM algorithms that the model's layers share; None: this layer has its own."""
        self.plans = Plans() if plans is None else plans
        self.recipe, self.parallel, self.eps = recipe, parallel, eps
        self.holds_weights = False  # set by the layer: recipe.keep_weights, in training only
        self.weights: dict[Tensor, Fp8Weight] = {}
        self.bf16_tensors: frozenset[str] = frozenset()  # names of numerics.TENSORS
        self.probe: Probe | None = None  # in steps whose numerics are logged
        self.scales: Scales = CurrentScales()  # of gradients
        self.noise: LayerNoise | None = None  # of gradients, for stochastic rounding

    def record(
        self, name: str, source: Tensor | RowSource, quantized: Tensor | QTensor | None
    ) -> None:
        """Give the probe x[M, K], or a function that computes its rows, if x is held in FP8."""
        operand = OPERAND_OF.get(name.rpartition("_")[2])
        if operand in self.recipe.bf16 or name in self.bf16_tensors:
            return
        if self.probe is not None and isinstance(quantized, QTensor):
            self.probe.record(name, source, quantized)

    def exact(self, linear: LinearName, operand: OperandName) -> bool:
        """Whether the linear's GEMM takes this operand in BF16."""
        return operand in self.recipe.bf16 or tensor_of(linear, operand) in self.bf16_tensors

    def saved_as(self, tensor: str) -> Operand | None:
        """How `..._saved` is saved for backward; None means in BF16."""
        return format_saved(self.recipe, tensor, self.bf16_tensors)

    def attention_in_fp8(self) -> dict[AttentionName, Operand]:
        """The format of each of q, k, v and o that is saved for backward in FP8."""
        found = {name: self.saved_as(f"{name}_saved") for name in ATTENTION}
        return {name: operand for name, operand in found.items() if operand is not None}

    def saves_input(self, linear: LinearName) -> bool:
        """Whether the FP8 codes of the linear's input are saved, for wgrad."""
        saved = self.recipe.saved
        wanted = saved.projection_input if linear == "proj" else saved.linear_input
        return wanted and INPUTS[linear] not in self.bf16_tensors

    def slot(self, name: str) -> dict[str, Tensor | None]:
        """How the gradient `name` is quantized: scale, amax and noise, as producers take them."""
        scale, amax = self.scales.slot(name)
        assert (self.noise is not None) == self.recipe.stochastic
        noise = None if self.noise is None else self.noise.slots[name]
        return {"scale": scale, "amax": amax, "noise": noise}

    def finish_microbatch(self) -> None:
        """Backward has quantized the last gradient of the layer."""
        if self.noise is not None:
            self.noise.advance_()

    # --- weights ---

    def forward_weight(self, weight: Tensor) -> QTensor:
        """W [out, in] as the operand of forward; cached if `holds_weights`."""
        if weight in self.weights:
            return self.weights[weight].direct
        direct = producers.as_operand(weight.detach(), self.recipe.forward.weight)
        if self.holds_weights:
            self.weights[weight] = Fp8Weight(direct, self._transposed(weight, direct))
        return direct

    def _transposed(self, weight: Tensor, direct: QTensor) -> QTensor:
        wanted = self.recipe.dgrad.weight
        if wanted.scaling != "forward" or self.recipe.rotated:
            return self.backward_weight(weight, self.weight_scale(direct))
        return producers.codes_transposed(direct, self.recipe.forward.weight, wanted)

    def weight_scale(self, weight: QTensor) -> Tensor | None:
        """The scales of a weight in forward, if dgrad's operand needs them."""
        return producers.scale_for_backward(weight, self.recipe.dgrad.weight)

    def backward_weight(self, weight: Tensor, scale: Tensor | None) -> QTensor:
        """W^T [in, out] as the operand of dgrad; `scale` is the `weight_scale` of forward."""
        if weight in self.weights:
            return self.weights[weight].transposed
        recipe = self.recipe
        return producers.weight_transposed(weight.detach(), recipe.forward, recipe.dgrad, scale)

    # --- GEMMs ---

    def project(
        self,
        linear: LinearName,
        x: QTensor,
        w: QTensor,
        weight: Tensor,
        values: Values,
        **options: Any,
    ) -> Tensor:
        """The forward GEMM, y = x W^T, of codes x and w; `weight` and `values` are both in BF16."""
        a = values() if self.exact(linear, "forward.activation") else x
        b = weight.detach() if self.exact(linear, "forward.weight") else w
        return self._multiply("forward", a, b, **options)

    def project_gathered(
        self,
        linear: LinearName,
        x: QTensor,
        gathered: list[RowPiece],
        w: QTensor,
        weight: Tensor,
        values: Values,
        **options: Any,
    ) -> tuple[QTensor, Tensor]:
        """`project` of a column-parallel linear, whose input is all-gathered meanwhile.

        x [T/tp, K] are the rows of this rank, `gathered` are those of all. Returns these and
        y [T, N].
        """
        if not self.parallel.scattered:
            return x, self.project(linear, x, w, weight, values, **options)
        return self._multiply_gathered("forward", gathered, w, **options)

    def project_summed(self, x: QTensor, w: QTensor) -> Wait:
        """The forward GEMM of a row-parallel linear; starts to sum y over the ranks."""
        return self.parallel.sum_columns(
            lambda columns: self._multiply("forward", x, w.rows(columns)), w.shape[0]
        )

    def input_gradient(
        self, linear: LinearName, dy: GemmInput, weight: Tensor, scale: Tensor | None
    ) -> Tensor:
        """The dgrad GEMM, dx = dy W."""
        exact = self.exact(linear, "dgrad.weight")
        w = weight.detach().t() if exact else self.backward_weight(weight, scale)
        return self._multiply("dgrad", dy, w)

    def output_gradient(
        self,
        linear: LinearName,
        dy: Tensor,
        weight: Tensor,
        scale: Tensor | None,
        amaxes: Tensor | None = None,
    ) -> tuple[GemmInput, Tensor]:
        """The gradient of a row-parallel linear: wgrad's operand [K, T'], and dx = dy W.

        dy [T/tp, K] is all-gathered, dx has all T tokens, and T' is T, padded. `scale` is the
        `weight_scale` of forward. `amaxes` are those of dy, if a kernel has computed them.
        """
        recipe, parallel, name = self.recipe, self.parallel, f"{linear}_grad"
        slot = self.slot(name)
        if not recipe.tensor_wise_gradients:
            dy = parallel.gather_values(dy)()
        elif slot["scale"] is None:  # the largest of the ranks, each from its own tokens
            slot["scale"] = parallel.shared_scale(producers.gradient_scale(dy, recipe, amaxes))
        if not (parallel.scattered and recipe.tensor_wise_gradients):
            both = producers.gradient(dy, recipe, **slot)
            self.record(name, dy, both.direct)
            d = self.as_gradient(linear, both, lambda: dy)
            return d.transposed, self.input_gradient(linear, d.direct, weight, scale)
        mine = producers.gradient_direct(dy, recipe, **slot)
        gathered = parallel.gather_pieces(mine)
        self.record(name, dy, mine)
        w = self.backward_weight(weight, scale)
        whole, dx = self._multiply_gathered("dgrad", gathered, w)
        return transpose_codes(whole), dx

    def weight_gradient(self, weight: Tensor, dy_t: GemmInput, x_t: GemmInput) -> Tensor | None:
        """The wgrad GEMM, dW = dy^T x. It accumulates into `main_grad`, or overwrites a stale one.

        Returns None then, and dW if the weight has no `main_grad`.
        """
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            return self._multiply("wgrad", dy_t, x_t).to(weight.dtype)
        stale = getattr(weight, "main_grad_stale", False)
        self._multiply("wgrad", dy_t, x_t, out=main_grad, accumulate=not stale)
        if stale:
            weight.main_grad_stale = False  # type: ignore[attr-defined]
        return None

    def _multiply(self, name: GemmName, a: GemmInput, b: GemmInput, **options: Any) -> Tensor:
        if isinstance(a, QTensor) and isinstance(b, QTensor):
            return matmul(a, b, fast=name in self.recipe.fast, plans=self.plans, **options)
        return matmul_bf16(a, b, **options)

    def _multiply_gathered(
        self, name: GemmName, gathered: list[RowPiece], w: QTensor, **options: Any
    ) -> tuple[QTensor, Tensor]:
        """x w^T, piece by piece as the rows of x arrive. Returns all rows of both."""
        (_, first), *later = gathered
        whole = first()
        if not later:
            return whole, self._multiply(name, whole, w, **options)
        shape = whole.shape[0], w.shape[0]
        y = torch.empty(shape, dtype=torch.bfloat16, device=whole.codes.device)
        options["accumulate"] = False
        for rows, wait in gathered:
            self._multiply(name, wait().rows(rows), w, out=y[rows], **options)
        return whole, y

    # --- activations and gradients ---

    def input_scale(self, x: QTensor) -> Tensor | None:
        """The scales of a linear's input in forward, of all tokens, if wgrad needs them."""
        return producers.scale_for_backward(x, self.recipe.wgrad.activation)

    def as_gradient(self, linear: LinearName, codes: Codes, values: Values) -> Gradient:
        """The operands of dgrad and wgrad: codes of dy, or `values`, dy [T, K] in BF16."""
        direct = self.exact(linear, "dgrad.gradient")
        transposed = self.exact(linear, "wgrad.gradient")
        if not (direct or transposed):
            return Gradient(*codes)
        dy = values()
        return Gradient(
            dy if direct else codes.direct,
            self._columns(dy) if transposed else codes.transposed,
        )

    def input_transposed(self, linear: LinearName, codes: QTensor, values: Values) -> GemmInput:
        """A linear's input as the operand [K, T'] of wgrad: its codes, or `values` [T, K]."""
        return self._columns(values()) if self.exact(linear, "wgrad.activation") else codes

    def _columns(self, x: Tensor) -> Tensor:
        """x[T, K] in BF16 -> [K, T'], with zeros beyond T, as codes have them."""
        beyond = padded(len(x), self.recipe.wgrad.gradient.granularity) - len(x)
        return (F.pad(x, (0, 0, 0, beyond)) if beyond else x).t()

    def norm_output_transposed(
        self,
        linear: LinearName,
        x: Tensor | QTensor,
        rstd: Tensor,
        weight: Tensor,
        y: QTensor | None,
        scale: Tensor | None,
    ) -> Callable[[], GemmInput]:
        """The operand [K, T'] of wgrad from the input of a column-parallel linear, of all tokens.

        This input is the output of RMSNorm: its codes `y` if they were saved, else recomputed from
        the saved norm input `x`. `scale` is the `input_scale` of forward. Under sequence
        parallelism this starts the all-gather. The function that is returned does all the rest.
        """
        values = partial(producers.recomputed_norm, x, weight, self.eps)
        if self.exact(linear, "wgrad.activation"):
            return lambda: self._columns(values())
        parallel, one = self.parallel, None if scale is None else scale.amax()
        source, wanted = self.recipe.forward.activation, self.recipe.wgrad.activation
        fused = wanted == OF_FORWARD and (source == ROWS or self.recipe.rotated)
        if fused and one is not None and (y is not None or producers.powers_of_two(x)):
            matrix = x if y is None else y.codes
            factors: dict[str, Any] = {"row": rstd, "column": weight}
            if y is not None:
                factors = {"row": y.scale}
            if not parallel.scattered:
                return lambda: quantize_transposed(matrix, one, **factors)
            codes = parallel.gather_rows(quantize_direct(matrix, one, **factors))
            return lambda: transpose_codes(codes())
        if y is not None:
            codes = parallel.gather_rows(y)
            return lambda: producers.codes_transposed(codes(), source, wanted)
        if not parallel.scattered:
            return lambda: emit_transposed(values(), wanted, scale=one)
        if one is not None:
            codes = parallel.gather_rows(emit_direct(values(), wanted, scale=one))
            return lambda: transpose_codes(codes())
        gathered = parallel.gather_values(values())
        return lambda: emit_transposed(gathered(), wanted)
