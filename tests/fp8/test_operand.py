"""Operands of FP8 GEMMs: scales and codes of every granularity against plain formulas."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from coatlm.config.operands import ROW, TENSOR, Granularity, Operand, block
from coatlm.fp8.formats import FORMATS
from coatlm.fp8.operand import emit, emit_direct, emit_transposed, format_of
from coatlm.fp8.qtensor import QTensor

GRANULARITIES = [TENSOR, ROW, block(1, 16), block(1, 128), block(128, 128)]
MAX = {"e4m3": 448.0, "e5m2": 57344.0}


def random(rows: int, columns: int) -> Tensor:
    """Rows and columns that differ in size, so that a scale of the wrong ones is seen."""
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.logspace(-2, 1, rows)[:, None] * torch.logspace(1, -1, columns)
    return x.bfloat16()


def blocks(shape: tuple[int, int], granularity: Granularity) -> list[tuple[slice, slice]]:
    """The parts of a matrix that share a scale, in the order of their scales."""
    height, width = granularity.rows or shape[0], granularity.columns or shape[1]
    return [
        (slice(i, i + height), slice(j, j + width))
        for i in range(0, shape[0], height)
        for j in range(0, shape[1], width)
    ]


def plain(x: Tensor, operand: Operand) -> tuple[Tensor, Tensor]:
    """Codes as values and scales, block by block."""
    codes, scales = torch.zeros(x.shape), []
    for place in blocks(x.shape, operand.granularity):
        scale = float(x[place].abs().max()) / MAX[operand.fmt]
        if operand.power_of_two and scale:
            scale = 2.0 ** torch.tensor(scale).log2().ceil().item()
        scales.append(torch.tensor(scale or 1.0))
        codes[place] = (x[place].float() / scales[-1]).to(format_of(operand).dtype).float()
    return codes, torch.stack(scales)


CASES = list(itertools.product(GRANULARITIES, ("e4m3", "e5m2"), (True, False)))


@pytest.mark.parametrize(("granularity", "fmt", "power_of_two"), CASES)
def test_direct_codes_and_scales_are_those_of_the_formula(
    granularity: Granularity, fmt: str, power_of_two: bool
) -> None:
    x, operand = random(200, 256), Operand(fmt, granularity, power_of_two=power_of_two)
    made = emit_direct(x, operand)
    codes, scales = plain(x, operand)
    assert torch.equal(made.codes.float(), codes)
    assert torch.equal(made.scale.flatten(), scales)
    assert (made.fmt, made.granularity) == (FORMATS[fmt], granularity)
    assert made.scale.shape == granularity.scale_shape(x.shape)


@pytest.mark.parametrize("tokens", [256, 200, 7])
@pytest.mark.parametrize(("granularity", "fmt", "power_of_two"), CASES)
def test_transposed_codes_are_those_of_the_transposed_matrix_and_zero_beyond_it(
    granularity: Granularity, fmt: str, power_of_two: bool, tokens: int
) -> None:
    x, operand = random(tokens, 128), Operand(fmt, granularity, power_of_two=power_of_two)
    made = emit_transposed(x, operand)
    multiple = 128 if granularity.columns == 128 else 16
    columns = -(-tokens // multiple) * multiple
    x_t = torch.zeros(128, columns, dtype=x.dtype)
    x_t[:, :tokens] = x.t()
    codes, scales = plain(x_t, operand)
    assert torch.equal(made.codes.float(), codes)
    assert torch.equal(made.scale.flatten(), scales)
    assert not made.codes.view(torch.uint8)[:, tokens:].any()


def test_a_transposed_row_has_the_scale_of_a_column() -> None:
    x = random(48, 32)
    made = emit_transposed(x, Operand("e4m3", ROW, power_of_two=False))
    assert torch.equal(made.scale[:, 0], x.float().abs().amax(0) / 448)


def test_both_operands_of_a_tensor_share_a_scale_and_codes() -> None:
    x, operand = random(40, 32), Operand("e5m2", TENSOR)
    direct, transposed = emit(x, direct=operand, transposed=operand)
    assert direct is not None and transposed is not None
    assert torch.equal(direct.scale, transposed.scale)
    assert torch.equal(transposed.codes[:, :40].float(), direct.codes.float().t())


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_makes_its_block_nan_and_no_other(
    granularity: Granularity, bad: float
) -> None:
    x = random(200, 256)
    x[130, 140] = bad
    operand = Operand("e4m3", granularity)
    for made, at in (
        (emit_direct(x, operand), (130, 140)),
        (emit_transposed(x, operand), (140, 130)),
    ):
        for place in blocks(made.codes.shape, granularity):
            inside = all(s.start <= i < s.stop for s, i in zip(place, at, strict=True))
            valid = made.codes.float()[place][:, : 200 if at[0] == 140 else None]
            if at[0] == 140 and inside:
                valid = valid[:, : max(0, 200 - place[1].start)]
            assert valid.isnan().all() if inside else not valid.isnan().any()


@pytest.mark.parametrize("power_of_two", [True, False])
def test_zeros_have_scales_of_one(power_of_two: bool) -> None:
    for granularity in GRANULARITIES:
        made = emit_direct(
            torch.zeros(128, 128), Operand("e4m3", granularity, power_of_two=power_of_two)
        )
        assert (made.scale == 1).all() and not made.codes.float().any()


def test_a_given_scale_is_taken_and_what_does_not_fit_saturates() -> None:
    x, scale = torch.tensor([[1.0, -9.0, 448.0, 1000.0]]), torch.tensor(2.0)
    made = emit_direct(x, Operand("e4m3", TENSOR, "delayed"), scale=scale)
    assert made.codes.float().tolist() == [[0.5, -4.5, 224.0, 448.0]]
    assert made.scale is scale


def test_the_amax_is_raised_to_the_largest_and_to_nan() -> None:
    amax, operand = torch.tensor(3.0), Operand("e5m2", TENSOR)
    emit(torch.tensor([[1.0, -2.0]]), direct=operand, amax=amax)
    assert amax == 3
    emit(torch.tensor([[1.0, -5.0]]), direct=operand, amax=amax)
    assert amax == 5
    emit(torch.tensor([[1.0, torch.nan]]), direct=operand, amax=amax)
    assert amax.isnan()


def test_a_quantized_tensor_stands_for_the_values_of_its_codes() -> None:
    q = emit_direct(random(32, 32), Operand("e4m3", ROW, power_of_two=False))
    assert isinstance(q, QTensor)
    again, values = (emit_transposed(x, Operand("e4m3", TENSOR)) for x in (q, q.dequantize()))
    assert torch.equal(again.codes.float(), values.codes.float())


@pytest.mark.parametrize(
    ("message", "x", "options"),
    [
        ("a matrix", torch.ones(2, 2, 16), {"direct": Operand("e4m3", TENSOR)}),
        ("x.dtype=torch.float64", torch.ones(2, 2).double(), {"direct": Operand("e4m3", TENSOR)}),
        ("multiples of 128", torch.ones(2, 100), {"direct": Operand("e4m3", block(1, 128))}),
        ("must be given", torch.ones(2, 16), {"direct": Operand("e4m3", TENSOR, "forward")}),
        (
            "one scale per tensor",
            torch.ones(2, 16),
            {"direct": Operand("e4m3", ROW), "scale": torch.ones(())},
        ),
        (
            "two formats",
            torch.ones(2, 16),
            {
                "direct": Operand("e4m3", TENSOR),
                "transposed": Operand("e5m2", TENSOR),
                "scale": torch.ones(()),
            },
        ),
        (
            r"torch.float32\[\] is needed",
            torch.ones(2, 16),
            {"direct": Operand("e4m3", TENSOR), "scale": torch.ones(1)},
        ),
    ],
)
def test_what_cannot_be_done_is_refused(
    message: str, x: Tensor, options: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match=message):
        emit(x, **options)


def test_only_one_scale_per_tensor_can_be_delayed_or_that_of_forward() -> None:
    for scaling in ("delayed", "forward"):
        with pytest.raises(ValueError, match=f"scaling={scaling}"):
            Operand("e4m3", ROW, scaling)
