"""FP8 with one scale, transposed: the operands of a weight gradient.

A weight gradient sums over tokens, and Hopper's FP8 GEMM takes operands whose summed axis is last:
both are needed as [features, tokens]. A scale for the tensor, known beforehand, makes the codes in
one pass over whatever holds the values:

    source[M, K] (BF16, fp32, or FP8 with group scales) * row[M] * column[K] -> codes_t[K, M']

`row` and `column` are those of a norm (1 / rms and weight), so that a norm's output is made again
from its saved input. M' is M rounded up to a multiple of 16, as the GEMM needs it; codes beyond M
are zero, which adds nothing to a sum.

The transposed weight of dgrad is made of the codes that forward has, those of `quantize_rows`:

    code = cast(cast(w / S_row) S_row / S)

Its kernel takes BF16 weights and makes both casts, so the codes of forward need not be there. Where
w becomes a subnormal under S, the first cast makes a difference: backward has a weight of forward,
rounded, and not another one. Whoever has w or only its codes (weight_rows.py) gets the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatlm.fp8 import tiles
from coatlm.fp8.formats import E4M3, Fp8Format
from coatlm.fp8.gemm import ALIGNMENT
from coatlm.fp8.norm_quantize import parts_of
from coatlm.fp8.qtensor import ROW, TENSOR, QTensor
from coatlm.fp8.quantize import words_of_rows
from coatlm.fp8.scaling import inverse_power_of_two, raise_amax_ref, scaled_codes_ref


class Tile(NamedTuple):
    """What a program of tiles.py handles, and how."""

    rows: int
    columns: int
    run: int  # columns a thread
    down: int  # tiles in a column of tiles before the next column
    warps: int


WIDE_TILE = Tile(128, 64, 8, 1, 8)  # of BF16 and fp32
CODES_TILE = Tile(128, 128, 16, 1, 8)  # of FP8


class Codes(NamedTuple):
    """The same matrix twice, with one scale."""

    direct: QTensor  # [M, K]
    transposed: QTensor  # [K, M']


def quantize_ref(
    source: Tensor | QTensor,
    scale: Tensor,
    *,
    fmt: Fp8Format,
    row: Tensor | None,
    column: Tensor | None,
    amax: Tensor | None = None,
) -> Codes:
    """The definition, and the CPU path."""
    x = source.dequantize() if isinstance(source, QTensor) else source.float()
    raise_amax_ref(amax, x)
    if row is not None:
        x = x * row.reshape(-1, 1)
    if column is not None:
        x = x * column.float()
    direct = scaled_codes_ref(x, scale, fmt)
    return Codes(QTensor(direct, scale, TENSOR, fmt), QTensor(padded_t(direct), scale, TENSOR, fmt))


def padded_t(codes: Tensor) -> Tensor:
    """codes[M, K] -> [K, M'], zeros beyond M."""
    flat = codes.view(torch.uint8)
    padded = torch.nn.functional.pad(flat, (0, 0, 0, -flat.shape[0] % ALIGNMENT))
    return padded.t().contiguous().view(codes.dtype)


@triton.jit
def as_bytes(x, FORMAT: tl.constexpr):
    """FP8 codes of fp32 values, as uint8."""
    return x.to(FORMAT).to(tl.uint8, bitcast=True)


@triton.jit
def store_words(a, b, c, d, at_ptr, word, words, col, stop):
    """Transposed codes of four tiles of bytes, which hold the rows 4 word + 0, 1, 2 and 3.

    `at_ptr`: int32 [columns, words], four rows a word, the first one lowest. Words are opaque to
    compilers, on purpose: ptxas 12.8 loses codes that are stored both as they are and byte by byte.
    """
    code_t = words_of_rows(a, b, c, d)
    at = at_ptr + col.to(tl.int64)[:, None] * words + word[None, :]
    mask = (col[:, None] < stop) & (word[None, :] < words)
    tl.store(at, tl.trans(code_t), mask=mask)


@triton.jit
def inverse_of(scale_ptr):
    """1 / S of a power-of-two scale in memory; NaN where it is not finite."""
    return inverse_power_of_two((tl.load(scale_ptr).to(tl.int32, bitcast=True) >> 23) & 255)


def quantize_direct(
    source: Tensor | QTensor,
    scale: Tensor,
    *,
    fmt: Fp8Format = E4M3,
    row: Tensor | None = None,
    column: Tensor | None = None,
    amax: Tensor | None = None,
) -> QTensor:
    """As `quantize_transposed`, but [M, K]. `amax`: as in `quantize_both`, of the source."""
    if not scale.is_cuda:
        return quantize_ref(source, scale, fmt=fmt, row=row, column=column, amax=amax).direct
    codes, _ = _launch(source, scale, fmt, row, column, amax, direct=True, transposed=False)
    assert codes is not None
    return QTensor(codes, scale, TENSOR, fmt)


def quantize_transposed(
    source: Tensor | QTensor,
    scale: Tensor,
    *,
    fmt: Fp8Format = E4M3,
    row: Tensor | None = None,
    column: Tensor | None = None,
) -> QTensor:
    """source[M, K] times row[M] and column[K] in FP8 with a scale (fp32 [], a power of two).

    Returns [K, M']. A QTensor source has groups with E8M0 scales.
    """
    if not scale.is_cuda:
        return quantize_ref(source, scale, fmt=fmt, row=row, column=column).transposed
    _, codes_t = _launch(source, scale, fmt, row, column, None, direct=False, transposed=True)
    assert codes_t is not None
    return QTensor(codes_t, scale, TENSOR, fmt)


def transpose_rows(x: QTensor) -> QTensor:
    """x[M, K], codes with a power-of-two scale a row -> [K, M'] with their largest one."""
    return quantize_transposed(x.codes, x.scale.amax(), row=x.scale)


def quantize_rows_transposed(w: Tensor, row_scale: Tensor) -> QTensor:
    """`transpose_rows` of what `quantize_rows` makes of w; `row_scale`: the scales it found."""
    scale = row_scale.amax()
    if not scale.is_cuda:
        codes = scaled_codes_ref(w.float(), row_scale.reshape(-1, 1), E4M3)
        return transpose_rows(QTensor(codes, row_scale, ROW, E4M3))
    row = row_scale.contiguous()
    made = _launch(w, scale, E4M3, row, None, None, direct=False, transposed=True, cast_rows=True)
    assert made[1] is not None
    return QTensor(made[1], scale, TENSOR, E4M3)


def quantize_both(x: Tensor, scale: Tensor, *, fmt: Fp8Format, amax: Tensor | None = None) -> Codes:
    """x[M, K] in FP8 with a scale, as it is and transposed, from one read.

    `amax`: fp32 [], raised to the largest |x| by the same read. What does not fit a scale that is
    not of x saturates; NaN and Inf are NaN.
    """
    if not scale.is_cuda:
        return quantize_ref(x, scale, fmt=fmt, row=None, column=None, amax=amax)
    codes, codes_t = _launch(x, scale, fmt, None, None, amax, direct=True, transposed=True)
    assert codes is not None and codes_t is not None
    return Codes(QTensor(codes, scale, TENSOR, fmt), QTensor(codes_t, scale, TENSOR, fmt))


def transpose_codes(x: QTensor) -> QTensor:
    """The same codes [K, M'] of a matrix with one scale."""
    if not x.codes.is_cuda:
        return QTensor(padded_t(x.codes), x.scale, TENSOR, x.fmt)
    moved = x.codes.view(torch.uint8)
    _, codes_t = _launch(moved, x.scale, x.fmt, None, None, None, direct=False, transposed=True)
    assert codes_t is not None
    return QTensor(codes_t, x.scale, TENSOR, x.fmt)


def _launch(
    source: Tensor | QTensor,
    scale: Tensor,
    fmt: Fp8Format,
    row: Tensor | None,
    column: Tensor | None,
    amax: Tensor | None,
    *,
    direct: bool,
    transposed: bool,
    cast_rows: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    elements, exponents, size = parts_of(source)
    elements = elements.contiguous()
    (m, k), device = elements.shape, elements.device
    padded = padded_rows(m) if transposed else m
    codes = torch.empty(m, k, dtype=fmt.dtype, device=device) if direct else None
    codes_t = torch.empty(k, padded, dtype=fmt.dtype, device=device) if transposed else None
    tile = CODES_TILE if elements.element_size() == 1 else WIDE_TILE
    tiles.transpose_kernel[(triton.cdiv(padded, tile.rows) * triton.cdiv(k, tile.columns),)](
        elements,
        exponents,
        row,
        column,
        scale,
        None if codes is None else codes.view(torch.uint8),
        None if codes_t is None else codes_t.view(torch.int32),
        None if amax is None else amax.view(torch.int32),
        m,
        padded,
        k,
        FORMAT=fmt.triton_dtype,
        SIZE=size,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        RUN=tile.run,
        DOWN=tile.down,
        WARPS=tile.warps,
        CAST_ROWS=cast_rows,
        num_warps=tile.warps,
    )
    return codes, codes_t


def padded_rows(m: int) -> int:
    """M': m rounded up to what the GEMM needs of a summed axis."""
    return -(-m // ALIGNMENT) * ALIGNMENT
