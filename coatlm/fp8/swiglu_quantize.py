"""SwiGLU between FP8 linears (COAT, arXiv 2410.19313, section 5). M rows; F of gate, F of up.

    a = silu(gate) * up                                                as in activation.py

Forward, one pass over x[M, 2F] = gate | up (a row is read twice, the second time from cache):

    codes of a, one power-of-two scale a row                           into the down projection
    codes of x, one power-of-two scale for 1 x `group` elements        saved for backward

Backward decodes x and makes, for the GEMMs of both linears, the codes of dx as they are and
transposed, and those of a transposed: a is not saved. dx takes one scale for the tensor, so a first
pass over the same operands finds its amax: cheaper than writing dx in BF16 and reading it back.
Rounding: a and dx from fp32 to FP8 directly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatlm.fp8.activation import swiglu_backward_ref, swiglu_ref
from coatlm.fp8.formats import E4M3, Fp8Format
from coatlm.fp8.norm import processors
from coatlm.fp8.norm_quantize import (
    UNSCALED,
    empty_rows,
    group_exponents,
    parts_of,
    quantize_rows_ref,
)
from coatlm.fp8.qtensor import ROW, TENSOR, QTensor, group
from coatlm.fp8.quantize import quantize_ref
from coatlm.fp8.scaling import (
    exponent_of,
    group_scale,
    inverse_power_of_two,
    power_of_two,
    power_of_two_ref,
    top_exponent,
)
from coatlm.fp8.transpose import Tile, padded_rows, padded_t

BLOCK = 2048  # columns of a row that a program of forward handles at a time
TILE = Tile(32, 128, 8, 16, 4)  # of a in backward
AMAX_TILE = Tile(4, 256, 16, 1, 2)  # to find the amax of dx
WARPS = 8
PROGRAMS_PER_SM = 16  # of the pass that finds an amax


class Activated(NamedTuple):
    """What forward makes; `saved` is None unless asked for."""

    a: QTensor  # [M, F], a scale a row
    saved: QTensor | None  # x, [M, 2F], a scale a group


class Gradients(NamedTuple):
    """What backward makes, each with one scale. M' is M padded for the GEMM (transpose.py)."""

    dx: QTensor  # [M, 2F]
    dx_t: QTensor  # [2F, M']
    a_t: QTensor | None  # [F, M']


def swiglu_quantize_ref(x: Tensor, *, group_size: int) -> Activated:
    """The definition, and the CPU path."""
    saved = None
    if group_size:
        saved = quantize_ref(
            x, fmt=E4M3, granularity=group(group_size), scale_dtype=torch.float8_e8m0fnu
        )
    return Activated(quantize_rows_ref(swiglu_ref(x.float())), saved)


def swiglu_backward_quantize_ref(
    da: Tensor, x: Tensor | QTensor, a_scale: Tensor, fmt: Fp8Format, with_a: bool
) -> Gradients:
    """The definition, and the CPU path."""
    x32 = x.dequantize() if isinstance(x, QTensor) else x.float()
    dx = swiglu_backward_ref(da.float(), x32)
    scale = power_of_two_ref(dx.abs().amax(), fmt)
    codes = fmt.encode(dx / torch.where(scale.isfinite(), scale, torch.nan))
    a_t = None
    if with_a:
        a = E4M3.encode(swiglu_ref(x32) / torch.where(a_scale.isfinite(), a_scale, torch.nan))
        a_t = QTensor(padded_t(a), a_scale, TENSOR, E4M3)
    return Gradients(
        QTensor(codes, scale, TENSOR, fmt), QTensor(padded_t(codes), scale, TENSOR, fmt), a_t
    )


@triton.jit
def _swiglu_quantize_kernel(
    x_ptr,
    a_ptr,
    a_scale_ptr,
    saved_ptr,  # or None
    saved_exponent_ptr,
    F: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * 2 * F
    largest = tl.zeros([GROUPS, SIZE], tl.int32)
    for first in tl.range(0, F // SIZE, GROUPS):
        group = first + tl.arange(0, GROUPS)
        col = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        some = group < F // SIZE
        mask = some[:, None]
        gate = tl.load(x_row + col, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x_row + F + col, mask=mask, other=0.0).to(tl.float32)
        a = gate * tl.sigmoid(gate) * up
        largest = tl.maximum(largest, a.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        if saved_ptr is not None:
            at = saved_ptr + row * 2 * F + col
            group_at = saved_exponent_ptr + row * (2 * F // SIZE) + group
            exponent = group_exponents(gate, TOP)
            code = gate * inverse_power_of_two(exponent)[:, None]
            tl.store(at, code.to(saved_ptr.dtype.element_ty), mask=mask)
            tl.store(group_at, exponent.to(tl.uint8), mask=some)
            exponent = group_exponents(up, TOP)
            code = up * inverse_power_of_two(exponent)[:, None]
            tl.store(at + F, code.to(saved_ptr.dtype.element_ty), mask=mask)
            tl.store(group_at + F // SIZE, exponent.to(tl.uint8), mask=some)
    amax = tl.max(tl.max(largest, 1), 0).to(tl.float32, bitcast=True)
    exponent = exponent_of(amax, TOP)
    tl.store(a_scale_ptr + row, power_of_two(exponent))
    inverse = inverse_power_of_two(exponent)
    for first in tl.range(0, F // SIZE, GROUPS):
        group = first + tl.arange(0, GROUPS)
        col = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        mask = group[:, None] < F // SIZE
        gate = tl.load(x_row + col, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x_row + F + col, mask=mask, other=0.0).to(tl.float32)
        a = gate * tl.sigmoid(gate) * up * inverse
        tl.store(a_ptr + row * F + col, a.to(a_ptr.dtype.element_ty), mask=mask)


def swiglu_quantize(x: Tensor, *, group_size: int = 0) -> Activated:
    """x[M, 2F] = gate | up, BF16 or fp32 -> codes of silu(gate) * up, and of x.

    `group_size`: elements a scale of the x that is saved; 0 saves nothing. Raises ValueError where
    it does not divide F.
    """
    m, f = x.shape[0], x.shape[1] // 2
    if group_size and f % group_size:
        raise ValueError(f"group_size={group_size} does not divide halves of {f}")
    if not x.is_cuda:
        return swiglu_quantize_ref(x, group_size=group_size)
    codes, scale = empty_rows(x[:, :f])
    saved = exponents = None
    if group_size:
        saved = torch.empty(x.shape, dtype=E4M3.dtype, device=x.device)
        exponents = torch.empty(m, 2 * f // group_size, dtype=torch.uint8, device=x.device)
    size = group_size or UNSCALED
    _swiglu_quantize_kernel[(m,)](
        x,
        codes,
        scale,
        saved,
        exponents,
        F=f,
        GROUPS=BLOCK // size,
        SIZE=size,
        TOP=top_exponent(E4M3),
        num_warps=WARPS,
    )
    kept = None
    if saved is not None and exponents is not None:
        kept = QTensor(saved, exponents.view(torch.float8_e8m0fnu), group(group_size), E4M3)
    return Activated(QTensor(codes, scale, ROW, E4M3), kept)


def swiglu_backward_quantize(
    da: Tensor,
    x: Tensor | QTensor,
    a_scale: Tensor,
    *,
    fmt: Fp8Format,
    with_a: bool = True,
) -> Gradients:
    """da[M, F], the saved x[M, 2F] -> codes of dx and of a, for the GEMMs of backward.

    `a_scale`: fp32 [], the scale of the whole of a (the largest of its row scales). `fmt`: of dx.
    Without `with_a` there is no `a_t`.
    """
    if not da.is_cuda:
        return swiglu_backward_quantize_ref(da, x, a_scale, fmt, with_a)
    from coatlm.fp8 import tiles  # Gluon is young: only CUDA depends on it

    (m, f), device = da.shape, da.device
    elements, exponents, size = parts_of(x)
    padded = padded_rows(m)
    scale = _gradient_scale(da, elements, exponents, size, fmt)
    dx = torch.empty(m, 2 * f, dtype=fmt.dtype, device=device)
    dx_t = torch.empty(2 * f, padded, dtype=fmt.dtype, device=device)
    a_t = torch.empty(f, padded, dtype=E4M3.dtype, device=device) if with_a else None
    programs = triton.cdiv(padded, TILE.rows) * triton.cdiv(f, TILE.columns)
    tiles.swiglu_backward_kernel[(programs,)](
        da,
        elements,
        exponents,
        scale,
        a_scale,
        dx.view(torch.uint8),
        dx_t.view(torch.int32),
        None if a_t is None else a_t.view(torch.int32),
        m,
        padded,
        f,
        FORMAT=fmt.triton_dtype,
        A_FORMAT=E4M3.triton_dtype,
        SIZE=size,
        ROWS=TILE.rows,
        COLUMNS=TILE.columns,
        RUN=TILE.run,
        DOWN=TILE.down,
        WARPS=TILE.warps,
        num_warps=TILE.warps,
    )
    return Gradients(
        QTensor(dx, scale, TENSOR, fmt),
        QTensor(dx_t, scale, TENSOR, fmt),
        None if a_t is None else QTensor(a_t, a_scale, TENSOR, E4M3),
    )


def _gradient_scale(
    da: Tensor, elements: Tensor, exponents: Tensor | None, size: int, fmt: Fp8Format
) -> Tensor:
    """The scale [] of dx, from a pass over its operands."""
    from coatlm.fp8 import tiles

    m, f = da.shape
    count = triton.cdiv(m, AMAX_TILE.rows) * triton.cdiv(f, AMAX_TILE.columns)
    programs = min(count, PROGRAMS_PER_SM * processors(da.device))
    amax = torch.empty(programs, dtype=torch.float32, device=da.device)
    tiles.swiglu_amax_kernel[(programs,)](
        da,
        elements,
        exponents,
        amax,
        m,
        f,
        SIZE=size,
        ROWS=AMAX_TILE.rows,
        COLUMNS=AMAX_TILE.columns,
        RUN=AMAX_TILE.run,
        WARPS=AMAX_TILE.warps,
        num_warps=AMAX_TILE.warps,
    )
    return group_scale(amax, fmt, power_of_two=True)
