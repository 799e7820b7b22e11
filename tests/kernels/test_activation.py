"""SwiGLU and GeGLU against torch, backward against autograd, kernels against the references."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from coatlm.kernels import activation
from coatlm.kernels.activation import Activation, swiglu, swiglu_backward_ref, swiglu_ref
from tests.fp8.sm90 import POINTER, access_bytes, compile_sm90, run_interpreted

FP32 = 1e-6  # relative and absolute: about ten operations of 2^-24 on values of order one
ACTIVATIONS = get_args(Activation)


def tensors(*shape: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x[..., 2 * half], dy[..., half]."""
    torch.manual_seed(0)
    return torch.randn(*shape, 2 * half), torch.randn(*shape, half)


def test_forward_is_silu_of_the_first_half_times_the_second() -> None:
    x, _ = tensors(3, 5, half=24)
    expected = F.silu(x[..., :24]) * x[..., 24:]
    torch.testing.assert_close(swiglu(x), expected, rtol=FP32, atol=FP32)


def test_forward_of_geglu_has_the_tanh_approximation_of_gelu() -> None:
    x, _ = tensors(3, 5, half=24)
    expected = F.gelu(x[..., :24], approximate="tanh") * x[..., 24:]
    torch.testing.assert_close(swiglu(x, "gelu_tanh"), expected, rtol=FP32, atol=FP32)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_backward_equals_autograd_of_the_forward_definition(kind: Activation) -> None:
    x, dy = tensors(3, 5, half=24)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(swiglu_ref(x, kind), x, dy)
    (actual,) = torch.autograd.grad(swiglu(x, kind), x, dy)
    torch.testing.assert_close(actual, expected, rtol=FP32, atol=FP32)


def test_a_large_negative_gate_gives_zero_not_nan() -> None:
    x = torch.tensor([[-1e4, 2.0]], requires_grad=True)
    swiglu(x).backward(torch.ones(1, 1))
    assert torch.equal(x.grad, torch.zeros(1, 2))


def test_bf16_rounds_the_fp32_result_once() -> None:
    x, dy = (t.bfloat16() for t in tensors(3, 5, half=24))
    assert torch.equal(swiglu(x), swiglu(x.float()).bfloat16())
    expected = swiglu_backward_ref(dy.float(), x.float()).bfloat16()
    assert torch.equal(swiglu_backward_ref(dy, x), expected)


def test_saves_its_input_alone() -> None:
    x, _ = tensors(3, 5, half=24)
    x.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        swiglu(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]


def test_an_odd_last_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match="5, must be even"):
        swiglu(torch.ones(2, 5))


@pytest.mark.parametrize("half", [8, 300, 2500])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def interpreted_kernels_equal_the_references(kind: Activation, half: int) -> None:
    x, dy = tensors(3, 2, half=half)
    y, dx = activation._launch_forward(x, kind), activation._launch_backward(dy, x, kind)
    torch.testing.assert_close(y, swiglu_ref(x, kind), rtol=FP32, atol=FP32)
    torch.testing.assert_close(dx, swiglu_backward_ref(dy, x, kind), rtol=FP32, atol=FP32)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("half", [8192, 11008])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_kernels_compile_for_sm90_with_16_byte_accesses(
    kind: Activation, half: int, dtype: torch.dtype
) -> None:
    constexprs = {"F": half, **activation._options(kind)}
    warps = constexprs.pop("num_warps")
    forward = dict.fromkeys(("x_ptr", "y_ptr"), POINTER[dtype])
    backward = dict.fromkeys(("dy_ptr", "x_ptr", "dx_ptr"), POINTER[dtype])
    for kernel, signature in (
        (activation._swiglu_kernel, forward),
        (activation._swiglu_backward_kernel, backward),
    ):
        compiled = compile_sm90(kernel, signature, constexprs, num_warps=warps)
        assert set(access_bytes(compiled)) == {16}
