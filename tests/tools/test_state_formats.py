"""The formats that the study of optimizer states compares."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from coatlm.fp8.expand import V_E4M3
from coatlm.fp8.formats import SCALE_BLOCK
from tests.fp8.test_expand import simulated_adam
from tools.studies.state_formats import (
    DE8_M,
    DE8_V,
    M_FORMATS,
    V_FORMATS,
    DynamicExponent,
    plain,
    round_trip,
)


def de8_value(pattern: str, signed: bool) -> float:
    """Value of a bit pattern of dynamic tree quantization: zeros, an indicator bit, a fraction."""
    sign = -1 if signed and pattern[0] == "1" else 1
    body = pattern[1:] if signed else pattern
    zeros = body.index("1")
    fraction = body[zeros + 1 :]
    intervals = 2 ** len(fraction)
    middle = (int(fraction or "0", 2) + 0.5) / intervals
    return sign * 10.0**-zeros * (0.1 + 0.9 * middle)


@pytest.mark.parametrize("signed", [True, False])
def test_de8_holds_the_values_of_its_bit_patterns_and_zero_and_one(signed: bool) -> None:
    # Seven decades: without a sign bit 00000001 would be an eighth one, and stands for 0 or 1.
    patterns = [f"{i:08b}" for i in range(256)]
    eighth = "" if signed else "00000001"
    body = [p for p in patterns if "1" in (p[1:] if signed else p) and p != eighth]
    expected = sorted([de8_value(p, signed) for p in body] + [0.0, 1.0])
    table = DynamicExponent(signed).table()
    assert len(expected) == 256
    torch.testing.assert_close(table, torch.tensor(expected), rtol=2**-24, atol=0)
    assert DynamicExponent(signed).smallest_normal == min(e for e in expected if e > 0)


@pytest.mark.parametrize("signed", [True, False])
def test_de8_rounds_to_the_nearest_value(signed: bool) -> None:
    torch.manual_seed(0)
    fmt = DynamicExponent(signed)
    x = torch.rand(4000).pow(4) * (torch.randn(4000).sign() if signed else 1)
    x = torch.cat([x, fmt.table()])
    distance = (x[:, None].double() - fmt.table().double()).abs()
    chosen = distance.gather(1, fmt.encode(x).long()[:, None])[:, 0]
    # A midpoint is rounded to fp32, 2^-24 of its value: so much may the second nearest be nearer.
    assert (chosen <= distance.amin(1) + 2 * 2.0**-24 * x.abs()).all()
    assert torch.equal(fmt.decode(fmt.encode(fmt.table())), fmt.table())


def moment(*, signed: bool) -> Tensor:
    """100 blocks of a log-normal moment, each block with a magnitude of its own."""
    generator = torch.Generator().manual_seed(0)
    x = torch.exp(torch.randn(100, SCALE_BLOCK, generator=generator))
    x *= 2.0 ** torch.randint(-30, 20, (100, 1), generator=generator)
    return x * torch.randn(100, SCALE_BLOCK, generator=generator).sign() if signed else x


@pytest.mark.parametrize("name", M_FORMATS)
def test_every_format_of_m_keeps_signs_and_the_largest_element(name: str) -> None:
    x = moment(signed=True)
    x[:, 7] = 1.5 * x.abs().amax(1)  # positive: DE8 has 1 but not -1
    stored = round_trip(x, M_FORMATS[name])
    assert (stored * x >= 0).all()
    torch.testing.assert_close(stored[:, 7], x[:, 7], rtol=2.0**-15, atol=0.0)


@pytest.mark.parametrize("name", V_FORMATS)
def test_every_format_of_v_stays_non_negative(name: str) -> None:
    stored = round_trip(moment(signed=False), V_FORMATS[name])
    assert (stored >= 0).all() and stored.isfinite().all()


@pytest.mark.parametrize("name", ["E4M3 + Expand", "E5M2 + Expand", "DE8 + Expand"])
def test_expanded_formats_of_v_round_nothing_to_zero(name: str) -> None:
    x = torch.exp2(torch.linspace(-100, 20, SCALE_BLOCK))
    assert (round_trip(x, V_FORMATS[name]) > 0).all()


def test_expansion_helps_de8_in_m_and_harms_it_in_v_as_in_table_8() -> None:
    plain_m, plain_v = plain(DE8_M), plain(DE8_V)
    expanded_m, expanded_v = M_FORMATS["DE8 + Expand"], V_FORMATS["DE8 + Expand"]
    error = partial(simulated_adam, spread=0.5, beta2=0.95, store=round_trip)
    assert error(expanded_m, V_E4M3) < error(plain_m, V_E4M3)
    assert error(expanded_m, plain_v) < error(expanded_m, expanded_v)
