"""SwiGLU between FP8 linears (COAT, arXiv 2410.19313, section 5). M rows; F of gate, F of up.

    a = silu(gate) * up                                                as in activation.py

Forward is one pass over x[M, 2F] = gate | up; a program holds a row in registers:

    codes of a, one power-of-two scale per row, or of a rotated (int8.py)  for the down projection
    codes of x, one power-of-two scale per 1 x `block_size` elements       saved for backward

Backward decodes x and writes, for the GEMMs of both linears, the codes of dx as they are and
transposed, and those of a transposed, which is recomputed. dx has one scale per tensor: unless it
is given (delayed.py), a first pass over the same operands finds the amax, which is cheaper than to
write dx in BF16 and read it back. The kernels of backward are those of emit.py.
Rounding: a and dx from fp32 to FP8 directly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8 import int8, swiglu_tiles
from coatlm.fp8.formats import E4M3, Fp8Format
from coatlm.fp8.gemm import padded_rows
from coatlm.fp8.launch import Matrix, Placed, TileShape, launch_amax, launch_emit
from coatlm.fp8.norm_quantize import quantize_rows_ref
from coatlm.fp8.qtensor import TENSOR, QTensor
from coatlm.fp8.rotation import rotate_runs
from coatlm.fp8.row_codes import empty_rows, row_tile, store_row
from coatlm.fp8.saved_blocks import (
    UNSCALED,
    arguments,
    empty_saved,
    parts_of,
    save_ref,
    store_block_codes,
)
from coatlm.fp8.scaling import (
    amax_of,
    larger,
    power_of_two_ref,
    raise_amax_ref,
    scaled_codes_ref,
    tensor_scale,
    top_exponent,
)
from coatlm.fp8.transpose import padded_t
from coatlm.kernels.activation import swiglu_backward_ref, swiglu_ref

CHUNKS = 6  # of a row in forward, at most, as far as 32 warps allow: the fastest for most sizes
ROTATED_CHUNKS = 4  # the same, of rows that are rotated
TILE = TileShape(32, 128, 8, 16, 4)  # of da in backward
AMAX_TILE = TileShape(4, 256, 16, 1, 2)  # to find the amax of dx


class Activated(NamedTuple):
    """The results of forward; `saved` is None unless asked for."""

    a: QTensor  # [M, F], a scale per row
    saved: QTensor | None  # x, [M, 2F], a scale per block


class Gradients(NamedTuple):
    """The results of backward, each with one scale. M' is M padded for the GEMM (transpose.py)."""

    dx: QTensor  # [M, 2F]
    dx_t: QTensor  # [2F, M']
    a_t: QTensor | None  # [F, M']


def swiglu_quantize_ref(x: Tensor, *, block_size: int, rotated: bool) -> Activated:
    """The definition, and the CPU path."""
    a = quantize_rows_ref(swiglu_ref(x.float()), rotated=rotated)
    return Activated(a, save_ref(x, block_size))


def swiglu_backward_quantize_ref(
    da: Tensor,
    x: Tensor | QTensor,
    a_scale: Tensor,
    fmt: Fp8Format,
    with_a: bool,
    scale: Tensor | None,
    amax: Tensor | None,
    noise: Tensor | None = None,
) -> Gradients:
    """The definition, and the CPU path."""
    x32 = x.dequantize() if isinstance(x, QTensor) else x.float()
    dx = swiglu_backward_ref(da.float(), x32)
    raise_amax_ref(amax, dx)
    scale = power_of_two_ref(dx.abs().amax(), fmt) if scale is None else scale
    codes = scaled_codes_ref(dx, scale, fmt, noise=noise, halves=da.shape[1])
    a_t = None
    if with_a:
        a = scaled_codes_ref(swiglu_ref(x32), a_scale, E4M3)
        a_t = QTensor(padded_t(a), a_scale, TENSOR, E4M3)
    return Gradients(
        QTensor(codes, scale, TENSOR, fmt), QTensor(padded_t(codes), scale, TENSOR, fmt), a_t
    )


@triton.jit
def _power_of_two_exponential(x):
    """2^x in one instruction, within 2^-22; 0 for what would be subnormal."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _reciprocal(x):
    """1 / x in one instruction, within 2^-23; 0 for what would be subnormal."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) in two special functions, without the slow path for extreme values."""
    return _reciprocal(1.0 + _power_of_two_exponential(x * -1.4426950408889634))


@gluon.jit
def _swiglu_quantize_kernel(
    x_ptr,
    a_ptr,
    a_scale_ptr,
    saved_ptr,  # or None
    saved_exponent_ptr,
    F: gl.constexpr,
    SIZE: gl.constexpr,
    RUN: gl.constexpr,
    CHUNKS: gl.constexpr,
    TOP: gl.constexpr,
    SPAN: gl.constexpr,  # of a rotation (int8.py); 0: E4M3 codes without one
    WARPS: gl.constexpr,
):
    """A program takes a row in chunks, and holds a in registers until its scale is known."""
    WIDE: gl.constexpr = SIZE // RUN if SIZE // RUN < 32 else 32  # threads of a block
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, RUN], [32 // WIDE, WIDE], [WARPS, 1], [1, 0])
    BLOCKS: gl.constexpr = 32 * WARPS // WIDE  # blocks per chunk
    row = gl.program_id(0).to(gl.int64)
    x_row = x_ptr + row * 2 * F
    each = gl.arange(0, BLOCKS, gl.SliceLayout(1, LAYOUT))
    col = each[:, None] * SIZE + gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))[None, :]
    halves = ()
    for k in gl.static_range(CHUNKS):
        mask = (each < F // SIZE - k * BLOCKS)[:, None]
        at = x_row + k * BLOCKS * SIZE + col
        halves += (gl.load(at, mask=mask, other=0.0),)  # type: ignore[assignment]
        halves += (gl.load(at + F, mask=mask, other=0.0),)  # type: ignore[assignment]
    activated = ()
    amax = gl.full([BLOCKS], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    for k in gl.static_range(CHUNKS):
        some = each < F // SIZE - k * BLOCKS
        gate, up = halves[2 * k].to(gl.float32), halves[2 * k + 1].to(gl.float32)  # type: ignore[var-annotated]
        a = gate * _sigmoid(gate) * up
        if SPAN:
            a = rotate_runs(a, SPAN, WARPS)
        amax = larger(amax, amax_of(a, 1))
        activated += (a,)
        if saved_ptr is not None:
            at = saved_ptr + row * 2 * F + k * BLOCKS * SIZE + col
            exponent_at = saved_exponent_ptr + row * (2 * F // SIZE) + k * BLOCKS + each
            store_block_codes(gate, at, exponent_at, some[:, None], some, TOP)
            store_block_codes(up, at + F, exponent_at + F // SIZE, some[:, None], some, TOP)
    store_row(
        activated, amax, a_ptr, a_scale_ptr, row, each, col, F, BLOCKS, SIZE, CHUNKS, TOP, SPAN
    )


def swiglu_quantize(x: Tensor, *, block_size: int = 0, rotated: bool = False) -> Activated:
    """x[M, 2F] = gate | up, BF16 or fp32 -> codes of silu(gate) * up, and of x.

    `block_size`: elements per scale of the saved x; 0 saves nothing. With `rotated`, codes are INT8
    codes of rotated rows (int8.py). Raises ValueError unless `block_size` divides F, on a GPU
    unless 16 does, and with `rotated` as `int8.check_rows` does.
    """
    f = x.shape[1] // 2
    if block_size and f % block_size:
        raise ValueError(f"block_size={block_size} does not divide halves of {f}")
    if rotated:
        int8.check_rows(f, block_size)
    if not x.is_cuda:
        return swiglu_quantize_ref(x, block_size=block_size, rotated=rotated)
    return _swiglu_quantize(x, block_size, rotated)


def _swiglu_quantize(x: Tensor, block_size: int, rotated: bool) -> Activated:
    m, f = x.shape[0], x.shape[1] // 2
    x = x.contiguous()
    a, saved = empty_rows(m, f, x.device, rotated=rotated), empty_saved(x, block_size)
    most = ROTATED_CHUNKS if rotated else CHUNKS
    _swiglu_quantize_kernel[(m,)](
        *(x, a.codes, a.scale, *arguments(saved)),
        F=f,
        TOP=top_exponent(E4M3),
        **row_tile(f, block_size or UNSCALED, most, rotated=rotated),
    )
    return Activated(a, saved)


def swiglu_backward_quantize(
    da: Tensor,
    x: Tensor | QTensor,
    a_scale: Tensor,
    *,
    fmt: Fp8Format,
    with_a: bool = True,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    noise: Tensor | None = None,
) -> Gradients:
    """da[M, F], the saved x[M, 2F] -> codes of dx and of a, for the GEMMs of backward.

    `a_scale`: fp32 [], the scale of the whole of a (the largest of its row scales). `fmt`: of dx.
    Without `with_a`, `a_t` is None. `scale`: fp32 [], a power of two for dx; if None, from the amax
    of dx. `amax`: fp32 [], raised to the largest |dx|, where dx / scale fits fp32. `noise`: for
    stochastic rounding of dx (stochastic.py); None rounds to nearest.
    """
    if not da.is_cuda:
        return swiglu_backward_quantize_ref(da, x, a_scale, fmt, with_a, scale, amax, noise)

    (m, f), device = da.shape, da.device
    elements, exponents, size = parts_of(x)
    padded = padded_rows(m)
    if scale is None:
        scale = _gradient_scale(da, elements, exponents, size, fmt)
    dx = torch.empty(m, 2 * f, dtype=fmt.dtype, device=device)
    dx_t = torch.empty(2 * f, padded, dtype=fmt.dtype, device=device)
    a_t = torch.empty(f, padded, dtype=E4M3.dtype, device=device) if with_a else None
    gradient = Matrix(dx, dx_t, scale)
    values: tuple[Placed, ...] = (Placed(0, fmt, 2, 0), Placed(0, fmt, 2, 1))
    matrices: tuple[Matrix, ...] = (gradient,)
    if a_t is not None:
        matrices, values = (gradient, Matrix(None, a_t, a_scale)), (*values, Placed(1, E4M3))
    launch_emit(
        swiglu_tiles.load_gradient,
        (da, elements, exponents),
        matrices,
        values,
        (m, padded, f),
        TILE._replace(inner=min(size, 16)),
        options=(size, with_a),
        amax=amax,
        noise=noise,
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
    source, load = (da, elements, exponents), swiglu_tiles.load_largest
    tile = AMAX_TILE._replace(inner=min(size, 16))
    m, f = da.shape
    amax = launch_amax(load, source, m, f, tile, options=size)
    return tensor_scale(amax, fmt, power_of_two=True)
