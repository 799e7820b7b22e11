"""GEMMs of forward by format: BF16, FP8 with and without fast accumulation, and rotated INT8.

y = x W^T of x[T, K] and W[N, K], random numbers; FP8 has scales per row of both operands, by
cuBLASLt's first guess, INT8 is the kernel of coatlm/fp8/int8_gemm.py. The shapes are those of the
four linears of Llama layers with hidden sizes of 4096 and 2048, 8192 tokens.
Options: shapes=TxNxK,...
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coatlm.fp8 import int8_gemm
from coatlm.fp8.gemm import matmul
from coatlm.fp8.norm_quantize import quantize_rows
from tools.benchmarks.layer_kernels import milliseconds

OPTIONS = ("shapes",)
SETS = 3  # of operands, used in turn
SHAPES = (
    "8192x12288x4096,8192x4096x4096,8192x22016x4096,8192x4096x11008,"
    "8192x6144x2048,8192x2048x2048,8192x11008x2048,8192x2048x5504"
)


def rows(options: dict[str, str]) -> list[str]:
    """One process measures all formats for a shape."""
    return options.get("shapes", SHAPES).split(",")


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs that the benchmark needs."""
    return 1


def measure(row: str, options: dict[str, str]) -> list[dict[str, Any]]:
    """One record per format: milliseconds, TFLOP/s, and the speed relative to fast FP8."""
    t, n, k = (int(size) for size in row.split("x"))
    sets = [_gemms(t, n, k) for _ in range(SETS)]
    times = {name: milliseconds([each[name] for each in sets]) for name in sets[0]}
    return [
        {
            "shape": row,
            "format": name,
            "ms": round(ms, 4),
            "tflops": round(2 * t * n * k / ms / 1e9),
            "to_fp8_fast": round(times["fp8, fast"] / ms, 3),
        }
        for name, ms in times.items()
    ]


def _gemms(t: int, n: int, k: int) -> dict[str, Callable[[], Tensor]]:
    x = torch.randn(t, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    x8, w8, xi, wi = (
        quantize_rows(x),
        quantize_rows(w),
        quantize_rows(x, rotated=True),
        quantize_rows(w, rotated=True),
    )
    return {
        "bf16": partial(torch.mm, x, w.t()),
        "fp8, fast": partial(matmul, x8, w8, fast=True),
        "fp8": partial(matmul, x8, w8, fast=False),
        "int8": partial(int8_gemm.matmul, xi, wi),
    }
