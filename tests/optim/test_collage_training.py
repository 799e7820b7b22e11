"""AdamW with BF16 states and BF16 pairs, over many steps of a toy problem.

Weights N(0, .02), gradients (mu + N(0, 1)) * 1e-3 with mu = .3 N(0, 1) per weight, lr 1e-4, weight
decay .1, the same gradients for all optimizers. The error of a recipe is the distance of its
weights from those of fp64 AdamW, relative to the distance that fp64 AdamW moved them. The expected
error is that of a second implementation, `Emulated`: it computes in fp64, rounds every result to 8
significant bits, and has the error-free transformations by their definition, e = (a + b) - s, not
by the formulas of `coatlm.optim.collage`.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from coatlm.optim.adamw import AdamW
from coatlm.optim.shards import FlatShard

N, STEPS, LR, DECAY, EPS = 256, 1500, 1e-4, 0.1, 1e-8
BETA1, BETA2S = 0.9, (0.95, 0.99, 0.999)
STRICT = ("adamw-bf16", "collage-light", "kahan", "collage-plus")
Array = np.ndarray
BF16Pair = tuple[Array, Array]


def bf16(x: Array | float) -> Array:
    """x rounded to 8 significant bits, ties to even; no value here is subnormal in BF16."""
    significand, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(significand, 8)), exponent - 8)


def added(a: Array, b: Array) -> BF16Pair:
    """(a + b rounded, its error); fp64 has room for the exact sum."""
    s = bf16(a + b)
    return s, bf16(a + b - s)


def pair_plus(x: BF16Pair, a: Array) -> BF16Pair:
    high, error = added(x[0], a)
    return added(high, bf16(x[1] + error))


def pair_times(x: BF16Pair, b: BF16Pair) -> BF16Pair:
    p = bf16(x[0] * b[0])
    cross = bf16(bf16(x[0] * b[1]) + bf16(x[1] * b[0]))
    return added(p, bf16(bf16(x[0] * b[0] - p) + cross))


class Emulated:
    """A BF16 recipe: algorithm 2 of Collage (arXiv 2405.03637), A, B, C and Kahan summation."""

    def __init__(self, recipe: str, w: Array, beta2: float) -> None:
        self.recipe, self.beta2, self.step = recipe, beta2, 0
        zero = np.zeros_like(w)
        self.w, self.low, self.m, self.v = w, zero, zero, (zero, zero)
        high = bf16(beta2)
        self.beta2_pair = high, bf16(beta2 - high)

    def update(self, g: Array) -> None:
        self.step += 1
        self.m = bf16(bf16(BETA1 * self.m) + bf16((1 - BETA1) * g))
        added_v = bf16((1 - self.beta2) * g * g)
        if self.recipe == "collage-plus":
            self.v = pair_plus(pair_times(self.v, self.beta2_pair), added_v)
        else:
            self.v = bf16(bf16(self.beta2 * self.v[0]) + added_v), np.zeros_like(g)
        m_hat = self.m / (1 - BETA1**self.step)
        v_hat = (self.v[0] + self.v[1]) / (1 - self.beta2**self.step)
        change = bf16(-LR * m_hat / (np.sqrt(v_hat) + EPS) - LR * DECAY * self.w)
        if self.recipe == "adamw-bf16":
            self.w = bf16(self.w + change)
        elif self.recipe == "kahan":
            change = bf16(change + self.low)
            new = bf16(self.w + change)
            self.w, self.low = new, bf16(change - bf16(new - self.w))
        else:
            self.w, self.low = pair_plus((self.w, self.low), change)


class Fp64:
    def __init__(self, w: Array, beta2: float) -> None:
        self.w, self.beta2, self.step = w, beta2, 0
        self.m = self.v = np.zeros_like(w)

    def update(self, g: Array) -> None:
        self.step += 1
        self.m = BETA1 * self.m + (1 - BETA1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g * g
        root = np.sqrt(self.v / (1 - self.beta2**self.step)) + EPS
        self.w = self.w - LR * (self.m / (1 - BETA1**self.step) / root + DECAY * self.w)


@functools.cache
def errors(beta2: float) -> dict[str, tuple[float, float]]:
    """Recipe -> (its error, the error of its emulation, NaN where there is none)."""
    generator = torch.Generator().manual_seed(0)
    start = (0.02 * torch.randn(N, generator=generator)).bfloat16()
    mu = 0.3 * torch.randn(N, generator=generator)
    grad = torch.zeros(N, dtype=torch.bfloat16)
    optimizers = {
        recipe: AdamW(
            [FlatShard(start.clone(), grad, decay=((0, N),))],
            recipe=recipe,
            betas=(BETA1, beta2),
            eps=EPS,
            weight_decay=DECAY,
        )
        for recipe in (*STRICT, "adamw-fp32")
    }
    w = start.double().numpy()
    exact, emulated = Fp64(w, beta2), {recipe: Emulated(recipe, w, beta2) for recipe in STRICT}
    for _ in range(STEPS):
        grad.copy_((mu + torch.randn(N, generator=generator)) * 1e-3)
        for optimizer in optimizers.values():
            optimizer.step(lr=LR)
        for other in (exact, *emulated.values()):
            other.update(grad.double().numpy())
    moved = np.linalg.norm(exact.w - w)

    def error(weight: Array) -> float:
        return float(np.linalg.norm(weight - exact.w) / moved)

    found = {
        name: error(o.decode(0, "fp32_param").double().numpy()) for name, o in optimizers.items()
    }
    expected = {name: error(e.w + e.low) for name, e in emulated.items()}
    return {name: (value, expected.get(name, math.nan)) for name, value in found.items()}


@pytest.mark.parametrize("beta2", BETA2S)
@pytest.mark.parametrize("recipe", STRICT)
def test_bf16_recipes_err_as_an_independent_emulation_does(recipe: str, beta2: float) -> None:
    """The update is computed in fp32 in one and in fp64 in the other: of N * STEPS updates about
    2^-14 round differently to BF16, by 2^-8 of their value. That is 1 % of the smallest error."""
    found, expected = errors(beta2)[recipe]
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("beta2", BETA2S)
def test_fp32_states_and_master_follow_fp64(beta2: float) -> None:
    # v rounds by 2^-24 at each of the last 1 / (1 - beta2) steps, in random directions: 2e-6
    assert errors(beta2)["adamw-fp32"][0] < 1e-5


@pytest.mark.parametrize("beta2", (0.99, 0.999))
def test_only_plus_keeps_up_with_fp32_where_beta2_rounds_badly(beta2: float) -> None:
    """beta2 = .999 is 1 in BF16: light's v cannot decay, plus has the low half."""
    found = {recipe: value for recipe, (value, _) in errors(beta2).items()}
    assert found["collage-light"] > 10 * found["collage-plus"]
    assert found["kahan"] == pytest.approx(found["collage-light"], rel=0.05)


def test_bf16_weights_without_a_low_half_lose_most_of_their_updates() -> None:
    assert errors(0.95)["adamw-bf16"][0] > 100 * errors(0.95)["collage-plus"][0]
