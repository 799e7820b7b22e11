"""Attention within documents and over windows: every backend against causal attention by cuDNN.

Rows are B x S tokens in documents of a fixed length, or one document with a sliding window, with 32
query heads. `ratio` divides the time of forward and backward by that of cuDNN's causal attention,
which reads whole samples; `mask` is torch's attention with a tensor of S x S elements per sample.
`flash, longest` is given the length of the longest document, which a run would have to wait for.
`error` is the largest relative error of the output and the gradients against `mask`.
Options: cases=2048:500:8,8192:1000:2 (S:document:B); windows=8192:1024:2 (S:window:B).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from coatlm.data.dataset import document_bounds
from coatlm.fp8.document_attention import (
    BACKENDS,
    ON_GPU,
    cumulative_lengths,
    document_attention,
)
from tools.benchmarks.clock import milliseconds

OPTIONS = ("cases", "windows")
CASES, WINDOWS = "2048:500:8,8192:1000:2", "8192:1024:2"
HEADS = 32
KV_HEADS = {"MHA": 32, "GQA": 8}
NAMES = {"reference": "mask"}


def rows(options: dict[str, str]) -> list[str]:
    """One process measures all backends for a case, a head size and a number of key heads."""
    cases = [f"documents:{case}" for case in options.get("cases", CASES).split(",")]
    cases += [f"window:{case}" for case in options.get("windows", WINDOWS).split(",")]
    return [f"{case} {kind} {size}" for case in cases for size in (128, 64) for kind in KV_HEADS]


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs that the benchmark needs."""
    return 1


def measure(row: str, options: dict[str, str]) -> list[dict[str, Any]]:
    """One record per backend: milliseconds of forward and backward, ratio and error."""
    case, kind, head_dim = row.split()
    what, *sizes = case.split(":")
    length, limit, batch = (int(size) for size in sizes)
    shapes = [(batch, length, heads, int(head_dim)) for heads in (HEADS, *[KV_HEADS[kind]] * 2)]
    qkv = [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes]
    bounds = window = None
    if what == "documents":
        numbers = (torch.arange(length) // limit).expand(batch, -1)
        bounds = document_bounds(numbers).cuda()
    else:
        window = limit
    calls: dict[str, Callable[[], Tensor]] = {"causal cuDNN": partial(causal, *qkv)}
    for name in BACKENDS:
        attend = partial(document_attention, *qkv, bounds, window=window, backend=name)
        calls[NAMES.get(name, name)] = attend
    if bounds is not None:
        calls["flash, longest"] = partial(flash, *qkv, bounds, limit)
    expected = results(calls["mask"], qkv)
    records: list[dict[str, Any]] = []
    for name, call in calls.items():
        out = call()
        dout = torch.ones_like(out)
        forward = milliseconds(call)
        backward = milliseconds(partial(torch.autograd.grad, out, qkv, dout, retain_graph=True))
        total = forward + backward
        ratio = total / records[0]["total_ms"] if records else 1.0
        record = {"case": row, "backend": name + " (default)" * (name == ON_GPU)}
        record |= {"forward_ms": round(forward, 3), "backward_ms": round(backward, 3)}
        record |= {"total_ms": round(total, 3), "ratio": round(ratio, 3)}
        if name != "causal cuDNN":
            record["error"] = f"{error(results(call, qkv), expected):.1e}"
        records.append(record)
        del out
    return records


def causal(q_BSND: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> Tensor:
    """Causal attention to whole samples by cuDNN, [B, S, N, D]."""
    qkv = (x.transpose(1, 2) for x in (q_BSND, k_BSGD, v_BSGD))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        gqa = q_BSND.shape[2] != k_BSGD.shape[2]
        return scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=gqa).transpose(1, 2)


def flash(
    q_BSND: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, bounds_BE: Tensor, longest: int
) -> Tensor:
    """FlashAttention-2 with the length of the longest document, by which it sizes its grid."""
    length = q_BSND.shape[1]
    at = cumulative_lengths(bounds_BE, length, length)
    qkv = (x.flatten(0, 1) for x in (q_BSND, k_BSGD, v_BSGD))
    attend = torch.ops.aten._flash_attention_forward
    return attend(*qkv, *at, longest, longest, 0.0, True, False)[0].view(q_BSND.shape)


def results(call: Callable[[], Tensor], qkv: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of q, k and v for a fixed gradient of the output."""
    out = call()
    dout = torch.linspace(-1, 1, out.numel(), device=out.device).to(out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error of a tensor relative to its norm."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
