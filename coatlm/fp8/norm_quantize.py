"""RMSNorm into FP8 linears (COAT, arXiv 2410.19313, section 5). R rows (tokens) of H elements.

One pass over x:

    x = a + b (rounded to BF16: the residual stream), or x = a
    y = x * rstd * weight, rstd = (mean(x^2) + eps)^(-1/2)              as in norm.py
    codes of y, one power-of-two scale per row, or of y rotated (int8.py)  for the linear's GEMM
    codes of x, one power-of-two scale per 1 x `block_size` elements       saved for backward

y is not saved: transpose.py recomputes it from x for the weight gradient. A row-wise scale depends
on no other row, so codes of y are written in the pass that computes y (COAT reduces a tensor-wise
scale first), and rows are all-gathered between TP ranks with their scales. norm_backward.py has the
gradients. Rounding: y from fp32 to FP8 directly, or to BF16 and then to INT8; x to BF16, then to
FP8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8 import int8
from coatlm.fp8.formats import E4M3
from coatlm.fp8.qtensor import ROW, QTensor
from coatlm.fp8.rotation import rotate_runs
from coatlm.fp8.row_codes import empty_rows, row_tile, store_row
from coatlm.fp8.saved_blocks import (
    UNSCALED,
    arguments,
    empty_saved,
    save_ref,
    store_block_codes,
)
from coatlm.fp8.scaling import (
    amax_of,
    larger,
    power_of_two_ref,
    scaled_codes_ref,
    top_exponent,
)

CHUNKS = 2  # of a row, at most, as far as 32 warps allow: the fastest for most sizes


class Normed(NamedTuple):
    """The results of forward; `x` is `a + b`, or `a` itself."""

    y: QTensor  # [R, H], a scale per row
    x: Tensor  # [R, H]
    rstd: Tensor  # [R], fp32
    saved: QTensor | None  # x, [R, H], a scale per block; None unless asked for


def quantize_rows_ref(x: Tensor, *, rotated: bool = False) -> QTensor:
    """The definition: x[R, K] in E4M3 with a power-of-two scale per row, fp32 [R, 1], or INT8."""
    if rotated:
        return int8.quantize_ref(x)
    scale = power_of_two_ref(x.float().abs().amax(-1, keepdim=True), E4M3)
    return QTensor(scaled_codes_ref(x.float(), scale, E4M3), scale, ROW, E4M3)


def norm_quantize_ref(
    a: Tensor,
    weight: Tensor,
    eps: float,
    *,
    add: Tensor | None,
    block_size: int,
    rotated: bool,
) -> Normed:
    """The definition, and the CPU path."""
    x = a if add is None else a + add
    x32 = x.float()
    rstd = torch.rsqrt(x32.square().mean(-1) + eps)
    y = quantize_rows_ref(x32 * rstd[:, None] * weight.float(), rotated=rotated)
    return Normed(y, x, rstd, save_ref(x, block_size))


@gluon.jit
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
    eps,
    H: gl.constexpr,
    SIZE: gl.constexpr,
    RUN: gl.constexpr,
    CHUNKS: gl.constexpr,
    TOP: gl.constexpr,
    SPAN: gl.constexpr,  # of a rotation (int8.py); 0: E4M3 codes without one
    WARPS: gl.constexpr,
):
    """A program takes a row in chunks, and holds it in registers until its scale is known."""
    WIDE: gl.constexpr = SIZE // RUN if SIZE // RUN < 32 else 32  # threads of a block
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, RUN], [32 // WIDE, WIDE], [WARPS, 1], [1, 0])
    BLOCKS: gl.constexpr = 32 * WARPS // WIDE  # blocks per chunk
    row = gl.program_id(0).to(gl.int64)
    each = gl.arange(0, BLOCKS, gl.SliceLayout(1, LAYOUT))
    col = each[:, None] * SIZE + gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))[None, :]
    loaded, added = (), ()  # all loads come before the first store
    for k in gl.static_range(CHUNKS):
        mask = (each < H // SIZE - k * BLOCKS)[:, None]
        at = row * H + k * BLOCKS * SIZE + col
        loaded += (gl.load(a_ptr + at, mask=mask, other=0.0),)  # type: ignore[assignment]
        if add_ptr is not None:
            added += (gl.load(add_ptr + at, mask=mask, other=0.0),)  # type: ignore[assignment]
    chunks = ()
    squares = gl.full([BLOCKS], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    for k in gl.static_range(CHUNKS):
        some = each < H // SIZE - k * BLOCKS
        mask = some[:, None]
        at = row * H + k * BLOCKS * SIZE + col
        x = loaded[k].to(gl.float32)  # type: ignore[var-annotated]
        if add_ptr is not None:
            x = x + added[k].to(gl.float32)
            rounded = x.to(x_ptr.dtype.element_ty)
            gl.store(x_ptr + at, rounded, mask=mask)
            x = rounded.to(gl.float32)
        if saved_ptr is not None:
            exponent_at = saved_exponent_ptr + row * (H // SIZE) + k * BLOCKS + each
            store_block_codes(x, saved_ptr + at, exponent_at, mask, some, TOP)
        if weight_ptr is not None:
            squares += gl.sum(x * x, 1)
        chunks += (x,)
    if weight_ptr is not None:
        rstd = gl.rsqrt(gl.sum(squares, 0) / H + eps)
        gl.store(rstd_ptr + row, rstd)
    normed = ()
    amax = gl.full([BLOCKS], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    for k in gl.static_range(CHUNKS):
        y = chunks[k]  # type: ignore[var-annotated]
        if weight_ptr is not None:
            mask = (each < H // SIZE - k * BLOCKS)[:, None]
            weight = gl.load(weight_ptr + k * BLOCKS * SIZE + col, mask=mask, other=0.0)
            y = y * rstd * weight.to(gl.float32)
        if SPAN:
            y = rotate_runs(y, SPAN, WARPS)
        amax = larger(amax, amax_of(y, 1))
        normed += (y,)  # type: ignore[assignment]
    store_row(normed, amax, y_ptr, y_scale_ptr, row, each, col, H, BLOCKS, SIZE, CHUNKS, TOP, SPAN)


def norm_quantize(
    a: Tensor,
    weight: Tensor,
    eps: float,
    *,
    add: Tensor | None = None,
    block_size: int = 0,
    rotated: bool = False,
) -> Normed:
    """a (and add) BF16 or fp32 [R, H], weight [H] -> codes of the normalized rows, and of x.

    `block_size`: elements per scale of the saved x; 0 saves nothing. With `rotated`, codes are INT8
    codes of rotated rows (int8.py). Raises ValueError unless `block_size` divides H, on a GPU
    unless 16 does, and with `rotated` as `int8.check_rows` does.
    """
    hidden = a.shape[1]
    if block_size and hidden % block_size:
        raise ValueError(f"block_size={block_size} does not divide rows of {hidden}")
    if rotated:
        int8.check_rows(hidden, block_size)
    if not a.is_cuda:
        return norm_quantize_ref(a, weight, eps, add=add, block_size=block_size, rotated=rotated)
    return _norm_quantize(a, weight, eps, add, block_size, rotated)


def _norm_quantize(
    a: Tensor, weight: Tensor, eps: float, add: Tensor | None, block_size: int, rotated: bool
) -> Normed:
    rows, hidden = a.shape
    a, add = a.contiguous(), None if add is None else add.contiguous()
    y, saved = empty_rows(rows, hidden, a.device, rotated=rotated), empty_saved(a, block_size)
    x = a if add is None else torch.empty_like(a)
    rstd = torch.empty(rows, dtype=torch.float32, device=a.device)
    _norm_quantize_kernel[(rows,)](
        a,
        add,
        weight,
        None if add is None else x,
        rstd,
        y.codes,
        y.scale,
        *arguments(saved),
        eps,
        H=hidden,
        TOP=top_exponent(E4M3),
        **row_tile(hidden, block_size or UNSCALED, CHUNKS, rotated=rotated),
    )
    return Normed(y, x, rstd, saved)


def quantize_rows(x: Tensor, *, rotated: bool = False) -> QTensor:
    """x[R, K], BF16 or fp32 -> E4M3 codes with a power-of-two scale per row, fp32 [R, 1].

    With `rotated`, INT8 codes of rotated rows (int8.py). Raises ValueError then as
    `int8.check_rows` does, and on a GPU for a K that is no multiple of 16.
    """
    if rotated:
        int8.check_rows(x.shape[1])
    if not x.is_cuda:
        return quantize_rows_ref(x, rotated=rotated)
    return _quantize_rows(x.contiguous(), rotated)


def _quantize_rows(x: Tensor, rotated: bool) -> QTensor:
    rows, k = x.shape
    y = empty_rows(rows, k, x.device, rotated=rotated)
    if not rows:
        return y
    _norm_quantize_kernel[(rows,)](
        *(x, None, None, None, None, y.codes, y.scale, None, None, 0.0),
        H=k,
        TOP=top_exponent(E4M3),
        **row_tile(k, UNSCALED, CHUNKS, rotated=rotated),
    )
    return y
