"""Delayed scales, and quantization by scales that are not of the tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.fp8.delayed import MARGINS, DelayedScaling
from coatlm.fp8.formats import E4M3, E5M2, Fp8Format
from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.rope_quantize import join_quantize
from coatlm.fp8.scaling import power_of_two_ref
from coatlm.fp8.swiglu_quantize import swiglu_backward_quantize
from coatlm.fp8.transpose import quantize_both, quantize_direct
from coatlm.kernels.rope import rope_frequencies, rope_tables
from tests.fp8.bounds import bytes_of

both = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
M, K = 21, 64
Quantize = Callable[..., tuple[QTensor, ...]]


@both
def test_a_scale_is_the_power_of_two_for_the_largest_amax_remembered_with_its_margin(
    fmt: Fp8Format,
) -> None:
    rule = DelayedScaling(fmt, length=3)
    history = torch.zeros(2, 3)
    for first, second in [(8.0, 1.0), (2.0, 4.0), (3.0, 2.0)]:
        rule.push_(history, torch.tensor([first, second]))
    room = 2.0 ** MARGINS[fmt]
    assert torch.equal(rule.scale(history), power_of_two_ref(torch.tensor([8.0, 4.0]) * room, fmt))
    rule.push_(history, torch.tensor([1.0, 0.0]))
    assert history.tolist() == [[1.0, 3.0, 2.0], [0.0, 2.0, 4.0]]
    assert torch.equal(rule.scale(history), power_of_two_ref(torch.tensor([3.0, 4.0]) * room, fmt))


@both
@pytest.mark.parametrize("growth", [1.0, 1.99, 4.0])
def test_what_grows_by_less_than_the_margin_does_not_saturate(
    fmt: Fp8Format, growth: float
) -> None:
    rule = DelayedScaling(fmt)
    amax = torch.rand(1000) + 1.0
    history = torch.zeros(1000, 16)
    rule.push_(history, amax)
    fits = amax * growth <= rule.scale(history) * fmt.max
    assert bool(fits.all()) is (growth <= 2 ** MARGINS[fmt])


def test_a_tensor_may_grow_by_8_in_e5m2_and_by_2_in_e4m3() -> None:
    for fmt, room in ((E5M2, 8.0), (E4M3, 2.0)):
        assert DelayedScaling(fmt).scale(torch.full((1, 16), fmt.max)).item() == room


def test_a_history_has_any_number_of_dimensions_before_its_steps() -> None:
    rule = DelayedScaling(E5M2, length=3)
    history = torch.zeros(2, 4, 3)
    for step in (1.0, 2.0):
        assert rule.push_(history, torch.arange(8.0).view(2, 4) * step)
    expected = torch.arange(8.0).view(2, 4)
    assert torch.equal(history, torch.stack([2 * expected, expected, 0 * expected], -1))


@both
def test_without_history_the_scale_is_1(fmt: Fp8Format) -> None:
    assert DelayedScaling(fmt).scale(torch.zeros(2, 4, 16)).tolist() == [[1.0] * 4] * 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_amax_that_is_not_finite_leaves_every_history_alone(bad: float) -> None:
    rule = DelayedScaling(E5M2, length=2)
    history = torch.zeros(3, 2)
    assert rule.push_(history, torch.tensor([1.0, 2.0, 3.0]))
    assert not rule.push_(history, torch.tensor([4.0, bad, 6.0]))
    assert history.tolist() == [[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]


def test_16_steps_are_remembered_unless_told_otherwise() -> None:
    assert DelayedScaling(E4M3).length == 16
    assert DelayedScaling(E4M3, length=1).length == 1
    with pytest.raises(ValueError, match="length=0"):
        DelayedScaling(E4M3, length=0)


def test_a_margin_of_its_own_moves_scales_by_as_many_binades() -> None:
    history = torch.full((1, 16), 3.0)
    scales = [DelayedScaling(E4M3, margin=margin).scale(history) for margin in (0, 1, 6)]
    assert [(s / scales[0]).item() for s in scales] == [1.0, 2.0, 64.0]
    assert torch.equal(DelayedScaling(E4M3).scale(history), scales[1])


# quantization


def of_a_matrix(function: Any) -> Quantize:
    x = torch.randn(M, K).bfloat16()

    def quantize(scale: Tensor, fmt: Fp8Format, bad: float, **options: Any) -> tuple[QTensor, ...]:
        given = x.clone()
        given[3, 5] += bad
        made = function(given, scale, fmt=fmt, **options)
        return made if isinstance(made, tuple) else (made,)

    return quantize


def of_swiglu() -> Quantize:
    x, da = 3 * torch.randn(M, 2 * K), torch.randn(M, K)

    def quantize(scale: Tensor, fmt: Fp8Format, bad: float, **options: Any) -> tuple[QTensor, ...]:
        given = da.clone()
        given[3, 5] += bad
        made = swiglu_backward_quantize(
            given, x, torch.ones(()), fmt=fmt, with_a=False, scale=scale, **options
        )
        return made.dx, made.dx_t

    return quantize


def of_heads() -> Quantize:
    parts = [torch.randn(M, 1, heads, 16) for heads in (4, 2, 2)]
    tables = rope_tables(torch.arange(M), rope_frequencies(16, 100.0))

    def quantize(scale: Tensor, fmt: Fp8Format, bad: float, **options: Any) -> tuple[QTensor, ...]:
        first = parts[0].clone()
        first[3, 0, 0, 5] += bad
        return join_quantize(first, *parts[1:], *tables, fmt=fmt, scale=scale, **options)

    return quantize


QUANTIZED: dict[str, Callable[[], Quantize]] = {
    "both ways": lambda: of_a_matrix(quantize_both),
    "as it is": lambda: of_a_matrix(quantize_direct),
    "gate and up": of_swiglu,
    "q, k and v": of_heads,
}
each = pytest.mark.parametrize("kind", QUANTIZED)


def quantized(kind: str) -> Quantize:
    torch.manual_seed(0)
    return QUANTIZED[kind]()


@each
@both
def test_codes_by_a_given_scale_are_the_values_rounded_once_and_the_amax_is_theirs(
    kind: str, fmt: Fp8Format
) -> None:
    """Scales a power of two apart shift codes by binades, where none is subnormal or saturates."""
    quantize, amax = quantized(kind), torch.tensor(0.5)
    one, half = (quantize(torch.tensor(2.0**n), fmt, 0.0, amax=amax) for n in (-3, -4))
    for at_one, at_half in zip(one, half, strict=True):
        values, others = at_one.dequantize(), at_half.dequantize()
        exact = (values.abs() > 2.0**-3 * fmt.smallest_normal) & (others.abs() < 28.0 * 2**-4)
        assert exact.float().mean() > 0.3
        assert torch.equal(values[exact], others[exact])
    largest = one[0].dequantize().abs().amax()
    assert amax.item() == pytest.approx(largest.item(), rel=fmt.eps)


@each
def test_an_amax_is_raised_and_never_lowered(kind: str) -> None:
    quantize, scale = quantized(kind), torch.ones(())
    amax = torch.tensor(1e6)
    quantize(scale, E5M2, 0.0, amax=amax)
    assert amax == 1e6


@each
@both
def test_what_outgrows_a_given_scale_saturates(kind: str, fmt: Fp8Format) -> None:
    for made in quantized(kind)(torch.tensor(2.0**-20), fmt, 0.0):
        codes = made.codes.float()
        assert codes.abs().amax() == fmt.max
        assert not codes.isnan().any()


@each
@both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_reach_their_codes_and_the_amax_under_a_finite_scale(
    kind: str, fmt: Fp8Format, bad: float
) -> None:
    amax = torch.zeros(())
    for made in quantized(kind)(torch.ones(()), fmt, bad, amax=amax):
        lost = made.codes.float().isnan()
        assert lost.any() and not lost.all()
    assert not amax.isfinite()


@pytest.mark.parametrize("kind", ["gate and up", "q, k and v"])
def test_the_current_scale_given_gives_the_current_codes(kind: str) -> None:
    quantize: Any = quantized(kind)
    current = quantize(None, E5M2, 0.0)
    given = quantize(current[0].scale.clone(), E5M2, 0.0)
    for made, expected in zip(given, current, strict=True):
        assert torch.equal(bytes_of(made.codes), bytes_of(expected.codes))
