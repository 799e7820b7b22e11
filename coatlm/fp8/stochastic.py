"""Stochastic rounding to FP8: up or down at random, so that the mean of the codes is x.

    y = sign(x) floor(|x| / u + r) u        u: the spacing of the format at x, r uniform in (0, 1)

|x| / u is rounded up with the probability of its fraction. So E[y] = x, where rounding to nearest
has the same error each time; the mean square of the error is twice that of nearest. Here r is
(n + 1/2) / 2^16 with 16 random bits n, and the mean is x within 2^-17 u. What is larger than MAX
saturates as before.

The bits are a function of the element's place and of `noise`, int32 [4] = (k0, k1, c2, c3) on the
device, so that a CUDA graph takes the numbers that it finds there at each replay:

    w = Philox4x32-7(counter (row div 4, place, c2, c3), key (k0, k1))     Salmon et al., SC 2011
    n = 16 bits of w[row mod 4]: the lower for the first of two columns that share a place, the
        upper for the second

Columns 2 c and 2 c + 1 share place c. Where a kernel writes two values per column of its tile (gate
and up, both halves of a head), columns c and c + `halves` share place c.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8.formats import Fp8Format

ROUNDS = gl.constexpr(7)  # of Philox; the fewest that pass all tests of the paper
MULTIPLIERS = gl.constexpr((0xD2511F53, 0xCD9E8D57))
KEY_STEPS = gl.constexpr((0x9E3779B9, 0xBB67AE85))
WORD = 0xFFFFFFFF


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and lower 32 bits of a b, of 32-bit numbers in int64."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    return (high + (low >> 16)) >> 16, (low + (high << 16)) & WORD


def words_ref(noise: Tensor, quads: Tensor, places: Tensor) -> tuple[Tensor, ...]:
    """The four words of Philox, int64 of 32 bits. `quads`: row div 4; both counters broadcast."""
    k0, k1, c2, c3 = (noise.long() & WORD).unbind()
    c0, c1 = quads, places
    for _ in range(ROUNDS.value):
        (high0, low0), (high2, low2) = (
            _product(MULTIPLIERS.value[0], c0),
            _product(MULTIPLIERS.value[1], c2),
        )
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = ((k + s) & WORD for k, s in zip((k0, k1), KEY_STEPS.value, strict=True))
    return tuple(torch.broadcast_tensors(c0, c1, c2, c3))


def bits_ref(noise: Tensor, rows: int, columns: int, *, halves: int | None = None) -> Tensor:
    """n [rows, columns] of 16 bits, int64."""
    each = torch.arange(columns, device=noise.device)
    upper = each % 2 if halves is None else each // halves % 2
    places = each // 2 if halves is None else each - upper * halves
    quads = torch.arange(-(-rows // 4), device=noise.device)[:, None]
    words = torch.stack(words_ref(noise, quads, places), 1)
    return (words.flatten(0, 1)[:rows] >> 16 * upper) & 0xFFFF


def stochastic_ref(
    x: Tensor, noise: Tensor, fmt: Fp8Format, *, halves: int | None = None
) -> Tensor:
    """The definition: fp32 x[M, K], already divided by its scale -> numbers of the format, fp32."""
    dropped = 23 - fmt.mantissa_bits
    n = bits_ref(noise, *x.shape, halves=halves)
    r = ((2 * n + 1) << (dropped - 17)).int()
    size = x.abs()
    # The sum has the exponent at which the spacing is that of subnormal numbers.
    shift = torch.where(size < fmt.smallest_normal, fmt.smallest_normal, 0.0)
    up = ((size + shift).view(torch.int32) + r) & -(1 << dropped)
    rounded = up.view(torch.float32) - shift
    rounded = torch.where(x.view(torch.int32) < 0, -rounded, rounded)
    return torch.where(size <= fmt.max, rounded, x)


@gluon.jit
def words(noise_ptr, quads, places):
    """`words_ref`, uint32."""
    c0, c1 = quads.to(gl.uint32), places.to(gl.uint32)
    k0 = gl.load(noise_ptr).to(gl.uint32, bitcast=True)
    k1 = gl.load(noise_ptr + 1).to(gl.uint32, bitcast=True)
    c2 = gl.load(noise_ptr + 2).to(gl.uint32, bitcast=True)
    c3 = gl.load(noise_ptr + 3).to(gl.uint32, bitcast=True)
    for _ in gl.static_range(ROUNDS):
        high0, low0 = gl.umulhi(c0, MULTIPLIERS[0]), c0 * MULTIPLIERS[0]
        high2, low2 = gl.umulhi(c2, MULTIPLIERS[1]), c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + KEY_STEPS[0], k1 + KEY_STEPS[1]
    return c0, c1, c2, c3


@gluon.jit
def half(word, UPPER: gl.constexpr):
    """n: 16 bits of the words, int32."""
    return ((word >> (16 * UPPER)) & 0xFFFF).to(gl.int32)


@gluon.jit
def stochastic(x, n, FORMAT: gl.constexpr):
    """`stochastic_ref` of an fp32 tile with the bits n."""
    E5M2: gl.constexpr = gl.float8e5 == FORMAT
    DROPPED: gl.constexpr = 21 if E5M2 else 20
    # Scaled so that the smallest normal number of the format becomes that of fp32: then subnormal
    # numbers lose as many bits as others do. MAX stays far inside the range of fp32.
    DOWN: gl.constexpr = 2.0**-112 if E5M2 else 2.0**-120
    MAX: gl.constexpr = 57344.0 if E5M2 else 448.0
    r = (2 * n + 1) << (DROPPED - 17)
    # fp32 is sign and magnitude: adding r to the bits raises |x| for either sign
    up = ((x * DOWN).to(gl.int32, bitcast=True) + r) & -(1 << DROPPED)
    rounded = up.to(gl.float32, bitcast=True) * (1.0 / DOWN)
    return gl.where(gl.abs(x) <= MAX, rounded, x)
