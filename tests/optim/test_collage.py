"""Pairs of BF16 numbers: what the error-free transformations promise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coatlm.optim import collage

BF16 = torch.bfloat16
EPS = 2.0**-7  # spacing of BF16 at 1


def numbers(count: int, seed: int, *, spread: float = 8.0) -> Tensor:
    """Both signs, magnitudes over 2^(+-spread), some zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator)
    x *= torch.exp2(spread * (2 * torch.rand(count, generator=generator) - 1))
    x[::97] = 0.0
    return x.to(BF16)


def test_two_sum_is_exact_for_any_order_of_magnitude() -> None:
    a, b = numbers(20000, 0), numbers(20000, 1)
    s, e = collage.two_sum(a, b)
    assert torch.equal(s, a + b)
    assert torch.equal(s.double() + e.double(), a.double() + b.double())


def test_fast_two_sum_is_exact_for_ordered_operands_and_seldom_otherwise() -> None:
    a, b = numbers(20000, 0), numbers(20000, 1)
    large, small = torch.where(a.abs() >= b.abs(), a, b), torch.where(a.abs() >= b.abs(), b, a)
    exact = large.double() + small.double()
    for first, second, least, most in ((large, small, 1.0, 1.0), (small, large, 0.0, 0.5)):
        s, e = collage.fast_two_sum(first, second)
        share = (s.double() + e.double() == exact).double().mean().item()
        assert least <= share <= most


def test_two_prod_is_exact() -> None:
    a, b = numbers(20000, 0), numbers(20000, 1)
    p, e = collage.two_prod(a, b)
    assert torch.equal(p, a * b)
    assert torch.equal(p.double() + e.double(), a.double() * b.double())


@pytest.mark.parametrize("beta", (0.9, 0.95, 0.98, 0.99, 0.999))
def test_bf16_pair_is_the_nearest_pair(beta: float) -> None:
    high, low = collage.bf16_pair(beta)
    assert high == torch.tensor(beta).to(BF16).item()
    # low is the rest rounded to BF16; the rest is at most half a spacing below 1, EPS / 4
    assert abs(high + low - beta) <= EPS / 4 * EPS / 2


def test_bf16_pair_gives_the_pairs_of_the_papers_first_table() -> None:
    """The pairs agree to the digits that the table prints. For 0.99 it prints 0.9893, which is not
    in BF16 and is a misprint of 0.9883: only then is the sum of both 0.99.
    """
    expected = {0.999: (1.0, -0.001), 0.99: (0.9883, 0.0017), 0.95: (0.9492, 0.0008)}
    for beta, pair in expected.items():
        assert tuple(round(part, 4) for part in collage.bf16_pair(beta)) == pair


def test_mul_is_accurate_to_a_pair() -> None:
    x, b = numbers(20000, 0), numbers(20000, 1)
    y, c = (numbers(20000, s, spread=0.0).clamp(-1, 1) * EPS / 4 for s in (2, 3))
    y, c = (y * x).to(BF16), (c * b).to(BF16)
    p, e = collage.mul(x, y, b, c)
    exact = (x.double() + y.double()) * (b.double() + c.double())
    # left out: y c <= (EPS / 4)^2; rounded: x c, y b and two sums below EPS |x b|, EPS / 2 each
    bound = 3 * EPS**2 * (x.double() * b.double()).abs()
    assert ((p.double() + e.double() - exact).abs() <= bound).all()


def test_grow_collects_additions_that_bf16_would_lose() -> None:
    x, y = torch.ones(1000, dtype=BF16), torch.zeros(1000, dtype=BF16)
    small = torch.full((1000,), 2.0**-12, dtype=BF16)  # 1 + 2^-12 is 1 in BF16
    assert torch.equal(x + small, x)
    for _ in range(64):
        x, y = collage.grow(x, y, small)
    assert torch.equal(x.double() + y.double(), torch.full((1000,), 1 + 64 * 2.0**-12).double())


def test_a_growing_pair_starts_from_zero() -> None:
    zero, a = torch.zeros(1000, dtype=BF16), numbers(1000, 5)
    x, y = collage.grow(zero, zero, a)
    assert torch.equal(x, a)
    assert torch.equal(y, zero)


def test_grow_is_as_accurate_for_an_addend_larger_than_the_pair() -> None:
    """|a| > |x| in half of the cases: `fast_two_sum` in place of `two_sum` errs by 2^-9 |a|."""
    x, a = numbers(20000, 0), numbers(20000, 1)
    y = (x * (EPS / 4) * numbers(20000, 2, spread=0.0).clamp(-1, 1)).to(BF16)
    high, low = collage.grow(x, y, a)
    exact = x.double() + y.double() + a.double()  # fp64 has room for all bits
    largest = torch.maximum(x.abs(), a.abs()).double()
    # the low half, at most EPS / 2 of the largest, is rounded twice by EPS / 2 of itself
    bound = 2 * (EPS / 2) ** 2 * largest
    assert (high.double() + low.double() - exact).abs().le(bound).all()
    fast_high, v = collage.fast_two_sum(x, a)
    fast_high, fast_low = collage.fast_two_sum(fast_high, y + v)
    wrong = (fast_high.double() + fast_low.double() - exact).abs() > bound
    assert wrong[x.abs() < a.abs()].double().mean() > 0.2 and not wrong[x.abs() >= a.abs()].any()
