"""RMSNorm to FP8: values against fp64, backward against autograd, scales, what is not finite."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coatlm.fp8 import norm_quantize as module
from coatlm.fp8 import rotation, row_codes, saved_blocks, scaling
from coatlm.fp8.norm_backward import norm_backward
from coatlm.fp8.norm_quantize import norm_quantize, quantize_rows
from coatlm.fp8.qtensor import ROW, block
from tests.fp8.bounds import (
    FP32,
    assert_powers_of_two_that_fit,
    assert_rounded,
    assert_same_blocks,
    bytes_of,
    numpy_codes,
)
from tests.fp8.gluon_on_cpu import simulated

EPS = 1e-5
R, H = 7, 256
sizes = pytest.mark.parametrize("size", [16, 32, 64, 128])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def tensors(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """a, add, weight; rows of very different sizes."""
    torch.manual_seed(0)
    sizes = 10.0 ** torch.linspace(-6, 6, R)[:, None]
    a, add = (sizes * torch.randn(R, H) for _ in range(2))
    return a.to(dtype), add.to(dtype), (1 + 0.3 * torch.randn(H)).to(dtype)


def normed64(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.double(), (H,), weight.double(), EPS)


@dtypes
def test_codes_are_the_normalized_rows_rounded_once(dtype: torch.dtype) -> None:
    a, _, weight = tensors(dtype)
    made = norm_quantize(a, weight, EPS)
    exact = normed64(a, weight)
    assert made.y.granularity == ROW
    assert_rounded(made.y, exact)
    assert_powers_of_two_that_fit(made.y.scale, exact.abs().amax(-1, keepdim=True))
    expected = (a.double().square().mean(-1) + EPS).rsqrt()
    torch.testing.assert_close(made.rstd.double(), expected, rtol=FP32, atol=0)


def test_the_sum_is_the_residual_stream_in_bf16_and_what_is_normalized() -> None:
    a, add, weight = tensors()
    made = norm_quantize(a, weight, EPS, add=add, block_size=16)
    assert torch.equal(made.x, (a.float() + add.float()).bfloat16())
    alone = norm_quantize(made.x, weight, EPS, block_size=16)
    assert torch.equal(bytes_of(made.y.codes), bytes_of(alone.y.codes))
    assert torch.equal(bytes_of(made.saved.codes), bytes_of(alone.saved.codes))


@sizes
@dtypes
def test_the_saved_input_has_a_power_of_two_for_each_block(size: int, dtype: torch.dtype) -> None:
    a, _, weight = tensors(dtype)
    saved = norm_quantize(a, weight, EPS, block_size=size).saved
    assert saved.granularity == block(1, size)
    assert saved.scale.nbytes == R * H // size
    assert_rounded(saved, a.double())
    assert_powers_of_two_that_fit(saved.scale.float(), a.unflatten(1, (-1, size)).abs().amax(-1))


def test_nothing_is_saved_unless_asked_for() -> None:
    a, _, weight = tensors()
    made = norm_quantize(a, weight, EPS)
    assert made.saved is None
    assert made.x is a


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_makes_its_row_and_its_saved_block_nan(bad: float) -> None:
    a, _, weight = tensors()
    a[3, 100] = bad
    made = norm_quantize(a, weight, EPS, block_size=16)
    rows = made.y.codes.float().isnan()
    assert rows.any(1).nonzero().flatten().tolist() == [3]
    assert rows[3].all()
    saved = made.saved.codes.float().isnan()
    assert saved.nonzero().tolist() == [[3, column] for column in range(96, 112)]


@dtypes
def test_quantize_rows_gives_the_codes_of_ml_dtypes_under_its_scale(dtype: torch.dtype) -> None:
    x, _, _ = tensors(dtype)
    x[2] = 0
    made = quantize_rows(x)
    amax = x.float().abs().amax(-1, keepdim=True)
    assert made.scale[2] == 1
    assert_powers_of_two_that_fit(made.scale[amax > 0], amax[amax > 0])
    assert torch.equal(bytes_of(made.codes), numpy_codes(x.float() / made.scale, made.fmt))


def test_block_sizes_that_do_not_divide_a_row_are_refused() -> None:
    a = torch.zeros(2, 80).bfloat16()
    with pytest.raises(ValueError, match="block_size=32 does not divide rows of 80"):
        norm_quantize(a, torch.ones(80), EPS, block_size=32)


@dtypes
@pytest.mark.parametrize("size", [0, 16, 128])
def test_backward_is_that_of_autograd_at_the_saved_input(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    a, weight = torch.randn(R, H).to(dtype), (1 + 0.3 * torch.randn(H)).to(dtype)
    dy, dresidual = torch.randn(R, H).to(dtype), torch.randn(R, H).to(dtype)
    made = norm_quantize(a, weight, EPS, block_size=size)
    x = made.x if made.saved is None else made.saved
    x64 = (x if isinstance(x, Tensor) else x.dequantize()).double().requires_grad_()
    w64 = weight.double().requires_grad_()
    # rstd was saved and is that of the exact rows: autograd sees the saved row at that length
    length = (a.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    own = (x64.square().mean(-1, keepdim=True)).detach()
    y = x64 * (x64.square().mean(-1, keepdim=True) - own + length.square()).rsqrt() * w64
    expected, dweight = torch.autograd.grad(y, (x64, w64), dy.double())
    expected = expected + dresidual.double()
    actual, dnorm, amaxes = norm_backward(dy, x, made.rstd, weight, dresidual=dresidual)
    assert (actual.dtype, dnorm.dtype) == (dtype, torch.float32)
    half = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(actual.double(), expected, rtol=half * 1.01, atol=FP32)
    torch.testing.assert_close(dnorm.double(), dweight, rtol=FP32, atol=FP32)
    assert amaxes.amax() == actual.float().abs().amax()
    without = norm_backward(dy, x, made.rstd, weight)[0]
    torch.testing.assert_close(
        without.double(), expected - dresidual.double(), rtol=half * 1.01, atol=FP32
    )


def test_rows_that_kernels_would_cut_short_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 40: on a GPU they are multiples of 16 long"):
        module._quantize_rows(torch.zeros(2, 40), rotated=False)


MODULES = (module, row_codes, rotation, saved_blocks, scaling)


@pytest.mark.parametrize(("hidden", "size"), [(1088, 0), (1088, 16), (512, 128), (80, 16)])
@pytest.mark.parametrize("with_add", [True, False])
def test_the_simulated_kernel_has_the_results_of_the_reference(
    hidden: int, size: int, with_add: bool
) -> None:
    torch.manual_seed(3)
    sizes = 10.0 ** torch.linspace(-6, 6, R)[:, None]
    a, weight = sizes * torch.randn(R, hidden), torch.rand(hidden) + 0.5
    add = sizes * torch.randn(R, hidden) if with_add else None
    with simulated(*MODULES):
        made = module._norm_quantize(a, weight, EPS, add, size, rotated=False)
        alone = module._quantize_rows(a, rotated=False)
    wanted = norm_quantize(a, weight, EPS, add=add, block_size=size)
    assert torch.equal(made.x, wanted.x)
    torch.testing.assert_close(made.rstd, wanted.rstd)
    for found, expected in ((made.y, wanted.y), (alone, quantize_rows(a))):
        assert torch.equal(found.scale, expected.scale)
        assert (bytes_of(found.codes) != bytes_of(expected.codes)).float().mean() < 1e-3
    assert_same_blocks(made.saved, wanted.saved)
