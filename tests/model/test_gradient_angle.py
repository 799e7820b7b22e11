"""Why precision.guard has no limit for the angle of weight gradients (docs/concepts.md, the guard).

With G = dy^T x over T tokens and the same from FP8 operands, whose relative errors are e_x and
e_dy, independent roundings give |G8 - G| / |G| = k sqrt(e_x^2 + e_dy^2), where

    k^2 = sum_t |dy_t|^2 |x_t|^2 / |G|^2    1 if tokens are independent, less if they agree

and k is also the relative error of G as a sample of its tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from coatlm.config.recipes import RECIPES
from coatlm.fp8 import producers
from coatlm.fp8.operand import emit_ref

TOKENS, IN, OUT = 4096, 96, 64
CASES = {"agree": 0.3, "independent": 0.0, "cancel": 0.1}


class Found(NamedTuple):
    """What is measured of one gradient."""

    operands: tuple[float, float]  # e_x and e_dy
    error: float  # of G
    angle: float  # of G, in degrees
    length: float  # of G8 / of G
    k: float
    noise: float  # relative difference of G from twice that of a random half of the tokens


def off(actual: Tensor, exact: Tensor) -> float:
    return ((actual - exact).norm() / exact.norm()).item()


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    return {name: measured(name, share) for name, share in CASES.items()}


def measured(name: str, share: float) -> Found:
    """The wgrad GEMM of `coat` for Gaussian tokens.

    They agree by a common vector `share` as large, or all but cancel in pairs with opposite dy.
    """
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(TOKENS, n, generator=generator) for n in (IN, OUT))
    if name == "agree":
        x += share * torch.randn(IN, generator=generator)
        dy += share * torch.randn(OUT, generator=generator)
    if name == "cancel":
        half = TOKENS // 2
        x[half:] = x[:half] + share * torch.randn(half, IN, generator=generator)
        dy[half:] = -dy[:half]
    recipe = RECIPES["coat"]
    codes = emit_ref(x, direct=recipe.forward.activation).direct
    dy8 = emit_ref(dy, transposed=recipe.wgrad.gradient).transposed
    assert codes is not None and dy8 is not None
    x8 = producers.codes_transposed(codes, recipe.forward.activation, recipe.wgrad.activation)
    a, b = dy8.dequantize().double(), x8.dequantize().double()
    x, dy = x.double(), dy.double()
    exact, fp8 = dy.t() @ x, a @ b.t()
    cosine = (exact * fp8).sum() / exact.norm() / fp8.norm()
    tokens = (dy.square().sum(1) * x.square().sum(1)).sum().sqrt() / exact.norm()
    some = torch.randperm(TOKENS, generator=generator)[: TOKENS // 2]
    return Found(
        (off(b, x.t()), off(a, dy.t())),
        off(fp8, exact),
        math.degrees(math.acos(cosine.item())),
        (fp8.norm() / exact.norm()).item(),
        tokens.item(),
        off(2 * dy[some].t() @ x[some], exact),
    )


def test_the_angle_depends_on_how_tokens_agree_at_the_same_errors_of_operands(
    found: dict[str, Found],
) -> None:
    for each in found.values():
        assert each.operands == (pytest.approx(0.0265, abs=5e-4), pytest.approx(0.053, abs=1e-3))
    angles = {name: each.angle for name, each in found.items()}
    assert 0.4 < angles["agree"] < 0.9
    assert 3 < angles["independent"] < 4
    assert 15 < angles["cancel"] < 25


def test_independent_roundings_give_the_error_of_the_operands_times_k(
    found: dict[str, Found],
) -> None:
    """In pairs that cancel the roundings of both are alike, and cancel too."""
    for name in ("agree", "independent"):
        each = found[name]
        assert each.error == pytest.approx(each.k * math.hypot(*each.operands), rel=0.1)
    assert found["cancel"].error < found["cancel"].k * math.hypot(*found["cancel"].operands)


def test_the_error_is_the_same_small_share_of_what_other_tokens_would_change(
    found: dict[str, Found],
) -> None:
    for each in found.values():
        assert each.noise == pytest.approx(each.k, rel=0.05)
        assert each.error < 1.1 * math.hypot(*each.operands) * each.noise


def test_the_length_holds_where_tokens_do_not_cancel(found: dict[str, Found]) -> None:
    for name in ("agree", "independent"):
        assert found[name].length == pytest.approx(1, abs=0.005)
