"""SwiGLU to FP8: values against fp64, gradients against autograd, transposes, NaN."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coatlm.fp8.formats import E4M3, E5M2, Fp8Format
from coatlm.fp8.qtensor import ROW, TENSOR, QTensor, block
from coatlm.fp8.swiglu_quantize import swiglu_backward_quantize, swiglu_quantize
from tests.fp8.bounds import (
    assert_padded_transpose,
    assert_powers_of_two_that_fit,
    assert_rounded,
    bytes_of,
)

both = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
M, FFN = 21, 128


def gate_up(dtype: torch.dtype = torch.bfloat16, m: int = M) -> Tensor:
    """Gates where sigmoid is near 0, 1/2 and 1; rows of very different sizes of up."""
    torch.manual_seed(0)
    gate, up = 3 * torch.randn(m, FFN), torch.randn(m, FFN)
    gate[:, 0], gate[:, 1] = 30.0, -30.0
    return torch.cat([gate, up * 10.0 ** torch.linspace(-4, 4, m)[:, None]], 1).to(dtype)


def swiglu64(x: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, 1)
    return F.silu(gate) * up


def gradient64(da: Tensor, x: Tensor) -> Tensor:
    x64 = x.double().requires_grad_()
    return torch.autograd.grad(swiglu64(x64), x64, da.double())[0]


@dtypes
def test_codes_are_the_activations_rounded_once_with_a_scale_per_row(dtype: torch.dtype) -> None:
    x = gate_up(dtype)
    made = swiglu_quantize(x)
    exact = swiglu64(x)
    assert made.a.granularity == ROW
    assert made.saved is None
    assert_rounded(made.a, exact)
    assert_powers_of_two_that_fit(made.a.scale, exact.abs().amax(-1, keepdim=True))


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_the_saved_input_has_a_power_of_two_for_each_block(size: int) -> None:
    x = gate_up()
    saved = swiglu_quantize(x, block_size=size).saved
    assert saved.granularity == block(1, size)
    assert saved.scale.nbytes == 2 * M * FFN // size
    assert_rounded(saved, x.double())
    assert_powers_of_two_that_fit(saved.scale.float(), x.unflatten(1, (-1, size)).abs().amax(-1))


@pytest.mark.parametrize("at", [5, FFN + 5])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_makes_its_row_and_its_saved_block_nan(
    at: int, bad: float
) -> None:
    x = gate_up()
    x[3, at] = bad
    made = swiglu_quantize(x, block_size=16)
    rows = made.a.codes.float().isnan()
    assert rows.any(1).nonzero().flatten().tolist() == [3]
    assert rows[3].all()
    saved = made.saved.codes.float().isnan().nonzero().tolist()
    assert saved == [[3, at // 16 * 16 + i] for i in range(16)]


def test_block_sizes_that_do_not_divide_a_half_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size=32 does not divide halves of 48"):
        swiglu_quantize(torch.zeros(2, 96).bfloat16(), block_size=32)


def backward(
    x: Tensor, da: Tensor, *, size: int = 0, fmt: Fp8Format = E5M2, with_a: bool = True
) -> tuple[QTensor, QTensor, QTensor | None, Tensor, QTensor]:
    """dx, dx_t, a_t, the x that backward saw, and forward's a."""
    made = swiglu_quantize(x, block_size=size)
    seen = x if made.saved is None else made.saved
    out = swiglu_backward_quantize(da, seen, made.a.scale.amax(), fmt=fmt, with_a=with_a)
    return *out, seen if isinstance(seen, Tensor) else seen.dequantize(), made.a


@both
@dtypes
@pytest.mark.parametrize("size", [0, 16, 128])
def test_gradient_is_that_of_autograd_at_the_saved_input_rounded_once(
    size: int, dtype: torch.dtype, fmt: Fp8Format
) -> None:
    x, da = gate_up(dtype), torch.randn(M, FFN).to(dtype)
    dx, dx_t, _, seen, _ = backward(x, da, size=size, fmt=fmt)
    exact = gradient64(da, seen)
    assert dx.granularity == TENSOR
    assert_rounded(dx, exact)
    assert_powers_of_two_that_fit(dx.scale, exact.abs().amax(), fmt)
    assert_padded_transpose(dx_t.codes, dx.codes)
    assert dx_t.scale is dx.scale


@pytest.mark.parametrize("m", [1, 16, 21])
def test_the_recomputed_activations_are_those_of_the_saved_input_padded(m: int) -> None:
    x, da = gate_up(m=m), torch.randn(m, FFN).bfloat16()
    _, _, a_t, seen, _ = backward(x, da, size=16)
    assert a_t.shape == (FFN, -(-m // 16) * 16)
    inside = QTensor(a_t.codes[:, :m].contiguous(), a_t.scale, TENSOR, E4M3)
    assert_rounded(inside, swiglu64(seen).t())
    assert not bytes_of(a_t.codes)[:, m:].any()


def test_without_saving_in_fp8_backward_makes_the_values_of_forward() -> None:
    x, da = gate_up(), torch.randn(M, FFN).bfloat16()
    _, _, a_t, _, a = backward(x, da)
    normal = a.dequantize().abs() >= a_t.scale * E4M3.smallest_normal  # under the larger scale too
    assert normal.any()
    assert torch.equal(a.dequantize()[normal], a_t.dequantize().t()[:M][normal])


def test_activations_are_not_recomputed_unless_asked_for() -> None:
    x, da = gate_up(), torch.randn(M, FFN).bfloat16()
    whole, without = (backward(x, da, size=16, with_a=with_a) for with_a in (True, False))
    assert without[2] is None
    assert torch.equal(bytes_of(without[0].codes), bytes_of(whole[0].codes))


@both
def test_a_gradient_that_is_not_finite_reaches_every_code(fmt: Fp8Format) -> None:
    x, da = gate_up(), torch.randn(M, FFN).bfloat16()
    da[2, 3] = math.nan
    dx, dx_t, a_t, _, _ = backward(x, da, size=16, fmt=fmt)
    assert dx.codes.float().isnan().all()
    assert dx_t.codes.float()[:, :M].isnan().all()
    assert not a_t.codes.float().isnan().any()
