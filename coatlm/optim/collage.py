"""BF16 pairs of Collage: a value is the exact sum of two BF16 numbers, high and low.

    two_sum(a, b)       s = a + b, t = s - a, e = (a - (s - t)) + (b - t)     s + e = a + b exactly
    fast_two_sum(a, b)  s = a + b, e = b - (s - a)          s + e = a + b exactly, if |a| >= |b|
    two_prod(a, b)      p = a b,   e = fma(a, b, -p)                          p + e = a b exactly
    grow(x, y, a)       (x + y) + a as a pair
    mul(x, y, b, c)     (x + y) (b + c) as a pair

Collage (arXiv 2405.03637) section 4, algorithm 1; Dekker 1971, Knuth 1969. Each operation is
rounded to BF16 and must be neither fused nor reordered.

`grow` begins with `two_sum` because |x| >= |a| does not always hold: a moment starts at zero, and
an update may exceed a weight near zero. `fast_two_sum` would err by up to 2^-9 |a| there, as much
as a sum in BF16 without a pair.

`tiles.py` compiles the sums for the GPU from this source; their annotations are quoted for that.
"""

import torch
from torch import Tensor


def two_sum(a: "Tensor", b: "Tensor") -> "tuple[Tensor, Tensor]":
    """(a + b rounded, its rounding error), for operands of any order."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def fast_two_sum(a: "Tensor", b: "Tensor") -> "tuple[Tensor, Tensor]":
    """(a + b rounded, its rounding error), for |a| >= |b|."""
    s = a + b
    return s, b - (s - a)


def two_prod(a: "Tensor", b: "Tensor") -> "tuple[Tensor, Tensor]":
    """(a b rounded, its rounding error) in BF16; exact unless it underflows."""
    p = a * b
    # addcmul computes in fp32, where a b of BF16 numbers is exact: it rounds once, as an fma does
    return p, torch.addcmul(-p, a, b)


def grow(x: Tensor, y: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """The pair (x, y) + a, for a of any magnitude."""
    u, v = two_sum(x, a)
    return fast_two_sum(u, y + v)


def mul(x: Tensor, y: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The pair (x, y) * the pair (b, c)."""
    p, e = two_prod(x, b)
    return fast_two_sum(p, e + (x * c + y * b))


def bf16_pair(value: float) -> tuple[float, float]:
    """The BF16 pair nearest to a number: bf16_pair(0.999) = (1.0, -0.00099945)."""
    high = torch.tensor(value, dtype=torch.float64).bfloat16().item()
    return high, torch.tensor(value - high, dtype=torch.float64).bfloat16().item()
