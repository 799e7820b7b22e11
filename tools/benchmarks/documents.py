"""Attention within documents and over windows: backends of a GPU against cuDNN without documents.

Rows are B x S tokens in documents of a fixed length, or one document with a sliding window, with 32
query heads. `ratio` divides the time of forward and backward by that of cuDNN's causal attention,
which reads whole samples; `reference` is torch's attention with a mask of S x S elements.
`flash, longest` and `cuDNN by te` (TransformerEngine's call of cuDNN with ragged documents, if it
is installed) are given the length of the longest document; in training the CPU would wait for it.
`error` is the largest relative error of the output and the gradients against `reference`.
Options: cases=2048:500:8,8192:1000:2 (S:document:B); windows=8192:1024:2 (S:window:B).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from coatlm.data.batches import document_bounds
from coatlm.kernels.document_attention import (
    FOR_GPUS,
    ON_GPU,
    cumulative_lengths,
    document_attention,
)
from tools.benchmarks.clock import milliseconds

OPTIONS = ("cases", "windows")
CASES, WINDOWS = "2048:500:8,8192:1000:2", "8192:1024:2"
HEADS = 32
MASKED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
KV_HEADS = {"MHA": 32, "GQA": 8}


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
    for name in ("reference", *FOR_GPUS):
        attend = masked if name == "reference" else partial(document_attention, backend=name)
        calls[name] = partial(attend, *qkv, bounds, window=window)
    if bounds is not None:
        calls["flash, longest"] = partial(flash, *qkv, bounds, limit)
        if find_spec("transformer_engine"):
            calls["cuDNN by te"] = partial(te_attention(*qkv[:2]), *qkv, bounds, limit)
    dout = torch.linspace(-1, 1, qkv[0].numel(), device="cuda").view_as(qkv[0]).bfloat16()
    expected = results(calls["reference"], qkv, dout)
    records: list[dict[str, Any]] = []
    for name, call in calls.items():
        record: dict[str, Any] = {"case": row, "backend": name + " (default)" * (name == ON_GPU)}
        records.append(record)
        try:
            if name != "causal cuDNN":
                record["error"] = f"{error(results(call, qkv, dout), expected):.1e}"
            forward = milliseconds(call)
            total = milliseconds(partial(results, call, qkv, dout))
        except RuntimeError as problem:  # such as a kernel that does not compile
            record["missing"] = (str(problem).strip() or repr(problem)).splitlines()[0][:200]
            continue
        record |= {"forward_ms": round(forward, 3), "backward_ms": round(total - forward, 3)}
        record["total_ms"] = round(total, 3)
        record["ratio"] = round(record["total_ms"] / records[0]["total_ms"], 3)
    return records


def masked(*args: Any, **options: Any) -> Tensor:
    """The reference, by the fastest kernel that reads a mask."""
    with sdpa_kernel(MASKED, set_priority=True):
        return document_attention(*args, **options, backend="reference")


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


def te_attention(q_BSND: Tensor, k_BSGD: Tensor) -> Callable[..., Tensor]:
    """TransformerEngine's attention to ragged documents with these heads, without its flash."""
    os.environ |= {"NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
    from transformer_engine.pytorch import DotProductAttention

    *_, heads, head_dim = q_BSND.shape
    options = {"num_gqa_groups": k_BSGD.shape[2], "attention_dropout": 0.0}
    ragged = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
    attention = DotProductAttention(heads, head_dim, **options, **ragged)

    def attend(q: Tensor, k: Tensor, v: Tensor, bounds_BE: Tensor, longest: int) -> Tensor:
        at, _ = cumulative_lengths(bounds_BE, q.shape[1], q.shape[1])
        qkv = (x.flatten(0, 1) for x in (q, k, v))
        lengths = {"cu_seqlens_q": at, "cu_seqlens_kv": at}
        out: Tensor = attention(*qkv, **lengths, max_seqlen_q=longest, max_seqlen_kv=longest)
        return out.view(q.shape)

    return attend


def results(call: Callable[[], Tensor], qkv: list[Tensor], dout: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v for the gradient `dout` of the output."""
    out = call()
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error of a tensor relative to its norm."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
