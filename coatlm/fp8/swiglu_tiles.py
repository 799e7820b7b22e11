"""SwiGLU's backward in the tiles of tiles.py: the kernels of swiglu_quantize.py, in Gluon."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8.tiles import (
    amax_bits,
    axes,
    bytes_of,
    given,
    inverse_at,
    load_powers,
    load_values,
    loads,
    place,
    store_transposed,
)

SIGMOID = gl.constexpr("""{
    .reg .f32 e;
    mul.rn.f32 e, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 e, e;
    add.rn.f32 e, e, 0f3F800000;
    rcp.approx.ftz.f32 $0, e;
}""")  # 1 / (1 + 2^(-x log2 e)); the reciprocal is good to one unit in the last place


@gluon.jit
def _swiglu_parts(gate):
    """(silu, its derivative) of gate: g s and s + g s (1 - s)."""
    s = gl.inline_asm_elementwise(SIGMOID, "=f,f", [gate], dtype=gl.float32, is_pure=True, pack=1)
    silu = gate * s
    return silu, gl.fma(silu, 1.0 - s, s)


@gluon.jit
def _load_swiglu(da_ptr, x_ptr, exponent_ptr, at, exponent_at, some, F, SIZE: gl.constexpr,
                 x_at):  # fmt: skip
    """(da, gate, up) of a tile, in fp32."""
    da = load_values(da_ptr, at, some)
    gate, up = load_values(x_ptr, x_at, some), load_values(x_ptr + F, x_at, some)
    if exponent_ptr is not None:
        gate = gate * load_powers(exponent_ptr, exponent_at, some)[:, :, None]
        up = up * load_powers(exponent_ptr + F // SIZE, exponent_at, some)[:, :, None]
    return da, gate, up


@gluon.jit
def _gradient_codes(
    da_ptr, x_ptr, exponent_ptr, dx_ptr, inverse, a_inverse, at, x_at, exponent_at, some, F,
    largest, AMAX: gl.constexpr, SIZE: gl.constexpr, FORMAT: gl.constexpr, A_FORMAT: gl.constexpr,
):  # fmt: skip
    """Codes of dgate, dup and a of a tile's rows 4 r + j, for one j; those of dx are stored.

    And with AMAX the amaxes of dx / S so far.
    """
    da, gate, up = _load_swiglu(da_ptr, x_ptr, exponent_ptr, at, exponent_at, some, F, SIZE, x_at)
    silu, slope = _swiglu_parts(gate)
    da = da * inverse
    dgate, dup = da * up * slope, da * silu
    if AMAX:
        largest = gl.maximum(largest, gl.maximum(amax_bits(dgate), amax_bits(dup)))
        dgate, dup = given(dgate), given(dup)
    dgate, dup = bytes_of(dgate, FORMAT), bytes_of(dup, FORMAT)
    gl.store(dx_ptr + x_at, dgate, mask=some[:, :, None])
    gl.store(dx_ptr + F + x_at, dup, mask=some[:, :, None])
    return dgate, dup, bytes_of(silu * up * a_inverse, A_FORMAT), largest


@gluon.jit
def swiglu_backward_kernel(
    da_ptr,  # [M, F]
    x_ptr,  # [M, 2F]
    exponent_ptr,  # uint8[M, 2F / SIZE], or None: x is not FP8
    dx_scale_ptr,
    a_scale_ptr,
    dx_ptr,  # uint8[M, 2F]
    dx_t_ptr,  # int32[2F, padded / 4]
    a_t_ptr,  # int32[F, padded / 4], or None
    amax_ptr,  # int32[], the bits of an amax to be raised to that of dx, or None
    M,
    padded,
    F,
    FORMAT: gl.constexpr,
    A_FORMAT: gl.constexpr,
    SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    RUN: gl.constexpr,
    DOWN: gl.constexpr,
    WARPS: gl.constexpr,
):
    INNER: gl.constexpr = min(SIZE, 16)
    GROUPS: gl.constexpr = COLUMNS // INNER
    R: gl.constexpr = ROWS // 4
    L: gl.constexpr = loads(R, GROUPS, INNER, min(RUN, INNER), WARPS)
    first_row, first_column = place(padded, F, ROWS, COLUMNS, DOWN)
    row, group, inner = axes(R, GROUPS, INNER, L)
    row *= 4
    da_ptr += first_row.to(gl.int64) * F + first_column
    x_offset = first_row.to(gl.int64) * (2 * F) + first_column
    x_ptr += x_offset
    dx_ptr += x_offset
    at = (row * F + group * INNER)[:, :, None] + inner
    x_at = (row * (2 * F) + group * INNER)[:, :, None] + inner
    step = 2 * F // SIZE
    exponent_at = row * step + (first_column + group * INNER) // SIZE
    if exponent_ptr is not None:
        exponent_ptr += first_row.to(gl.int64) * step
    across = group * INNER < F - first_column
    inverse, a_inverse = inverse_at(dx_scale_ptr), inverse_at(a_scale_ptr)
    left = M - first_row
    AMAX: gl.constexpr = amax_ptr is not None
    largest = gl.full([R, GROUPS], 0, gl.int32, gl.SliceLayout(2, L))
    g0, u0, a0, largest = _gradient_codes(
        da_ptr, x_ptr, exponent_ptr, dx_ptr, inverse, a_inverse, at, x_at, exponent_at,
        (row < left) & across, F, largest, AMAX, SIZE, FORMAT,
        A_FORMAT)  # fmt: skip
    g1, u1, a1, largest = _gradient_codes(
        da_ptr, x_ptr, exponent_ptr, dx_ptr, inverse, a_inverse, at + F, x_at + 2 * F,
        exponent_at + step, (row + 1 < left) & across, F, largest, AMAX, SIZE, FORMAT,
        A_FORMAT)  # fmt: skip
    g2, u2, a2, largest = _gradient_codes(
        da_ptr, x_ptr, exponent_ptr, dx_ptr, inverse, a_inverse, at + 2 * F, x_at + 4 * F,
        exponent_at + 2 * step, (row + 2 < left) & across, F, largest, AMAX, SIZE, FORMAT,
        A_FORMAT)  # fmt: skip
    g3, u3, a3, largest = _gradient_codes(
        da_ptr, x_ptr, exponent_ptr, dx_ptr, inverse, a_inverse, at + 3 * F, x_at + 6 * F,
        exponent_at + 3 * step, (row + 3 < left) & across, F, largest, AMAX, SIZE, FORMAT,
        A_FORMAT)  # fmt: skip
    store_transposed(g0, g1, g2, g3, dx_t_ptr, first_row, first_column, padded, F,
                     R, GROUPS, INNER, WARPS)  # fmt: skip
    if AMAX:
        scaled = gl.max(gl.max(largest, 1), 0).to(gl.float32, bitcast=True)
        amax = (scaled * gl.load(dx_scale_ptr)).to(gl.int32, bitcast=True) & 0x7FFFFFFF
        gl.atomic_max(amax_ptr, amax, sem="relaxed")
    up_ptr = dx_t_ptr + F.to(gl.int64) * (padded // 16 * 4)
    store_transposed(u0, u1, u2, u3, up_ptr, first_row, first_column, padded, F,
                     R, GROUPS, INNER, WARPS)  # fmt: skip
    if a_t_ptr is not None:
        store_transposed(a0, a1, a2, a3, a_t_ptr, first_row, first_column, padded, F,
                         R, GROUPS, INNER, WARPS)  # fmt: skip


@gluon.jit
def swiglu_amax_kernel(
    da_ptr,
    x_ptr,
    exponent_ptr,
    amax_ptr,  # fp32[programs], of dx
    M,
    F,
    SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    RUN: gl.constexpr,
    WARPS: gl.constexpr,
):
    INNER: gl.constexpr = min(SIZE, 16)
    GROUPS: gl.constexpr = COLUMNS // INNER
    L: gl.constexpr = loads(ROWS, GROUPS, INNER, min(RUN, INNER), WARPS)
    row, group, inner = axes(ROWS, GROUPS, INNER, L)
    at = (row * F + group * INNER)[:, :, None] + inner
    x_at = (row * (2 * F) + group * INNER)[:, :, None] + inner
    step = 2 * F // SIZE
    tiles = gl.cdiv(F, COLUMNS)
    largest = gl.full([ROWS, GROUPS, INNER], 0.0, gl.float32, L)
    for tile in range(gl.program_id(0), gl.cdiv(M, ROWS) * tiles, gl.num_programs(0)):
        first_row, first_column = tile // tiles * ROWS, tile % tiles * COLUMNS
        some = (row < M - first_row) & (group * INNER < F - first_column)
        start = first_row.to(gl.int64) * F
        exponent_at = first_row.to(gl.int64) * step
        exponent_at += row * step + (first_column + group * INNER) // SIZE
        da, gate, up = _load_swiglu(da_ptr + start + first_column,
                                    x_ptr + 2 * start + first_column,
                                    exponent_ptr, at, exponent_at, some, F, SIZE, x_at)  # fmt: skip
        silu, slope = _swiglu_parts(gate)
        NAN: gl.constexpr = tl.PropagateNan.ALL
        most = gl.maximum(gl.abs(up * slope), gl.abs(silu), propagate_nan=NAN)
        largest = gl.maximum(largest, gl.abs(da * most), propagate_nan=NAN)
    bits = largest.to(gl.int32, bitcast=True)
    amax = gl.max(gl.max(gl.max(bits, 2), 1), 0).to(gl.float32, bitcast=True)
    gl.store(amax_ptr + gl.program_id(0), amax)
