"""Triton counterparts, on tiles, of the storage formats and of `collage.py`, for the fused step.

A tile is fp32 or BF16 [blocks, 128]; `scale` and `k` are [blocks]. The definition of each function
is that of the same purpose in `moment_formats.py`, `weight_formats.py` or `collage.py`, and results
are bit-identical if the kernel is launched without contraction into fused multiply-adds. COAT's
codes come from `fp8.expand`, which says by how much they may differ. M and W are the recipe's
format objects.
"""

import triton
import triton.language as tl

from coatlm.fp8.expand import expand_decode
from coatlm.optim import collage

two_sum = triton.jit(collage.two_sum)  # compiled from the source of the reference
fast_two_sum = triton.jit(collage.fast_two_sum)


# --- arithmetic ---------------------------------------------------------------------------------


@triton.jit
def two_prod(a, b):
    p = a * b
    return p, tl.fma(a, b, -p)


@triton.jit
def grow(x, y, a):
    u, v = two_sum(x, a)
    return fast_two_sum(u, y + v)


@triton.jit
def mul(x, y, b, c):
    p, e = two_prod(x, b)
    return fast_two_sum(p, e + (x * c + y * b))


@triton.jit
def round_bits(x, BITS: tl.constexpr):
    half: tl.constexpr = (1 << BITS) >> 1
    raw = tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFFFFFF - half)
    return (raw + half) & -(1 << BITS)


@triton.jit
def nearest_bf16(x):
    return (round_bits(x, 16) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def power_of_two_above(x):
    bits = tl.maximum(x, 1.1754943508222875e-38).to(tl.int32, bitcast=True)
    return ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(x):
    """1 / x with an error of at most 1 ulp, in one instruction."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def divide(a, b):
    """a / b by the fast path of div.rn: the same bits unless an operand or the quotient is near the
    ends of fp32's range.

    div.rn branches for those, and a branch per division keeps a thread from overlapping divisions.
    Here b is sqrt(v) + eps, so only quotients near 2^-126 may round differently.
    """
    y = reciprocal(b)
    y = tl.fma(tl.fma(-b, y, 1.0), y, y)
    q = a * y
    return tl.fma(tl.fma(-b, q, a), y, q)


@triton.jit
def square_root(x):
    """sqrt(x) with the bits of sqrt.rn for x >= 2^-101; sqrt(0) = 0, and finite in between."""
    y = tl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;",
        "=f,f",
        [tl.maximum(x, 1.1754943508222875e-38)],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
    s = x * y
    return tl.fma(tl.fma(-s, s, x), y * 0.5, s)


# --- moments ------------------------------------------------------------------------------------


@triton.jit
def scaled_value(M: tl.constexpr, main, scale):
    code = main.to(tl.float8e4nv, bitcast=True) if M.fp8 else main
    return code.to(tl.float32) * scale[:, None]


@triton.jit
def scaled_code(M: tl.constexpr, x, amax):
    """The codes of x and their scale; `amax` is the largest magnitude of the whole tensor."""
    scale = power_of_two_above(tl.div_rn(amax, M.max))
    inverse = (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return (x * inverse).to(tl.float8e4nv if M.fp8 else tl.float16), scale


@triton.jit
def ema(M: tl.constexpr, main, low, scale, k, x, BETA: tl.constexpr, PAIR: tl.constexpr):
    """The new moment as (main, low) in the dtype of its arithmetic, fp32 or BF16.

    PAIR is BETA as a BF16 pair.
    """
    REST: tl.constexpr = 1.0 - BETA
    if M.kind == "bf16":
        return (BETA * main.to(tl.float32)).to(tl.bfloat16) + (REST * x).to(tl.bfloat16), low
    elif M.kind == "pair":
        high, low = mul(main, low, tl.cast(PAIR[0], tl.bfloat16), tl.cast(PAIR[1], tl.bfloat16))
        return grow(high, low, (REST * x).to(tl.bfloat16))
    else:
        if M.kind == "expanded":
            HOW: tl.constexpr = M.how
            code = main.to(HOW.fmt.triton_dtype, bitcast=True)
            old = expand_decode(code, k, scale, HOW)
        elif M.kind == "scaled":
            old = scaled_value(M, main, scale)
        else:
            tl.static_assert(M.kind == "fp32", "a moment format that this kernel does not know")
            old = main
        return BETA * old + REST * x, low


@triton.jit
def value(M: tl.constexpr, main, low):
    """The moment that `ema` returned, as fp32."""
    if M.kind == "pair":
        return main.to(tl.float32) + low.to(tl.float32)
    else:
        return main.to(tl.float32)


# --- weights ------------------------------------------------------------------------------------


@triton.jit
def master(W: tl.constexpr, weight, main, scale):
    """The weight at its full precision, fp32: it decays, and the update is added to it."""
    if W.kind == "remainder":
        high = weight.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return (high + (main.to(tl.int32) << W.shift)).to(tl.float32, bitcast=True)
    elif W.kind == "scaled":
        return scaled_value(W, main, scale)
    elif W.kind == "master" and weight.dtype != tl.float32:
        return main
    else:
        PLAIN: tl.constexpr = W.kind == "direct" or W.kind == "kahan" or W.kind == "pair"
        tl.static_assert(
            PLAIN or W.kind == "master", "a weight format that this kernel does not know"
        )
        return weight.to(tl.float32)


@triton.jit
def add(W: tl.constexpr, weight, low, old, update):
    """(the model's weight, main, low) after an update; `old` is the result of `master`.

    For a format with a scale, main is fp32: it is encoded once the scale is known.
    """
    if W.kind == "direct":
        return weight + update.to(tl.bfloat16), old, low
    elif W.kind == "kahan":
        total = update.to(tl.bfloat16) + low
        new = weight + total
        return new, old, total - (new - weight)
    elif W.kind == "pair":
        high, low = grow(weight, low, update.to(tl.bfloat16))
        return high, old, low
    else:
        new = old + update
        if W.kind == "remainder":
            bits = round_bits(new, W.shift) if W.shift > 0 else new.to(tl.int32, bitcast=True)
            main = (bits << 16) >> (16 + W.shift)
            return nearest_bf16(bits.to(tl.float32, bitcast=True)), main, low
        elif weight.dtype == tl.float32:
            return new, new, low
        else:
            return nearest_bf16(new), new, low
