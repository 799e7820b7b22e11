"""Operands of weight gradients: codes against ml_dtypes, transposes, padding, norms recomputed."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coatlm.fp8.formats import E4M3, E5M2, Fp8Format
from coatlm.fp8.gemm import padded_rows
from coatlm.fp8.norm_quantize import norm_quantize
from coatlm.fp8.qtensor import TENSOR
from coatlm.fp8.scaling import current_scale
from coatlm.fp8.transpose import (
    quantize_both,
    quantize_direct,
    quantize_transposed,
    transpose_codes,
)
from tests.fp8.bounds import (
    FP32,
    assert_padded_transpose,
    bytes_of,
    numpy_codes,
)

both = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
rows = pytest.mark.parametrize("m", [1, 15, 16, 37, 128])
K = 48


def source(m: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(m)
    return (torch.randn(m, K) * 10.0 ** torch.randint(-3, 3, (m, 1))).to(dtype)


@both
@rows
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_are_those_of_ml_dtypes_and_their_transpose(
    m: int, fmt: Fp8Format, dtype: torch.dtype
) -> None:
    x = source(m, dtype)
    scale = current_scale(x, fmt, power_of_two=True)
    made = quantize_both(x, scale, fmt=fmt)
    assert made.direct.granularity == made.transposed.granularity == TENSOR
    assert torch.equal(bytes_of(made.direct.codes), numpy_codes(x.float() / scale, fmt))
    assert_padded_transpose(made.transposed.codes, made.direct.codes)


@rows
def test_each_way_to_a_transpose_gives_the_same_codes(m: int) -> None:
    x = source(m)
    scale = current_scale(x, E4M3, power_of_two=True)
    made = quantize_both(x, scale, fmt=E4M3)
    direct = quantize_direct(x, scale)
    assert torch.equal(bytes_of(direct.codes), bytes_of(made.direct.codes))
    for transposed in (quantize_transposed(x, scale), transpose_codes(direct)):
        assert torch.equal(bytes_of(transposed.codes), bytes_of(made.transposed.codes))
        assert transposed.scale is scale


@both
def test_rows_and_columns_multiply_before_the_one_rounding(fmt: Fp8Format) -> None:
    x, row, column = source(37), torch.rand(37) + 0.5, (torch.rand(K) + 0.5).bfloat16()
    product = x.float() * row[:, None] * column.float()
    scale = current_scale(product, fmt, power_of_two=True)
    made = quantize_direct(x, scale, fmt=fmt, row=row, column=column)
    assert torch.equal(bytes_of(made.codes), numpy_codes(product / scale, fmt))
    column_alone = quantize_direct(x, scale, fmt=fmt, row=row[:, None], column=None)
    expected = numpy_codes(x.float() * row[:, None] / scale, fmt)
    assert torch.equal(bytes_of(column_alone.codes), expected)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_a_norm_is_recomputed_from_its_saved_input_within_two_roundings(size: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(37, 256).bfloat16(), (1 + 0.3 * torch.randn(256)).bfloat16()
    made = norm_quantize(x, weight, 1e-5, block_size=size)
    scale = made.y.scale.amax()
    again = quantize_transposed(made.saved, scale, row=made.rstd, column=weight)
    exact = F.rms_norm(x.double(), (256,), weight.double(), 1e-5)
    actual = again.dequantize().double().t()[:37]
    # saved: half a spacing, or of a subnormal under the block's scale; then the same of the codes
    lost = made.saved.granularity.spread(made.saved.scale.double(), x.shape) * 2.0**-10
    lost = lost * made.rstd.double()[:, None] * weight.double().abs()
    allowed = (2 * 2.0**-4 + 2.0**-8 + FP32) * exact.abs() + 1.1 * lost + scale * 2.0**-10
    assert ((actual - exact).abs() <= allowed).all()
    # and so, with the rounding of forward, off by sqrt(3) 2^-4 / sqrt(3) of its norm at most
    forward = made.y.dequantize().double()
    assert ((actual - forward).norm() / forward.norm()) <= 2.0**-4


def test_fp8_rows_become_one_scale_without_leaving_their_binade() -> None:
    """A row's codes under the tensor's larger power of two: the same values, but subnormals."""
    x = source(37)
    made = norm_quantize(x, torch.ones(K), 1e-5).y
    again = quantize_transposed(made.codes, made.scale.amax(), row=made.scale)
    values, whole = made.dequantize(), again.dequantize().t()[:37]
    normal = values.abs() >= made.scale.amax() * E4M3.smallest_normal
    assert normal.float().mean() > 0.5
    assert torch.equal(values[normal], whole[normal])


@both
@pytest.mark.parametrize("scale", [math.inf, math.nan])
def test_a_scale_that_is_not_finite_makes_every_code_nan(fmt: Fp8Format, scale: float) -> None:
    made = quantize_both(source(20), torch.tensor(scale), fmt=fmt)
    assert made.direct.codes.float().isnan().all()
    assert made.transposed.codes.float()[:, :20].isnan().all()
    assert not bytes_of(made.transposed.codes)[:, 20:].any()


@both
def test_a_value_that_is_not_finite_reaches_the_whole_tensor(fmt: Fp8Format) -> None:
    x = source(20)
    x[3, 4] = math.inf
    scale = current_scale(x, fmt, power_of_two=True)
    assert quantize_direct(x, scale, fmt=fmt).codes.float().isnan().all()


def test_padded_rows_are_the_next_multiple_of_16() -> None:
    assert [padded_rows(m) for m in (1, 16, 17, 8191)] == [16, 16, 32, 8192]
