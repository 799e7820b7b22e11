"""Kernels that find amaxes of a loader's values (emit.py): per program, or per row and column."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8.scaling import larger
from coatlm.fp8.tiles import amax_bits, axes, loads, place, present


@gluon.jit
def amax_kernel(
    source,
    amax_ptr,  # fp32[programs]
    M,
    K,
    LOAD: gl.constexpr,
    OPTIONS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STEP: gl.constexpr,
    WIDTH: gl.constexpr,
    INNER: gl.constexpr,
    RUN: gl.constexpr,
    WARPS: gl.constexpr,
):
    """One amax per program, of every `num_programs`-th tile."""
    BLOCKS: gl.constexpr = COLUMNS // INNER
    L: gl.constexpr = loads(ROWS, BLOCKS, INNER, min(RUN, INNER), WARPS)
    row, block, inner = axes(ROWS, BLOCKS, INNER, L)
    across = gl.cdiv(K, STEP)
    largest = gl.full([ROWS, BLOCKS, INNER], 0.0, gl.float32, L)
    for tile in range(gl.program_id(0), gl.cdiv(M, ROWS) * across, gl.num_programs(0)):
        first_row, first_column = tile // across * ROWS, tile % across * STEP
        columns = gl.minimum(K - first_column, WIDTH)
        at = (first_row, first_column, row, block * INNER, inner, columns)
        values = LOAD(source, (None, None, None), K, at, present(at, M, 0), 0, OPTIONS)
        for i in gl.static_range(len(values)):
            largest = larger(largest, gl.abs(values[i]))
    bits = largest.to(gl.int32, bitcast=True)
    amax = gl.max(gl.max(gl.max(bits, 2), 1), 0).to(gl.float32, bitcast=True)
    gl.store(amax_ptr + gl.program_id(0), amax)


@gluon.jit
def line_amax_kernel(
    source,
    row_ptr,  # int32[M], the bits of amaxes, raised to those of the rows; or None
    column_ptr,  # int32[K], the same for columns
    M,
    K,
    LOAD: gl.constexpr,
    OPTIONS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    INNER: gl.constexpr,
    RUN: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The amaxes of rows, of columns, or of both."""
    BLOCKS: gl.constexpr = COLUMNS // INNER
    L: gl.constexpr = loads(ROWS, BLOCKS, INNER, min(RUN, INNER), WARPS)
    first_row, first_column = place(M, K, ROWS, COLUMNS, 1)
    row, block, inner = axes(ROWS, BLOCKS, INNER, L)
    columns = K - first_column
    at = (first_row, first_column, row, block * INNER, inner, columns)
    (x,) = LOAD(source, (None,), K, at, present(at, M, 0), 0, OPTIONS)
    if row_ptr is not None:
        each = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, L)))
        bits = gl.max(amax_bits(x), 1)
        gl.atomic_max(row_ptr + first_row + each, bits, mask=each < M - first_row, sem="relaxed")
    if column_ptr is not None:
        bits = gl.max(x.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        block = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(0, L)))[:, None]
        inner = gl.arange(0, INNER, gl.SliceLayout(0, gl.SliceLayout(0, L)))[None, :]
        each = block * INNER + inner
        gl.atomic_max(column_ptr + first_column + each, bits, mask=each < columns, sem="relaxed")
