"""RMSNorm between FP8 linears (COAT, arXiv 2410.19313, section 5). R rows (tokens) of H elements.

Forward, one pass over x:

    x = a + b (rounded to BF16: the residual stream), or x = a
    y = x * rstd * weight, rstd = (mean(x^2) + eps)^(-1/2)          as in norm.py
    codes of y, one power-of-two scale per row                        for the linear's GEMM
    codes of x, one power-of-two scale per 1 x `block_size` elements  saved for backward

Backward decodes x. y is not saved: transpose.py recomputes it from x for the weight gradient. A
row-wise scale depends on no other row, so codes of y are written in the pass that computes y (COAT
reduces a tensor-wise scale first), and rows are all-gathered between TP ranks with their scales.

    g = dy * weight        dx = rstd * (g - xhat * mean(g * xhat)) + dresidual,   xhat = x * rstd

Rounding: y from fp32 to FP8 directly; x to BF16, then to FP8; dx once, to BF16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8.formats import E4M3, Fp8Format
from coatlm.fp8.qtensor import ROW, QTensor, block
from coatlm.fp8.quantize import quantize_ref
from coatlm.fp8.saved_blocks import UNSCALED, arguments, block_exponents, empty_saved, parts_of
from coatlm.fp8.scaling import (
    amax_of,
    exponent_of,
    inverse_power_of_two,
    larger,
    power_of_two,
    power_of_two_ref,
    scaled_codes_ref,
    top_exponent,
)
from coatlm.kernels.norm import processors

TILE = 4096  # elements that a program holds at least: short rows share a program
THREAD = 16  # elements per thread
RUN = 16  # elements per thread in backward
WARPS_PER_SM = 16  # in backward; more would hide latency better, but write more partial sums


class Normed(NamedTuple):
    """The results of forward; `x` is `a + b`, or `a` itself."""

    y: QTensor  # [R, H], a scale per row
    x: Tensor  # [R, H]
    rstd: Tensor  # [R], fp32
    saved: QTensor | None  # x, [R, H], a scale per block; None unless asked for


def quantize_rows_ref(x: Tensor, fmt: Fp8Format = E4M3) -> QTensor:
    """x[R, K] with a power-of-two scale per row, fp32 [R, 1]."""
    scale = power_of_two_ref(x.float().abs().amax(-1, keepdim=True), fmt)
    return QTensor(scaled_codes_ref(x.float(), scale, fmt), scale, ROW, fmt)


def norm_quantize_ref(
    a: Tensor,
    weight: Tensor,
    eps: float,
    *,
    add: Tensor | None,
    block_size: int,
    operand: Callable[[Tensor], QTensor] = quantize_rows_ref,
) -> Normed:
    """The definition, and the CPU path. `operand` quantizes y."""
    x = a if add is None else a + add
    x32 = x.float()
    rstd = torch.rsqrt(x32.square().mean(-1) + eps)
    y = operand(x32 * rstd[:, None] * weight.float())
    saved = None
    if block_size:
        saved = quantize_ref(
            x, fmt=E4M3, granularity=block(1, block_size), scale_dtype=torch.float8_e8m0fnu
        )
    return Normed(y, x, rstd, saved)


def norm_backward_ref(
    dy: Tensor, x: Tensor | QTensor, rstd: Tensor, weight: Tensor, dresidual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The definition: dx[R, H] in the dtype of dy, dweight[H] in fp32."""
    x32 = x.dequantize() if isinstance(x, QTensor) else x.float()
    xhat = x32 * rstd[:, None]
    g = dy.float() * weight.float()
    dx = rstd[:, None] * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    if dresidual is not None:
        dx = dx + dresidual.float()
    return dx.to(dy.dtype), (dy.float() * xhat).sum(0)


# Tiles are [rows, BLOCKS, SIZE]: BLOCKS blocks per row, of SIZE elements that share a scale.


@triton.jit
def _norm_quantize_kernel(
    a_ptr,
    add_ptr,  # or None
    weight_ptr,  # or None: no norm, y = x
    x_ptr,  # a + add; None without add
    rstd_ptr,
    y_ptr,
    y_scale_ptr,
    saved_ptr,  # or None
    saved_exponent_ptr,
    R,
    eps,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    each = tl.arange(0, BLOCKS)
    col = each[None, :, None] * SIZE + tl.arange(0, SIZE)[None, None, :]
    at = row[:, None, None] * H + col
    some = (row[:, None] < R) & (each[None, :] < H // SIZE)
    mask = some[:, :, None]
    x = tl.load(a_ptr + at, mask=mask, other=0.0)
    if add_ptr is not None:
        x = x.to(tl.float32) + tl.load(add_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + at, x, mask=mask)
    x = x.to(tl.float32)
    if saved_ptr is not None:
        exponent = block_exponents(x, TOP)
        code = (x * inverse_power_of_two(exponent)[:, :, None]).to(saved_ptr.dtype.element_ty)
        tl.store(saved_ptr + at, code, mask=mask)
        exponent_at = row[:, None] * (H // SIZE) + each[None, :]
        tl.store(saved_exponent_ptr + exponent_at, exponent.to(tl.uint8), mask=some)
    if weight_ptr is not None:
        rstd = tl.rsqrt(tl.sum(tl.sum(x * x, 2), 1) / H + eps)
        weight = tl.load(weight_ptr + col, mask=col < H, other=0.0).to(tl.float32)
        x = x * rstd[:, None, None] * weight
        tl.store(rstd_ptr + row, rstd, mask=row < R)
    exponent = exponent_of(amax_of(amax_of(x, 2), 1), TOP)
    code = (x * inverse_power_of_two(exponent)[:, None, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, code, mask=mask)
    tl.store(y_scale_ptr + row, power_of_two(exponent), mask=row < R)


@gluon.jit
def _row_operands(
    dy_ptr, x_ptr, x_exponent_ptr, rstd_ptr, dresidual_ptr, row, R, col, some, H: gl.constexpr,
    SIZE: gl.constexpr, RUN: gl.constexpr,
):  # fmt: skip
    """Load what backward reads of one row, in the dtypes of memory; 0 past the last row."""
    some = some & (row < R)
    mask = some[:, None]
    row = row.to(gl.int64)
    dy = gl.load(dy_ptr + row * H + col, mask=mask, other=0.0)
    x = gl.load(x_ptr + row * H + col, mask=mask, other=0.0)
    rstd = gl.load(rstd_ptr + row, mask=row < R, other=0.0)
    exponent, dresidual = rstd, dy  # placeholders where there are none
    if x_exponent_ptr is not None:
        each = gl.arange(0, col.shape[0], some.type.layout) * RUN // SIZE
        exponent = gl.load(x_exponent_ptr + row * (H // SIZE) + each, mask=some, other=127)
    if dresidual_ptr is not None:
        dresidual = gl.load(dresidual_ptr + row * H + col, mask=mask, other=0.0)
    return dy, x, rstd, exponent, dresidual


@gluon.jit
def _norm_backward_kernel(
    dy_ptr,
    x_ptr,
    x_exponent_ptr,  # or None: x is not FP8
    rstd_ptr,
    weight_ptr,
    dresidual_ptr,  # or None
    dx_ptr,
    part_ptr,  # [programs, H]
    amax_ptr,  # [programs]
    R,
    H: gl.constexpr,
    SIZE: gl.constexpr,
    RUN: gl.constexpr,
    RUNS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """A program takes every `num_programs`-th row. A thread holds RUN columns, one row ahead."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, RUN], [32, 1], [WARPS, 1], [1, 0])
    run = gl.arange(0, RUNS, gl.SliceLayout(1, LAYOUT))
    some = run < H // RUN
    col = run[:, None] * RUN + gl.arange(0, RUN, gl.SliceLayout(0, LAYOUT))[None, :]
    weight = gl.load(weight_ptr + col, mask=some[:, None], other=0.0)
    dweight = gl.full([RUNS, RUN], 0.0, gl.float32, LAYOUT)
    largest = gl.full([RUNS], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    program, programs = gl.program_id(0), gl.num_programs(0)
    dy_row, x_row, rstd, exponent, dresidual = _row_operands(
        dy_ptr, x_ptr, x_exponent_ptr, rstd_ptr, dresidual_ptr, program, R, col, some, H, SIZE, RUN
    )
    for row in range(program, R, programs):
        ahead = _row_operands(
            dy_ptr, x_ptr, x_exponent_ptr, rstd_ptr, dresidual_ptr, row + programs, R, col, some,
            H, SIZE, RUN,
        )  # fmt: skip
        dy, xhat = dy_row.to(gl.float32), x_row.to(gl.float32)
        if x_exponent_ptr is not None:
            xhat = xhat * power_of_two(exponent.to(gl.int32))[:, None]
        xhat = xhat * rstd
        g = dy * weight.to(gl.float32)
        dx = rstd * (g - xhat * (gl.sum(gl.sum(g * xhat, 1), 0) / H))
        if dresidual_ptr is not None:
            dx += dresidual.to(gl.float32)
        at = dx_ptr + tl.cast(row, tl.int64) * H + col
        gl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=some[:, None])
        dweight += dy * xhat
        largest = larger(largest, amax_of(dx, 1))
        dy_row, x_row, rstd, exponent, dresidual = ahead
    gl.store(part_ptr + program.to(gl.int64) * H + col, dweight, mask=some[:, None])
    amax = amax_of(largest, 0)  # of numbers not yet rounded: rounding keeps their order
    gl.store(amax_ptr + program, amax.to(dx_ptr.dtype.element_ty).to(gl.float32))


def norm_quantize(
    a: Tensor, weight: Tensor, eps: float, *, add: Tensor | None = None, block_size: int = 0
) -> Normed:
    """a (and add) BF16 or fp32 [R, H], weight [H] -> codes of the normalized rows, and of x.

    `block_size`: elements per scale of the saved x; 0 saves nothing. Raises ValueError unless it
    divides H.
    """
    rows, hidden = a.shape
    if block_size and hidden % block_size:
        raise ValueError(f"block_size={block_size} does not divide rows of {hidden}")
    if not a.is_cuda:
        return norm_quantize_ref(a, weight, eps, add=add, block_size=block_size)
    x = a if add is None else torch.empty_like(a)
    rstd = torch.empty(rows, dtype=torch.float32, device=a.device)
    (y, scale), saved = empty_rows(a), empty_saved(a, block_size)
    tile = forward_tile(hidden, block_size)
    _norm_quantize_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
        a,
        add,
        weight,
        x if add is not None else None,
        rstd,
        y,
        scale,
        *arguments(saved),
        rows,
        eps,
        TOP=top_exponent(E4M3),
        **tile,
    )
    return Normed(QTensor(y, scale, ROW, E4M3), x, rstd, saved)


def quantize_rows(x: Tensor) -> QTensor:
    """x[R, K], BF16 or fp32 -> E4M3 codes with a power-of-two scale per row, fp32 [R, 1]."""
    if not x.is_cuda:
        return quantize_rows_ref(x)
    codes, scale = empty_rows(x)
    tile = forward_tile(x.shape[1])
    _norm_quantize_kernel[(triton.cdiv(x.shape[0], tile["ROWS"]),)](
        x.contiguous(), None, None, None, None, codes, scale, None, None, x.shape[0], 0.0,
        TOP=top_exponent(E4M3), **tile,
    )  # fmt: skip
    return QTensor(codes, scale, ROW, E4M3)


def empty_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialized codes of x[R, K] and row-wise scales [R, 1]."""
    codes = torch.empty(x.shape, dtype=E4M3.dtype, device=x.device)
    return codes, torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)


def norm_backward(
    dy: Tensor, x: Tensor | QTensor, rstd: Tensor, weight: Tensor, *,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dy[R, H], the saved x (block-wise FP8, or BF16) -> dx[R, H], dweight[H], amaxes of dx.

    dx has the dtype of dy and includes `dresidual`, the gradient that reaches x past the norm;
    dweight is fp32; the amaxes, fp32 of any shape, are stage 1 of Group Scaling for dx.
    """
    if not dy.is_cuda:
        dx, dweight = norm_backward_ref(dy, x, rstd, weight, dresidual)
        return dx, dweight, dx.float().abs().amax()
    rows, hidden = dy.shape
    codes, exponents, size = parts_of(x)
    tile = backward_tile(hidden, size)
    programs = max(WARPS_PER_SM // tile["WARPS"], 1) * processors(dy.device)
    programs = max(1, min(rows, programs))
    dx = torch.empty_like(dy)
    part = torch.empty((programs, hidden), dtype=torch.float32, device=dy.device)
    amax = torch.empty(programs, dtype=torch.float32, device=dy.device)
    _norm_backward_kernel[(programs,)](
        dy,
        codes,
        exponents,
        rstd,
        weight,
        dresidual,
        dx,
        part,
        amax,
        rows,
        **tile,
        num_warps=tile["WARPS"],
    )
    return dx, part.sum(0), amax


def forward_tile(hidden: int, size: int = 0) -> dict[str, int]:
    """Launch shape: how many rows, of how many blocks, a program holds, with how many warps."""
    size = size or UNSCALED
    blocks = triton.next_power_of_2(triton.cdiv(hidden, size))
    rows = max(1, TILE // (blocks * size))
    warps = min(max(rows * blocks * size // (32 * THREAD), 4), 32)
    return {"H": hidden, "ROWS": rows, "BLOCKS": blocks, "SIZE": size, "num_warps": warps}


def backward_tile(hidden: int, size: int) -> dict[str, int]:
    """Launch shape of backward: a row is RUNS runs of RUN elements, one run per thread."""
    run = min(RUN, size)
    runs = triton.next_power_of_2(hidden // run)
    warps = min(max(runs // 32, 1), 32)
    return {"H": hidden, "SIZE": size, "RUN": run, "RUNS": runs, "WARPS": warps}
