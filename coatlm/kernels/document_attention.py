"""Causal attention within documents, over a sliding window, with a soft cap on logits.

The queries are the last S of T positions. A query at position i attends to the keys j with

    max(start, i - window + 1) <= j <= i        start: the first position of the query's document

and its logits are x = scale q k, or softcap tanh(x / softcap) (Gemma 2, arXiv 2408.00118, s2).
`bounds_BE` lists for each sample the first position of each document, beginning with 0, padded on
the right with the sample's length. The backends, of which only the first materializes tensors of
S x T elements:

    reference   the definition, with a mask, which tests and benchmarks compare with
    flash       FlashAttention-2 with cumulative lengths (arXiv 2307.08691), on a GPU; no soft cap
    flex        FlexAttention: a Triton kernel that torch.compile generates (arXiv 2412.05496)
    cpu         FlashAttention of torch for CPUs, by document (cpu_attention.py); no soft cap
    blocks      the definition by blocks of queries (block_attention.py): for fp32 on a GPU, and for
                a soft cap on a CPU

Shapes: S queries, T keys, B samples, N query heads, G key/value heads, D elements per head, E
bounds per sample.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.overrides import handle_torch_function, has_torch_function

from coatlm.kernels.block_attention import block_attention
from coatlm.kernels.cpu_attention import cpu_attention

SHAPES = 64  # for which FlexAttention may be compiled
BLOCK = 128  # queries and keys per block of FlexAttention's mask


def first_keys(bounds_BE: Tensor | None, positions_S: Tensor, window: int | None = None) -> Tensor:
    """The first position that each query attends to: int32 [B, S], or [1, S] without documents."""
    first_BS = torch.zeros_like(positions_S)[None]
    if bounds_BE is not None:
        queries_BS = positions_S.expand(bounds_BE.shape[0], -1).contiguous()
        document_BS = torch.searchsorted(bounds_BE, queries_BS, right=True) - 1
        first_BS = bounds_BE.gather(1, document_BS)
    return first_BS if window is None else first_BS.maximum(positions_S - (window - 1))


def document_positions(bounds_BE: Tensor, positions_S: Tensor) -> Tensor:
    """The position within its document of the token at each position of a sample: int32 [B, S]."""
    return positions_S - first_keys(bounds_BE, positions_S)


def visible_keys(
    bounds_BE: Tensor | None, queries: int, keys: int, window: int | None, device: torch.device
) -> Tensor:
    """bool [B, 1, S, T], True where a query attends to a key; [1, 1, S, T] without documents."""
    at_T = torch.arange(keys, dtype=torch.int32, device=device)
    positions_S = at_T[keys - queries :]
    first_BS = first_keys(bounds_BE, positions_S, window)
    return (at_T >= first_BS[:, None, :, None]) & (at_T <= positions_S[:, None])


def document_attention_ref(
    q_BSND: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    bounds_BE: Tensor | None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The definition, with a mask of S x T elements per sample."""
    q_BNSD, k_BGTD, v_BGTD = (x.transpose(1, 2) for x in (q_BSND, k_BTGD, v_BTGD))
    mask = visible_keys(bounds_BE, q_BSND.shape[1], k_BTGD.shape[1], window, q_BSND.device)
    heads, kv_heads = q_BNSD.shape[1], k_BGTD.shape[1]
    if softcap is None:
        o_BNSD = F.scaled_dot_product_attention(
            q_BNSD, k_BGTD, v_BGTD, attn_mask=mask, scale=scale, enable_gqa=heads != kv_heads
        )
        return o_BNSD.transpose(1, 2)
    scale = 1 / math.sqrt(q_BSND.shape[-1]) if scale is None else scale
    k_BNTD, v_BNTD = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k_BGTD, v_BGTD))
    logits = softcap * torch.tanh((q_BNSD @ k_BNTD.mT).float() * (scale / softcap))
    p_BNST = logits.masked_fill(~mask, -math.inf).softmax(-1)
    return (p_BNST.to(v_BNTD.dtype) @ v_BNTD).transpose(1, 2)


def cumulative_lengths(bounds_BE: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """For all samples, one behind the other, where each document's queries and keys begin.

    int32 [B * (E - 1) + 1] each. A document that ends before the first query has keys only;
    documents of length 0 fill up.
    """
    samples = torch.arange(bounds_BE.shape[0], dtype=torch.int32, device=bounds_BE.device)[:, None]
    bounds = bounds_BE[:, 1:].clamp(max=keys)
    key_at = F.pad((bounds + samples * keys).flatten(), (1, 0))
    if queries == keys:
        return key_at, key_at
    ends = (bounds - (keys - queries)).clamp(min=0)
    return F.pad((ends + samples * queries).flatten(), (1, 0)), key_at


def _flash(
    q_BSND: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    bounds_BE: Tensor | None,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """FlashAttention-2 of torch, which aligns the last query with the last key.

    With documents the samples become one dimension of tokens: contiguous inputs are not copied.
    """
    if softcap is not None:
        raise ValueError(f"softcap={softcap}: backend flash has no soft cap; it needs flex")
    queries, keys = q_BSND.shape[1], k_BTGD.shape[1]
    q, k, v = q_BSND, k_BTGD, v_BTGD
    at: tuple[Tensor | None, Tensor | None] = None, None
    if bounds_BE is not None:
        at = cumulative_lengths(bounds_BE, queries, keys)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *(q, k, v, *at),
        *(queries, keys),  # the longest lengths that are known without waiting for the GPU
        *(0.0, True, False),  # dropout, causal, debug mask
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]
    return out.view(q_BSND.shape)


def block_mask(first_BS: Tensor, keys: int) -> BlockMask:
    """FlexAttention's mask, from the first position that each query attends to.

    The keys of a block of queries form one range, because `first_BS` never decreases. Of that
    range, the blocks of keys that all these queries attend to need no mask.
    """
    queries = first_BS.shape[1]
    offset = keys - queries
    rows, columns = -(-queries // BLOCK), -(-keys // BLOCK)
    row = torch.arange(rows, dtype=torch.int32, device=first_BS.device)
    top, bottom = row * BLOCK, (row * BLOCK + BLOCK - 1).clamp(max=queries - 1)
    begin = first_BS[:, top] // BLOCK
    end = ((bottom + offset) // BLOCK + 1).expand_as(begin)
    full_begin = (first_BS[:, bottom] + BLOCK - 1) // BLOCK
    full = ((top + offset + 1) // BLOCK - full_begin).clamp(min=0)
    number = torch.arange(columns, dtype=torch.int32, device=first_BS.device)
    masked = begin[..., None] + number
    masked = torch.where(masked < full_begin[..., None], masked, masked + full[..., None])
    whole = full_begin[..., None] + number

    def visible(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k >= first_BS[b, q]) & (k <= q + offset)

    return BlockMask.from_kv_blocks(
        (end - begin - full)[:, None],
        masked.clamp(max=columns - 1)[:, None],
        full[:, None],
        whole.clamp(max=columns - 1)[:, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(queries, keys),
    )


def _capped(softcap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    def capped(x: Tensor, _b: Tensor, _n: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
        return softcap * torch.tanh(x / softcap)

    return capped


def _flex_attention(
    q_BNSD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    first_BS: Tensor,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    out = flex_attention(
        q_BNSD,
        k_BGTD,
        v_BGTD,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=block_mask(first_BS, k_BGTD.shape[2]),
        scale=scale,
        enable_gqa=q_BNSD.shape[1] != k_BGTD.shape[1],
        # the kernel for decoding, which short samples would get, has no variant for some sizes
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    assert isinstance(out, Tensor)  # no statistics were asked for
    return out


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    # training, evaluations and tasks have samples of more lengths than torch's limit of 8 compiles
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, SHAPES)
    return torch.compile(_flex_attention, dynamic=False, fullgraph=True)


def _first_keys_of(
    q_BSND: Tensor, k_BTGD: Tensor, bounds_BE: Tensor | None, window: int | None
) -> Tensor:
    """`first_keys` of these queries, the last positions of the keys."""
    queries, keys = q_BSND.shape[1], k_BTGD.shape[1]
    positions_S = torch.arange(keys - queries, keys, dtype=torch.int32, device=q_BSND.device)
    return first_keys(bounds_BE, positions_S, window)


def _flex(
    q_BSND: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    bounds_BE: Tensor | None,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """FlexAttention: inputs with any strides, and any mask and change of logits."""
    first_BS = _first_keys_of(q_BSND, k_BTGD, bounds_BE, window)
    first_BS = first_BS.expand(q_BSND.shape[0], -1).contiguous()
    q_BNSD, k_BGTD, v_BGTD = (x.transpose(1, 2) for x in (q_BSND, k_BTGD, v_BTGD))
    attend = _compiled_flex_attention()
    return attend(q_BNSD, k_BGTD, v_BGTD, first_BS, scale, softcap).transpose(1, 2)


def _blocks(
    q_BSND: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    bounds_BE: Tensor | None,
    *,
    window: int | None,
    **options: float | None,
) -> Tensor:
    first_BS = _first_keys_of(q_BSND, k_BTGD, bounds_BE, window)
    return block_attention(q_BSND, k_BTGD, v_BTGD, first_BS, window=window, **options)


BACKENDS: dict[str, Callable[..., Tensor]] = {
    "reference": document_attention_ref,
    "flash": _flash,
    "flex": _flex,
    "cpu": cpu_attention,
    "blocks": _blocks,
}
ON_GPU, WITH_SOFTCAP = "flash", "flex"  # in 16 bits; fp32 on a GPU takes the blocks
FOR_GPUS = ("flash", "flex")  # backends of GPUs for 16 bits


def default_backend(x: Tensor, softcap: float | None) -> str:
    """The backend for queries, keys and values with the device and the dtype of x."""
    if x.is_cuda and x.dtype.itemsize == 2:
        return ON_GPU if softcap is None else WITH_SOFTCAP
    return "cpu" if x.is_cpu and softcap is None else "blocks"


def document_attention(
    q_BSND: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    bounds_BE: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention as the module's docstring defines it; returns [B, S, N, D].

    `bounds_BE`: int32, see `coatlm.data.batches.document_bounds`; None if each sample is a single
    document. `scale` is 1 / sqrt(D) unless given; `window` is in keys, the query's own included.
    `backend` is a name in BACKENDS; by default it follows from the device, the dtype and `softcap`.
    """
    backend = backend or default_backend(q_BSND, softcap)
    if backend == "flash" and bounds_BE is not None:
        # all samples are one dimension: copied here if they are not, so that a mode sees the copy
        q_BSND, k_BTGD, v_BTGD = (
            x.flatten(0, 1).unflatten(0, x.shape[:2]) for x in (q_BSND, k_BTGD, v_BTGD)
        )
    if has_torch_function((q_BSND, k_BTGD, v_BTGD)):  # a mode such as SavedInFp8, which watches
        return handle_torch_function(
            document_attention,
            (q_BSND, k_BTGD, v_BTGD),
            q_BSND,
            k_BTGD,
            v_BTGD,
            bounds_BE,
            scale=scale,
            window=window,
            softcap=softcap,
            backend=backend,
        )
    attend = BACKENDS[backend]
    return attend(q_BSND, k_BTGD, v_BTGD, bounds_BE, scale=scale, window=window, softcap=softcap)
