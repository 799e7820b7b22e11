"""Attention within documents and over windows on a CPU, as document_attention.py defines it.

A document's queries attend to nothing outside of it, so documents are separate calls of torch's
FlashAttention for CPUs. Queries that begin where their document does, no more of them than the
window has keys, are one causal call without a mask. Others are called by at most BLOCK, and read
the keys from the first to the last that these attend to:

    queries beyond a window of w keys              a mask of BLOCK x (BLOCK + w - 1)
    a document that began before the first query   a mask of BLOCK x T; queries are the last S of T

So no tensor has S x T elements, in forward or backward. For backward q, k, v, the output and its
log-sum-exp are saved; masks are computed again. Calls that share keys add up their gradients, in
fp32 at least, rounded once.

Shapes: S queries, T keys, B samples, N query heads, G key/value heads, D elements per head, E
bounds per sample; R queries and C keys of one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coatlm.kernels.attention_merge import wide_dtype
from coatlm.kernels.cpu_gemms import widened

aten: Any = torch.ops.aten
BLOCK = 128  # queries of a call with a mask


class Rectangle(NamedTuple):
    """The queries and keys of one call, as slices of q [B, S, N, D] and of k and v [B, T, G, D]."""

    samples: slice
    queries: slice
    keys: slice
    before: int  # keys of this call before the position of its first query
    causal: bool  # each query attends to all keys up to its own position, and `before` is 0


def rectangles(
    bounds_BE: Tensor | None, samples: int, queries: int, keys: int, window: int | None
) -> Iterator[Rectangle]:
    """Calls that together have each query exactly once; `bounds_BE` is in host memory."""
    offset = keys - queries
    rows = [(slice(samples), [0, keys])]
    if bounds_BE is not None:
        rows = [(slice(b, b + 1), row) for b, row in enumerate(bounds_BE.tolist())]
    for sample, bounds in rows:
        for start, end in itertools.pairwise(bounds):
            end, first = min(end, keys), max(start, offset)
            while first < end:
                whole = first == start and (window is None or window >= BLOCK)
                most = (window or keys) if whole else BLOCK
                last = min(first + most, end)
                begin = start if window is None else max(start, first - window + 1)
                causal = first == start and (window is None or window >= last - first)
                at = slice(first - offset, last - offset)
                yield Rectangle(sample, at, slice(begin, last), first - begin, causal)
                first = last


def additive_mask(of: Rectangle, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """[R, C], 0 where a query attends to a key and -inf elsewhere; None for a causal call."""
    if of.causal:
        return None
    shape = (of.queries.stop - of.queries.start, of.keys.stop - of.keys.start)
    visible = torch.ones(shape, dtype=torch.bool).tril(of.before)
    if window is not None:
        visible = visible.triu(of.before - window + 1)
    return torch.zeros(shape, dtype=dtype).masked_fill(~visible, -torch.inf)


def _part(x_BXHD: Tensor, samples: slice, positions: slice) -> Tensor:
    """The view [b, heads, positions, D] that the operators of a CPU take."""
    return x_BXHD[samples, positions].transpose(1, 2)


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSND: Tensor,
        k_BTGD: Tensor,
        v_BTGD: Tensor,
        bounds_BE: Tensor | None,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        samples, queries, heads, _ = q_BSND.shape
        calls = list(rectangles(bounds_BE, samples, queries, k_BTGD.shape[1], window))
        o_BSND = torch.empty_like(q_BSND)
        lse_BSN = o_BSND.new_empty(samples, queries, heads, dtype=wide_dtype(q_BSND))
        for call in calls:
            q = _part(q_BSND, call.samples, call.queries)
            k, v = (_part(x, call.samples, call.keys) for x in (k_BTGD, v_BTGD))
            mask = additive_mask(call, window, q.dtype)
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                *(q, k, v, 0.0, call.causal), attn_mask=mask, scale=scale
            )
            o_BSND[call.samples, call.queries] = out.transpose(1, 2)
            lse_BSN[call.samples, call.queries] = lse.transpose(1, 2)
        ctx.save_for_backward(q_BSND, k_BTGD, v_BTGD, o_BSND, lse_BSN)
        ctx.calls, ctx.scale, ctx.window = calls, scale, window
        return o_BSND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BSND: Tensor) -> tuple[Tensor | None, ...]:
        q_BSND, k_BTGD, v_BTGD, o_BSND, lse_BSN = ctx.saved_tensors
        dq_BSND = torch.empty_like(o_BSND)
        sums = [torch.zeros_like(x, dtype=wide_dtype(x)) for x in (k_BTGD, v_BTGD)]
        for call in ctx.calls:
            do, q, o = (_part(x, call.samples, call.queries) for x in (do_BSND, q_BSND, o_BSND))
            k, v = (_part(x, call.samples, call.keys) for x in (k_BTGD, v_BTGD))
            do, q, k, v, o = widened(do, q, k, v, o)
            lse = lse_BSN[call.samples, call.queries].transpose(1, 2)
            mask = additive_mask(call, ctx.window, q.dtype)
            dq, *shares = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(do, q, k, v, o, lse, 0.0, call.causal), attn_mask=mask, scale=ctx.scale
            )
            dq_BSND[call.samples, call.queries] = dq.transpose(1, 2)
            for total, share in zip(sums, shares, strict=True):
                total[call.samples, call.keys] += share.transpose(1, 2)
        dk_BTGD, dv_BTGD = (x.to(k_BTGD.dtype) for x in sums)
        return dq_BSND, dk_BTGD, dv_BTGD, None, None, None


def _with_unit_stride(x: Tensor) -> Tensor:
    """x, copied unless the elements of a head are contiguous, as the operators read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def cpu_attention(
    q_BSND: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    bounds_BE: Tensor | None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention [B, S, N, D] in the memory layout of q, differentiable in q, k and v.

    Arguments as in `coatlm.kernels.document_attention.document_attention`; all are in host memory.
    Raises ValueError for a soft cap.
    """
    if softcap is not None:
        raise ValueError(f"softcap={softcap}: backend=cpu has no soft cap; use backend=blocks")
    q, k, v = (_with_unit_stride(x) for x in (q_BSND, k_BTGD, v_BTGD))
    return _CpuAttention.apply(q, k, v, bounds_BE, scale, window)
