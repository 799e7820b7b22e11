"""Weight formats alone: what they store exactly, and what rounding costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coatlm.optim.moment_formats import TensorScaled
from coatlm.optim.weight_formats import (
    Direct,
    Kahan,
    Master,
    Pair,
    Remainder,
    TensorScaledMaster,
    nearest_bf16,
)

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
