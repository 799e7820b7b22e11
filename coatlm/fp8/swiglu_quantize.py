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
    load_scaled,
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
from coatlm.fp8.transpose import (
    as_bytes,
    columns_of,
    inverse_of,
    padded_rows,
    padded_t,
    store_words,
)

BLOCK = 2048  # columns of a row that a program of forward handles at a time
TILE, TILE_WARPS = (16, 64), 4  # words of four rows x columns of a in backward
AMAX_TILE, AMAX_WARPS = (8, 512), 8  # rows x columns, to find the amax of dx
WARPS = 8
PROGRAMS_PER_SM = 8  # of the pass that finds an amax


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


@triton.jit
def _swiglu_gradients(gate, up, da):
    """(a, dgate, dup) of a tile."""
    s = tl.sigmoid(gate)
    silu = gate * s
    return silu * up, da * up * s * (1 + gate * (1 - s)), da * silu


@triton.jit
def _gradient_codes(
    da_ptr,
    x_ptr,
    exponent_ptr,
    dx_ptr,
    inverse,
    a_inverse,
    row,
    M,
    first,
    F,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    A_FORMAT: tl.constexpr,
):
    """Codes of dgate, dup and a for the given rows and a run of groups; those of dx are stored."""
    half = F // SIZE
    gate = load_scaled(x_ptr, exponent_ptr, row, M, first, half, 2 * F, GROUPS, SIZE)
    up = load_scaled(x_ptr, exponent_ptr, row, M, half + first, 2 * half, 2 * F, GROUPS, SIZE)
    da = load_scaled(da_ptr, None, row, M, first, half, F, GROUPS, SIZE)
    a, dgate, dup = _swiglu_gradients(gate, up, da)
    dgate = as_bytes(dgate * inverse, FORMAT)
    dup = as_bytes(dup * inverse, FORMAT)
    a = as_bytes(a * a_inverse, A_FORMAT)
    col = columns_of(first, GROUPS, SIZE)
    mask = (row[:, None, None] < M) & (col < F)
    at = dx_ptr + row[:, None, None] * 2 * F + col
    tl.store(at, dgate, mask=mask)
    tl.store(at + F, dup, mask=mask)
    dgate = tl.reshape(dgate, [WORDS, GROUPS * SIZE])
    dup = tl.reshape(dup, [WORDS, GROUPS * SIZE])
    return dgate, dup, tl.reshape(a, [WORDS, GROUPS * SIZE])


@triton.jit
def _swiglu_backward_kernel(
    da_ptr,
    x_ptr,
    exponent_ptr,  # or None: x is not FP8
    dx_scale_ptr,
    a_scale_ptr,
    dx_ptr,  # uint8[M, 2F]
    dx_t_ptr,  # int32[2F, words]
    a_t_ptr,  # int32[F, words], or None
    M,
    words,
    F,
    FORMAT: tl.constexpr,
    A_FORMAT: tl.constexpr,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    tiles = tl.cdiv(F, GROUPS * SIZE)
    word = (tl.program_id(0) // tiles).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    first = tl.program_id(0) % tiles * GROUPS
    col = first * SIZE + tl.arange(0, GROUPS * SIZE)
    inverse, a_inverse = inverse_of(dx_scale_ptr), inverse_of(a_scale_ptr)
    row = 4 * word
    g0, u0, a0 = _gradient_codes(da_ptr, x_ptr, exponent_ptr, dx_ptr, inverse, a_inverse, row, M,
                                 first, F, WORDS, GROUPS, SIZE, FORMAT, A_FORMAT)  # fmt: skip
    g1, u1, a1 = _gradient_codes(da_ptr, x_ptr, exponent_ptr, dx_ptr, inverse, a_inverse, row + 1,
                                 M, first, F, WORDS, GROUPS, SIZE, FORMAT, A_FORMAT)  # fmt: skip
    g2, u2, a2 = _gradient_codes(da_ptr, x_ptr, exponent_ptr, dx_ptr, inverse, a_inverse, row + 2,
                                 M, first, F, WORDS, GROUPS, SIZE, FORMAT, A_FORMAT)  # fmt: skip
    g3, u3, a3 = _gradient_codes(da_ptr, x_ptr, exponent_ptr, dx_ptr, inverse, a_inverse, row + 3,
                                 M, first, F, WORDS, GROUPS, SIZE, FORMAT, A_FORMAT)  # fmt: skip
    store_words(g0, g1, g2, g3, dx_t_ptr, word, words, col, F)
    store_words(u0, u1, u2, u3, dx_t_ptr + F.to(tl.int64) * words, word, words, col, F)
    if a_t_ptr is not None:
        store_words(a0, a1, a2, a3, a_t_ptr, word, words, col, F)


@triton.jit
def _swiglu_backward_amax_kernel(
    da_ptr,
    x_ptr,
    exponent_ptr,
    amax_ptr,  # [programs]
    M,
    F,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    half = F // SIZE
    tiles = tl.cdiv(half, GROUPS)
    largest = tl.zeros([ROWS, GROUPS, SIZE], tl.int32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS) * tiles, tl.num_programs(0)):
        row = (tile // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        first = tile % tiles * GROUPS
        gate = load_scaled(x_ptr, exponent_ptr, row, M, first, half, 2 * F, GROUPS, SIZE)
        up = load_scaled(x_ptr, exponent_ptr, row, M, half + first, 2 * half, 2 * F, GROUPS, SIZE)
        da = load_scaled(da_ptr, None, row, M, first, half, F, GROUPS, SIZE)
        _, dgate, dup = _swiglu_gradients(gate, up, da)
        largest = tl.maximum(largest, dgate.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        largest = tl.maximum(largest, dup.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    amax = tl.max(tl.max(tl.max(largest, 2), 1), 0).to(tl.float32, bitcast=True)
    tl.store(amax_ptr + tl.program_id(0), amax)


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
    (m, f), device = da.shape, da.device
    elements, exponents, size = parts_of(x)
    padded = padded_rows(m)
    scale = _gradient_scale(da, elements, exponents, size, fmt)
    dx = torch.empty(m, 2 * f, dtype=fmt.dtype, device=device)
    dx_t = torch.empty(2 * f, padded, dtype=fmt.dtype, device=device)
    a_t = torch.empty(f, padded, dtype=E4M3.dtype, device=device) if with_a else None
    words = padded // 4
    rows, columns = TILE
    _swiglu_backward_kernel[(triton.cdiv(words, rows) * triton.cdiv(f, columns),)](
        da,
        elements,
        exponents,
        scale,
        a_scale,
        dx.view(torch.uint8),
        dx_t.view(torch.int32),
        None if a_t is None else a_t.view(torch.int32),
        m,
        words,
        f,
        FORMAT=fmt.triton_dtype,
        A_FORMAT=E4M3.triton_dtype,
        WORDS=rows,
        GROUPS=columns // size,
        SIZE=size,
        num_warps=TILE_WARPS,
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
    m, f = da.shape
    rows, columns = AMAX_TILE
    tiles = triton.cdiv(m, rows) * triton.cdiv(f, columns)
    programs = min(tiles, PROGRAMS_PER_SM * processors(da.device))
    amax = torch.empty(programs, dtype=torch.float32, device=da.device)
    _swiglu_backward_amax_kernel[(programs,)](
        da,
        elements,
        exponents,
        amax,
        m,
        f,
        ROWS=rows,
        GROUPS=columns // size,
        SIZE=size,
        num_warps=AMAX_WARPS,
    )
    return group_scale(amax, fmt, power_of_two=True)
