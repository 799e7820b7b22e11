"""SwiGLU's backward as loaders of emit.py, for swiglu_quantize.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8.scaling import larger
from coatlm.fp8.tiles import load_scales, load_values

SIGMOID = gl.constexpr("""{
    .reg .f32 e;
    mul.rn.f32 e, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 e, e;
    add.rn.f32 e, e, 0f3F800000;
    rcp.approx.ftz.f32 $0, e;
}""")  # 1 / (1 + 2^(-x log2 e)); the reciprocal is good to one unit in the last place


@gluon.jit
def _swiglu_parts(gate):
    """silu(g) = g s and its derivative s + g s (1 - s), where g is gate and s its sigmoid."""
    s = gl.inline_asm_elementwise(SIGMOID, "=f,f", [gate], dtype=gl.float32, is_pure=True, pack=1)
    silu = gate * s
    return silu, gl.fma(silu, 1.0 - s, s)


@gluon.jit
def _load_swiglu(source, F, at, some, J, SIZE: gl.constexpr):
    """(da, gate, up) of a tile, in fp32, from da[M, F] and x[M, 2F] with its scale exponents."""
    da_ptr, x_ptr, exponent_ptr = source
    first_row, first_column, row, column, inner, _ = at
    da_ptr += first_row.to(gl.int64) * F + first_column
    x_ptr += first_row.to(gl.int64) * (2 * F) + first_column
    da = load_values(da_ptr, (row * F + column)[:, :, None] + inner + J * F, some)
    x_at = (row * (2 * F) + column)[:, :, None] + inner + J * 2 * F
    gate, up = load_values(x_ptr, x_at, some), load_values(x_ptr + F, x_at, some)
    if exponent_ptr is not None:
        step = 2 * F // SIZE
        exponent_ptr += first_row.to(gl.int64) * step
        exponent_at = row * step + (first_column + column) // SIZE + J * step
        gate = gate * load_scales(exponent_ptr, exponent_at, some)[:, :, None]
        up = up * load_scales(exponent_ptr + F // SIZE, exponent_at, some)[:, :, None]
    return da, gate, up


@gluon.jit
def load_gradient(source, factors, F, at, some, J: gl.constexpr, OPTIONS: gl.constexpr):
    """dgate, dup and, if wanted, a = silu(gate) * up. OPTIONS: (SIZE, whether a is wanted)."""
    da, gate, up = _load_swiglu(source, F, at, some, J, OPTIONS[0])
    silu, slope = _swiglu_parts(gate)
    da = da * factors[0]
    if OPTIONS[1]:
        return da * up * slope, da * silu, silu * up * factors[2]
    else:
        return da * up * slope, da * silu


@gluon.jit
def load_largest(source, factors, F, at, some, J: gl.constexpr, SIZE: gl.constexpr):
    """The larger of |dgate| and |dup|, which is all that an amax needs."""
    da, gate, up = _load_swiglu(source, F, at, some, J, SIZE)
    silu, slope = _swiglu_parts(gate)
    return (da * larger(gl.abs(up * slope), gl.abs(silu)),)
