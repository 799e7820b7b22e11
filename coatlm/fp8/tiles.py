"""Tiles of a matrix in registers, and the layouts in which they are loaded, stored and transposed.

A tile has 4 R rows and is four tensors [R, BLOCKS, INNER], of the rows 4 r + j for j = 0, 1, 2, 3.
INNER consecutive columns belong to one block and share a scale.

A thread holds RUN columns of its rows. For the transpose it turns 4 x 4 codes into 32-bit words of
four rows; the words are then exchanged between threads once, through shared memory. A thread loads
and stores 16 bytes at a time wherever it has as many.

The words come from inline assembly that the compiler cannot look into: ptxas 12.8 loses codes that
are stored both as they are and byte by byte. The kernels are in Gluon because the layouts decide
the speed.
"""

# mypy: disable-error-code="assignment"
# Kernels extend tuples at compile time, which changes their types.
from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8.scaling import inverse_power_of_two, power_of_two
from coatlm.fp8.stochastic import half, words

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
}""")  # four words, each with four codes of a row -> four words, each with four codes of a column


@gluon.constexpr_function
def loads(R: int, BLOCKS: int, INNER: int, RUN: int, WARPS: int) -> Any:
    """The layout of loads: RUN columns per thread; a warp covers whole rows as far as it can."""
    inner = INNER // RUN
    blocks = min(BLOCKS, 32 // inner)
    rows = 32 // (inner * blocks)
    down = min(WARPS, max(R // rows, 1))
    return gl.BlockedLayout([1, 1, RUN], [rows, blocks, inner], [down, WARPS // down, 1], [2, 1, 0])


@gluon.constexpr_function
def stores(R: int, BLOCKS: int, INNER: int, WARPS: int) -> Any:
    """The layout of transposed stores: a thread has four words of a column, which are 16 rows."""
    rows = min(R // 4, 32)
    inner = min(32 // rows, INNER)
    blocks = 32 // (rows * inner)
    across = min(WARPS, max(BLOCKS // blocks, 1))
    return gl.BlockedLayout(
        [4, 1, 1], [rows, blocks, inner], [1, across, WARPS // across], [0, 2, 1]
    )


@gluon.jit
def place(M, K, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DOWN: gl.constexpr):
    """First row and column of a program's tile: DOWN tiles downwards, then the next column."""
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
def axes(R: gl.constexpr, BLOCKS: gl.constexpr, INNER: gl.constexpr, L: gl.constexpr):
    """Indices in layout L: row (or word) [R, 1], block [1, BLOCKS], column in it [1, 1, INNER]."""
    row = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None]
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :]
    inner = gl.arange(0, INNER, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :][:, None, :]
    return row, block, inner


@gluon.jit
def random_bits(
    noise_ptr, first_row, first_column, R: gl.constexpr, BLOCKS: gl.constexpr, INNER: gl.constexpr,
    RUN: gl.constexpr, WARPS: gl.constexpr, ROUNDED: gl.constexpr,
):  # fmt: skip
    """n (stochastic.py) of each element, in layout `loads`: for each j, a tuple.

    ROUNDED: how many values a column has, 1 or 2. With one, the first column and RUN are even.
    """
    SHARED: gl.constexpr = 2 // ROUNDED  # neighboring columns have one place
    PLACES: gl.constexpr = INNER // SHARED
    L: gl.constexpr = loads(R, BLOCKS, PLACES, RUN // SHARED, WARPS)
    row, block, inner = axes(R, BLOCKS, PLACES, L)
    places = first_column // SHARED + (block * PLACES)[:, :, None] + inner
    four = words(noise_ptr, (first_row // 4 + row)[:, :, None], places)
    bits = ()
    for j in gl.static_range(4):
        low, high = half(four[j], 0), half(four[j], 1)
        if ROUNDED == 1:
            both = gl.reshape(gl.join(low, high), [R, BLOCKS, INNER])
            bits += ((gl.convert_layout(both, loads(R, BLOCKS, INNER, RUN, WARPS)),),)
        else:
            bits += ((low, high),)
    return bits


@gluon.jit
def present(at, M, J: gl.constexpr):
    """The mask [R, BLOCKS] of the blocks of the rows 4 r + J that are valid."""
    first_row, _, row, column, _, columns = at
    return (row + J < M - first_row) & (column < columns)


@gluon.jit
def load_values(x_ptr, at, some):
    """Load a tile in fp32; zero outside of the mask `some`."""
    return gl.load(x_ptr + at, mask=some[:, :, None], other=0.0).to(gl.float32)


@gluon.jit
def load_scales(scale_ptr, at, some):
    """Load the scales of a tile's blocks, [R, BLOCKS], in fp32; uint8 scales are E8M0."""
    if scale_ptr.dtype.element_ty == gl.uint8:
        return power_of_two(gl.load(scale_ptr + at, mask=some, other=127).to(gl.int32))
    else:
        return gl.load(scale_ptr + at, mask=some, other=1.0)


@gluon.jit
def bytes_of(x, FORMAT: gl.constexpr):
    """FP8 codes of fp32 values, as uint8."""
    return x.to(FORMAT).to(gl.uint8, bitcast=True)


@gluon.jit
def not_saturated(x):
    """x where it is finite, else NaN. For quotients x whose scale comes from other values.

    The conversion to FP8 would saturate an infinity as it does large numbers; its code is NaN here.
    """
    return x + x * 0.0


@gluon.jit
def amax_bits(x):
    """The bits of the largest |x| of each block of an fp32 tile, int32: NaN > Inf > numbers."""
    return gl.max(x.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 2)


@gluon.jit
def inverse_of(scale):
    """1 / S of power-of-two scales; NaN where S is not finite."""
    return inverse_power_of_two((scale.to(gl.int32, bitcast=True) >> 23) & 255)


@gluon.jit
def store_transposed(
    a, b, c, d, code_t_ptr, first_row, first_column, padded, columns,
    R: gl.constexpr, BLOCKS: gl.constexpr, INNER: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Store codes of the rows 4 r + 0, 1, 2, 3 in int32[., padded / 4], row 4 r in the lowest byte.

    `columns`: valid columns from the tile's first one on. `padded`: a multiple of 16.
    """
    word = gl.inline_asm_elementwise(
        TRANSPOSE_4X4,
        "=r,=r,=r,=r,r,r,r,r",
        [a, b, c, d],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )
    L: gl.constexpr = stores(R, BLOCKS, INNER, WARPS)
    word = gl.convert_layout(word, L)
    words = padded // 16 * 4
    row, block, inner = axes(R, BLOCKS, INNER, L)
    column = (block * INNER)[:, :, None] + inner
    at_ptr = code_t_ptr + first_column.to(gl.int64) * words + first_row // 16 * 4
    some = (row < words - first_row // 4) & (block * INNER < columns)
    at = column.to(gl.int64) * words + row[:, :, None]
    gl.store(at_ptr + at, word, mask=some[:, :, None])
