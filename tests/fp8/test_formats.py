"""The formats against definitions written down independently: the OFP8 tables bit by bit, exact
rational arithmetic for rounding, and ml_dtypes."""

import bisect
import functools
import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coatlm.fp8.formats import (
    E3M4,
    E4M3,
    E5M2,
    FORMATS,
    Fp8Format,
    cast,
    decode_table,
)

MAX_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}
ML_DTYPE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
both = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


def ofp8_value(code: int, name: str) -> Fraction | float:
    """Value of a code by tables 1 and 2 of OFP8 1.0: a rational number, or nan, or +-inf."""
    sign = -1 if code & 0x80 else 1
    if name == "e4m3":
        exponent, mantissa, steps, bias = (code >> 3) & 0xF, code & 0x7, 8, 7
        if (exponent, mantissa) == (0xF, 0x7):
            return math.nan
    else:
        exponent, mantissa, steps, bias = (code >> 2) & 0x1F, code & 0x3, 4, 15
        if exponent == 0x1F:
            return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * Fraction(mantissa, steps) * Fraction(2) ** (1 - bias)
    return sign * (1 + Fraction(mantissa, steps)) * Fraction(2) ** (exponent - bias)


@functools.cache
def positive_values(fmt: Fp8Format) -> list[Fraction]:
    """Every finite value >= 0, by code."""
    return [Fraction(ofp8_value(code, fmt.name)) for code in range(MAX_CODE[fmt.name] + 1)]


def nearest_code(x: Fraction, fmt: Fp8Format) -> int:
    """Code of the finite value nearest to x >= 0; of two, the one with the even mantissa."""
    values = positive_values(fmt)
    above = bisect.bisect_left(values, x)
    near = [code for code in (above - 1, above) if 0 <= code < len(values)]
    return min(near, key=lambda code: (abs(x - values[code]), code & 1))


def codes(x: list[float] | torch.Tensor, fmt: Fp8Format, **options: str) -> list[int]:
    return cast(torch.as_tensor(x), fmt, **options).view(torch.uint8).tolist()


@both
def test_all_256_codes_decode_to_the_values_of_the_ofp8_table(fmt: Fp8Format) -> None:
    expected = torch.tensor([float(ofp8_value(code, fmt.name)) for code in range(256)])
    bits = torch.arange(256, dtype=torch.uint8)
    for actual in (decode_table(fmt), bits.view(fmt.dtype).float()):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        assert actual.signbit()[128:255].all() and not actual.signbit()[:127].any()
    from_ml_dtypes = np.arange(256, dtype=np.uint8).view(ML_DTYPE[fmt.name]).astype(np.float32)
    np.testing.assert_array_equal(decode_table(fmt).numpy(), from_ml_dtypes)


@both
def test_constants_are_those_of_the_table(fmt: Fp8Format) -> None:
    values = positive_values(fmt)
    assert fmt.max == values[-1]
    assert fmt.smallest_subnormal == values[1]
    assert fmt.smallest_normal == values[2**fmt.mantissa_bits]
    one = values.index(Fraction(1))
    assert fmt.eps == values[one + 1] - 1
    assert FORMATS[fmt.name] is fmt


def test_constants_of_the_paper() -> None:
    assert (E4M3.max, E4M3.smallest_normal, E4M3.smallest_subnormal) == (448, 2**-6, 2**-9)
    assert (E5M2.max, E5M2.smallest_normal, E5M2.smallest_subnormal) == (57344, 2**-14, 2**-16)


@both
@pytest.mark.parametrize("overflow", ["saturate", "propagate"])
def test_every_finite_code_survives_a_round_trip(fmt: Fp8Format, overflow: str) -> None:
    finite = [c for c in range(256) if c & 0x7F <= MAX_CODE[fmt.name]]
    assert codes(decode_table(fmt)[finite], fmt, overflow=overflow) == finite


@both
@pytest.mark.parametrize("sign", [1, -1])
def test_every_tie_goes_to_the_even_mantissa_and_its_neighbors_to_the_nearest(
    fmt: Fp8Format, sign: int
) -> None:
    values = positive_values(fmt)
    tie = torch.tensor([float(a + b) / 2 for a, b in itertools.pairwise(values)])
    below = torch.nextafter(tie, torch.zeros(()))
    above = torch.nextafter(tie, torch.tensor(torch.inf))
    negative = 0x80 if sign < 0 else 0
    lower = [code | negative for code in range(len(tie))]
    assert codes(sign * below, fmt) == lower
    assert codes(sign * above, fmt) == [code + 1 for code in lower]
    assert codes(sign * tie, fmt) == [code + (code & 1) for code in lower]


@both
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_rounded_as_rational_arithmetic_rounds_it(
    fmt: Fp8Format, source: torch.dtype
) -> None:
    x = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(source)
    x = x[x.float() <= fmt.max]
    # 16-bit values repeat their upper bits, so a few of each code suffice for exact arithmetic.
    sample = torch.cat([x[::37], x[-40:], x[:3]])
    expected = [nearest_code(Fraction(value), fmt) for value in sample.tolist()]
    assert codes(sample, fmt) == expected
    expected_all = x.float().numpy().astype(ML_DTYPE[fmt.name]).view(np.uint8).tolist()
    assert codes(x, fmt) == expected_all
    assert codes(-x, fmt) == [code | 0x80 for code in expected_all]


@both
@settings(max_examples=300)
@given(x=st.floats(width=32, allow_nan=False))
def test_propagate_equals_ml_dtypes(fmt: Fp8Format, x: float) -> None:
    expected = np.float32(x).astype(ML_DTYPE[fmt.name]).view(np.uint8)
    assert codes([x], fmt, overflow="propagate") == [int(expected)]


@both
@settings(max_examples=300)
@given(x=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_saturate_gives_the_nearest_finite_value(fmt: Fp8Format, x: float) -> None:
    negative = 0x80 if math.copysign(1, x) < 0 else 0
    assert codes([x], fmt) == [nearest_code(abs(Fraction(x)), fmt) | negative]


def test_the_examples_of_the_formats_note() -> None:
    tiny = [2.0**-10, 3 * 2.0**-10]
    assert cast(torch.tensor([17.0, 19.0, *tiny]), E4M3).tolist() == [16.0, 20.0, 0.0, 2.0**-8]
    assert codes([2.0**-17, -(2.0**-17)], E5M2) == [0x00, 0x80]


@both
def test_overflow_starts_past_the_tie_in_e4m3_and_at_it_in_e5m2(fmt: Fp8Format) -> None:
    tie = {"e4m3": 464.0, "e5m2": 61440.0}[fmt.name]
    after_tie = torch.nextafter(torch.tensor(tie), torch.tensor(torch.inf)).item()
    last = torch.nextafter(torch.tensor(fmt.overflow), torch.zeros(())).item()
    assert fmt.overflow == (tie if fmt.has_inf else after_tie)
    top = MAX_CODE[fmt.name]
    x = [last, fmt.overflow, 3e38, -last, -fmt.overflow]
    after = top + 1
    assert codes(x, fmt, overflow="propagate") == [top, after, after, top | 0x80, after | 0x80]
    assert codes(x, fmt, overflow="saturate") == [top, top, top, top | 0x80, top | 0x80]


@both
def test_infinities_and_nans_stay_visible(fmt: Fp8Format) -> None:
    nan = torch.tensor([0x7FC00000, 0x7F800001, -0x400000], dtype=torch.int32).view(torch.float32)
    assert nan.isnan().all()
    x = torch.cat([torch.tensor([torch.inf, -torch.inf]), nan])
    assert codes(x, fmt, overflow="saturate") == [0x7F] * 5
    infinity = 0x7C if fmt.has_inf else 0x7F
    assert codes(x, fmt, overflow="propagate") == [infinity, infinity | 0x80, 0x7F, 0x7F, 0x7F]
    assert not cast(x, fmt).float().isfinite().any()


def test_a_float64_is_refused_because_it_would_be_rounded_twice() -> None:
    x = torch.tensor([17 + 2.0**-30], dtype=torch.float64)
    assert nearest_code(Fraction(x.item()), E4M3) != codes(x.float(), E4M3)[0]
    with pytest.raises(ValueError, match=r"x\.dtype=torch\.float64"):
        cast(x, E4M3)


def test_an_unknown_overflow_is_refused() -> None:
    with pytest.raises(ValueError, match="overflow='wrap'"):
        cast(torch.ones(1), E4M3, overflow="wrap")  # type: ignore[arg-type]


def test_shape_and_order_survive_a_transposed_input() -> None:
    x = torch.randn(5, 7).t()
    assert cast(x, E4M3).shape == (7, 5)
    assert codes(x, E4M3) == codes(x.contiguous(), E4M3)


def e3m4_value(code: int) -> Fraction:
    """1 sign bit, 3 of the exponent with bias 15, 4 of the mantissa; every code is a number."""
    sign, exponent, mantissa = -1 if code & 0x80 else 1, (code >> 4) & 7, code & 0xF
    if exponent == 0:
        return sign * Fraction(mantissa, 16 << 14)
    return sign * (1 + Fraction(mantissa, 16)) / Fraction(2) ** (15 - exponent)


def test_every_e3m4_code_decodes_to_its_value_and_back() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = E3M4.decode(codes)
    assert decoded.tolist() == [float(e3m4_value(code)) for code in range(256)]
    assert torch.equal(E3M4.encode(decoded), codes)  # -0 too
    assert decoded[0x7F] == E3M4.max and decoded[0x10] == E3M4.smallest_normal
    assert decoded[0x11] == decoded[0x10] * (1 + E3M4.eps) and E3M4.eps == 1 / 16
    numbers = (codes & 0x7F) < 0x70  # in ml_dtypes b = 3, and above are Inf and NaN
    others = codes.numpy().view(ml_dtypes.float8_e3m4).astype(np.float32)
    np.testing.assert_array_equal(4096 * decoded[numbers].numpy(), others[numbers.numpy()])


def test_e3m4_rounds_to_the_nearest_value_and_saturates() -> None:
    torch.manual_seed(0)
    values = E3M4.decode(torch.arange(128, dtype=torch.uint8))
    ties = (values[1:] + values[:-1]) / 2
    some = torch.rand(4000) * torch.tensor([E3M4.max, E3M4.smallest_normal]).repeat(2000)
    x = torch.cat([values, ties, some])
    x = torch.cat([x, -x])
    found = E3M4.decode(E3M4.encode(x))
    nearest = (x.abs()[:, None] - values).abs().amin(1)
    # rounded to fp16 before, by 2^-11 or 2^-25: by twice that the second nearest may be nearer
    assert ((x - found).abs() <= nearest + x.abs() * 2.0**-10 + 2.0**-24).all()
    assert (found.signbit() == x.signbit()).all()
    assert not (E3M4.encode(ties) & 1).any()
    beyond = torch.tensor([1.02 * E3M4.max, 1.0, 1e30, torch.inf, torch.nan])
    assert E3M4.decode(E3M4.encode(beyond)).tolist() == [E3M4.max] * 5
    assert E3M4.decode(E3M4.encode(-beyond[:4])).tolist() == [-E3M4.max] * 4
