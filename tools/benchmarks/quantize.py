"""FP8 quantization of BF16 tensors, as a share of a device copy's bandwidth in the same run.

Bandwidth counts the bytes that a kernel must move per element: 3 for a cast with a given scale, 4
for a cast with transpose, 5 for a tensor-wise scale from its own amax, because the tensor is read
twice. Dynamic range expansion starts from fp32. Norms add a residual stream, write it, and save it
in blocks of 16; SwiGLU takes the columns of the shape as gate and up, and saves them.
Options: shapes=8192x8192,32768x4096.
"""

from __future__ import annotations

from typing import Any

import torch

from coatlm.config.operands import Operand
from coatlm.fp8 import weight_rows
from coatlm.fp8.expand import M_E4M3, V_E4M3, expand_dequantize, expand_quantize
from coatlm.fp8.formats import E4M3
from coatlm.fp8.norm_quantize import norm_quantize, quantize_rows
from coatlm.fp8.operand import emit, emit_direct
from coatlm.fp8.qtensor import ROW, TENSOR, block
from coatlm.fp8.quantize import quantize
from coatlm.fp8.scaling import current_scale
from coatlm.fp8.swiglu_quantize import swiglu_quantize
from coatlm.fp8.transpose import quantize_rows_transposed
from tools.benchmarks.layer_kernels import LaunchKernel, milliseconds

OPTIONS = ("shapes",)
SETS = 4  # of tensors, used in turn: together many times the L2 cache
SHAPES = "8192x8192,32768x4096"


def rows(options: dict[str, str]) -> list[str]:
    """One process measures all kernels and the copy for a shape."""
    return options.get("shapes", SHAPES).split(",")


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs that the benchmark needs."""
    return 1


def measure(row: str, options: dict[str, str]) -> list[dict[str, Any]]:
    """One record per kernel: milliseconds, GB/s, share of the copy's bandwidth."""
    shape = tuple(int(size) for size in row.split("x"))
    sets = [kernels(shape) for _ in range(SETS)]
    records: list[dict[str, Any]] = []
    for name, (_, bytes_moved) in sets[0].items():
        ms = milliseconds([kernel[name][0] for kernel in sets])
        rate = bytes_moved / ms / 1e6
        records.append({"shape": row, "kernel": name, "ms": round(ms, 4), "gb_per_s": round(rate)})
    for record in records:
        record["share_of_copy"] = round(record["gb_per_s"] / records[0]["gb_per_s"], 3)
    return records


def kernels(shape: tuple[int, ...]) -> dict[str, tuple[LaunchKernel, float]]:
    """name -> (launch, bytes that it must move)."""
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    to, scale = torch.empty_like(x), current_scale(x, E4M3)
    m = x.float()
    v, state = m.square(), expand_quantize(m, M_E4M3)
    n = x.numel()
    rows, row_scale = weight_rows.Rows.of([(0, *shape)], x.device), quantize_rows(x).scale
    flat, codes = to.view(-1), torch.empty(n, dtype=torch.uint8, device="cuda")
    amax = weight_rows.row_amax(x.view(-1), rows, 0, n)
    span = amax, rows, 0, n

    w, saved = torch.ones(shape[-1], device="cuda"), {"block_size": 16}

    def quantized(granularity: Any, **options: Any) -> LaunchKernel:
        return lambda: quantize(x, fmt=E4M3, granularity=granularity, **options)

    any_scale = Operand("e4m3", TENSOR, power_of_two=False)
    e8m0 = {"scale_dtype": torch.float8_e8m0fnu}
    return {
        "copy": (lambda: to.copy_(x), 4 * n),
        "scaled cast": (lambda: emit_direct(x, any_scale, scale=scale), 3 * n),
        "1x16": (quantized(block(1, 16)), (3 + 4 / 16) * n),
        "1x16, e8m0 scales": (quantized(block(1, 16), **e8m0), (3 + 1 / 16) * n),
        "1x128": (quantized(block(1, 128)), (3 + 4 / 128) * n),
        "128x128": (quantized(block(128, 128)), 3 * n),
        "row": (quantized(ROW), 3 * n),
        "cast + transpose": (
            lambda: emit(x, direct=any_scale, transposed=any_scale, scale=scale),
            4 * n,
        ),
        "scale": (lambda: current_scale(x, E4M3), 2 * n),
        "tensor, own amax": (quantized(TENSOR), 5 * n),
        "row, rotated int8": (lambda: quantize_rows(x, rotated=True), 3 * n),
        "row, flow": (lambda: quantize_rows(x), 3 * n),
        "norm, row": (lambda: norm_quantize(x, w, 1e-5, add=to, **saved), (8 + 1 / 16) * n),
        "norm, rotated int8": (
            lambda: norm_quantize(x, w, 1e-5, add=to, rotated=True, **saved),
            (8 + 1 / 16) * n,
        ),
        "swiglu, row": (lambda: swiglu_quantize(x, **saved), (3.5 + 1 / 16) * n),
        "swiglu, rotated int8": (
            lambda: swiglu_quantize(x, rotated=True, **saved),
            (3.5 + 1 / 16) * n,
        ),
        "its codes, transposed": (lambda: quantize_rows_transposed(x, row_scale), 3 * n),
        "rows to gather, amax": (lambda: weight_rows.row_amax(x.view(-1), rows, 0, n), 2 * n),
        "rows to gather, cast": (lambda: weight_rows.encode_rows(x.view(-1), codes, *span), 3 * n),
        "rows gathered": (lambda: weight_rows.decode_rows(codes, flat, *span), 3 * n),
        "expand m": (lambda: expand_quantize(m, M_E4M3), (5 + 5 / 128) * n),
        "expand v": (lambda: expand_quantize(v, V_E4M3), (5 + 5 / 128) * n),
        "decode m": (lambda: expand_dequantize(state, M_E4M3), (5 + 5 / 128) * n),
    }
