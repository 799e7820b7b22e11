"""FP8 codes written as they are and transposed: what transpose.py and swiglu_tiles.py share.

A program has a tile of 4 R rows. A thread takes RUN columns of the rows 4 r + 0, 1, 2 and 3, makes
their codes, and turns 4 x 4 codes into words of four rows. Only words change threads, once, through
shared memory; loads and stores are of 16 bytes a thread wherever there are as many.

    tile [R, GROUPS, INNER]   INNER consecutive columns of one group: its scale is one byte

Words are opaque to compilers, on purpose: ptxas 12.8 loses codes that are stored both as they are
and byte by byte. Written in Gluon, for the layouts decide the speed.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8.quantize import TRANSPOSE_4X4
from coatlm.fp8.scaling import inverse_power_of_two, power_of_two


@gluon.constexpr_function
def loads(R: int, GROUPS: int, INNER: int, RUN: int, WARPS: int) -> Any:
    """A warp covers whole rows as far as it can, RUN columns a thread."""
    inner = INNER // RUN
    groups = min(GROUPS, 32 // inner)
    rows = 32 // (inner * groups)
    down = min(WARPS, max(R // rows, 1))
    return gl.BlockedLayout([1, 1, RUN], [rows, groups, inner], [down, WARPS // down, 1], [2, 1, 0])


@gluon.constexpr_function
def stores(R: int, GROUPS: int, INNER: int, WARPS: int) -> Any:
    """A thread has four words of a column, 16 rows."""
    rows = min(R // 4, 32)
    inner = min(32 // rows, INNER)
    groups = 32 // (rows * inner)
    across = min(WARPS, max(GROUPS // groups, 1))
    return gl.BlockedLayout(
        [4, 1, 1], [rows, groups, inner], [1, across, WARPS // across], [0, 2, 1]
    )


@gluon.jit
def place(M, K, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DOWN: gl.constexpr):
    """The program's tile, row by row in bands of DOWN rows of tiles."""
    program = gl.program_id(0)
    across = gl.cdiv(K, COLUMNS)
    if DOWN == 1:
        i, j = program // across, program % across
    else:
        band = program // (DOWN * across)
        height = gl.minimum(gl.cdiv(M, ROWS) - band * DOWN, DOWN)
        inside = program - band * DOWN * across
        i, j = band * DOWN + inside % height, inside // height
    return i * ROWS, j * COLUMNS


@gluon.jit
def axes(R: gl.constexpr, GROUPS: gl.constexpr, INNER: gl.constexpr, L: gl.constexpr):
    """Row or word [R, 1], group [1, GROUPS] and column in a group [1, 1, INNER] of a layout."""
    row = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None]
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :]
    inner = gl.arange(0, INNER, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :][:, None, :]
    return row, group, inner


@gluon.jit
def load_values(x_ptr, at, some):
    return gl.load(x_ptr + at, mask=some[:, :, None], other=0.0).to(gl.float32)


@gluon.jit
def load_powers(exponent_ptr, at, some):
    """The scales of a tile's groups, [R, GROUPS]."""
    return power_of_two(gl.load(exponent_ptr + at, mask=some, other=127).to(gl.int32))


@gluon.jit
def bytes_of(x, FORMAT: gl.constexpr):
    """FP8 codes of fp32 values, as uint8."""
    return x.to(FORMAT).to(gl.uint8, bitcast=True)


@gluon.jit
def given(x):
    """A quotient by a scale that is not of this tensor: NaN where it is infinite, else unchanged.

    Conversions would saturate it, as they do what is finite. FP8 codes of Inf are NaN here.
    """
    return x + x * 0.0


@gluon.jit
def amax_bits(x):
    """The largest |x| of each group of an fp32 tile, as integers, where NaN > Inf > numbers."""
    return gl.max(x.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 2)


@gluon.jit
def inverse_at(scale_ptr):
    """1 / S of a power-of-two scale in memory; NaN where it is not finite."""
    return inverse_power_of_two((gl.load(scale_ptr).to(gl.int32, bitcast=True) >> 23) & 255)


@gluon.jit
def store_transposed(
    a, b, c, d, code_t_ptr, first_row, first_column, padded, K,
    R: gl.constexpr, GROUPS: gl.constexpr, INNER: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Codes of the rows 4 r + 0, 1, 2 and 3 -> int32[K, padded / 4], the first row lowest."""
    word = gl.inline_asm_elementwise(
        TRANSPOSE_4X4,
        "=r,=r,=r,=r,r,r,r,r",
        [a, b, c, d],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )
    L: gl.constexpr = stores(R, GROUPS, INNER, WARPS)
    word = gl.convert_layout(word, L)
    words = padded // 16 * 4
    row, group, inner = axes(R, GROUPS, INNER, L)
    column = (group * INNER)[:, :, None] + inner
    at_ptr = code_t_ptr + first_column.to(gl.int64) * words + first_row // 16 * 4
    some = (row < words - first_row // 4) & (group * INNER < K - first_column)
    at = column.to(gl.int64) * words + row[:, :, None]
    gl.store(at_ptr + at, word, mask=some[:, :, None])


@gluon.jit
def _row_codes(
    x_ptr, exponent_ptr, row_ptr, code_ptr, column, inverse, at, exponent_at, row, some, largest,
    AMAX: gl.constexpr, FORMAT: gl.constexpr, CAST_ROWS: gl.constexpr,
):  # fmt: skip
    """Codes of a tile's rows 4 r + j, for one j, stored if asked for; with AMAX amaxes too."""
    if x_ptr.dtype.element_ty == gl.uint8:
        code = gl.load(x_ptr + at, mask=some[:, :, None], other=0)
    else:
        x = load_values(x_ptr, at, some)
        if AMAX:
            largest = gl.maximum(largest, amax_bits(x))
        # Powers of two first: they move no bits, so that the rounding is that of x * row * column.
        factor = inverse
        if exponent_ptr is not None:
            factor = load_powers(exponent_ptr, exponent_at, some) * factor
        if row_ptr is not None:
            scale = gl.load(row_ptr + row, mask=some, other=0.0)
            if CAST_ROWS:
                down = inverse_power_of_two((scale.to(gl.int32, bitcast=True) >> 23) & 255)
                x = (x * down[:, :, None]).to(FORMAT).to(gl.float32)
            factor = scale * factor
        if exponent_ptr is not None or row_ptr is not None:
            x = x * factor[:, :, None]
        else:
            x = x * factor
        if column is not None:
            x = x * column
        if AMAX:
            x = given(x)
        code = bytes_of(x, FORMAT)
    if code_ptr is not None:
        gl.store(code_ptr + at, code, mask=some[:, :, None])
    return code, largest


@gluon.jit
def transpose_kernel(
    x_ptr,  # [M, K]; uint8 stands for codes that are only moved
    exponent_ptr,  # uint8[M, K / SIZE], or None
    row_ptr,  # fp32[M], or None
    column_ptr,  # [K], or None
    scale_ptr,
    code_ptr,  # uint8[M, K], or None
    code_t_ptr,  # int32[K, padded / 4], or None
    amax_ptr,  # int32[], the bits of an amax to be raised to that of x, or None
    M,
    padded,
    K,
    FORMAT: gl.constexpr,
    SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    RUN: gl.constexpr,
    DOWN: gl.constexpr,
    WARPS: gl.constexpr,
    CAST_ROWS: gl.constexpr,  # x is cast by the scales in row_ptr before it is multiplied by them
):
    INNER: gl.constexpr = min(SIZE, 16)
    GROUPS: gl.constexpr = COLUMNS // INNER
    R: gl.constexpr = ROWS // 4
    L: gl.constexpr = loads(R, GROUPS, INNER, min(RUN, INNER), WARPS)
    first_row, first_column = place(padded, K, ROWS, COLUMNS, DOWN)
    row, group, inner = axes(R, GROUPS, INNER, L)
    row *= 4
    offset = first_row.to(gl.int64) * K + first_column
    x_ptr += offset
    if code_ptr is not None:
        code_ptr += offset
    at = (row * K + group * INNER)[:, :, None] + inner
    exponent_at = at
    if exponent_ptr is not None:
        exponent_ptr += first_row.to(gl.int64) * (K // SIZE)
        exponent_at = row * (K // SIZE) + (first_column + group * INNER) // SIZE
    if row_ptr is not None:
        row_ptr += first_row
    across = group * INNER < K - first_column
    column = None
    if column_ptr is not None:
        mask = across[:, :, None]
        at_column = (group * INNER)[:, :, None] + inner
        column = gl.load(column_ptr + first_column + at_column, mask=mask, other=0.0)
        column = column.to(gl.float32)
    inverse = inverse_at(scale_ptr)
    left = M - first_row
    step = 0
    if exponent_ptr is not None:
        step = K // SIZE
    AMAX: gl.constexpr = amax_ptr is not None
    largest = gl.full([R, GROUPS], 0, gl.int32, gl.SliceLayout(2, L))
    a, largest = _row_codes(
        x_ptr, exponent_ptr, row_ptr, code_ptr, column, inverse, at, exponent_at, row,
        (row < left) & across, largest, AMAX, FORMAT, CAST_ROWS)  # fmt: skip
    b, largest = _row_codes(
        x_ptr, exponent_ptr, row_ptr, code_ptr, column, inverse, at + K, exponent_at + step,
        row + 1, (row + 1 < left) & across, largest, AMAX, FORMAT, CAST_ROWS)  # fmt: skip
    c, largest = _row_codes(
        x_ptr, exponent_ptr, row_ptr, code_ptr, column, inverse, at + 2 * K, exponent_at + 2 * step,
        row + 2, (row + 2 < left) & across, largest, AMAX, FORMAT, CAST_ROWS)  # fmt: skip
    d, largest = _row_codes(
        x_ptr, exponent_ptr, row_ptr, code_ptr, column, inverse, at + 3 * K, exponent_at + 3 * step,
        row + 3, (row + 3 < left) & across, largest, AMAX, FORMAT, CAST_ROWS)  # fmt: skip
    if AMAX:
        gl.atomic_max(amax_ptr, gl.max(gl.max(largest, 1), 0), sem="relaxed")
    if code_t_ptr is not None:
        store_transposed(a, b, c, d, code_t_ptr, first_row, first_column, padded, K,
                         R, GROUPS, INNER, WARPS)  # fmt: skip
