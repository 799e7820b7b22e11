"""How the operands of a layer's GEMMs are computed: by one fused kernel, or in two steps.

Each function computes a tensor and returns it as the operands that are asked for. If a fused kernel
exists that computes the tensor and writes these operands, it runs:

    tensor              fused where                                                  kernel
    any x, weights      forward takes power-of-two scales per row, or rotated INT8   norm_quantize
    norm output         the same; x is saved in power-of-two blocks or in BF16       the same
    SwiGLU output       the same for gate | up                                       swiglu_quantize
    x^T, W^T            one power-of-two scale from those of forward                 transpose
    any dy              one power-of-two scale for dy and dy^T                       transpose
    d(gate | up)        the same, and for the SwiGLU output transposed               swiglu_quantize
    d(q | k | v)        the same as for dy                                           rope_quantize

Otherwise the tensor is computed in BF16 and `emit` quantizes it (operand.py): scales per row of a
transpose and fp32 scales need amaxes of the whole tensor before its first code. Recipes with such
operands train as any other and are up to a third slower (docs/results/layer.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from coatlm.config.operands import TENSOR, Operand
from coatlm.config.recipes import OF_FORWARD, ROTATED, ROWS, DgradGemm, FlowRecipe, ForwardGemm
from coatlm.fp8 import int8
from coatlm.fp8.attention import dequantize_blocks
from coatlm.fp8.formats import INT8
from coatlm.fp8.norm_quantize import Normed, norm_quantize, quantize_rows
from coatlm.fp8.operand import emit, emit_direct, emit_transposed, format_of
from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.quantize import quantize
from coatlm.fp8.rope_quantize import join_quantize
from coatlm.fp8.scaling import current_scale, tensor_scale
from coatlm.fp8.swiglu_quantize import Activated, swiglu_backward_quantize, swiglu_quantize
from coatlm.fp8.transpose import (
    Codes,
    quantize_both,
    quantize_direct,
    quantize_rows_transposed,
    quantize_transposed,
    transpose_codes,
    transpose_rows,
)
from coatlm.kernels.activation import swiglu, swiglu_backward
from coatlm.kernels.norm import rms_norm, rms_norm_statistics
from coatlm.kernels.rope import join_qkv_rope

Share = Callable[[Tensor], Tensor]  # a scale of this rank -> the one that all ranks use


class SwigluOperands(NamedTuple):
    """What the backward pass of SwiGLU gives the GEMMs of both linears around it."""

    gradient: Codes  # of gate | up
    output_t: QTensor | None  # SwiGLU's output [F, T'], unless it was saved


def _alone(scale: Tensor) -> Tensor:
    """A scale that no other rank shares."""
    return scale


# --- forward ------------------------------------------------------------------------------------


def as_operand(x: Tensor, wanted: Operand, *, share: Share = _alone) -> QTensor:
    """x[M, K] as an operand of forward. `share` makes a tensor-wise scale that of all ranks."""
    if wanted == ROWS:
        return quantize_rows(x)
    if wanted == ROTATED:
        return quantize_rows(x, rotated=True)
    if wanted.granularity != TENSOR:
        return emit_direct(x, wanted)
    scale = current_scale(x, format_of(wanted), power_of_two=wanted.power_of_two)
    return emit_direct(x, wanted, scale=share(scale))


def scale_for_backward(x: QTensor, wanted: Operand) -> Tensor | None:
    """Scales of x, an operand of forward, if backward's operand `wanted` takes the largest."""
    if wanted.scaling != "forward":
        return None
    return int8.e4m3_scale(x) if x.fmt == INT8 else x.scale


def save_blocks(x: Tensor, wanted: Operand | None) -> QTensor | None:
    """x as it is saved for backward, in blocks of a row; None where it is saved in BF16."""
    if wanted is None:
        return None
    dtype = torch.float8_e8m0fnu if wanted.power_of_two else torch.float32
    return quantize(x, fmt=format_of(wanted), granularity=wanted.granularity, scale_dtype=dtype)


def _block_size(saved: Operand | None) -> int:
    """Elements per scale for the fused kernels; 0 saves nothing in FP8."""
    return 0 if saved is None else saved.granularity.columns or 0


def _fused(wanted: Operand, saved: Operand | None) -> bool:
    """Whether a kernel writes the operand `wanted` together with what is saved."""
    return wanted in (ROWS, ROTATED) and (saved is None or saved.power_of_two)


def norm_output(
    a: Tensor,
    weight: Tensor,
    eps: float,
    *,
    wanted: Operand,
    saved: Operand | None,
    add: Tensor | None = None,
    share: Share = _alone,
) -> Normed:
    """RMSNorm of a (+ add), both [T, H]: its output as an operand, and its input as it is saved."""
    if _fused(wanted, saved):
        size, rotated = _block_size(saved), wanted == ROTATED
        return norm_quantize(a, weight, eps, add=add, block_size=size, rotated=rotated)
    x = a if add is None else a + add
    y, rstd = rms_norm_statistics(x, weight, eps)
    return Normed(as_operand(y, wanted, share=share), x, rstd, save_blocks(x, saved))


def swiglu_output(gate_up: Tensor, *, wanted: Operand, saved: Operand | None) -> Activated:
    """SwiGLU of gate | up [T, 2F]: its output as an operand, and its input as it is saved."""
    if _fused(wanted, saved):
        return swiglu_quantize(gate_up, block_size=_block_size(saved), rotated=wanted == ROTATED)
    return Activated(as_operand(swiglu(gate_up), wanted), save_blocks(gate_up, saved))


# --- transposed, for backward -------------------------------------------------------------------


def weight_transposed(
    weight: Tensor, forward: ForwardGemm, dgrad: DgradGemm, scale: Tensor | None
) -> QTensor:
    """W[out, in] as dgrad takes it, [in, out]. `scale`: that of forward, for "forward" scaling."""
    if dgrad.weight.scaling != "forward":
        return emit_transposed(weight, dgrad.weight)
    assert scale is not None
    if (forward.weight, dgrad.weight) == (ROWS, OF_FORWARD):
        return quantize_rows_transposed(weight, scale)
    if forward.weight.fmt == "int8" and dgrad.weight == OF_FORWARD:
        return quantize_transposed(weight, scale.amax())
    if forward.weight.granularity == TENSOR:  # casts as forward does
        return emit_transposed(weight, dgrad.weight, scale=scale)
    again = as_operand(weight, forward.weight)
    return codes_transposed(again, forward.weight, dgrad.weight)


def codes_transposed(x: QTensor, source: Operand, wanted: Operand) -> QTensor:
    """The codes of forward [M, K], an operand `source`, as the operand `wanted` [K, M']."""
    if (source, wanted) == (ROWS, OF_FORWARD):
        return transpose_rows(x)
    if wanted.scaling != "forward":
        return emit_transposed(x, wanted)
    if (source.granularity, source.fmt) == (TENSOR, wanted.fmt):
        return transpose_codes(x)
    return emit_transposed(x, wanted, scale=x.scale.amax())


def input_transposed(x: Tensor | QTensor, wanted: Operand, scale: Tensor | None) -> QTensor:
    """A saved x[T, K] in BF16 or in blocks, as wgrad takes it: [K, T']. `scale`: of forward."""
    one = None if scale is None else scale.amax()
    if wanted == OF_FORWARD and one is not None and powers_of_two(x):
        return quantize_transposed(x, one)
    return emit_transposed(x, wanted, scale=one)


def powers_of_two(x: Tensor | QTensor) -> bool:
    """Whether fused kernels can read a saved tensor: BF16, or blocks with one-byte scales."""
    return not isinstance(x, QTensor) or x.scale.dtype == torch.float8_e8m0fnu


def decoded(x: Tensor | QTensor) -> Tensor:
    """A saved tensor in BF16, for functions that are not fused."""
    if not isinstance(x, QTensor):
        return x
    if powers_of_two(x):
        return dequantize_blocks(x, torch.bfloat16)
    return x.dequantize(torch.bfloat16)


def recomputed_norm(x: Tensor | QTensor, weight: Tensor, eps: float) -> Tensor:
    """The norm output [T, H] in BF16, from its saved input."""
    return rms_norm(decoded(x), weight, eps)


def recomputed_swiglu(gate_up: Tensor | QTensor) -> Tensor:
    """SwiGLU's output [T, F] in BF16, from its saved input."""
    return swiglu(decoded(gate_up))


# --- gradients ----------------------------------------------------------------------------------


def gradient(
    dy: Tensor,
    recipe: FlowRecipe,
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    noise: Tensor | None = None,
) -> Codes:
    """dy[T, K] for dgrad and wgrad. `scale`: fp32 [], where known. `amax`: raised to max|dy|.

    `noise`, here and below: for stochastic rounding, which fused gradients alone can have.
    """
    if not recipe.fused_gradients:
        return _emit_gradient(dy, recipe, scale, amax)
    scale = gradient_scale(dy, recipe) if scale is None else scale
    fmt = format_of(recipe.dgrad.gradient)
    return quantize_both(dy, scale, fmt=fmt, amax=amax, noise=noise)


def gradient_direct(
    dy: Tensor,
    recipe: FlowRecipe,
    *,
    scale: Tensor | None,
    amax: Tensor | None,
    noise: Tensor | None,
) -> QTensor:
    """dy[T, K] for dgrad alone, for recipes with tensor-wise gradients; needs `scale`."""
    assert scale is not None
    wanted = recipe.dgrad.gradient
    if recipe.fused_gradients:
        return quantize_direct(dy, scale, fmt=format_of(wanted), amax=amax, noise=noise)
    made = emit(dy, direct=wanted, scale=scale, amax=amax).direct
    assert made is not None
    return made


def _emit_gradient(
    dy: Tensor, recipe: FlowRecipe, scale: Tensor | None, amax: Tensor | None
) -> Codes:
    if scale is None and recipe.tensor_wise_gradients:
        scale = gradient_scale(dy, recipe)
    wanted = {"direct": recipe.dgrad.gradient, "transposed": recipe.wgrad.gradient}
    made = emit(dy, **wanted, scale=scale, amax=amax)
    assert made.direct is not None and made.transposed is not None
    return Codes(made.direct, made.transposed)


def gradient_scale(dy: Tensor, recipe: FlowRecipe, amaxes: Tensor | None = None) -> Tensor:
    """The current tensor-wise scale [] of a gradient. `amaxes`: of dy, where they are known."""
    wanted = recipe.dgrad.gradient
    options = {"power_of_two": wanted.power_of_two}
    if amaxes is None:
        return current_scale(dy, format_of(wanted), **options)
    return tensor_scale(amaxes, format_of(wanted), **options)


def swiglu_gradient(
    da: Tensor,
    gate_up: Tensor | QTensor,
    output_scale: Tensor | None,
    recipe: FlowRecipe,
    *,
    with_output: bool,
    scale: Tensor | None,
    amax: Tensor | None,
    noise: Tensor | None,
) -> SwigluOperands:
    """da[T, F] and the saved gate | up [T, 2F] -> operands of d(gate | up) and of SwiGLU's output.

    `output_scale`: scales of the output in forward, where wgrad takes scales of forward.
    """
    wanted = recipe.wgrad.activation
    fused = recipe.fused_gradients and wanted == OF_FORWARD
    if fused and powers_of_two(gate_up):
        assert output_scale is not None
        fmt = format_of(recipe.dgrad.gradient)
        made = swiglu_backward_quantize(
            *(da, gate_up, output_scale.amax()),
            fmt=fmt,
            with_a=with_output,
            scale=scale,
            amax=amax,
            noise=noise,
        )
        return SwigluOperands(Codes(made.dx, made.dx_t), made.a_t)
    x = decoded(gate_up)
    dx = gradient(swiglu_backward(da, x), recipe, scale=scale, amax=amax, noise=noise)
    output_t = input_transposed(swiglu(x), wanted, output_scale) if with_output else None
    return SwigluOperands(dx, output_t)


def swiglu_gradient_values(da: Tensor, gate_up: Tensor | QTensor) -> Tensor:
    """d(gate | up) [T, 2F] in BF16, of which `swiglu_gradient` computes codes."""
    return swiglu_backward(da, decoded(gate_up))


def joined(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """d(q | k | v) [T, W] in BF16, of which `qkv_gradient` computes codes."""
    return join_qkv_rope(dq, dk, dv, cos, sin).flatten(2).flatten(0, 1)


def qkv_gradient(
    parts: tuple[Tensor, Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    recipe: FlowRecipe,
    *,
    scale: Tensor | None,
    amax: Tensor | None,
    noise: Tensor | None,
) -> Codes:
    """Gradients of rotated q, k and of v [S, B, heads, D] -> operands of d(q | k | v) [T, W]."""
    if recipe.fused_gradients:
        fmt = format_of(recipe.dgrad.gradient)
        return join_quantize(*parts, cos, sin, fmt=fmt, scale=scale, amax=amax, noise=noise)
    return _emit_gradient(joined(*parts, cos, sin), recipe, scale, amax)
