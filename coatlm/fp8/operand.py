"""Tensors as operands of FP8 GEMMs: x[M, K] -> codes as they are, transposed, or both.

    direct       [M, K]      a row, for its granularity, is a row of x
    transposed   [K, M']     a row is a column of x: ROW is one scale per column of x

A block's scale is S = amax / MAX in fp32, or with `power_of_two` the power of two at or above it
(scaling.py): 1 where all elements are zero, at least 2^-126, not finite where the block holds a
NaN or an infinity, whose codes are then all NaN. A code is x / S in fp32, rounded to nearest.

M' is M rounded up to a multiple of 16, as GEMMs need it of a summed axis, or of the block length
where that is larger. Codes beyond M are zero: they add nothing to a sum.

`emit_ref` is the definition and runs on every device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coatlm.config.operands import TENSOR, Granularity, Operand
from coatlm.fp8.formats import FORMATS, SOURCES, Fp8Format
from coatlm.fp8.gemm import padded_rows
from coatlm.fp8.launch import emit_operands
from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.quantize import amax_ref
from coatlm.fp8.scaling import power_of_two_ref, raise_amax_ref, scale_ref, scaled_codes_ref


class Emitted(NamedTuple):
    """The operands of a tensor that were asked for."""

    direct: QTensor | None  # [M, K]
    transposed: QTensor | None  # [K, M']


def format_of(operand: Operand) -> Fp8Format:
    """The FP8 format that the operand names."""
    return FORMATS[operand.fmt]


def padded(tokens: int, granularity: Granularity) -> int:
    """M': the length of a transposed operand's rows for M = `tokens`."""
    return padded_rows(tokens, granularity.columns or 1)


def operand_scale_ref(x: Tensor, operand: Operand) -> Tensor:
    """The definition of current scaling: fp32, in the shape of the operand's scales."""
    amax, fmt = amax_ref(x, operand.granularity), format_of(operand)
    return power_of_two_ref(amax, fmt) if operand.power_of_two else scale_ref(amax, fmt)


def emit_ref(
    x: Tensor | QTensor,
    *,
    direct: Operand | None = None,
    transposed: Operand | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> Emitted:
    """The definition, and the CPU path."""
    values = x.dequantize() if isinstance(x, QTensor) else x.float()
    raise_amax_ref(amax, values)
    one = None if direct is None else _encode(values, direct, scale)
    other = None
    if transposed is not None:
        rows = len(values)
        beyond = padded(rows, transposed.granularity) - rows
        values_t = torch.nn.functional.pad(values.t(), (0, beyond))
        other = _encode(values_t, transposed, scale)
        other.codes.view(torch.uint8)[:, rows:] = 0  # also where the block is NaN
    return Emitted(one, other)


def _encode(x: Tensor, operand: Operand, scale: Tensor | None) -> QTensor:
    granularity, fmt = operand.granularity, format_of(operand)
    if scale is None:
        scale = operand_scale_ref(x, operand)
    codes = scaled_codes_ref(x, granularity.spread(scale, x.shape), fmt)
    return QTensor(codes, scale, granularity, fmt)


def emit(
    x: Tensor | QTensor,
    *,
    direct: Operand | None = None,
    transposed: Operand | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> Emitted:
    """x[M, K] (fp32, BF16, FP16, or a QTensor, which stands for codes * scale) as FP8 operands.

    `scale`: fp32 [], for TENSOR operands: a delayed scale, one that ranks share, or that of
    forward. Without it scales are computed from x. `amax`: fp32 [], raised to the largest |x|; NaN
    where x has one. Values too large for a given scale saturate; NaN and Inf become NaN.

    Raises ValueError where x is no matrix of these types, where `scale` is given for a granularity
    other than TENSOR or for two formats, where it is missing for an operand whose scaling is not
    "current", and where blocks do not divide rows (see Granularity).
    """
    _check(x, direct, transposed, scale)
    if not (x.codes if isinstance(x, QTensor) else x).is_cuda:
        return emit_ref(x, direct=direct, transposed=transposed, scale=scale, amax=amax)
    length = 0 if transposed is None else padded(x.shape[0], transposed.granularity)
    return Emitted(*emit_operands(x, direct, transposed, scale, amax, length))


def emit_direct(x: Tensor | QTensor, operand: Operand, *, scale: Tensor | None = None) -> QTensor:
    """`emit` of the direct operand alone."""
    made = emit(x, direct=operand, scale=scale).direct
    assert made is not None
    return made


def emit_transposed(
    x: Tensor | QTensor, operand: Operand, *, scale: Tensor | None = None
) -> QTensor:
    """`emit` of the transposed operand alone."""
    made = emit(x, transposed=operand, scale=scale).transposed
    assert made is not None
    return made


def _check(
    x: Tensor | QTensor, direct: Operand | None, transposed: Operand | None, scale: Tensor | None
) -> None:
    """Raise ValueError for what `emit` cannot do."""
    if len(x.shape) != 2:
        raise ValueError(f"x has the shape {list(x.shape)}: a matrix [M, K] is needed")
    if isinstance(x, Tensor) and x.dtype not in SOURCES:
        raise ValueError(f"x.dtype={x.dtype}: operands are made of {SOURCES}, or of a QTensor")
    operands = [operand for operand in (direct, transposed) if operand is not None]
    for operand in operands:
        if scale is None and operand.scaling != "current":
            raise ValueError(f"scaling={operand.scaling}: the scale must be given")
        if scale is not None and operand.granularity != TENSOR:
            raise ValueError(f"scale: for one scale per tensor, not for {operand.granularity}")
    if scale is not None:
        if scale.shape or scale.dtype != torch.float32:
            raise ValueError(f"scale: {scale.dtype}{list(scale.shape)}, torch.float32[] is needed")
        if len({operand.fmt for operand in operands}) > 1:
            raise ValueError("scale: one scale cannot serve operands of two formats")
    if direct is not None:
        direct.granularity.scale_shape(x.shape)
