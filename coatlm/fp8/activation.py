"""SwiGLU with fp32 arithmetic (Shazeer 2020, eq. 6). R rows; F elements of gate, then F of up.

    y = silu(gate) * up,    silu(g) = g * s,    s = sigmoid(g) = 1 / (1 + exp(-g))
    dgate = dy * up * s * (1 + g * (1 - s))     dup = dy * silu(g)

gate | up is the output of one linear layer (megatron's linear_fc1), so backward writes its gradient
as one tensor too. Rounding: once per output, to the dtype of x. Saved for backward: x alone.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

# columns of y per program; with WARPS, two 16-byte loads per thread and operand in BF16
BLOCK = 2048
WARPS = 4


def swiglu_ref(x: Tensor) -> Tensor:
    """The definition: x[..., 2F] -> y[..., F]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def swiglu_backward_ref(dy: Tensor, x: Tensor) -> Tensor:
    """The definition of backward: dy[..., F], x[..., 2F] -> dx[..., 2F]."""
    dy32, (gate, up) = dy.float(), x.float().chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    dgate, dup = dy32 * up * s * (1 + gate * (1 - s)), dy32 * gate * s
    return torch.cat((dgate, dup), dim=-1).to(x.dtype)


@triton.jit
def _swiglu_kernel(x_ptr, y_ptr, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * F + col, mask=col < F).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + col, mask=col < F).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * F + col, y.to(y_ptr.dtype.element_ty), mask=col < F)


@triton.jit
def _swiglu_backward_kernel(dy_ptr, x_ptr, dx_ptr, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * F + col, mask=col < F).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + col, mask=col < F).to(tl.float32)
    dy = tl.load(dy_ptr + row * F + col, mask=col < F).to(tl.float32)
    s = tl.sigmoid(gate)
    dgate = dy * up * s * (1 + gate * (1 - s))
    dup = dy * gate * s
    tl.store(dx_ptr + row * 2 * F + col, dgate.to(dx_ptr.dtype.element_ty), mask=col < F)
    tl.store(dx_ptr + row * 2 * F + F + col, dup.to(dx_ptr.dtype.element_ty), mask=col < F)


def _launch_forward(x: Tensor) -> Tensor:
    x, half = x.contiguous(), x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], half)
    grid = (x.numel() // x.shape[-1], triton.cdiv(half, BLOCK))
    _swiglu_kernel[grid](x, y, F=half, BLOCK=BLOCK, num_warps=WARPS)
    return y


def _launch_backward(dy: Tensor, x: Tensor) -> Tensor:
    dy, x, half = dy.contiguous(), x.contiguous(), x.shape[-1] // 2
    dx = torch.empty_like(x)
    grid = (x.numel() // x.shape[-1], triton.cdiv(half, BLOCK))
    _swiglu_backward_kernel[grid](dy, x, dx, F=half, BLOCK=BLOCK, num_warps=WARPS)
    return dx


def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """dy[..., F], x[..., 2F] -> dx[..., 2F] in the dtype of x. No gradient."""
    return (_launch_backward if dy.is_cuda else swiglu_backward_ref)(dy, x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (_launch_forward if x.is_cuda else swiglu_ref)(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return swiglu_backward(dy, *ctx.saved_tensors)


def swiglu(x: Tensor) -> Tensor:
    """x[..., 2F] = gate | up -> y[..., F] = silu(gate) * up; Triton on CUDA, else the reference.

    Differentiable; BF16, FP16 or FP32 in and out. Raises ValueError for an odd last dimension.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"last dimension is {x.shape[-1]}, must be even: gate and up halves")
    return _SwiGLU.apply(x)
