"""INT8 operands of forward's GEMMs: rows rotated by H (rotation.py), then rounded to integers.

    y = x H                            x[M, K] rounded to BF16, y in fp32
    S[i] = max_k |y[i, k]| / 127       one scale per row, in fp32, at least 2^-126
    code[i, k] = round(y[i, k] * (1 / S[i]))

An integer of 8 bits has steps of the same size everywhere, a number of E4M3 has three bits of
mantissa. Where the elements of a row are alike, as rotation makes them, integers are the better
choice: with Gaussian elements whose largest is r times their root mean square, the relative error
is r / (127 sqrt(12)), 0.007 to 0.01 for r = 3 to 4.5, that of E4M3 0.026. int8_gemm.py multiplies.

One kernel quantizes rows as they are and the output of RMSNorm, whose input it can save in FP8 as
norm_quantize.py does; swiglu_quantize.py has the output of SwiGLU.

Backward quantizes x to E4M3 without an amax of its own: a row x = y H has no element larger than
sqrt(n) 127 S, n = 64 or 16 (`e4m3_scale`). The scale is up to eight times too large, which costs
E4M3 nothing but three of the 15 binades of its normal numbers.

`quantize_ref` is the definition. On a GPU the sums of a rotation have another order, so that a
quotient half way between two integers can get the other code. In rows that are not finite, the
scale is not finite, and codes are any integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8.formats import E4M3, INT8, SMALLEST
from coatlm.fp8.norm_quantize import Normed, norm_quantize_ref
from coatlm.fp8.qtensor import ROW, QTensor
from coatlm.fp8.quantize import LONGEST_ROW
from coatlm.fp8.rotation import RUN, rotate, rotate_runs, span_of
from coatlm.fp8.saved_blocks import arguments, empty_saved, store_block_codes
from coatlm.fp8.scaling import amax_of, larger, scales_of, top_exponent

CHUNKS = 4  # of a row, at most; a thread holds 16 elements of each
LONGEST_SUM = 2**31 // 127**2  # elements of a row whose products an int32 holds
LARGEST_BLOCK = 32 * RUN  # elements of a row that a warp holds


def quantize_ref(x: Tensor) -> QTensor:
    """The definition, and the CPU path."""
    y = rotate(x.bfloat16())
    scale = y.abs().amax(-1, keepdim=True) / torch.tensor(INT8.max)
    scale = torch.where(scale < SMALLEST, SMALLEST, scale)
    codes = INT8.encode(y * torch.where(scale.isfinite(), 1 / scale, torch.nan))
    return QTensor(codes, scale, ROW, INT8)


@triton.jit
def int8_scale(amax):
    """The scale of a row; NaN or Inf where amax is."""
    scale = tl.div_rn(amax, 127.0)
    return tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)


@triton.jit
def int8_codes(y, scale):
    """The integers next to y / scale."""
    # 1.5 * 2^23: the sum is rounded to an integer, which its low bits hold
    sums = tl.fma(y, tl.div_rn(1.0, scale), 12582912.0)
    return sums.to(tl.int32, bitcast=True).to(tl.int8)


@gluon.jit
def _rows_kernel(
    a_ptr,
    add_ptr,  # or None
    weight_ptr,  # or None: no norm, the row is quantized as it is
    x_ptr,  # a + add; None without add
    rstd_ptr,
    code_ptr,
    scale_ptr,
    saved_ptr,  # or None
    saved_exponent_ptr,
    eps,
    K: gl.constexpr,
    SPAN: gl.constexpr,
    SIZE: gl.constexpr,  # elements of a block of what is saved
    CHUNKS: gl.constexpr,
    TOP: gl.constexpr,
    WARPS: gl.constexpr,
):
    """A program takes a row in chunks, and holds it in registers until its scale is known."""
    WIDE: gl.constexpr = SIZE // 16  # threads of a block
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [32 // WIDE, WIDE], [WARPS, 1], [1, 0])
    BLOCKS: gl.constexpr = 32 * WARPS // WIDE  # blocks per chunk
    row = gl.program_id(0).to(gl.int64)
    each = gl.arange(0, BLOCKS, gl.SliceLayout(1, LAYOUT))
    col = each[:, None] * SIZE + gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))[None, :]
    chunks = ()
    squares = gl.full([BLOCKS], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    for k in gl.static_range(CHUNKS):
        some = each < K // SIZE - k * BLOCKS
        mask = some[:, None]
        at = row * K + k * BLOCKS * SIZE + col
        x = gl.load(a_ptr + at, mask=mask, other=0.0).to(gl.float32)
        if add_ptr is not None:
            x = x + gl.load(add_ptr + at, mask=mask, other=0.0).to(gl.float32)
            rounded = x.to(x_ptr.dtype.element_ty)
            gl.store(x_ptr + at, rounded, mask=mask)
            x = rounded.to(gl.float32)
        if saved_ptr is not None:
            exponent_at = saved_exponent_ptr + row * (K // SIZE) + k * BLOCKS + each
            store_block_codes(x, saved_ptr + at, exponent_at, mask, some, TOP)
        if weight_ptr is not None:
            squares += gl.sum(x * x, 1)
        chunks += (x,)  # type: ignore[assignment]
    if weight_ptr is not None:
        rstd = gl.rsqrt(gl.sum(squares, 0) / K + eps)
        gl.store(rstd_ptr + row, rstd)
    rotated = ()
    amax = gl.full([BLOCKS], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    for k in gl.static_range(CHUNKS):
        x = chunks[k]
        if weight_ptr is not None:
            mask = (each < K // SIZE - k * BLOCKS)[:, None]
            weight = gl.load(weight_ptr + k * BLOCKS * SIZE + col, mask=mask, other=0.0)
            x = x * rstd * weight.to(gl.float32)
        y = rotate_runs(x, SPAN, WARPS)
        amax = larger(amax, amax_of(y, 1))
        rotated += (y,)  # type: ignore[assignment]
    scale = int8_scale(amax_of(amax, 0))
    gl.store(scale_ptr + row, scale)
    for k in gl.static_range(CHUNKS):
        mask = (each < K // SIZE - k * BLOCKS)[:, None]
        at = row * K + k * BLOCKS * SIZE + col
        gl.store(code_ptr + at, int8_codes(rotated[k], scale), mask=mask)


def quantize(x: Tensor) -> QTensor:
    """x[M, K] as INT8 codes of rotated rows, with a scale per row, fp32 [M, 1].

    Raises ValueError for K that is no multiple of 16 or too long for int32 sums, and on a GPU for
    what is neither BF16 nor fp32, or has rows of more than 65536 elements.
    """
    _check(x)
    return _quantize(x.contiguous()) if x.is_cuda else quantize_ref(x)


def _check(x: Tensor) -> None:
    if x.ndim != 2 or x.shape[1] % RUN or x.shape[1] > LONGEST_SUM:
        raise ValueError(
            f"shape={list(x.shape)}: [M, K] with a multiple of {RUN} up to {LONGEST_SUM} for K"
        )
    known = x.dtype in (torch.bfloat16, torch.float32) and x.shape[1] <= LONGEST_ROW
    if x.is_cuda and not known:
        raise ValueError(
            f"x is {x.dtype}{list(x.shape)}: on a GPU torch.bfloat16 or torch.float32, with rows "
            f"of at most {LONGEST_ROW}"
        )


def _quantize(x: Tensor) -> QTensor:
    made = empty_rows(x)
    if x.shape[0]:
        _rows_kernel[(x.shape[0],)](
            *(x, None, None, None, None, made.codes, made.scale, None, None, 0.0),
            TOP=0,
            **_row_tile(x.shape[1]),
        )
    return made


def norm_quantize(
    a: Tensor, weight: Tensor, eps: float, *, add: Tensor | None = None, block_size: int = 0
) -> Normed:
    """a (and add) BF16 or fp32 [R, H], weight [H] -> INT8 codes of the normalized rows.

    `block_size`: elements per scale of the saved x, as for norm_quantize.norm_quantize; 0 saves
    nothing. Raises ValueError as `quantize` does, and for a block size that does not divide H or
    that kernels do not have (`holds_blocks`).
    """
    _check(a)
    check_blocks(a.shape[1], block_size)
    if not a.is_cuda:
        return norm_quantize_ref(
            a, weight, eps, add=add, block_size=block_size, operand=quantize_ref
        )
    return _norm_quantize(a, weight, eps, add, block_size)


def _norm_quantize(
    a: Tensor, weight: Tensor, eps: float, add: Tensor | None, block_size: int
) -> Normed:
    made, saved = empty_rows(a), empty_saved(a, block_size)
    x = a if add is None else torch.empty_like(a)
    rstd = torch.empty(a.shape[0], dtype=torch.float32, device=a.device)
    _rows_kernel[(a.shape[0],)](
        a,
        add,
        weight,
        None if add is None else x,
        rstd,
        made.codes,
        made.scale,
        *arguments(saved),
        eps,
        TOP=top_exponent(E4M3),
        **_row_tile(a.shape[1], block_size),
    )
    return Normed(made, x, rstd, saved)


def holds_blocks(size: int) -> bool:
    """Whether kernels that rotate can save blocks of this many elements; 0 for none."""
    return size == 0 or (size % RUN == 0 and LARGEST_BLOCK % size == 0)


def check_blocks(k: int, size: int) -> None:
    """Raise ValueError unless kernels can rotate rows of k and save them in blocks of `size`."""
    if k % RUN or not holds_blocks(size) or (size and k % size):
        raise ValueError(
            f"block_size={size} of rows of {k}: rotated rows are multiples of {RUN} long, and "
            "blocks of 0, 16, 32, 64, 128, 256 or 512 divide them"
        )


def empty_rows(x: Tensor) -> QTensor:
    """Uninitialized codes and scales of x[M, K]."""
    codes = torch.empty(x.shape, dtype=INT8.dtype, device=x.device)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    return QTensor(codes, scale, ROW, INT8)


def e4m3_scale(x: QTensor) -> Tensor:
    """Power-of-two scales, fp32 [M, 1], with which E4M3 holds what INT8 codes stand for."""
    largest = x.scale * (INT8.max * span_of(x.shape[1]) ** 0.5)
    return scales_of(largest, E4M3, power_of_two=True)


def _row_tile(k: int, size: int = 0) -> dict[str, int]:
    """How the threads of a program share a row: the fewest warps with at most CHUNKS runs each."""
    warps = min(triton.next_power_of_2(triton.cdiv(k, 32 * RUN * CHUNKS)), 32)
    tile = {"K": k, "SPAN": span_of(k), "SIZE": size or RUN, "WARPS": warps, "num_warps": warps}
    return tile | {"CHUNKS": triton.cdiv(k, 32 * RUN * warps)}
