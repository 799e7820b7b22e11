"""Dynamic Range Expansion: error bounds by the formats' eps, the cases that go wrong easily, and
what it is for, the error of m / sqrt(v) over many steps."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coatlm.fp8 import expand
from coatlm.fp8.expand import (
    M_E4M3,
    V_E4M3,
    Expanded,
    Expansion,
    expand_dequantize,
    expand_quantize,
)
from coatlm.fp8.formats import E4M3, E5M2, SCALE_BLOCK
from tests.fp8.sm90 import compile_sm90

PLAIN_M = Expansion(E4M3, signed=True, k16_max=16)
PLAIN_V = Expansion(E4M3, signed=False, k16_max=16)
V_E5M2 = Expansion(E5M2, signed=False)  # the range of E5M2 needs no k < 1
ALL = [M_E4M3, V_E4M3, V_E5M2, PLAIN_M, PLAIN_V, Expansion(E5M2, signed=True)]
MOMENTS = [M_E4M3, V_E4M3, V_E5M2]


def name(how: Expansion) -> str:
    return f"{'m' if how.signed else 'v'}-{how.fmt.name}-{how.k16_min}-{how.k16_max}"


every = pytest.mark.parametrize("how", ALL, ids=name)
moments = pytest.mark.parametrize("how", MOMENTS, ids=name)
seeds = st.integers(0, 2**32 - 1)
# log2 and exp2 in fp32 of numbers up to 2^7: 2^-17 each way, and k times that before the cast.
ARITHMETIC = 2.0**-15


def values(how: Expansion, seed: int = 0, n: int = 16 * SCALE_BLOCK, spread: float = 1.0) -> Tensor:
    """A log-normal state, with a magnitude of its own for each block."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.exp(spread * torch.randn(n, generator=generator))
    size = torch.randint(-30, 20, (-(-n // SCALE_BLOCK),), generator=generator)
    x = x * (2.0**size).repeat_interleave(SCALE_BLOCK)[:n]
    return x * torch.randn(n, generator=generator).sign() if how.signed else x


def round_trip(x: Tensor, how: Expansion) -> Tensor:
    return expand_dequantize(expand_quantize(x, how), how)


def relative(actual: Tensor, expected: Tensor) -> Tensor:
    return ((actual - expected) / expected).abs()


@every
@settings(max_examples=20)
@given(seed=seeds, spread=st.floats(0.01, 4))
def test_error_of_a_normal_code_is_half_a_spacing_to_the_power_one_over_k(
    how: Expansion, seed: int, spread: float
) -> None:
    x = values(how, seed, spread=spread)
    state = expand_quantize(x, how)
    inverse_k = (16 / state.k16.float()).repeat_interleave(SCALE_BLOCK)
    normal = state.codes.float().abs() > how.fmt.smallest_normal
    high = (1 + how.fmt.eps / 2) ** inverse_k - 1
    low = 1 - (1 - how.fmt.eps / 2) ** inverse_k
    error = relative(expand_dequantize(state, how), x)
    assert (error <= torch.maximum(high, low) + ARITHMETIC)[normal].all()


@every
@settings(max_examples=20)
@given(seed=seeds, spread=st.floats(0.01, 4))
def test_error_of_a_subnormal_code_is_half_the_smallest_and_a_kept_one_all_of_it(
    how: Expansion, seed: int, spread: float
) -> None:
    x = values(how, seed, spread=spread)
    state = expand_quantize(x, how)
    k = (state.k16.float() / 16).repeat_interleave(SCALE_BLOCK)
    exact = torch.exp2(k * (x.abs().log2() - state.log2_scale.repeat_interleave(SCALE_BLOCK)))
    error = (how.fmt.decode(state.codes).abs() - exact).abs()
    smallest = how.fmt.smallest_subnormal
    small = exact < how.fmt.smallest_normal
    lifted = small & (exact < smallest) & (not how.signed)
    assert (error <= smallest / 2 * (1 + 2.0**-10))[small & ~lifted].all()
    assert (how.fmt.decode(state.codes) == smallest)[lifted].all()


@every
def test_the_largest_element_of_a_block_is_exact(how: Expansion) -> None:
    x = values(how).view(-1, SCALE_BLOCK)
    x[:, 77] = x.abs().amax(1) * 1.5
    assert relative(round_trip(x, how)[:, 77], x[:, 77]).max() < ARITHMETIC


@every
def test_signs_are_preserved_and_states_have_the_shape_of_x(how: Expansion) -> None:
    x = values(how, n=6 * 100).view(6, 100)
    state = expand_quantize(x, how)
    assert state.codes.shape == x.shape and state.k16.shape == state.log2_scale.shape == (5,)
    decoded = expand_dequantize(state, how)
    assert decoded.shape == x.shape
    assert (decoded * x >= 0).all()


@moments
def test_side_data_is_at_most_five_bytes_per_block(how: Expansion) -> None:
    state = expand_quantize(values(how, n=100 * SCALE_BLOCK), how)
    assert sum(part.nbytes for part in state) == 100 * (SCALE_BLOCK + 5)


@every
def test_zeros_stay_zero_and_change_nothing_else(how: Expansion) -> None:
    # The published kernel lets a zero into the minimum: k = 0.125 and 25 times the error.
    x = values(how, n=4 * SCALE_BLOCK)
    at = torch.arange(len(x)) % 5 == 2
    first = x.view(-1, SCALE_BLOCK)[:, :1]
    x[at] = first.expand(-1, SCALE_BLOCK).flatten()[at]  # values that are present elsewhere too
    expected, with_zeros = expand_quantize(x, how), expand_quantize(x.masked_fill(at, 0), how)
    assert torch.equal(with_zeros.k16, expected.k16)
    assert torch.equal(with_zeros.log2_scale, expected.log2_scale)
    decoded = expand_dequantize(with_zeros, how)
    assert (decoded[at] == 0).all()
    assert torch.equal(decoded[~at], expand_dequantize(expected, how)[~at])


def test_the_sign_of_zero_is_preserved_in_m() -> None:
    x = torch.tensor([0.0, -0.0, 1.0])
    assert round_trip(x, M_E4M3).signbit().tolist() == [False, True, False]


@every
def test_a_block_of_zeros_is_zero(how: Expansion) -> None:
    x = values(how, n=3 * SCALE_BLOCK)
    x[SCALE_BLOCK : 2 * SCALE_BLOCK] = 0
    state = expand_quantize(x, how)
    assert all(part.float().isfinite().all() for part in state)
    assert (expand_dequantize(state, how)[SCALE_BLOCK : 2 * SCALE_BLOCK] == 0).all()


@every
def test_bytes_of_zero_decode_to_zero(how: Expansion) -> None:
    state = Expanded(
        torch.zeros(300, dtype=torch.uint8).view(how.fmt.dtype),
        torch.zeros(3, dtype=torch.uint8),
        torch.zeros(3),
    )
    assert torch.equal(expand_dequantize(state, how), torch.zeros(300))


@every
def test_equal_elements_have_the_largest_k_and_are_exact(how: Expansion) -> None:
    x = torch.full((SCALE_BLOCK,), 0.3)
    x[::2] *= -1 if how.signed and how.fmt.dtype != torch.uint8 else 1
    assert expand_quantize(x, how).k16 == how.k16_max
    assert relative(round_trip(x, how), x).max() < ARITHMETIC


@every
def test_a_tail_is_quantized_like_the_block_it_would_begin(how: Expansion) -> None:
    x = values(how, n=SCALE_BLOCK + 5)
    filled = torch.cat([x, x[-5:].repeat(25)])[: 2 * SCALE_BLOCK]
    expected = round_trip(filled, how)[SCALE_BLOCK : SCALE_BLOCK + 5]
    assert torch.equal(round_trip(x, how)[SCALE_BLOCK:], expected)


@every
@pytest.mark.parametrize("n", [0, 1, 127, 128, 129])
def test_any_number_of_elements_has_its_blocks(how: Expansion, n: int) -> None:
    x = values(how, n=n)
    state = expand_quantize(x, how)
    assert len(state.k16) == len(state.log2_scale) == -(-n // SCALE_BLOCK)
    assert expand_dequantize(state, how).shape == (n,)


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_value_makes_its_whole_block_nan_and_no_other(how: Expansion, bad: float) -> None:
    x = values(how, n=3 * SCALE_BLOCK)
    good = round_trip(x, how)
    x[SCALE_BLOCK + 9] = bad
    decoded = round_trip(x, how).view(3, SCALE_BLOCK)
    assert decoded[1].isnan().all()
    assert torch.equal(decoded[[0, 2]], good.view(3, SCALE_BLOCK)[[0, 2]])


@every
def test_subnormal_values_count_as_zero(how: Expansion) -> None:
    x = values(how, n=SCALE_BLOCK)
    x[:5] = torch.tensor([1e-45, 1e-39, 1.1e-38, 1e-40, 0.0])
    zeros = x.clone()
    zeros[:5] = 0
    assert torch.equal(round_trip(x, how), round_trip(zeros, how))
    assert (round_trip(torch.full((SCALE_BLOCK,), 1e-39), how) == 0).all()


@every
@pytest.mark.parametrize("size", [2.0**-125, 2.0**120])
def test_the_ends_of_fp32_are_as_precise_as_its_middle(how: Expansion, size: float) -> None:
    x = values(how, n=SCALE_BLOCK, spread=0.5)
    x = x / x.abs().amin()
    kept = relative(round_trip(x * size, how) / size, round_trip(x, how))
    # log2 of 2^120 has six bits less behind the point than log2 of 2; k16 or a code may move.
    assert (kept < 2 * ARITHMETIC).float().mean() > 0.9
    assert relative(round_trip(x * size, how) / size, x).max() < 2.0**-3


@moments
@settings(max_examples=20)
@given(seed=seeds, power=st.integers(-60, 60))
def test_a_power_of_two_changes_only_the_scale(how: Expansion, seed: int, power: int) -> None:
    x = values(how, seed)
    state, moved = expand_quantize(x, how), expand_quantize(x * 2.0**power, how)
    # Larger logarithms are rounded more coarsely, so a k or a code at a boundary may move by one.
    assert (state.k16 == moved.k16).float().mean() >= 0.9
    same_k = (state.k16 == moved.k16).repeat_interleave(SCALE_BLOCK)
    steps = (state.codes.view(torch.uint8).int() - moved.codes.view(torch.uint8).int()).abs()
    assert steps[same_k].max() <= 1 and (steps[same_k] == 0).float().mean() > 0.99
    shift = (moved.log2_scale - state.log2_scale - power)[state.k16 == moved.k16]
    assert shift.abs().max() < ARITHMETIC


@moments
@settings(max_examples=20)
@given(seed=seeds)
def test_encoding_again_and_again_does_not_drift(how: Expansion, seed: int) -> None:
    once = again = round_trip(values(how, seed), how)
    for _ in range(20):
        again = round_trip(again, how)
    # Rounding moves min|x| and with it k, once or to and fro: to codes next to the old, either way.
    k = (expand_quantize(again, how).k16.float() / 16).repeat_interleave(SCALE_BLOCK)
    normal = expand_quantize(once, how).codes.float().abs() > how.fmt.smallest_normal
    change = ((again - once) / once)[normal]
    assert (change.abs() <= 2 * ((1 + how.fmt.eps) ** (1 / k[normal]) - 1)).all()
    assert change.mean().abs() < 1e-3


@pytest.mark.parametrize("how", [V_E4M3, V_E5M2, PLAIN_V], ids=name)
def test_what_is_not_zero_in_v_stays_so(how: Expansion) -> None:
    x = torch.exp2(torch.linspace(-100, 20, SCALE_BLOCK))
    decoded = round_trip(x, how)
    assert (decoded > 0).all()
    assert (decoded.diff() >= 0).all()


def test_k_of_m_is_at_least_one_and_small_values_of_m_become_zero() -> None:
    x = torch.exp2(torch.linspace(-60, 0, SCALE_BLOCK))
    state = expand_quantize(x, M_E4M3)
    assert state.k16 == 16
    assert (expand_dequantize(state, M_E4M3)[:30] == 0).all()
    assert expand_quantize(x, V_E4M3).k16 == 8


def test_k_fills_the_range_of_the_format() -> None:
    """k = log2(R) / log2(max / min), to the nearest sixteenth: 17.81 bits for m, 14.81 for v."""
    x = torch.linspace(1, 2, SCALE_BLOCK) ** 4  # max / min = 16
    for how, bits in ((M_E4M3, math.log2(448 * 512)), (V_E4M3, math.log2(448 * 64))):
        state = expand_quantize(x, how)
        assert state.k16 == round(16 * bits / 4)
        codes = state.codes.float()
        assert codes.max() == 448
        smallest = 2.0**-9 if how.signed else 2.0**-6
        # The rounding of k moves the smallest value by at most half a sixteenth of 4 bits.
        assert 2**-0.125 * 0.9 <= codes.min() / smallest <= 2**0.125 * 1.1


def test_plain_fp8_is_scaled_to_the_largest_value() -> None:
    x = values(PLAIN_M, spread=2)
    expected = x.view(-1, SCALE_BLOCK) / x.view(-1, SCALE_BLOCK).abs().amax(1, keepdim=True) * 448
    codes = expand_quantize(x, PLAIN_M).codes.view(torch.uint8).int()
    steps = (codes - expected.flatten().to(torch.float8_e4m3fn).view(torch.uint8).int()).abs()
    assert steps.max() <= 1 and (steps == 0).float().mean() > 0.999


@pytest.mark.parametrize(("low", "high"), [(0, 16), (17, 16), (1, 256)])
def test_k16_is_a_byte_and_not_zero(low: int, high: int) -> None:
    with pytest.raises(ValueError, match=f"k16_min={low}, k16_max={high}"):
        Expansion(E4M3, signed=True, k16_min=low, k16_max=high)


def simulated_adam(
    m_how: Expansion,
    v_how: Expansion,
    *,
    spread: float,
    beta2: float,
    store: Callable[[Tensor, Expansion], Tensor] = round_trip,
) -> float:
    """||u' - u|| / ||u||, u = mhat / sqrt(vhat), over 60 steps, u' from stored states."""
    generator = torch.Generator().manual_seed(0)
    deviation = torch.exp(spread * torch.randn(100, SCALE_BLOCK, generator=generator) - 8)
    mean = 0.2 * deviation * torch.randn(100, SCALE_BLOCK, generator=generator)
    m, v, stored_m, stored_v = torch.zeros(4, 100, SCALE_BLOCK)
    wrong = right = 0.0
    for step in range(1, 61):
        g = mean + deviation * torch.randn(100, SCALE_BLOCK, generator=generator)
        m, v = 0.9 * m + 0.1 * g, beta2 * v + (1 - beta2) * g * g
        now_m, now_v = 0.9 * stored_m + 0.1 * g, beta2 * stored_v + (1 - beta2) * g * g
        correction = math.sqrt(1 - beta2**step) / (1 - 0.9**step)
        u, now_u = (a / (b.sqrt() + 1e-8) * correction for a, b in ((m, v), (now_m, now_v)))
        wrong, right = wrong + (now_u - u).square().sum().item(), right + u.square().sum().item()
        stored_m, stored_v = store(now_m, m_how), store(now_v, v_how)
    return math.sqrt(wrong / right)


@pytest.mark.parametrize("v_how", [V_E4M3, V_E5M2], ids=name)
def test_expansion_reduces_the_error_of_the_update(v_how: Expansion) -> None:
    plain = simulated_adam(PLAIN_M, PLAIN_V, spread=0.5, beta2=0.95)
    assert simulated_adam(M_E4M3, v_how, spread=0.5, beta2=0.95) < plain / 1.5


@pytest.mark.parametrize("v_how", [V_E4M3, V_E5M2], ids=name)
def test_blocks_wider_than_the_format_are_no_worse_than_the_rounding_of_normals(
    v_how: Expansion,
) -> None:
    assert simulated_adam(M_E4M3, v_how, spread=1.5, beta2=0.95) < 0.1


def arguments(how: Expansion) -> tuple[dict[str, str], dict[str, Any]]:
    code = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}[how.fmt.name]
    signature = {"x_ptr": "*fp32", "code_ptr": code, "k16_ptr": "*u8", "log2_scale_ptr": "*fp32"}
    return signature | {"n": "i64"}, {"HOW": how, "BLOCK": expand.BLOCK}


@every
def test_quantize_kernel_compiles_for_sm90_in_fp32_with_one_lg2_and_one_ex2_per_element(
    how: Expansion,
) -> None:
    kernel = compile_sm90(expand._quantize_kernel, *arguments(how), aligned=("n",))
    ptx = kernel.asm["ptx"]
    assert "f64" not in ptx
    a_thread = expand.BLOCK * SCALE_BLOCK // 128
    assert ptx.count("ex2.approx.ftz.f32") == a_thread
    assert a_thread < ptx.count("lg2.approx.ftz.f32") <= a_thread * 1.25  # and two per block


@every
def test_dequantize_kernel_compiles_for_sm90_in_fp32_with_one_lg2_and_one_ex2_per_element(
    how: Expansion,
) -> None:
    kernel = compile_sm90(expand._dequantize_kernel, *arguments(how), aligned=("n",))
    ptx = kernel.asm["ptx"]
    assert "f64" not in ptx
    assert ptx.count("ex2.approx.ftz.f32") == ptx.count("lg2.approx.ftz.f32") == expand.BLOCK
