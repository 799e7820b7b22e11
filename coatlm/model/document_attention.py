"""Causal attention within documents, over a sliding window, with a soft cap on logits.

The queries are the last S of T positions. A query at position i attends to the keys j with

    max(start, i - window + 1) <= j <= i        start: the first position of the query's document

and its logits are x = scale q k, or softcap tanh(x / softcap) (Gemma 2, arXiv 2408.00118, s2).
Documents are given by their bounds: for each sample the first positions of its documents, from 0
on, and then its length, repeated. No tensor of S x T elements travels with a batch.

Shapes: S queries, T keys, B samples, N query heads, G key/value heads, D elements per head, E
bounds per sample.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def first_keys(bounds_BE: Tensor | None, positions_S: Tensor, window: int | None = None) -> Tensor:
    """The first position that each query attends to: int32 [B, S], or [1, S] without documents."""
    first_BS = torch.zeros_like(positions_S)[None]
    if bounds_BE is not None:
        queries_BS = positions_S.expand(bounds_BE.shape[0], -1).contiguous()
        document_BS = torch.searchsorted(bounds_BE, queries_BS, right=True) - 1
        first_BS = bounds_BE.gather(1, document_BS)
    return first_BS if window is None else first_BS.maximum(positions_S - (window - 1))


def visible_keys(
    bounds_BE: Tensor | None, queries: int, keys: int, window: int | None, device: torch.device
) -> Tensor:
    """bool [B, 1, S, T], True where a query attends to a key; [1, 1, S, T] without documents."""
    at_T = torch.arange(keys, dtype=torch.int32, device=device)
    positions_S = at_T[keys - queries :]
    first_BS = first_keys(bounds_BE, positions_S, window)
    return (at_T >= first_BS[:, None, :, None]) & (at_T <= positions_S[:, None])


def document_attention_ref(
    q_SBND: Tensor,
    k_TBGD: Tensor,
    v_TBGD: Tensor,
    bounds_BE: Tensor | None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The definition, with a mask of S x T elements per sample."""
    q_BNSD, k_BGTD, v_BGTD = (x.permute(1, 2, 0, 3) for x in (q_SBND, k_TBGD, v_TBGD))
    mask = visible_keys(bounds_BE, q_SBND.shape[0], k_TBGD.shape[0], window, q_SBND.device)
    heads, kv_heads = q_BNSD.shape[1], k_BGTD.shape[1]
    if softcap is None:
        o_BNSD = F.scaled_dot_product_attention(
            q_BNSD, k_BGTD, v_BGTD, attn_mask=mask, scale=scale, enable_gqa=heads != kv_heads
        )
        return o_BNSD.permute(2, 0, 1, 3)
    scale = 1 / math.sqrt(q_SBND.shape[-1]) if scale is None else scale
    k_BNTD, v_BNTD = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k_BGTD, v_BGTD))
    logits = softcap * torch.tanh((q_BNSD @ k_BNTD.mT).float() * (scale / softcap))
    p_BNST = logits.masked_fill(~mask, -math.inf).softmax(-1)
    return (p_BNST.to(v_BNTD.dtype) @ v_BNTD).permute(2, 0, 1, 3)


def document_attention(
    q_SBND: Tensor,
    k_TBGD: Tensor,
    v_TBGD: Tensor,
    bounds_BE: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention as the module's docstring defines it; returns [S, B, N, D].

    `bounds_BE`: int32, see `coatlm.data.dataset.document_bounds`; None if each sample is a single
    document. `scale` is 1 / sqrt(D) unless given; `window` is in keys, the query's own included.
    """
    return document_attention_ref(
        q_SBND, k_TBGD, v_TBGD, bounds_BE, scale=scale, window=window, softcap=softcap
    )
