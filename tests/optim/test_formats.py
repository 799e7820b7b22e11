"""Storage formats alone: what they keep exactly, and what rounding costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coatlm.optim.formats import (
    Bf16,
    Bf16Pair,
    Direct,
    Kahan,
    Master,
    Pair,
    Remainder,
    TensorScaled,
    TensorScaledMaster,
    nearest_bf16,
)
from coatlm.optim.recipes import RECIPES

BF16 = torch.bfloat16
ALL_LOW_HALVES = torch.arange(1 << 16, dtype=torch.int32)


def floats(high: int) -> Tensor:
    """The 65536 fp32 numbers whose upper half is `high`."""
    return ((high << 16) + ALL_LOW_HALVES).view(torch.float32)


@pytest.mark.parametrize("high", (0x0000, 0x0001, 0x3F80, 0x3F81, 0x42F7, 0x7F7E))
@pytest.mark.parametrize("negative", (False, True))
def test_remainder_16_keeps_every_fp32_bit(high: int, negative: bool) -> None:
    master = floats(high - (1 << 15) if negative else high)
    remainder = Remainder(16)
    weight, state = remainder.add(torch.zeros(1 << 16, dtype=BF16), _zero(remainder), master)
    assert torch.equal(weight, nearest_bf16(master))
    assert torch.equal(remainder.decode(weight, state), master)


def _zero(remainder: Remainder) -> dict[str, Tensor]:
    return remainder.initial(torch.zeros(1 << 16, dtype=BF16))


def test_nearest_bf16_is_nearest_and_takes_ties_away_from_zero() -> None:
    for x in (floats(0x3F80), -floats(0x3F80), floats(0x3F81)):
        rounded = nearest_bf16(x)
        even = x.to(BF16)
        tie = (x.view(torch.int32) & 0xFFFF) == 0x8000
        assert torch.equal(rounded[~tie], even[~tie])
        assert (rounded[tie].abs().float() > x[tie].abs()).all()


def test_nearest_bf16_keeps_nan_and_infinity() -> None:
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, 0x7F800000, -0x00800000])
    x = nearest_bf16(bits.to(torch.int32).view(torch.float32))
    # 0x7F800001 is a NaN whose only set bit of the fraction is below BF16: no GPU result has it
    assert x[[0, 1]].isnan().all()
    assert x[3] == torch.inf
    assert x[4] == -torch.inf


def test_correction_8_keeps_24_bits() -> None:
    correction = Remainder(8)
    master = floats(0x3F80)
    weight, state = correction.add(torch.zeros(1 << 16, dtype=BF16), _zero(correction), master)
    kept = correction.decode(weight, state)
    assert state[".remainder"].dtype == torch.int8
    assert (kept.view(torch.int32) & 0xFF == 0).all()
    assert ((kept.double() - master.double()).abs() <= 2.0**-16).all()  # 16 bits: half a unit
    assert torch.equal(weight, nearest_bf16(kept))


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


def test_a_pair_near_zero_collects_updates_larger_than_itself() -> None:
    """Weights that cross zero: each update of 2^-13 exceeds a weight of 2^-16, and none is lost."""
    generator = torch.Generator().manual_seed(0)
    weight = (2.0**-16 * torch.randn(4096, generator=generator)).to(BF16)
    pair, exact = Pair(), weight.double()
    state, largest = pair.initial(weight), torch.zeros(())
    for _ in range(16):
        update = (2.0**-13 * torch.randn(4096, generator=generator)).to(BF16)
        exact += update.double()
        largest = torch.maximum(largest, torch.maximum(update.abs().max(), weight.abs().max()))
        weight, state = pair.add(weight, state, update.float())
    error = (pair.decode(weight, state).double() - exact).abs().max()
    assert error <= 16 * 2.0**-15 * largest  # 2^-15: two roundings of the low half, as in `grow`


def test_v_of_a_quiet_weight_takes_a_large_gradient() -> None:
    """A pair that holds 2^-9 of what is added to it must not lose its own value."""
    quiet = torch.linspace(1.0, 2.0, 128).to(BF16) * 2.0**-9
    moment, x = Bf16Pair(), torch.ones(128)
    state = {"": quiet, ".low": torch.zeros(128, dtype=BF16)}
    _, state = moment.ema(state, x, 0.5)  # 0.5 is exact in BF16, so are both products
    expected = 0.5 * quiet.double() + 0.5
    assert ((moment.decode(state).double() - expected).abs() <= 2.0**-17).all()


def test_kahan_adds_what_rounding_took_from_the_last_update() -> None:
    """64 updates of 2^-12, each less than half the spacing at 1, arrive in steps of 2^-7."""
    kahan, weight = Kahan(), torch.ones(128, dtype=BF16)
    state = kahan.initial(weight)
    for _ in range(64):
        weight, state = kahan.add(weight, state, torch.full((128,), 2.0**-12))
        assert (state[".compensation"].abs() <= 2.0**-8).all()
    assert torch.equal(kahan.decode(weight, state), torch.full((128,), 1 + 2.0**-6))


def test_direct_adds_an_update_that_is_rounded_to_bf16() -> None:
    weight, update = torch.full((128,), 2.0**-7, dtype=BF16), torch.full((128,), 1 + 2.0**-8)
    new, state = Direct().add(weight, {}, update)  # the tie 1 + 2^-8 rounds to 1
    assert state == {}
    assert torch.equal(new, torch.full((128,), 1 + 2.0**-7, dtype=BF16))


def test_masters_are_rounded_once_to_the_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(128, generator=generator).to(BF16)
    update = 2.0**-10 * torch.randn(128, generator=generator)
    exact = weight.float() + update
    new, state = Master().add(weight, Master().initial(weight), update)
    assert torch.equal(state[""], exact) and torch.equal(new, nearest_bf16(exact))
    assert Master().initial(exact) == {} and Master().add(exact, {}, update)[1] == {}
    fp16 = TensorScaledMaster()
    new, state = fp16.add(weight, fp16.initial(weight), update)
    assert torch.equal(new, nearest_bf16(exact))  # BF16 weights of one size are exact in FP16
    stored = fp16.decode(new, state)
    assert torch.equal(stored, TensorScaled(torch.float16).decode(state))
    assert ((stored - exact).abs() <= 2.0**-11 * exact.abs()).all() and (stored != exact).any()


def test_tensor_scale_of_zeros_is_the_smallest_normal_number() -> None:
    scale = TensorScaled(torch.float16).encode(torch.zeros(256))[".scale"]
    assert scale.tolist() == [torch.finfo(torch.float32).smallest_normal] * 2
