"""Tensor-wise FP8 codes, transposed: the operands of a weight gradient.

A weight gradient sums over tokens, and Hopper's FP8 GEMM takes operands whose summed axis is last:
both are needed as [features, tokens]. With a tensor-wise scale that is known beforehand, one pass
over whatever holds the values writes the codes:

    source[M, K] (BF16, fp32 or FP8) * row[M] * column[K] -> codes_t[K, M']

`row` and `column` are those of a norm (1 / rms and weight), so that a norm's output is recomputed
from its saved input. M' is M rounded up to a multiple of 16, as the GEMM needs it; codes beyond M
are zero, which adds nothing to a sum.

The transposed weight of dgrad comes from the codes of forward, those of `quantize_rows`:

    code = cast(cast(w / S_row) S_row / S)

The kernel reads BF16 weights and does both casts, so the codes of forward need not be saved. Where
w / S is subnormal, the first cast makes a difference: backward rounds the rounded weight of forward
and not w. A rank with w and a rank with its codes (weight_rows.py) get the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coatlm.fp8 import loaders
from coatlm.fp8.formats import E4M3, Fp8Format
from coatlm.fp8.gemm import padded_rows
from coatlm.fp8.launch import (
    CODES_TILE,
    WIDE_TILE,
    Matrix,
    Placed,
    TileShape,
    empty_codes,
    launch_emit,
    matrix_source,
)
from coatlm.fp8.qtensor import ROW, TENSOR, QTensor
from coatlm.fp8.scaling import raise_amax_ref, scaled_codes_ref


class Codes(NamedTuple):
    """The same matrix twice; a gradient is direct for dgrad and transposed for wgrad."""

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
    noise: Tensor | None = None,
) -> Codes:
    """The definition, and the CPU path."""
    x = source.dequantize() if isinstance(source, QTensor) else source.float()
    raise_amax_ref(amax, x)
    if row is not None:
        x = x * row.reshape(-1, 1)
    if column is not None:
        x = x * column.float()
    direct = scaled_codes_ref(x, scale, fmt, noise=noise)
    return Codes(QTensor(direct, scale, TENSOR, fmt), QTensor(padded_t(direct), scale, TENSOR, fmt))


def padded_t(codes: Tensor) -> Tensor:
    """codes[M, K] -> [K, M'], zeros beyond M."""
    flat = codes.view(torch.uint8)
    beyond = padded_rows(len(flat)) - len(flat)
    padded = torch.nn.functional.pad(flat, (0, 0, 0, beyond))
    return padded.t().contiguous().view(codes.dtype)


def quantize_direct(
    source: Tensor | QTensor,
    scale: Tensor,
    *,
    fmt: Fp8Format = E4M3,
    row: Tensor | None = None,
    column: Tensor | None = None,
    amax: Tensor | None = None,
    noise: Tensor | None = None,
) -> QTensor:
    """source[M, K] times row[M] and column[K] in FP8 with a scale, not transposed.

    `amax` and `noise` as in `quantize_both`, without row or column.
    """
    options = {"row": row, "column": column, "amax": amax, "noise": noise}
    if not scale.is_cuda:
        return quantize_ref(source, scale, fmt=fmt, **options).direct
    codes, _ = _quantize(source, scale, fmt, direct=True, **options)
    assert codes is not None
    return QTensor(codes, scale, TENSOR, fmt)


def quantize_transposed(
    source: Tensor | QTensor,
    scale: Tensor,
    *,
    fmt: Fp8Format = E4M3,
    row: Tensor | None = None,
    column: Tensor | None = None,
    noise: Tensor | None = None,
) -> QTensor:
    """source[M, K] times row[M] and column[K] in FP8 with a scale (fp32 [], a power of two).

    Returns [K, M']. A QTensor source has a scale per row, or per block of a row. `noise`: for
    stochastic rounding (stochastic.py); None rounds to nearest.
    """
    if not scale.is_cuda:
        return quantize_ref(source, scale, fmt=fmt, row=row, column=column, noise=noise).transposed
    _, codes_t = _quantize(source, scale, fmt, row=row, column=column, noise=noise, transposed=True)
    assert codes_t is not None
    return QTensor(codes_t, scale, TENSOR, fmt)


def transpose_rows(x: QTensor) -> QTensor:
    """x[M, K], codes with a power-of-two scale per row -> [K, M'] with their largest one."""
    return quantize_transposed(x.codes, x.scale.amax(), row=x.scale)


def quantize_rows_transposed(w: Tensor, row_scale: Tensor) -> QTensor:
    """`transpose_rows(quantize_rows(w))` from w; `row_scale`: the scales of forward."""
    scale = row_scale.amax()
    if not scale.is_cuda:
        codes = scaled_codes_ref(w.float(), row_scale.reshape(-1, 1), E4M3)
        return transpose_rows(QTensor(codes, row_scale, ROW, E4M3))
    source = (w.contiguous(), row_scale.contiguous())
    load = loaders.load_forward_codes
    _, codes_t = _launch(load, source, scale, E4M3, WIDE_TILE, transposed=True)
    assert codes_t is not None
    return QTensor(codes_t, scale, TENSOR, E4M3)


def quantize_both(
    x: Tensor,
    scale: Tensor,
    *,
    fmt: Fp8Format,
    amax: Tensor | None = None,
    noise: Tensor | None = None,
) -> Codes:
    """x[M, K] in FP8 with a scale, direct and transposed; x is read once.

    `amax`: fp32 [], raised to the largest |x| in the same pass. Values too large for the scale
    saturate; NaN and Inf become NaN. `noise`: for stochastic rounding (stochastic.py); None rounds
    to nearest.
    """
    if not scale.is_cuda:
        return quantize_ref(x, scale, fmt=fmt, row=None, column=None, amax=amax, noise=noise)
    codes, codes_t = _quantize(x, scale, fmt, amax=amax, noise=noise, direct=True, transposed=True)
    assert codes is not None and codes_t is not None
    return Codes(QTensor(codes, scale, TENSOR, fmt), QTensor(codes_t, scale, TENSOR, fmt))


def transpose_codes(x: QTensor) -> QTensor:
    """Transpose the codes of a matrix with one scale: [K, M']."""
    if not x.codes.is_cuda:
        return QTensor(padded_t(x.codes), x.scale, TENSOR, x.fmt)
    assert isinstance(x.fmt, Fp8Format)
    source = (x.codes.contiguous().view(torch.uint8),)
    _, codes_t = _launch(loaders.load_codes, source, x.scale, x.fmt, CODES_TILE, transposed=True)
    assert codes_t is not None
    return QTensor(codes_t, x.scale, TENSOR, x.fmt)


def _quantize(
    x: Tensor | QTensor,
    scale: Tensor,
    fmt: Fp8Format,
    *,
    row: Tensor | None = None,
    column: Tensor | None = None,
    **outputs: Any,
) -> tuple[Tensor | None, Tensor | None]:
    """Codes of x * row * column on a GPU; `outputs` are those of `_launch`."""
    row = row if row is None else row.contiguous()
    source, size, tile = matrix_source(x, row, column)
    prepare = None if column is None else loaders.prepare_matrix
    return _launch(
        loaders.load_matrix, source, scale, fmt, tile, options=size, prepare=prepare, **outputs
    )


def _launch(
    load: Any,
    source: tuple[Any, ...],
    scale: Tensor,
    fmt: Fp8Format,
    tile: TileShape,
    *,
    direct: bool = False,
    transposed: bool = False,
    options: Any = None,
    **more: Any,
) -> tuple[Tensor | None, Tensor | None]:
    """Launch emit.py's epilogue with a loader of x[M, K] and one scale."""
    m, k = source[0].shape
    padded = padded_rows(m) if transposed else m
    fmts = fmt if direct else None, fmt if transposed else None
    codes, codes_t = empty_codes(source[0], *fmts, padded)
    matrix = Matrix(codes, codes_t, scale)
    shape = (m, padded, k)
    launch_emit(load, source, (matrix,), (Placed(0, fmt),), shape, tile, options=options, **more)
    return codes, codes_t
