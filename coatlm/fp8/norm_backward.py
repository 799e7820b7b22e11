"""Backward of RMSNorm between FP8 linears (COAT, arXiv 2410.19313, section 5): norm_quantize.py's.

    x from its codes        xhat = x * rstd        g = dy * weight
    dx = rstd * (g - xhat * mean(g * xhat)) + dresidual        dweight = sum over rows of dy * xhat

dx is rounded once, to the dtype of dy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.saved_blocks import parts_of
from coatlm.fp8.scaling import amax_of, larger, power_of_two
from coatlm.kernels.norm import processors

RUN = 16  # elements per thread
WARPS_PER_SM = 16  # more would hide latency better, but write more partial sums


def norm_backward_ref(
    dy: Tensor, x: Tensor | QTensor, rstd: Tensor, weight: Tensor, dresidual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The definition: dx[R, H] in the dtype of dy, dweight[H] in fp32."""
    x32 = x.dequantize() if isinstance(x, QTensor) else x.float()
    xhat = x32 * rstd[:, None]
    g = dy.float() * weight.float()
    dx = rstd[:, None] * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    if dresidual is not None:
        dx = dx + dresidual.float()
    return dx.to(dy.dtype), (dy.float() * xhat).sum(0)


@gluon.jit
def _row_operands(
    dy_ptr, x_ptr, x_exponent_ptr, rstd_ptr, dresidual_ptr, row, R, col, some, H: gl.constexpr,
    SIZE: gl.constexpr, RUN: gl.constexpr,
):  # fmt: skip
    """Load what backward reads of one row, in the dtypes of memory; 0 past the last row."""
    some = some & (row < R)
    mask = some[:, None]
    row = row.to(gl.int64)
    dy = gl.load(dy_ptr + row * H + col, mask=mask, other=0.0)
    x = gl.load(x_ptr + row * H + col, mask=mask, other=0.0)
    rstd = gl.load(rstd_ptr + row, mask=row < R, other=0.0)
    exponent, dresidual = rstd, dy  # placeholders where there are none
    if x_exponent_ptr is not None:
        each = gl.arange(0, col.shape[0], some.type.layout) * RUN // SIZE
        exponent = gl.load(x_exponent_ptr + row * (H // SIZE) + each, mask=some, other=127)
    if dresidual_ptr is not None:
        dresidual = gl.load(dresidual_ptr + row * H + col, mask=mask, other=0.0)
    return dy, x, rstd, exponent, dresidual


@gluon.jit
def _norm_backward_kernel(
    dy_ptr,
    x_ptr,
    x_exponent_ptr,  # or None: x is not FP8
    rstd_ptr,
    weight_ptr,
    dresidual_ptr,  # or None
    dx_ptr,
    part_ptr,  # [programs, H]
    amax_ptr,  # [programs]
    R,
    H: gl.constexpr,
    SIZE: gl.constexpr,
    RUN: gl.constexpr,
    RUNS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """A program takes every `num_programs`-th row. A thread holds RUN columns, one row ahead."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, RUN], [32, 1], [WARPS, 1], [1, 0])
    run = gl.arange(0, RUNS, gl.SliceLayout(1, LAYOUT))
    some = run < H // RUN
    col = run[:, None] * RUN + gl.arange(0, RUN, gl.SliceLayout(0, LAYOUT))[None, :]
    weight = gl.load(weight_ptr + col, mask=some[:, None], other=0.0)
    dweight = gl.full([RUNS, RUN], 0.0, gl.float32, LAYOUT)
    largest = gl.full([RUNS], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    program, programs = gl.program_id(0), gl.num_programs(0)
    dy_row, x_row, rstd, exponent, dresidual = _row_operands(
        dy_ptr, x_ptr, x_exponent_ptr, rstd_ptr, dresidual_ptr, program, R, col, some, H, SIZE, RUN
    )
    for row in range(program, R, programs):
        ahead = _row_operands(
            dy_ptr, x_ptr, x_exponent_ptr, rstd_ptr, dresidual_ptr, row + programs, R, col, some,
            H, SIZE, RUN,
        )  # fmt: skip
        dy, xhat = dy_row.to(gl.float32), x_row.to(gl.float32)
        if x_exponent_ptr is not None:
            xhat = xhat * power_of_two(exponent.to(gl.int32))[:, None]
        xhat = xhat * rstd
        g = dy * weight.to(gl.float32)
        dx = rstd * (g - xhat * (gl.sum(gl.sum(g * xhat, 1), 0) / H))
        if dresidual_ptr is not None:
            dx += dresidual.to(gl.float32)
        at = dx_ptr + tl.cast(row, tl.int64) * H + col
        gl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=some[:, None])
        dweight += dy * xhat
        largest = larger(largest, amax_of(dx, 1))
        dy_row, x_row, rstd, exponent, dresidual = ahead
    gl.store(part_ptr + program.to(gl.int64) * H + col, dweight, mask=some[:, None])
    amax = amax_of(largest, 0)  # of numbers not yet rounded: rounding keeps their order
    gl.store(amax_ptr + program, amax.to(dx_ptr.dtype.element_ty).to(gl.float32))


def norm_backward(
    dy: Tensor, x: Tensor | QTensor, rstd: Tensor, weight: Tensor, *,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dy[R, H], the saved x (block-wise FP8, or BF16) -> dx[R, H], dweight[H], amaxes of dx.

    dx has the dtype of dy and includes `dresidual`, the gradient that reaches x past the norm;
    dweight is fp32; the amaxes, fp32 of any shape, are stage 1 of Group Scaling for dx.
    """
    if not dy.is_cuda:
        dx, dweight = norm_backward_ref(dy, x, rstd, weight, dresidual)
        return dx, dweight, dx.float().abs().amax()
    rows, hidden = dy.shape
    codes, exponents, size = parts_of(x)
    tile = backward_tile(hidden, size)
    programs = max(WARPS_PER_SM // tile["WARPS"], 1) * processors(dy.device)
    programs = max(1, min(rows, programs))
    dx = torch.empty_like(dy)
    part = torch.empty((programs, hidden), dtype=torch.float32, device=dy.device)
    amax = torch.empty(programs, dtype=torch.float32, device=dy.device)
    _norm_backward_kernel[(programs,)](
        dy,
        codes,
        exponents,
        rstd,
        weight,
        dresidual,
        dx,
        part,
        amax,
        rows,
        **tile,
        num_warps=tile["WARPS"],
    )
    return dx, part.sum(0), amax


def backward_tile(hidden: int, size: int) -> dict[str, int]:
    """Launch shape of backward: a row is RUNS runs of RUN elements, one run per thread."""
    run = min(RUN, size)
    runs = triton.next_power_of_2(hidden // run)
    warps = min(max(runs // 32, 1), 32)
    return {"H": hidden, "SIZE": size, "RUN": run, "RUNS": runs, "WARPS": warps}
