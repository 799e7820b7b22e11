"""The shared epilogue of kernels that write FP8 operands: a tile of fp32 values becomes codes.

    loader       what a kernel reads: a matrix, a norm's input, the gradient of SwiGLU or of RoPE
    matrix       what it writes: codes[M, K], their transpose [K, M'], or both, with their scales

A loader is a JIT function `LOAD(source, factors, K, at, some, J, OPTIONS)`. `source` holds its
pointers and integers, OPTIONS its constants; `at` is the place of the tile (first row, first
column, rows 4 r, first columns of blocks, columns in a block, number of valid columns from the
first one on), and `some` the mask of valid rows and blocks. It returns a tuple of values, fp32
tiles of the rows 4 r + J, zero where not valid. Each is already multiplied by its factor, where
that is cheapest: the inverse of a power-of-two scale, which is exact, or None for 1.

VALUES says where each value is stored: (matrix, parts, part, column offset, format). The matrix has
`parts` times K columns, and the value belongs to number `part` of the parts.

With `sums_ptr` the first value is also summed over the rows of each tile, before it is rounded.

SCALES says by what the values are divided:

    factor   one power of two per matrix, which the loader has divided by
    tensor   one fp32 scale per matrix
    rows     one scale per row of the operand; a row of the transpose is a column of the tile. The
             loader returns one value

`emit_blocks_kernel` computes block-wise scales, of 1 x 128 or 128 x 128 elements, because its tile
holds all elements of a block. Quotients by powers of two are exact, others are rounded correctly,
so that codes have the bits of the reference (scaling.scaled_codes_ref).
"""

# mypy: disable-error-code="assignment, misc"
# Kernels extend tuples at compile time, which changes their types.
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8.quantize import quotient
from coatlm.fp8.scaling import amax_of, larger, scale_of
from coatlm.fp8.stochastic import stochastic
from coatlm.fp8.tiles import (
    amax_bits,
    axes,
    bytes_of,
    inverse_of,
    loads,
    not_saturated,
    place,
    present,
    random_bits,
    store_transposed,
)


@gluon.jit
def _divided(x, scale, POWER: gl.constexpr):
    """x / scale, rounded to nearest; NaN where the scale is not finite."""
    if POWER:
        return x * inverse_of(scale)
    else:
        return quotient(x, scale)


@gluon.jit
def _store(x, code_ptr, at, some, width, start, J: gl.constexpr):
    """Store codes of the rows 4 r + J in uint8[M, width], `start` columns further right."""
    first_row, first_column, row, column, inner, _ = at
    tile_ptr = code_ptr + (first_row.to(gl.int64) * width + first_column) + start
    inside = (row * width + column)[:, :, None] + inner
    gl.store(tile_ptr + (inside + J * width), x, mask=some[:, :, None])


@gluon.jit
def _scaled_codes(x, scale, some, POWER: gl.constexpr, FORMAT: gl.constexpr):
    """Codes of x / scale, or of x where `scale` is None."""
    if scale is None:
        code = bytes_of(x, FORMAT)
    else:  # outside the mask too, 0 / scale is NaN if the scale is not finite
        code = bytes_of(_divided(x, scale, POWER), FORMAT)
        code = gl.where(some[:, :, None], code, 0)
    return code


@gluon.jit
def _row_scales(scale_ptr, at, some, J: gl.constexpr):
    """The scales of the rows 4 r + J."""
    first_row, _, row, _, _, _ = at
    return gl.load(scale_ptr + first_row + row + J, mask=some, other=1.0)[:, :, None]


@gluon.jit
def _column_scales(scale_ptr, at, start):
    """The scales of a tile's columns, which are rows of the transpose, `start` columns further.

    A program loads them once. In the loop over rows the load would be repeated after every store.
    """
    _, first_column, _, column, inner, columns = at
    each = start + first_column + column[:, :, None] + inner
    return gl.load(scale_ptr + each, mask=(column < columns)[:, :, None], other=1.0)


@gluon.jit
def _columns(BLOCKS: gl.constexpr, INNER: gl.constexpr, L: gl.constexpr):
    """The columns of a tile, int32 [BLOCKS, INNER], in the layout of its sums over rows."""
    block = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(0, L)))[:, None]
    inner = gl.arange(0, INNER, gl.SliceLayout(0, gl.SliceLayout(0, L)))[None, :]
    return block * INNER + inner


@gluon.jit
def emit_kernel(
    source,
    matrices,  # of each (uint8[M, .], int32[., padded / 4], scale, scale of the transpose, or None)
    amax_ptr,  # int32[], the bits of an amax, raised to that of the first matrix; or None
    noise_ptr,  # int32[4], for stochastic rounding of the first matrix (SCALES="factor"); or None
    sums_ptr,  # fp32[tiles of rows, K], the first value's sums over the rows of a tile; or None
    M,
    padded,
    K,
    PREPARE: gl.constexpr,
    LOAD: gl.constexpr,
    OPTIONS: gl.constexpr,
    VALUES: gl.constexpr,
    SCALES: gl.constexpr,  # "factor", "tensor" or "rows"
    POWER: gl.constexpr,  # all scales are powers of two
    ROUNDED: gl.constexpr,  # how many of VALUES, the first ones, are rounded stochastically
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STEP: gl.constexpr,  # columns from one tile to the next
    WIDTH: gl.constexpr,  # columns of a tile that are used
    INNER: gl.constexpr,
    RUN: gl.constexpr,
    DOWN: gl.constexpr,
    WARPS: gl.constexpr,
):
    R: gl.constexpr = ROWS // 4
    BLOCKS: gl.constexpr = COLUMNS // INNER
    L: gl.constexpr = loads(R, BLOCKS, INNER, min(RUN, INNER), WARPS)
    N: gl.constexpr = len(VALUES)
    FOLDED: gl.constexpr = SCALES == "factor"
    SHARED: gl.constexpr = SCALES != "rows"  # the transpose has the same codes
    first_row, first_column = place(padded, K, ROWS, STEP, DOWN)
    row, block, inner = axes(R, BLOCKS, INNER, L)
    columns = K - first_column
    if WIDTH < STEP:
        columns = gl.minimum(columns, WIDTH)
    at = (first_row, first_column, row * 4, block * INNER, inner, columns)
    if PREPARE is not None:
        source = (source[0], source[1], source[2], PREPARE(source, at))
    factors = (None, None, None)
    if FOLDED:
        factors = ()
        for i in gl.static_range(N):
            factors += (inverse_of(gl.load(matrices[VALUES[i][0]][2])),)
    column_scale = None
    if SCALES == "rows" and matrices[0][3] is not None:
        start = VALUES[0][2] * K + VALUES[0][3]
        column_scale = _column_scales(matrices[0][3], at, start)
    largest = gl.full([R, BLOCKS], 0, gl.int32, gl.SliceLayout(2, L))
    sums = gl.full([R, BLOCKS, INNER], 0.0, gl.float32, L)
    codes = ()
    bits = ()
    if ROUNDED:
        bits = random_bits(
            noise_ptr, first_row, first_column, R, BLOCKS, INNER, min(RUN, INNER), WARPS, ROUNDED
        )
    for j in gl.static_range(4):
        some = present(at, M, j)
        values = LOAD(source, factors, K, at, some, j, OPTIONS)
        if sums_ptr is not None:
            sums += values[0]
        for i in gl.static_range(N):
            code_ptr, code_t_ptr, scale_ptr, _ = matrices[VALUES[i][0]]
            x = values[i]
            if amax_ptr is not None and VALUES[i][0] == 0:
                largest = gl.maximum(largest, amax_bits(x))
                if FOLDED:
                    x = not_saturated(x)
            if i < ROUNDED:
                x = stochastic(x, bits[j][i], VALUES[i][4])
            code = x
            if x.dtype != gl.uint8 and (code_ptr is not None or SHARED):
                scale = None
                if SCALES == "tensor":
                    scale = gl.load(scale_ptr)
                elif SCALES == "rows":
                    scale = _row_scales(scale_ptr, at, some, j)
                code = _scaled_codes(x, scale, some, POWER, VALUES[i][4])
            if code_ptr is not None:
                width, start = VALUES[i][1] * K, VALUES[i][2] * K + VALUES[i][3]
                _store(code, code_ptr, at, some, width, start, j)
            if code_t_ptr is not None and not SHARED:
                code = _scaled_codes(x, column_scale, some, POWER, VALUES[i][4])
            codes += (code,)
    if amax_ptr is not None:
        amax = gl.max(gl.max(largest, 1), 0)
        if FOLDED:
            amax = amax.to(gl.float32, bitcast=True) * gl.load(matrices[0][2])
            amax = amax.to(gl.int32, bitcast=True) & 0x7FFFFFFF
        gl.atomic_max(amax_ptr, amax, sem="relaxed")
    if sums_ptr is not None:
        sums_at = sums_ptr + (first_row // ROWS).to(gl.int64) * K + first_column
        column = _columns(BLOCKS, INNER, L)
        gl.store(sums_at + column, gl.sum(sums, 0), mask=column < columns)
    for i in gl.static_range(N):
        code_t_ptr = matrices[VALUES[i][0]][1]
        if code_t_ptr is not None:
            start = (VALUES[i][2] * K + VALUES[i][3]).to(gl.int64)
            store_transposed(
                codes[i], codes[N + i], codes[2 * N + i], codes[3 * N + i],
                code_t_ptr + start * (padded // 16 * 4), first_row, first_column, padded, columns,
                R, BLOCKS, INNER, WARPS,
            )  # fmt: skip


@gluon.jit
def _largest_of_rows(values):
    """The largest |value| of the four rows 4 r + 0, 1, 2 and 3, for each r."""
    most = gl.abs(values[0])
    for J in gl.static_range(1, 4):
        most = larger(most, gl.abs(values[J]))
    return most


@gluon.jit
def _block_scales(
    values, at, M, K, scale_ptr, ROWS: gl.constexpr, POWER: gl.constexpr, TOP: gl.constexpr,
    L: gl.constexpr,
):  # fmt: skip
    """Block-wise scales of a 128 x 128 tile's direct codes, one for each J. ROWS: of a block.

    They are stored in the memory order that GEMMs read: scales of 1 x 128 blocks as [K / 128, M],
    those of 128 x 128 blocks as [M / 128, K / 128] with rows padded to a multiple of 4.
    """
    first_row, first_column, _, _, _, _ = at
    i, j = first_row // 128, first_column // 128
    if ROWS == 128:
        scale = scale_of(amax_of(amax_of(amax_of(_largest_of_rows(values), 2), 1), 0), TOP, POWER)
        gl.store(scale_ptr + i * ((gl.cdiv(K, 128) + 3) // 4 * 4) + j, scale)
        scales = (scale, scale, scale, scale)
    else:
        scales = ()
        row = gl.arange(0, values[0].shape[0], gl.SliceLayout(1, gl.SliceLayout(2, L))) * 4
        for J in gl.static_range(4):
            scale = scale_of(amax_of(amax_of(values[J], 2), 1), TOP, POWER)
            scale_at = scale_ptr + j.to(gl.int64) * M + first_row
            gl.store(scale_at + row + J, scale, mask=row + J < M - first_row)
            scales += (scale[:, None][:, :, None],)
    return scales


@gluon.jit
def _transposed_block_scales(
    values, at, K, padded, scale_ptr, ROWS: gl.constexpr, POWER: gl.constexpr, TOP: gl.constexpr,
    L: gl.constexpr,
):  # fmt: skip
    """The same for the transposed codes: one scale for all J."""
    first_row, first_column, _, _, _, columns = at
    i, j = first_row // 128, first_column // 128
    BLOCKS: gl.constexpr = values[0].shape[1]
    INNER: gl.constexpr = values[0].shape[2]
    most = _largest_of_rows(values)
    if ROWS == 128:
        scales = scale_of(amax_of(amax_of(amax_of(most, 2), 1), 0), TOP, POWER)
        gl.store(scale_ptr + j * ((gl.cdiv(padded, 128) + 3) // 4 * 4) + i, scales)
    else:
        column = _columns(BLOCKS, INNER, L)
        scale = scale_of(amax_of(most, 0), TOP, POWER)
        scale_at = scale_ptr + i.to(gl.int64) * K + first_column
        gl.store(scale_at + column, scale, mask=column < columns)
        scales = scale[None, :, :]
    return scales


@gluon.jit
def emit_blocks_kernel(
    source,
    code_ptr,  # uint8[M, K], or None
    code_t_ptr,  # int32[K, padded / 4], or None
    scale_ptr,
    scale_t_ptr,
    amax_ptr,  # int32[], the bits of an amax, raised to that of the matrix; or None
    M,
    padded,
    K,
    LOAD: gl.constexpr,
    OPTIONS: gl.constexpr,
    SIZES: gl.constexpr,  # rows of a block of each operand: 1 or 128; 0 without the operand
    POWER: gl.constexpr,
    FORMATS: gl.constexpr,
    TOPS: gl.constexpr,  # MAX of each
    INNER: gl.constexpr,
    RUN: gl.constexpr,
    WARPS: gl.constexpr,
):
    """A tile of 128 x 128 elements stays in registers until its scales are known."""
    R: gl.constexpr = 32
    BLOCKS: gl.constexpr = 128 // INNER
    L: gl.constexpr = loads(R, BLOCKS, INNER, min(RUN, INNER), WARPS)
    SHARED: gl.constexpr = SIZES[0] == 128 and SIZES[1] == 128 and FORMATS[0] == FORMATS[1]
    first_row, first_column = place(padded, K, 128, 128, 1)
    row, block, inner = axes(R, BLOCKS, INNER, L)
    columns = K - first_column
    at = (first_row, first_column, row * 4, block * INNER, inner, columns)
    values = ()
    for j in gl.static_range(4):
        values += LOAD(source, (None,), K, at, present(at, M, j), j, OPTIONS)
    if amax_ptr is not None:
        largest = gl.maximum(amax_bits(values[0]), amax_bits(values[1]))
        largest = gl.maximum(largest, gl.maximum(amax_bits(values[2]), amax_bits(values[3])))
        gl.atomic_max(amax_ptr, gl.max(gl.max(largest, 1), 0), sem="relaxed")
    if code_ptr is not None:
        scales = _block_scales(values, at, M, K, scale_ptr, SIZES[0], POWER, TOPS[0], L)
    if code_t_ptr is not None:
        scales_t = _transposed_block_scales(
            values, at, K, padded, scale_t_ptr, SIZES[1], POWER, TOPS[1], L
        )
    codes = ()
    for j in gl.static_range(4):
        some = present(at, M, j)
        if code_ptr is not None:
            # Zeros before the cast: ptxas loses bytes that are stored and selected after it.
            x = gl.where(some[:, :, None], _divided(values[j], scales[j], POWER), 0.0)
            code = bytes_of(x, FORMATS[0])
            _store(code, code_ptr, at, some, K, 0, j)
        if code_t_ptr is not None:
            if not SHARED:
                x = gl.where(some[:, :, None], _divided(values[j], scales_t, POWER), 0.0)
                code = bytes_of(x, FORMATS[1])
            codes += (code,)
    if code_t_ptr is not None:
        store_transposed(
            codes[0], codes[1], codes[2], codes[3], code_t_ptr, first_row, first_column, padded,
            columns, R, BLOCKS, INNER, WARPS,
        )  # fmt: skip
