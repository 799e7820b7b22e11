"""RMSNorm against torch, its backward against autograd, its kernels against the references."""

import pytest
import torch
import torch.nn.functional as F

from coatlm.kernels import norm
from coatlm.kernels.norm import rms_norm, rms_norm_backward_ref, rms_norm_ref
from tests.fp8.sm90 import POINTER, access_bytes, compile_sm90, run_interpreted

EPS = 1e-5
FP32 = 1e-5  # relative: a sum of a few hundred terms, each within 2^-24


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """x, weight, dy."""
    torch.manual_seed(0)
    x, weight, dy = torch.randn(shape), 1 + 0.1 * torch.randn(shape[-1]), torch.randn(shape)
    return x.to(dtype), weight.to(dtype), dy.to(dtype)


def test_forward_equals_torch_rms_norm() -> None:
    x, weight, _ = tensors(3, 5, 48)
    expected = F.rms_norm(x, (48,), weight, EPS)
    torch.testing.assert_close(rms_norm(x, weight, EPS), expected, rtol=FP32, atol=0)


def test_backward_equals_autograd_of_the_forward_definition() -> None:
    x, weight, dy = (t.requires_grad_() for t in tensors(3, 5, 48))
    expected = torch.autograd.grad(rms_norm_ref(x, weight, EPS)[0], (x, weight), dy)
    actual = torch.autograd.grad(rms_norm(x, weight, EPS), (x, weight), dy)
    assert max(map(relative, actual, expected)) < FP32


def test_bf16_rounds_the_fp32_result_once() -> None:
    x, weight, _ = tensors(3, 5, 48, dtype=torch.bfloat16)
    expected = rms_norm(x.float(), weight.float(), EPS).bfloat16()
    assert torch.equal(rms_norm(x, weight, EPS), expected)
    assert torch.equal(rms_norm(x, weight.float(), EPS), expected)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_each_gradient_has_the_dtype_of_its_tensor(weight_dtype: torch.dtype) -> None:
    x, weight, dy = tensors(4, 48, dtype=torch.bfloat16)
    x, weight = x.requires_grad_(), weight.to(weight_dtype).requires_grad_()
    rms_norm(x, weight, EPS).backward(dy)
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, weight_dtype)


def test_saves_the_input_and_four_bytes_per_row() -> None:
    x, weight, _ = (t.requires_grad_() for t in tensors(64, 48, dtype=torch.bfloat16))
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t
    ):
        rms_norm(x, weight, EPS)
    sizes = sorted(t.numel() * t.element_size() for t in saved.values())
    assert sizes == sorted([x.numel() * 2, weight.numel() * 2, 64 * 4])


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3,\), must be \(4,\)"):
        rms_norm(torch.ones(2, 4), torch.ones(3), EPS)


@pytest.mark.parametrize("shape", [(3, 5, 64), (7, 200), (2, 4096), (70, 128), (3, 1), (0, 64)])
def interpreted_kernels_equal_the_references(shape: tuple[int, ...]) -> None:
    x, weight, dy = tensors(*shape)
    y, rstd = rms_norm_ref(x, weight, EPS)
    dx, dweight = rms_norm_backward_ref(dy, x, weight, rstd)
    actual = (
        *norm._launch_forward(x, weight, EPS),
        *norm._launch_backward(dy, x, weight, rstd),
    )
    for got, expected in zip(actual, (y, rstd, dx, dweight), strict=True):
        torch.testing.assert_close(got, expected, rtol=FP32, atol=FP32)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [64, 128, 3072, 4096])
def test_kernels_compile_for_sm90_with_16_byte_accesses(hidden: int, dtype: torch.dtype) -> None:
    pointer, tile = POINTER[dtype], norm.row_tile(hidden)
    warps = tile.pop("num_warps")
    names = ("x_ptr", "weight_ptr", "y_ptr")
    signature = dict.fromkeys(names, pointer) | {"rstd_ptr": "*fp32", "R": "i32", "eps": "fp32"}
    forward = compile_sm90(norm._rms_norm_kernel, signature, tile, num_warps=warps)
    names = ("dy_ptr", "x_ptr", "weight_ptr", "dx_ptr")
    signature = dict.fromkeys(names, pointer)
    signature |= {"rstd_ptr": "*fp32", "part_ptr": "*fp32", "R": "i32"}
    backward = compile_sm90(
        norm._rms_norm_backward_kernel, signature, tile | {"STAGES": 3}, num_warps=warps
    )
    for compiled in (forward, backward):  # only rstd (one per row) and dweight's parts are narrower
        assert access_bytes(compiled).count(16) >= 3
        assert min(access_bytes(compiled)) >= 4
