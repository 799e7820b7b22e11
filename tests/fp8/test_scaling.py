"""Scales: the definition, its edges, the three recipes, and the kernels' arithmetic on the CPU."""

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from coatlm.fp8 import scaling
from coatlm.fp8.formats import E4M3, E5M2, Fp8Format
from coatlm.fp8.scaling import (
    block_amax_ref,
    current_scale,
    power_of_two_ref,
    raise_amax_ref,
    scale_ref,
    scaled_codes_ref,
    tensor_scale,
    top_exponent,
)
from tests.fp8.sm90 import POINTER, access_bytes, compile_sm90, run_interpreted

both = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
E8M0 = torch.float8_e8m0fnu
nan, inf = math.nan, math.inf


@both
@given(amax=st.floats(2.0**-100, 2.0**127, width=32))
def test_scale_is_the_correctly_rounded_quotient(fmt: Fp8Format, amax: float) -> None:
    exact = torch.tensor(amax, dtype=torch.float64) / fmt.max  # 53 >= 2 * 24 + 2 bits: exact enough
    assert scale_ref(torch.tensor(amax), fmt) == exact.float()


@both
def test_scale_of_zero_is_one_and_of_a_tiny_amax_a_normal_number(fmt: Fp8Format) -> None:
    scale = scale_ref(torch.tensor([0.0, 1e-45, 2.0**-126]), fmt)
    assert scale.tolist() == [1.0, 2.0**-126, 2.0**-126]


@both
@pytest.mark.parametrize("dtype", [torch.float32, E8M0])
def test_scale_of_what_is_not_finite_is_not_finite(fmt: Fp8Format, dtype: torch.dtype) -> None:
    scale = scale_ref(torch.tensor([nan, inf]), fmt, dtype=dtype)
    assert not scale.float().isfinite().any()


def test_margin_multiplies_the_scale_by_a_power_of_two() -> None:
    amax = torch.tensor([3.0, 1e-3])
    assert torch.equal(scale_ref(amax, E4M3, margin=2), 4 * scale_ref(amax, E4M3))
    assert torch.equal(power_of_two_ref(amax, E4M3, margin=2), 4 * power_of_two_ref(amax, E4M3))


@given(amax=st.floats(2.0**-110, 2.0**120, width=32))
def test_e8m0_is_the_next_power_of_two(amax: float) -> None:
    scale = scale_ref(torch.tensor(amax), E4M3).item()
    power = scale_ref(torch.tensor(amax), E4M3, dtype=E8M0)
    assert power.nbytes == 1
    assert power.float().item() == 2.0 ** math.ceil(math.log2(scale))


def test_e8m0_keeps_powers_of_two() -> None:
    amax = E4M3.max * 2.0 ** torch.arange(-100, 100)
    power = scale_ref(amax, E4M3, dtype=E8M0)
    assert torch.equal(power.float(), 2.0 ** torch.arange(-100, 100))


@both
@given(amax=st.floats(2.0**-120, 3.4028234663852886e38, width=32))
def test_power_of_two_scale_fills_the_upper_half_of_the_format_and_never_saturates(
    fmt: Fp8Format, amax: float
) -> None:
    scale = power_of_two_ref(torch.tensor(amax), fmt).item()
    assert math.frexp(scale)[0] == 0.5
    assert amax / scale <= fmt.max
    if scale > 2.0**-126:
        assert amax / scale > fmt.max / 2


@both
def test_power_of_two_scale_of_zero_is_one_and_of_what_is_not_finite_infinite(
    fmt: Fp8Format,
) -> None:
    amax = torch.tensor([0.0, 1e-45, inf, nan])
    assert power_of_two_ref(amax, fmt).tolist() == [1.0, 2.0**-126, inf, inf]


@both
def test_formats_end_at_seven_quarters_of_the_power_that_kernels_count_with(fmt: Fp8Format) -> None:
    assert 1.75 * 2.0 ** top_exponent(fmt) == fmt.max


def test_other_scale_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype=torch\.bfloat16"):
        scale_ref(torch.ones(1), E4M3, dtype=torch.bfloat16)


@pytest.mark.parametrize("size", [1, 16, 128])
def test_group_scaling_gives_the_current_scale(size: int) -> None:
    x = torch.randn(3, 5, 256).bfloat16()
    amax = block_amax_ref(x, size)
    assert amax.shape == (3, 5, 256 // size)
    assert torch.equal(tensor_scale(amax, E4M3), current_scale(x, E4M3))
    assert torch.equal(current_scale(x, E4M3), scale_ref(x.abs().max().float(), E4M3))


@both
def test_the_power_of_two_of_many_amaxes_is_that_of_the_largest(fmt: Fp8Format) -> None:
    amax = torch.tensor([[0.1, 700.0], [3.0, 0.0]])
    expected = power_of_two_ref(torch.tensor(700.0), fmt)
    assert tensor_scale(amax, fmt, power_of_two=True) == expected
    assert current_scale(-amax, fmt, power_of_two=True) == expected


@both
def test_codes_are_of_the_quotient_and_nan_where_the_scale_is_not_finite(fmt: Fp8Format) -> None:
    x, scale = torch.tensor([6.0, -6.0, 6.0, 6.0]), torch.tensor([4.0, 0.5, inf, nan])
    codes = scaled_codes_ref(x, scale, fmt).float()
    assert codes[:2].tolist() == [1.5, -12.0]
    assert codes[2:].isnan().all()


def test_an_amax_is_raised_to_the_largest_magnitude_and_a_nan_stays() -> None:
    amax = torch.tensor(2.0)
    raise_amax_ref(None, torch.ones(3))
    for x, expected in (
        ([1.0, -1.5], 2.0),
        ([1.0, -3.0, 0.0], 3.0),
        ([4.0, -1.0], 4.0),
        ([2.0], 4.0),
    ):
        raise_amax_ref(amax, torch.tensor(x))
        assert amax == expected
    raise_amax_ref(amax, torch.tensor([1.0, nan]))
    raise_amax_ref(amax, torch.ones(1))
    assert amax.isnan()


def test_current_scale_of_an_empty_tensor_is_one() -> None:
    assert current_scale(torch.empty(0, 16), E4M3) == 1


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_one_bad_value_reaches_the_scale(bad: float) -> None:
    x = torch.randn(4, 256)
    x[2, 200] = bad
    amax = block_amax_ref(x, 128)
    assert amax.isfinite().logical_not().nonzero().tolist() == [[2, 1]]
    assert not tensor_scale(amax, E4M3).isfinite()
    assert not current_scale(x, E4M3).isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_of_one_amax_reads_16_bytes_at_a_time(dtype: torch.dtype) -> None:
    compiled = compile_sm90(
        scaling._amax_kernel,
        {"x_ptr": POINTER[dtype], "amax_ptr": "*fp32", "n": "i64"},
        {"BLOCK": scaling.BLOCK},
        aligned=("n",),
        num_warps=scaling.WARPS,
    )
    loads = scaling.BLOCK * dtype.itemsize // (16 * 32 * scaling.WARPS)
    assert access_bytes(compiled) == [16] * loads + [4]  # 4 is the amax


def test_scale_kernel_compiles_for_sm90() -> None:
    compile_sm90(
        scaling._tensor_scale_kernel,
        {"amax_ptr": "*fp32", "scale_ptr": "*fp32", "n": "i32"},
        {"TOP": E4M3.max, "POWER": True, "BLOCK": scaling.STAGE_TWO},
        num_warps=8,
    )


def interpreted_few_amaxes_cover_a_tensor_and_keep_a_nan() -> None:
    x = torch.randn(3 * scaling.BLOCK + 5)
    assert scaling._few_amaxes(x).max() == x.abs().max()
    x[-1] = nan
    assert scaling._few_amaxes(x).isnan().any()


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-30, 3.0, 3e38, inf, nan])
def interpreted_scale_equals_the_reference(amax: float) -> None:
    parts, scale = torch.tensor([0.0, amax, 0.0]), torch.empty(())
    launch: Any = scaling._tensor_scale_kernel[(1,)]
    for power, expected in (
        (False, scale_ref(parts.amax(), E4M3)),
        (True, power_of_two_ref(parts.amax(), E4M3)),
    ):
        launch(parts, scale, 3, E4M3.max, power, 4)
        torch.testing.assert_close(scale, expected, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _exponents_kernel(amax_ptr, scale_ptr, inverse_ptr, n, TOP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    exponent = scaling.exponent_of(tl.load(amax_ptr + at, mask=at < n, other=0.0), TOP)
    tl.store(scale_ptr + at, scaling.power_of_two(exponent), mask=at < n)
    tl.store(inverse_ptr + at, scaling.inverse_power_of_two(exponent), mask=at < n)


def edge_amaxes() -> torch.Tensor:
    """0, denormals, the largest number, what is not finite, and 1.75 * 2^n with its neighbors."""
    edges = 1.75 * 2.0 ** torch.arange(-126, 128)
    up, down = (torch.nextafter(edges, torch.full_like(edges, to)) for to in (inf, 0.0))
    powers = 2.0 ** torch.arange(-126, 128)
    others = torch.tensor([0.0, 1e-45, 5.9e-39, 2.0**-126, 3.4028234663852886e38, inf, nan])
    return torch.cat([edges, up, down, powers, others])


@both
def interpreted_exponents_are_those_of_the_definition(fmt: Fp8Format) -> None:
    amax = edge_amaxes()
    scale, inverse = torch.empty_like(amax), torch.empty_like(amax)
    launch: Any = _exponents_kernel[(1,)]
    launch(amax, scale, inverse, amax.numel(), top_exponent(fmt), 2048)
    expected = power_of_two_ref(amax, fmt)
    assert torch.equal(scale, expected)
    finite = expected.isfinite()
    assert torch.equal(inverse[finite] * expected[finite], torch.ones(int(finite.sum())))
    assert inverse[~finite].isnan().all()


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(__file__)
