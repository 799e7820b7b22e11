"""The time of a layer by kernel, and its roofline on this machine.

Roofline of a Llama layer in FP8 = its GEMMs alone at their shapes (cuBLASLt through torch, E4M3
forward, E5M2 for gradients) + cuDNN's attention alone, forward and backward + the bytes that
elementwise kernels must move at the speed of a device copy. All are measured in one process.
T tokens, H hidden, F ffn.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.benchmarks.clock import DEVICE, milliseconds, synchronize
from tools.benchmarks.layer_stacks import LayerShape, Stack

COPY = {"cuda": 1 << 30, "cpu": 1 << 24}[DEVICE]  # bytes
PROFILED = 5  # steps
ATTENTION = ("sdpa", "flash", "fmha", "attention", "cudnn")  # in lower-cased kernel names
GEMM = ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk", "wgmma", "aten::mm")
SHOWN_MS = 0.003  # shorter kernels are not listed, but are in the sums

Bytes = Callable[[LayerShape], float]
BYTES: dict[str, dict[str, Bytes]] = {
    # row ("" means every row) -> kernel -> bytes that its launches must move per step and layer
    "": {
        "_rms_norm_kernel": lambda s: 2 * 4 * s.tokens * s.hidden,
        "_rms_norm_backward_kernel": lambda s: 2 * 6 * s.tokens * s.hidden,
        "_swiglu_kernel": lambda s: 6 * s.tokens * s.ffn,
        "_swiglu_backward_kernel": lambda s: 10 * s.tokens * s.ffn,
        "_rope_kernel": lambda s: 2 * 12 * s.tokens * s.hidden,  # and its inverse in backward
    },
}
ELEMENTWISE = {  # bytes per token that COAT's flow must move: (coefficient of H, of F)
    "norm 1, quantized input and output": (4, 0),
    "rotary embedding and split of q, k, v": (12, 0),
    "quantized attention output": (3, 0),
    "residual and norm 2, quantized input and output": (8, 0),
    "silu * mul, quantized input and output": (0, 7),
    "residual": (6, 0),
    "gradient of the output, codes and transpose": (4, 0),
    "silu * mul backward, codes and transpose, output recomputed": (0, 9),
    "norm 2 backward, codes and transpose, output recomputed": (10, 0),
    "attention output, transposed": (3, 0),
    "rotary embedding backward, codes and transpose": (12, 0),
    "norm 1 backward, output recomputed": (8, 0),
}
WEIGHT_CAST = 4  # bytes per weight: BF16 read, FP8 and its transpose written


def profile(row: str, stack: Stack, shape: LayerShape) -> list[dict[str, Any]]:
    """One record per kernel of a step, longest first: its kind, time, and bandwidth if known.

    On a CPU the records are of operators instead of kernels.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    copy = copy_rate()
    x, dy = stack.inputs(shape.batch)
    stack.step(x, dy)
    synchronize()
    activity = ProfilerActivity.CUDA if DEVICE == "cuda" else ProfilerActivity.CPU
    with record(activities=[activity]) as profiler:
        for _ in range(PROFILED):
            stack.step(x, dy)
        synchronize()
    known = BYTES[""] | BYTES.get(row, {})
    kernels = []
    for event in profiler.key_averages():
        us = event.self_device_time_total if DEVICE == "cuda" else event.self_cpu_time_total
        ms = us / 1000 / PROFILED
        if ms <= 0 or event.is_user_annotation:
            continue
        found: dict[str, Any] = {
            "table": "kernels",
            "kernel": event.key[:90],
            "kind": kind(event.key, known),
            "launches": round(event.count / PROFILED, 1),
            "kernel_ms": round(ms, 4),
        }
        if event.key in known:
            moved = known[event.key](shape)
            found["mb"] = round(moved / 1e6, 1)
            found["gb_per_s"] = round(moved / ms / 1e6)
            found["share_of_copy"] = round(moved / ms / 1e6 / copy, 3)
        kernels.append(found)
    return sorted(kernels, key=lambda kernel: -kernel["kernel_ms"])


def kind(kernel: str, known: dict[str, Bytes]) -> str:
    """gemm, attention or elementwise, by the kernel's name."""
    name = kernel.lower()
    if kernel in known or name.startswith("triton_"):  # the latter are torch.compile's
        return "elementwise"
    if any(word in name for word in ATTENTION):
        return "attention"
    return "gemm" if any(word in name for word in GEMM) else "elementwise"


def split(kernels: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds per step on the device by kind; the difference to `ms` is idle time."""
    sums = dict.fromkeys(("gemm", "attention", "elementwise"), 0.0)
    for kernel in kernels:
        sums[kernel["kind"]] += kernel["kernel_ms"]
    return {f"{name}_ms": round(ms, 3) for name, ms in sums.items()}


def shown(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernels that take long enough to be listed."""
    return [kernel for kernel in kernels if kernel["kernel_ms"] >= SHOWN_MS]


# the roofline


def roofline(shape: LayerShape) -> dict[str, Any]:
    """Milliseconds of GEMMs (fast and slow accumulation), attention and memory traffic alone."""
    copy = copy_rate()
    tokens, hidden, ffn = shape.tokens, shape.hidden, shape.ffn
    gemm_ms = {True: 0.0, False: 0.0}
    flops = 0
    for out, inner in ((3 * hidden, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn)):
        forward, dgrad, wgrad = (tokens, out, inner), (tokens, inner, out), (out, inner, tokens)
        for fast in gemm_ms:
            gemm_ms[fast] += gemm(*forward, torch.float8_e4m3fn, fast=True)
            gemm_ms[fast] += gemm(*dgrad, torch.float8_e5m2, fast=fast)
            gemm_ms[fast] += gemm(*wgrad, torch.float8_e5m2, fast=fast)
        flops += 6 * tokens * out * inner
    attention_forward, attention_backward = attention(shape)
    attention_flops = 2 * shape.batch * shape.seq**2 * hidden  # of forward, causal
    moved = elementwise_bytes(shape)
    elementwise_ms = moved / copy / 1e6
    attention_ms = attention_forward + attention_backward
    return {
        "roofline_ms": round(gemm_ms[True] + attention_ms + elementwise_ms, 2),
        "roofline_slow_grads_ms": round(gemm_ms[False] + attention_ms + elementwise_ms, 2),
        "gemm_ms": round(gemm_ms[True], 3),
        "attention_ms": round(attention_ms, 3),
        "elementwise_ms": round(elementwise_ms, 3),
        "gemm_tflops": round(flops / gemm_ms[True] / 1e9),
        "gemm_slow_grads_tflops": round(flops / gemm_ms[False] / 1e9),
        "attention_tflops": f"{attention_flops / attention_forward / 1e9:.0f} forward, "
        f"{2.5 * attention_flops / attention_backward / 1e9:.0f} backward",
        "copy_gb_per_s": round(copy),
    }


def elementwise_bytes(shape: LayerShape) -> int:
    """Bytes that the elementwise kernels of COAT's flow must move in a step of one layer."""
    a_token = sum(h * shape.hidden + f * shape.ffn for h, f in ELEMENTWISE.values())
    weights = shape.hidden * (4 * shape.hidden + 3 * shape.ffn)
    return a_token * shape.tokens + WEIGHT_CAST * weights


def gemm(m: int, n: int, k: int, dtype: torch.dtype, *, fast: bool) -> float:
    """Milliseconds of [m, k] @ [n, k]^T; the first operand in `dtype`, the second in E4M3."""
    a = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16).to(dtype)
    b = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    one = torch.ones((), device=DEVICE)
    return milliseconds(
        lambda: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    )


def attention(shape: LayerShape) -> tuple[float, float]:
    """Milliseconds of causal attention in BF16, forward and backward, on [S, B, N, D] memory."""

    def heads() -> Tensor:
        size = (shape.seq, shape.batch, shape.heads, shape.head_dim)
        x_SBND = torch.randn(size, device=DEVICE, dtype=torch.bfloat16)
        return x_SBND.permute(1, 2, 0, 3).detach().requires_grad_()

    q, k, v = heads(), heads(), heads()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if DEVICE == "cuda" else nullcontext():
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        do = torch.randn_like(o)
        with torch.no_grad():
            forward = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        backward = milliseconds(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))
    return forward, backward


def copy_rate() -> float:
    """GB/s of a device copy, bytes read and written."""
    source = torch.empty(COPY, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * COPY / milliseconds(lambda: target.copy_(source)) / 1e6
