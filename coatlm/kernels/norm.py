"""RMSNorm with fp32 arithmetic (Zhang & Sennrich 2019, eq. 4). R rows of H elements.

    rstd = (mean(x^2) + eps)^(-1/2)        xhat = x * rstd        y = xhat * weight
    g = dy * weight                        dx = rstd * (g - xhat * mean(g * xhat))
    dweight = sum over rows of dy * xhat

Rounding: once per output, to the dtype of x (y, dx) or of the weight (dweight). Saved for backward:
x and rstd (4 bytes per row), not y. Backward reads x and dy once: a fixed number of programs loop
over the rows, each accumulates a partial dweight in registers, and the partial sums [programs, H]
are added last.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 4096  # elements that a program holds at least: short rows share a program
THREAD = 16  # elements per thread: two 16-byte loads of BF16 in flight
PROGRAMS_PER_SM = 2  # in backward; more would hide latency better, but write more partial sums
PREFETCH = 96 * 1024  # bytes of shared memory a program may fill with rows loaded ahead


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The definition: y[..., H] in the dtype of x, rstd[...] in fp32."""
    x32 = x.float()
    rstd = torch.rsqrt(x32.square().mean(-1) + eps)
    return (x32 * rstd[..., None] * weight.float()).to(x.dtype), rstd


def rms_norm_backward_ref(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition of backward: dx in the dtype of x, dweight[H] in the dtype of the weight."""
    dy32, xhat = dy.float(), x.float() * rstd[..., None]
    g = dy32 * weight.float()
    dx = rstd[..., None] * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    dweight = (dy32 * xhat).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), dweight.to(weight.dtype)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    R,
    eps,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    at = row[:, None] * H + col
    mask = (row[:, None] < R) & (col < H)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + col, mask=col < H, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / H + eps)
    y = x * rstd[:, None] * weight
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < R)


@triton.jit
def _rms_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    part_ptr,
    R,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + col, mask=col < H, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(program * ROWS, R, step, num_stages=STAGES):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        at = row[:, None] * H + col
        mask = (row[:, None] < R) & (col < H)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < R, other=0.0)[:, None]
        xhat = x * rstd
        g = dy * weight
        mean = tl.sum(g * xhat, 1) / H
        dx = rstd * (g - xhat * mean[:, None])
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dweight += dy * xhat
    col_H = tl.arange(0, BLOCK)
    part = part_ptr + program.to(tl.int64) * H + col_H
    tl.store(part, tl.sum(dweight, 0), mask=col_H < H)


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 for the CPU, where only the interpreter launches."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def row_tile(hidden: int) -> dict[str, int]:
    """Launch shape: how many rows of which padded length a program holds, with how many warps."""
    block = triton.next_power_of_2(hidden)
    rows = max(1, TILE // block)
    warps = min(max(rows * block // (32 * THREAD), 4), 32)
    return {"H": hidden, "ROWS": rows, "BLOCK": block, "num_warps": warps}


def _launch_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, tile = x.numel() // x.shape[-1], row_tile(x.shape[-1])
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, tile["ROWS"]),)
    _rms_norm_kernel[grid](x, weight, y, rstd, rows, eps, **tile)
    return y, rstd


def _launch_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    hidden = x.shape[-1]
    rows, tile = x.numel() // hidden, row_tile(hidden)
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    dx = torch.empty_like(x)
    tiles = triton.cdiv(rows, tile["ROWS"])
    programs = max(1, min(tiles, PROGRAMS_PER_SM * processors(x.device)))
    part = torch.empty((programs, hidden), dtype=torch.float32, device=x.device)
    ahead = tile["ROWS"] * tile["BLOCK"] * (x.element_size() + dy.element_size())
    stages = min(max(PREFETCH // ahead, 1), 3)
    _rms_norm_backward_kernel[(programs,)](
        dy, x, weight, rstd, dx, part, rows, STAGES=stages, **tile
    )
    return dx, part.sum(0).to(weight.dtype)


def rms_norm_statistics(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y[..., H] of `rms_norm`, and rstd [...] in fp32. No gradient."""
    return (_launch_forward if x.is_cuda else rms_norm_ref)(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = rms_norm_statistics(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        backward = _launch_backward if dy.is_cuda else rms_norm_backward_ref
        dx, dweight = backward(dy, *ctx.saved_tensors)
        return dx, dweight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x[..., H], weight[H] -> y[..., H] in the dtype of x; Triton on CUDA, else the reference.

    Differentiable in x and weight, whose dtypes (BF16, FP16, FP32) may differ. Any H, also a head
    size: H should fit in one program's registers (up to about 64k). Raises ValueError when the
    weight is not [H].
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, must be {tuple(x.shape[-1:])}")
    return _RMSNorm.apply(x, weight, eps)
