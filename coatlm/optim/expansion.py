"""Multi-component BF16 arithmetic: a value is the exact sum of two BF16 numbers, high and low.

    two_sum(a, b)       s = a + b, t = s - a, e = (a - (s - t)) + (b - t)     s + e = a + b exactly
    fast_two_sum(a, b)  s = a + b, e = b - (s - a)                the same, but it asks |a| >= |b|
    two_prod(a, b)      p = a b,   e = fma(a, b, -p)                          p + e = a b exactly
    grow(x, y, a)       (x + y) + a as a pair
    mul(x, y, b, c)     (x + y) (b + c) as a pair

Collage (arXiv 2405.03637) section 4, algorithm 1; Dekker 1971, Knuth 1969. Every operation is
rounded to BF16; none may be fused or reordered. `grow` opens with `two_sum`, for Fast2Sum asks for
an order that a moment starting at zero does not have: exact sums would be the exception.

`fused.py` compiles the sums for the GPU from this very source, whence the quoted annotations.
"""

import torch
from torch import Tensor


def two_sum(a: "Tensor", b: "Tensor") -> "tuple[Tensor, Tensor]":
    """(a + b rounded, what rounding lost), whichever is larger."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def fast_two_sum(a: "Tensor", b: "Tensor") -> "tuple[Tensor, Tensor]":
    """(a + b rounded, what rounding lost) where |a| >= |b|."""
    s = a + b
    return s, b - (s - a)


def two_prod(a: "Tensor", b: "Tensor") -> "tuple[Tensor, Tensor]":
    """(a b rounded, what rounding lost), BF16; exact where nothing underflows."""
    p = a * b
    # addcmul computes in fp32, which holds a product of BF16 numbers: one rounding, as an fma has
    return p, torch.addcmul(-p, a, b)


def grow(x: Tensor, y: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """The pair (x, y) plus a."""
    u, v = two_sum(x, a)
    return fast_two_sum(u, y + v)


def mul(x: Tensor, y: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The pair (x, y) times the pair (b, c)."""
    p, e = two_prod(x, b)
    return fast_two_sum(p, e + (x * c + y * b))


def split(value: float) -> tuple[float, float]:
    """A number as a BF16 pair: (0.999) -> (1.0, -0.00099945)."""
    high = torch.tensor(value, dtype=torch.float64).bfloat16().item()
    return high, torch.tensor(value - high, dtype=torch.float64).bfloat16().item()
