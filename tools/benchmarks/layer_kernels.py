"""RMSNorm, RoPE and SwiGLU as a share of a device copy's bandwidth, in BF16.

Each kernel runs over several sets of inputs in turn, together far larger than the L2 cache, from a
CUDA graph. Bandwidth counts each byte that must be read or written, once. Options: hidden=4096
ffn=11008 seq=4096.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton.testing

from coatlm.kernels import activation, norm
from coatlm.kernels import rope as rope_module
from coatlm.kernels.rope import rope_frequencies, rope_tables

BATCH, EPS, SETS = 4, 1e-5, 4
BF16 = 2  # bytes
DEFAULTS = {"hidden": "4096", "ffn": "11008", "seq": "4096"}
OPTIONS = tuple(DEFAULTS)
LaunchKernel = Callable[[], object]


def rows(options: dict[str, str]) -> list[str]:
    """One process measures all kernels and the copy."""
    return ["layer kernels"]


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs that the benchmark needs."""
    return 1


def measure(row: str, options: dict[str, str]) -> list[dict[str, Any]]:
    """One record per kernel: milliseconds, GB/s, share of the copy's bandwidth."""
    hidden, ffn, seq = (int(options.get(k, v)) for k, v in DEFAULTS.items())
    sets = [kernels(hidden, ffn, seq) for _ in range(SETS)]
    records: list[dict[str, Any]] = []
    for name, (_, elements) in sets[0].items():
        ms = milliseconds([kernel[name][0] for kernel in sets])
        rate = elements * BF16 / ms / 1e6
        records.append({"kernel": name, "ms": round(ms, 4), "gb_per_s": round(rate)})
    for record in records:
        record["share_of_copy"] = round(record["gb_per_s"] / records[0]["gb_per_s"], 3)
    return records


def milliseconds(launches: list[LaunchKernel]) -> float:
    """Median time of one launch; successive launches use different memory."""

    def all_of_them() -> None:
        for launch in launches:
            launch()

    return triton.testing.do_bench_cudagraph(all_of_them, return_mode="median") / len(launches)


def kernels(hidden: int, ffn: int, seq: int) -> dict[str, tuple[LaunchKernel, int]]:
    """name -> (launch, elements read and written)."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, dy, to = (randn(seq, BATCH, hidden) for _ in range(3))
    weight = torch.ones(hidden, device="cuda")
    _, rstd = norm.rms_norm_ref(x, weight, EPS)
    gate_up, dh = randn(seq, BATCH, 2 * ffn), randn(seq, BATCH, ffn)
    heads = hidden // 128
    inv_freq = rope_frequencies(128, 500000.0).cuda()
    cos, sin = rope_tables(torch.arange(seq, device="cuda"), inv_freq)
    qkv = randn(seq, BATCH, heads // 4, 6 * 128)
    parts = rope_module._split_on_gpu(qkv, cos, sin, 4, 128)
    n, f = x.numel(), dh.numel()
    return {
        "copy": (lambda: to.copy_(x), 2 * n),
        "rms_norm": (lambda: norm._launch_forward(x, weight, EPS), 2 * n),
        "rms_norm backward": (lambda: norm._launch_backward(dy, x, weight, rstd), 3 * n),
        "swiglu": (lambda: activation._launch_forward(gate_up), 3 * f),
        "swiglu backward": (lambda: activation._launch_backward(dh, gate_up), 5 * f),
        "qkv split + rope": (
            lambda: rope_module._split_on_gpu(qkv, cos, sin, 4, 128),
            2 * qkv.numel(),
        ),
        "its backward": (lambda: rope_module._join_on_gpu(*parts, cos, sin), 2 * qkv.numel()),
    }
