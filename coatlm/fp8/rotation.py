"""Rotation of rows: x[..., K] -> x H, one Hadamard matrix of size n for each n elements of a row.

    n = 64, or 16 where 64 does not divide K
    H[i, j] = (-1)^popcount(i & j) / sqrt(n), 0 <= i, j < n

H is symmetric and orthogonal, H H = 1. So a rotation is its own inverse, lengths and products of
rows do not change, (x H)(w H)^T = x w^T, and an element far above the others of its n is spread
over all of them. Rows that are rounded to integers lose less then, because their scale is that of
their largest element (QuaRot, arXiv 2404.00456, section 3, has such rotations for inference).

Kernels call `rotate_runs`, which rounds x to BF16 and sums in fp32. A thread holds a run of 16
elements of a row, so a span of 64 lies in four threads. The bits of an index within the span are,
from the highest, t t s s h e: the two bits t number the threads, the others the elements of a
thread. H is a product of one 2 x 2 matrix for each bit, and is applied in two steps:

    bits t, t, h, e    a product with the H of size 16 on the tensor cores: the left operand of
                       `mma.m16n8k16` has 2 (h) x 2 (e) elements of each of 4 threads (t)
    bits s, s          sums and differences of two elements of the thread, once for each bit

The instruction takes its operand, and leaves its result, in registers of these very threads, so no
element is moved through shared memory. Spans of 16 lie in one thread, which needs sums alone.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

RUN = 16  # elements of a row that a thread holds


def span_of(k: int) -> int:
    """n for rows of k elements. Raises ValueError unless they are multiples of 16."""
    if k % RUN:
        raise ValueError(f"rows of {k}: must be multiples of {RUN} long")
    return 64 if k % 64 == 0 else RUN


@functools.cache
def hadamard(n: int, device: torch.device) -> Tensor:
    """H, fp32 [n, n]."""
    h = torch.ones(1, 1, device=device)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / n**0.5


def rotate(x: Tensor) -> Tensor:
    """x H in fp32. Raises ValueError unless rows are multiples of 16 long."""
    n = span_of(x.shape[-1])
    return (x.float().unflatten(-1, (-1, n)) @ hadamard(n, x.device)).flatten(-2)


@gluon.jit
def _hadamard_16(LAYOUT: gl.constexpr):
    """The signs of H for 16 elements, divided by 8; exact in BF16."""
    i = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    common = i & j
    common = common ^ (common >> 2)
    common = common ^ (common >> 1)
    return gl.where((common & 1) == 0, 0.125, -0.125).to(gl.bfloat16)


@gluon.jit
def _sum_and_difference(x):
    """(a, b) -> (a + b, a - b) along the last axis, which has two elements."""
    a, b = gl.split(x)
    return gl.join(a + b, a - b)


@gluon.jit
def rotate_runs(x, SPAN: gl.constexpr, WARPS: gl.constexpr):
    """x H, fp32, of x[., .] rounded to BF16, SPAN 64 or 16; 512 * WARPS elements as in memory.

    Consecutive threads must hold consecutive runs of 16 elements.
    """
    y = x.to(gl.bfloat16)
    if SPAN == 64:
        MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
        LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
        RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
        y = gl.reshape(y, [WARPS, 8, 4, 2, 2, 2, 2])  # warp, span, t, s, s, h, e
        y = gl.reshape(gl.permute(y, [3, 0, 4, 1, 5, 2, 6]), [32 * WARPS, 16])
        zero = gl.full([32 * WARPS, 16], 0.0, gl.float32, MMA)
        y = gl.nvidia.ampere.mma_v2(gl.convert_layout(y, LEFT), _hadamard_16(RIGHT), zero)
        y = gl.reshape(y, [2, WARPS, 2, 8, 2, 4, 2])  # s, warp, s, span, h, t, e
        y = _sum_and_difference(gl.permute(y, [1, 3, 5, 2, 4, 6, 0]))
        y = _sum_and_difference(gl.permute(y, [0, 1, 2, 6, 4, 5, 3]))
        y = gl.permute(y, [0, 1, 2, 3, 6, 4, 5])
    else:
        y = gl.reshape(y.to(gl.float32) * 0.25, [32 * WARPS, 2, 2, 2, 2])
        for _ in gl.static_range(4):
            y = gl.permute(_sum_and_difference(y), [0, 4, 1, 2, 3])
    return gl.convert_layout(gl.reshape(y, x.shape), x.type.layout)
