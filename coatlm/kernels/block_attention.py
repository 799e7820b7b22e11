"""Attention as document_attention.py defines it, by blocks of queries, for any device and dtype.

Only GEMMs, elementwise functions and reductions of rows are used. BLOCK queries at a time attend to
the keys from the first to the last that one of them could attend to if a sample were one document,
so that no tensor has an element for each pair of positions. q, k, v, the output and the log-sum-exp
of the logits are saved; backward computes the probabilities again, as FlashAttention does (arXiv
2307.08691, section 3.1). Arithmetic is in fp32, or in fp64 for fp64, and each result is rounded
once.

The kernels and their shapes do not depend on the documents, so the host does not wait for the GPU,
and CUDA graphs can capture them.

Shapes: S queries, T keys, B samples, N query heads, G key/value heads, D elements per head; a block
has R queries, C keys, and M = R N / G rows, the queries of all heads that share keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coatlm.kernels.attention_merge import wide_dtype

BLOCK = 128  # queries


def spans(queries: int, keys: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Yield slices: at most BLOCK queries, and the keys that causality and the window allow them.

    The queries are the last positions of the keys.
    """
    offset = keys - queries
    for first in range(0, queries, BLOCK):
        last = min(first + BLOCK, queries)
        begin = 0 if window is None else max(0, first + offset - window + 1)
        yield slice(first, last), slice(begin, last + offset)


class _Block:
    """The keys and values [B, G, C, D] of a block, and which of its logits count."""

    def __init__(
        self, span: tuple[slice, slice], k_BTGD: Tensor, v_BTGD: Tensor, first_BS: Tensor
    ) -> None:
        self.queries, self.keys = span
        wide = wide_dtype(k_BTGD)
        self.k, self.v = (x[:, self.keys].transpose(1, 2).to(wide) for x in (k_BTGD, v_BTGD))
        self.kv_heads = k_BTGD.shape[2]
        offset = k_BTGD.shape[1] - first_BS.shape[1]
        device = first_BS.device
        key_C = torch.arange(self.keys.start, self.keys.stop, device=device)
        last_R = torch.arange(self.queries.start, self.queries.stop, device=device) + offset
        first_BR = first_BS[:, self.queries]
        self.masked = ((key_C < first_BR[..., None]) | (key_C > last_R[:, None]))[:, None, :, None]

    def rows(self, x_BSND: Tensor) -> Tensor:
        """The rows [B, G, M, D] of this block, in the dtype of sums."""
        x_BRND = x_BSND[:, self.queries].to(wide_dtype(x_BSND))
        return x_BRND.unflatten(2, (self.kv_heads, -1)).transpose(1, 2).flatten(2, 3)

    def write_(self, x_BSND: Tensor, rows_BGMD: Tensor) -> None:
        """Write the rows of this block, rounded to the dtype of x."""
        x_BRND = x_BSND[:, self.queries]
        rows_BGRND = rows_BGMD.unflatten(2, (x_BRND.shape[1], -1))
        x_BRND.copy_(rows_BGRND.transpose(1, 2).flatten(2, 3))

    def logits(
        self, q_BGMD: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [B, G, M, C], -inf where a query does not attend, and the tanh of a soft cap."""
        x_BGMC, tanh_BGMC = q_BGMD @ self.k.mT * scale, None
        if softcap is not None:
            tanh_BGMC = torch.tanh(x_BGMC / softcap)
            x_BGMC = softcap * tanh_BGMC
        x_BGRNC = x_BGMC.unflatten(2, (self.masked.shape[2], -1))
        return x_BGRNC.masked_fill(self.masked, -math.inf).flatten(2, 3), tanh_BGMC


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSND: Tensor,
        k_BTGD: Tensor,
        v_BTGD: Tensor,
        first_BS: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        o_BSND = torch.empty_like(q_BSND, memory_format=torch.contiguous_format)
        lse_BSN1 = o_BSND.new_empty(*q_BSND.shape[:3], 1, dtype=wide_dtype(q_BSND))
        for span in spans(q_BSND.shape[1], k_BTGD.shape[1], window):
            block = _Block(span, k_BTGD, v_BTGD, first_BS)
            x_BGMC, _ = block.logits(block.rows(q_BSND), scale, softcap)
            lse_BGM1 = x_BGMC.logsumexp(-1, keepdim=True)
            block.write_(o_BSND, (x_BGMC - lse_BGM1).exp_() @ block.v)
            block.write_(lse_BSN1, lse_BGM1)
        ctx.save_for_backward(q_BSND, k_BTGD, v_BTGD, o_BSND, lse_BSN1, first_BS)
        ctx.options = scale, window, softcap
        return o_BSND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BSND: Tensor) -> tuple[Tensor | None, ...]:
        q_BSND, k_BTGD, v_BTGD, o_BSND, lse_BSN1, first_BS = ctx.saved_tensors
        scale, window, softcap = ctx.options
        dq_BSND = torch.empty_like(o_BSND)
        dk_BTGD, dv_BTGD = (torch.zeros_like(x, dtype=wide_dtype(x)) for x in (k_BTGD, v_BTGD))
        for span in spans(q_BSND.shape[1], k_BTGD.shape[1], window):
            block = _Block(span, k_BTGD, v_BTGD, first_BS)
            q, do, o, lse = (block.rows(x) for x in (q_BSND, do_BSND, o_BSND, lse_BSN1))
            x_BGMC, tanh_BGMC = block.logits(q, scale, softcap)
            slope = scale if tanh_BGMC is None else scale * (1 - tanh_BGMC.square())
            p_BGMC = (x_BGMC - lse).exp_()
            dx_BGMC = do @ block.v.mT - (do * o).sum(-1, keepdim=True)
            ds_BGMC = dx_BGMC.mul_(p_BGMC).mul_(slope)
            dk_BTGD[:, block.keys] += (ds_BGMC.mT @ q).transpose(1, 2)
            dv_BTGD[:, block.keys] += (p_BGMC.mT @ do).transpose(1, 2)
            block.write_(dq_BSND, ds_BGMC @ block.k)
        dk_BTGD, dv_BTGD = dk_BTGD.to(k_BTGD.dtype), dv_BTGD.to(v_BTGD.dtype)
        return dq_BSND, dk_BTGD, dv_BTGD, None, None, None, None


def block_attention(
    q_BSND: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    first_BS: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention [B, S, N, D], contiguous, differentiable in q, k and v.

    `first_BS`: the first position that each query attends to, int32 [B or 1, S], with documents and
    the window taken into account. `window` only lets a block skip the keys before it. Other
    arguments as in `coatlm.kernels.document_attention.document_attention`.
    """
    scale = 1 / math.sqrt(q_BSND.shape[-1]) if scale is None else scale
    out: Tensor = _BlockAttention.apply(q_BSND, k_BTGD, v_BTGD, first_BS, scale, window, softcap)
    return out
