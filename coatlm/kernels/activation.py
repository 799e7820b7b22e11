"""SwiGLU and GeGLU with fp32 arithmetic (Shazeer 2020, eqs. 5 and 6). R rows; F gate, then F up.

    y = act(gate) * up,    act(g) = g * s,    s = sigmoid(z(g)) = 1 / (1 + exp(-z))
    dgate = dy * up * s * (1 + g * z' * (1 - s))     dup = dy * act(g)

    silu         z = g                                    z' = 1
    gelu_tanh    z = sqrt(8 / pi) (g + 0.044715 g^3)      (1 + tanh(z / 2)) / 2 = sigmoid(z)

gate | up is the output of one linear layer (megatron's linear_fc1), so backward writes its gradient
as one tensor too. Rounding: once per output, to the dtype of x. Saved for backward: x alone.
"""

import math
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

# columns of y per program; with WARPS, two 16-byte loads per thread and operand in BF16
BLOCK = 2048
WARPS = 4
ROOT, CUBIC = math.sqrt(8 / math.pi), 0.044715  # of gelu_tanh (Hendrycks & Gimpel 2016, s2)

Activation = Literal["silu", "gelu_tanh"]


def swiglu_ref(x: Tensor, activation: Activation = "silu") -> Tensor:
    """The definition: x[..., 2F] -> y[..., F]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(_argument(gate, activation)) * up).to(x.dtype)


def swiglu_backward_ref(dy: Tensor, x: Tensor, activation: Activation = "silu") -> Tensor:
    """The definition of backward: dy[..., F], x[..., 2F] -> dx[..., 2F]."""
    dy32, (gate, up) = dy.float(), x.float().chunk(2, dim=-1)
    s = torch.sigmoid(_argument(gate, activation))
    slope = 1.0 if activation == "silu" else ROOT * (1 + 3 * CUBIC * gate * gate)
    dgate, dup = dy32 * up * s * (1 + gate * slope * (1 - s)), dy32 * gate * s
    return torch.cat((dgate, dup), dim=-1).to(x.dtype)


def _argument(gate: Tensor, activation: Activation) -> Tensor:
    """z, whose sigmoid the gate is multiplied by."""
    return gate if activation == "silu" else ROOT * gate * (1 + CUBIC * gate * gate)


@triton.jit
def _swiglu_kernel(
    x_ptr,
    y_ptr,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    ROOT: tl.constexpr,
    CUBIC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * F + col, mask=col < F).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + col, mask=col < F).to(tl.float32)
    z = gate
    if GELU:
        z = ROOT * gate * (1 + CUBIC * gate * gate)
    y = gate * tl.sigmoid(z) * up
    tl.store(y_ptr + row * F + col, y.to(y_ptr.dtype.element_ty), mask=col < F)


@triton.jit
def _swiglu_backward_kernel(
    dy_ptr,
    x_ptr,
    dx_ptr,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    ROOT: tl.constexpr,
    CUBIC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * F + col, mask=col < F).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + col, mask=col < F).to(tl.float32)
    dy = tl.load(dy_ptr + row * F + col, mask=col < F).to(tl.float32)
    if GELU:
        s = tl.sigmoid(ROOT * gate * (1 + CUBIC * gate * gate))
        turned = gate * ROOT * (1 + 3 * CUBIC * gate * gate)
    else:
        s = tl.sigmoid(gate)
        turned = gate
    dgate = dy * up * s * (1 + turned * (1 - s))
    dup = dy * gate * s
    tl.store(dx_ptr + row * 2 * F + col, dgate.to(dx_ptr.dtype.element_ty), mask=col < F)
    tl.store(dx_ptr + row * 2 * F + F + col, dup.to(dx_ptr.dtype.element_ty), mask=col < F)


def _options(activation: Activation) -> dict[str, Any]:
    """The constants of a kernel."""
    gelu = {"GELU": activation == "gelu_tanh", "ROOT": ROOT, "CUBIC": CUBIC}
    return {"BLOCK": BLOCK, "num_warps": WARPS, **gelu}


def _launch_forward(x: Tensor, activation: Activation = "silu") -> Tensor:
    x, half = x.contiguous(), x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], half)
    grid = (x.numel() // x.shape[-1], triton.cdiv(half, BLOCK))
    _swiglu_kernel[grid](x, y, F=half, **_options(activation))
    return y


def _launch_backward(dy: Tensor, x: Tensor, activation: Activation = "silu") -> Tensor:
    dy, x, half = dy.contiguous(), x.contiguous(), x.shape[-1] // 2
    dx = torch.empty_like(x)
    grid = (x.numel() // x.shape[-1], triton.cdiv(half, BLOCK))
    _swiglu_backward_kernel[grid](dy, x, dx, F=half, **_options(activation))
    return dx


def swiglu_backward(dy: Tensor, x: Tensor, activation: Activation = "silu") -> Tensor:
    """dy[..., F], x[..., 2F] -> dx[..., 2F] in the dtype of x. No gradient."""
    return (_launch_backward if dy.is_cuda else swiglu_backward_ref)(dy, x, activation)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        return (_launch_forward if x.is_cuda else swiglu_ref)(x, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return swiglu_backward(dy, x, ctx.activation), None


def swiglu(x: Tensor, activation: Activation = "silu") -> Tensor:
    """x[..., 2F] = gate | up -> y[..., F] = act(gate) * up; Triton on CUDA, else the reference.

    SwiGLU with the activation silu, GeGLU with gelu_tanh. Differentiable; BF16, FP16 or FP32 in and
    out. Raises ValueError for an odd last dimension.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"last dimension is {x.shape[-1]}, must be even: gate and up halves")
    return _SwiGLU.apply(x, activation)
