"""FP8 with one scale, transposed: the operands of a weight gradient.

A weight gradient sums over tokens, and Hopper's FP8 GEMM takes operands whose summed axis is last:
both are needed as [features, tokens]. A scale for the tensor, known beforehand, makes the codes in
one pass over whatever holds the values:

    source[M, K] (BF16, fp32, or FP8 with group scales) * row[M] * column[K] -> codes_t[K, M']

`row` and `column` are those of a norm (1 / rms and weight), so that a norm's output is made again
from its saved input. M' is M rounded up to a multiple of 16, as the GEMM needs it; codes beyond M
are zero, which adds nothing to a sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatlm.fp8.formats import E4M3, Fp8Format
from coatlm.fp8.gemm import ALIGNMENT
from coatlm.fp8.norm_quantize import load_scaled, parts_of
from coatlm.fp8.qtensor import TENSOR, QTensor
from coatlm.fp8.scaling import inverse_power_of_two

WORDS, COLUMNS, WARPS = 32, 64, 4  # a tile: 4 x 32 rows, runs of 128 transposed codes


TRANSPOSE_4X4 = tl.constexpr("""{
    .reg .b32 a, b, c, d;
    prmt.b32 a, $4, $5, 0x5140;
    prmt.b32 b, $6, $7, 0x5140;
    prmt.b32 c, $4, $5, 0x7362;
    prmt.b32 d, $6, $7, 0x7362;
    prmt.b32 $0, a, b, 0x5410;
    prmt.b32 $1, a, b, 0x7632;
    prmt.b32 $2, c, d, 0x5410;
    prmt.b32 $3, c, d, 0x7632;
}""")  # words of four codes of a row, one for each of four rows -> a word for each of four columns


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
) -> Codes:
    """The definition, and the CPU path."""
    x = source.dequantize() if isinstance(source, QTensor) else source.float()
    if row is not None:
        x = x * row.reshape(-1, 1)
    if column is not None:
        x = x * column.float()
    direct = fmt.encode(x / torch.where(scale.isfinite(), scale, torch.nan))
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
    code_t = tl.inline_asm_elementwise(
        TRANSPOSE_4X4,
        "=r,=r,=r,=r,r,r,r,r",
        [a, b, c, d],
        dtype=tl.int32,
        is_pure=False,
        pack=4,
    )
    at = at_ptr + col.to(tl.int64)[:, None] * words + word[None, :]
    mask = (col[:, None] < stop) & (word[None, :] < words)
    tl.store(at, tl.trans(code_t), mask=mask)


@triton.jit
def inverse_of(scale_ptr):
    """1 / S of a power-of-two scale in memory; NaN where it is not finite."""
    return inverse_power_of_two((tl.load(scale_ptr).to(tl.int32, bitcast=True) >> 23) & 255)


@triton.jit
def _codes(
    x_ptr,
    exponent_ptr,
    row_ptr,
    column,
    inverse,
    code_ptr,
    row,
    M,
    first,
    K,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Codes of the given rows and a run of groups, stored if asked for; as bytes."""
    x = load_scaled(x_ptr, exponent_ptr, row, M, first, K // SIZE, K, GROUPS, SIZE)
    if row_ptr is not None:
        x *= tl.load(row_ptr + row, mask=row < M, other=0.0)[:, None, None]
    if column is not None:
        x *= column
    code = as_bytes(x * inverse, FORMAT)
    if code_ptr is not None:
        col = columns_of(first, GROUPS, SIZE)
        mask = (row[:, None, None] < M) & (col < K)
        tl.store(code_ptr + row[:, None, None] * K + col, code, mask=mask)
    return tl.reshape(code, [WORDS, GROUPS * SIZE])


@triton.jit
def columns_of(first, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Columns of a run of groups, [1, GROUPS, SIZE]."""
    group = first + tl.arange(0, GROUPS)
    return group[None, :, None] * SIZE + tl.arange(0, SIZE)[None, None, :]


@triton.jit
def _transpose_kernel(
    x_ptr,
    exponent_ptr,  # or None
    row_ptr,  # or None
    column_ptr,  # or None
    scale_ptr,
    code_ptr,  # uint8[M, K], or None
    code_t_ptr,  # int32[K, words], or None
    M,
    words,
    K,
    FORMAT: tl.constexpr,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    tiles = tl.cdiv(K, GROUPS * SIZE)
    word = (tl.program_id(0) // tiles).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    first = tl.program_id(0) % tiles * GROUPS
    col = first * SIZE + tl.arange(0, GROUPS * SIZE)
    inverse = inverse_of(scale_ptr)
    column = None
    if column_ptr is not None:
        at = columns_of(first, GROUPS, SIZE)
        column = tl.load(column_ptr + at, mask=at < K, other=0.0).to(tl.float32)
    row = 4 * word
    a = _codes(x_ptr, exponent_ptr, row_ptr, column, inverse, code_ptr, row, M, first, K,
               WORDS, GROUPS, SIZE, FORMAT)  # fmt: skip
    b = _codes(x_ptr, exponent_ptr, row_ptr, column, inverse, code_ptr, row + 1, M, first, K,
               WORDS, GROUPS, SIZE, FORMAT)  # fmt: skip
    c = _codes(x_ptr, exponent_ptr, row_ptr, column, inverse, code_ptr, row + 2, M, first, K,
               WORDS, GROUPS, SIZE, FORMAT)  # fmt: skip
    d = _codes(x_ptr, exponent_ptr, row_ptr, column, inverse, code_ptr, row + 3, M, first, K,
               WORDS, GROUPS, SIZE, FORMAT)  # fmt: skip
    if code_t_ptr is not None:
        store_words(a, b, c, d, code_t_ptr, word, words, col, K)


def quantize_direct(
    source: Tensor | QTensor,
    scale: Tensor,
    *,
    fmt: Fp8Format = E4M3,
    row: Tensor | None = None,
    column: Tensor | None = None,
) -> QTensor:
    """As `quantize_transposed`, but [M, K]."""
    if not scale.is_cuda:
        return quantize_ref(source, scale, fmt=fmt, row=row, column=column).direct
    codes, _ = _launch(source, scale, fmt, row, column, direct=True, transposed=False)
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
    _, codes_t = _launch(source, scale, fmt, row, column, direct=False, transposed=True)
    assert codes_t is not None
    return QTensor(codes_t, scale, TENSOR, fmt)


def quantize_both(x: Tensor, scale: Tensor, *, fmt: Fp8Format) -> Codes:
    """x[M, K] in FP8 with a scale, as it is and transposed, from one read."""
    if not scale.is_cuda:
        return quantize_ref(x, scale, fmt=fmt, row=None, column=None)
    codes, codes_t = _launch(x, scale, fmt, None, None, direct=True, transposed=True)
    assert codes is not None and codes_t is not None
    return Codes(QTensor(codes, scale, TENSOR, fmt), QTensor(codes_t, scale, TENSOR, fmt))


def transpose_codes(x: QTensor) -> QTensor:
    """The same codes [K, M'] of a matrix with one scale."""
    if not x.codes.is_cuda:
        return QTensor(padded_t(x.codes), x.scale, TENSOR, x.fmt)
    one = torch.ones_like(x.scale)
    _, codes_t = _launch(x.codes, one, x.fmt, None, None, direct=False, transposed=True)
    assert codes_t is not None
    return QTensor(codes_t, x.scale, TENSOR, x.fmt)


def _launch(
    source: Tensor | QTensor,
    scale: Tensor,
    fmt: Fp8Format,
    row: Tensor | None,
    column: Tensor | None,
    *,
    direct: bool,
    transposed: bool,
) -> tuple[Tensor | None, Tensor | None]:
    elements, exponents, size = parts_of(source)
    elements = elements.contiguous()
    (m, k), device = elements.shape, elements.device
    padded = padded_rows(m) if transposed else m
    codes = torch.empty(m, k, dtype=fmt.dtype, device=device) if direct else None
    codes_t = torch.empty(k, padded, dtype=fmt.dtype, device=device) if transposed else None
    words = triton.cdiv(padded, 4)
    _transpose_kernel[(triton.cdiv(words, WORDS) * triton.cdiv(k, COLUMNS),)](
        elements,
        exponents,
        row,
        column,
        scale,
        None if codes is None else codes.view(torch.uint8),
        None if codes_t is None else codes_t.view(torch.int32),
        m,
        words,
        k,
        FORMAT=fmt.triton_dtype,
        WORDS=WORDS,
        GROUPS=COLUMNS // size,
        SIZE=size,
        num_warps=WARPS,
    )
    return codes, codes_t


def padded_rows(m: int) -> int:
    """M': m rounded up to what the GEMM needs of a summed axis."""
    return -(-m // ALIGNMENT) * ALIGNMENT
