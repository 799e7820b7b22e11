"""Loaders of emit.py for a matrix: plain or FP8 values, values rounded as in forward, or codes."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8.tiles import inverse_of, load_scales, load_values


@gluon.jit
def prepare_matrix(source, at):
    """The norm's weight for the tile's columns; replaces the pointer in `load_matrix`'s source.

    A program loads it once. In `load_matrix` the load would be repeated after every store.
    """
    _, first_column, _, column, inner, columns = at
    mask = (column < columns)[:, :, None]
    each = column[:, :, None] + inner
    return gl.load(source[3] + first_column + each, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def load_matrix(source, factors, K, at, some, J: gl.constexpr, SIZE: gl.constexpr):
    """x[M, K] * row[M] * weight[K], where x may have a scale per SIZE elements of a row.

    `source`: x, its scales [M, K / SIZE] (fp32, or E8M0 as uint8), row (fp32), and the weight as
    `prepare_matrix` returns it; all but x may be None.
    """
    x_ptr, scale_ptr, row_ptr, weight = source
    first_row, first_column, row, column, inner, _ = at
    x_ptr += first_row.to(gl.int64) * K + first_column
    x = load_values(x_ptr, (row * K + column)[:, :, None] + inner + J * K, some)
    # Powers of two come first and are exact: the rounding is that of x * row * weight.
    factor = factors[0]
    if scale_ptr is not None:
        scale_ptr += first_row.to(gl.int64) * (K // SIZE)
        scale_at = row * (K // SIZE) + (first_column + column) // SIZE + J * (K // SIZE)
        scales = load_scales(scale_ptr, scale_at, some)
        factor = scales if factor is None else scales * factor
    if row_ptr is not None:
        each = gl.load(row_ptr + first_row + row + J, mask=some, other=0.0)
        factor = each if factor is None else each * factor
    if scale_ptr is not None or row_ptr is not None:
        x = x * factor[:, :, None]
    elif factor is not None:
        x = x * factor
    if weight is not None:
        x = x * weight
    return (x,)


@gluon.jit
def load_forward_codes(source, factors, K, at, some, J: gl.constexpr, OPTIONS: gl.constexpr):
    """x[M, K] as in forward: cast to E4M3 by row[M], power-of-two scales, and decoded."""
    x_ptr, row_ptr = source
    first_row, first_column, row, column, inner, _ = at
    x_ptr += first_row.to(gl.int64) * K + first_column
    x = load_values(x_ptr, (row * K + column)[:, :, None] + inner + J * K, some)
    scale = gl.load(row_ptr + first_row + row + J, mask=some, other=0.0)
    x = (x * inverse_of(scale)[:, :, None]).to(gl.float8e4nv).to(gl.float32)
    return (x * (scale * factors[0])[:, :, None],)


@gluon.jit
def load_codes(source, factors, K, at, some, J: gl.constexpr, OPTIONS: gl.constexpr):
    """Codes uint8[M, K], unchanged."""
    (x_ptr,) = source
    first_row, first_column, row, column, inner, _ = at
    x_ptr += first_row.to(gl.int64) * K + first_column
    x_at = (row * K + column)[:, :, None] + inner + J * K
    return (gl.load(x_ptr + x_at, mask=some[:, :, None], other=0),)
