"""Moment formats alone: what they store exactly, and what rounding costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coatlm.optim.moment_formats import Bf16, Bf16Pair, TensorScaled
from coatlm.optim.recipes import RECIPES

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.float16))
def test_tensor_scale_is_the_power_of_two_that_just_fits(dtype: torch.dtype) -> None:
    codec = TensorScaled(dtype)
    for largest in (1e-30, 2.0**-9, 1.0, 447.9, 448.0, 448.1, 65504.0, 1e20):
        x = torch.tensor([largest, -largest / 3] + [0.0] * 126)
        state = codec.encode(x)
        scale = state[".scale"][0].item()
        assert scale == 2.0 ** round(torch.tensor(scale).log2().item())
        assert 0.5 < largest / (scale * codec.max) <= 1.0
        eps = torch.finfo(dtype).eps / 2
        assert torch.allclose(codec.decode(state), x, rtol=eps * 1.001, atol=0.0)


def test_tensor_scale_of_zeros_is_finite_and_decodes_to_zero() -> None:
    codec = TensorScaled(torch.float8_e4m3fn)
    state = codec.encode(torch.zeros(256))
    assert state[".scale"].isfinite().all()
    assert torch.equal(codec.decode(state), torch.zeros(256))


def test_a_new_scale_leaves_representable_values_alone() -> None:
    codec = TensorScaled(torch.float16)
    x = torch.randn(128).half().float()
    once = codec.decode(codec.encode(x))
    more = codec.decode(codec.encode(torch.cat([x, torch.full((128,), 500.0)])))[:128]
    assert torch.equal(once, x)
    assert torch.equal(more, x)


@pytest.mark.parametrize("beta", (0.95, 0.99, 0.999))
def test_a_pair_averages_what_bf16_cannot(beta: float) -> None:
    """The mean of x = 1 is 1 - beta^t; plain BF16 stops once (1 - beta) x rounds away."""
    steps, n = 8 * round(1 / (1 - beta)), 128
    x = torch.ones(n)
    errors = {}
    for name, moment in (("pair", Bf16Pair()), ("bf16", Bf16())):
        state = moment.zeros(n, torch.device("cpu"))
        for _ in range(steps):
            _, state = moment.ema(state, x, beta)
        errors[name] = (moment.decode(state) - (1 - beta**steps)).abs().max().item()
    # (1 - beta) x and the 1 - beta of the pair are off by 2^-9 each, and so is their fixed point;
    # every step rounds by 2^-17, and 1 / (1 - beta) steps add up
    assert errors["pair"] <= 2 * 2.0**-9 + 2.0**-17 / (1 - beta)
    assert errors["bf16"] > 4 * errors["pair"] or beta == 0.95


@given(recipe=st.sampled_from(sorted(RECIPES)), seed=st.integers(0, 2**16))
def test_zeros_decode_to_zeros_in_every_moment_format(recipe: str, seed: int) -> None:
    for moment in RECIPES[recipe].moments.values():
        state = moment.zeros(256, torch.device("cpu"))
        assert torch.equal(moment.decode(state), torch.zeros(256))
        value, state = moment.ema(state, torch.zeros(256), 0.9)
        assert torch.equal(value, torch.zeros(256))
        assert torch.equal(moment.decode(state), torch.zeros(256))


@given(
    recipe=st.sampled_from(("coat", "fp8lm", "adamw-fp32")),
    scale=st.floats(1e-6, 1e3),
    beta=st.sampled_from((0.9, 0.99)),
)
def test_the_step_uses_the_moment_before_it_is_rounded(
    recipe: str, scale: float, beta: float
) -> None:
    x = scale * torch.randn(256, generator=torch.Generator().manual_seed(0)).abs()
    for moment in RECIPES[recipe].moments.values():
        value, _ = moment.ema(moment.zeros(256, torch.device("cpu")), x, beta)
        assert torch.equal(value, (1 - beta) * x)


def test_v_of_a_quiet_weight_takes_a_large_gradient() -> None:
    """A pair that holds 2^-9 of what is added to it must not lose its own value."""
    quiet = torch.linspace(1.0, 2.0, 128).to(BF16) * 2.0**-9
    moment, x = Bf16Pair(), torch.ones(128)
    state = {"": quiet, ".low": torch.zeros(128, dtype=BF16)}
    _, state = moment.ema(state, x, 0.5)  # 0.5 is exact in BF16, so are both products
    expected = 0.5 * quiet.double() + 0.5
    assert ((moment.decode(state).double() - expected).abs() <= 2.0**-17).all()


def test_tensor_scale_of_zeros_is_the_smallest_normal_number() -> None:
    scale = TensorScaled(torch.float16).encode(torch.zeros(256))[".scale"]
    assert scale.tolist() == [torch.finfo(torch.float32).smallest_normal] * 2
