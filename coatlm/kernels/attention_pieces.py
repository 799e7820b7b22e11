"""Attention in pieces: queries attend to some keys at a time, and the outputs are merged.

FlashAttention-2 (arXiv 2307.08691, section 3.1) computes with each output the log-sum-exp of its
logits. Outputs o_i of the same queries for disjoint sets of keys have the sum

    lse = log(sum_i exp(lse_i))        o = sum_i exp(lse_i - lse) o_i

which attention_merge.py computes. In backward the probabilities of a piece are exp(scale q k^T -
lse) with the lse of all keys, and the sum over keys that the gradient of softmax needs is
rowsum(do o) with the output of all keys. So a kernel's backward pass, given the merged o and lse,
computes the piece's share of dq, and the gradients of its keys and values.

    cudnn    cuDNN's kernels
    flash    FlashAttention-2, with gradients of the same bits in every run
    cpu      torch's FlashAttention for CPUs
    matmul   the definition, which materializes all probabilities

A piece is causal, with as many queries as keys, or each of its queries attends to all of its keys.

Shapes: S queries, T keys, B samples, N query heads, G key/value heads, D elements per head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from coatlm.kernels.attention_merge import wide_dtype
from coatlm.kernels.cpu_gemms import widened
from coatlm.kernels.flash_attention import deterministic_algorithms

aten: Any = torch.ops.aten
RANDOM = slice(6, 8)  # what a GPU's forward pass returns for dropout, which is off


class AttendedKeys(NamedTuple):
    """The output of attention to some keys, and what its backward pass needs."""

    o_SBND: Tensor
    lse_BNS: Tensor  # fp32
    state: tuple[Tensor, ...] = ()  # of a random generator, which the kernels do not use


def piece_backend(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor) -> str:
    """The backend for these inputs: on a GPU cudnn or flash, the first that accepts them."""
    if not q_SBND.is_cuda:
        return "cpu"
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBND, k_SBGD, v_SBGD))
    params = SDPAParams(q, k, v, None, 0.0, True, q_SBND.shape[2] != k_SBGD.shape[2])
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        if q_SBND.shape[-1] % 8 == 0 and can_use_cudnn_attention(params):
            return "cudnn"
        if q_SBND.shape[-1] % 8 == 0 and can_use_flash_attention(params):
            return "flash"
    return "matmul"


def attend_piece(
    q_SBND: Tensor,
    k_TBGD: Tensor,
    v_TBGD: Tensor,
    *,
    scale: float | None,
    causal: bool,
    backend: str,
) -> AttendedKeys:
    """Attention of all queries to all keys, or causal. `scale` is 1 / sqrt(D) if None."""
    qkv = [x.permute(1, 2, 0, 3) for x in (q_SBND, k_TBGD, v_TBGD)]
    if backend == "cudnn":
        found = aten._scaled_dot_product_cudnn_attention(*qkv, None, True, 0.0, causal, scale=scale)
        lse_BNS = found[1].flatten(2)  # [B, N, S, 1]
        # not so with TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1, and backward would misread it
        assert lse_BNS.is_contiguous()
    elif backend == "flash":
        found = aten._scaled_dot_product_flash_attention(*qkv, 0.0, causal, scale=scale)
        lse_BNS = found[1]
    elif backend == "cpu":
        attend = aten._scaled_dot_product_flash_attention_for_cpu
        found = attend(*qkv, 0.0, causal, scale=scale)
        lse_BNS = found[1].contiguous()
    else:
        assert backend == "matmul"
        return attend_piece_ref(q_SBND, k_TBGD, v_TBGD, scale=scale, causal=causal)
    return AttendedKeys(found[0].permute(2, 0, 1, 3), lse_BNS, tuple(found[RANDOM]))


def piece_gradients(
    do_SBND: Tensor,
    q_SBND: Tensor,
    k_TBGD: Tensor,
    v_TBGD: Tensor,
    merged: AttendedKeys,
    *,
    scale: float | None,
    causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The piece's share of dq [S, B, N, D], and dk and dv [T, B, G, D], in the dtype of q.

    `merged` has the output and the log-sum-exp of these queries over all pieces, and the state that
    a piece of the same backend returned.
    """
    (do, *qkv, o), lse = (
        [x.permute(1, 2, 0, 3) for x in (do_SBND, q_SBND, k_TBGD, v_TBGD, merged.o_SBND)],
        merged.lse_BNS.contiguous(),
    )
    none, lengths = (None, None), (q_SBND.shape[0], k_TBGD.shape[0])
    if backend == "cudnn":
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            *(do, *qkv, o, lse[..., None], *merged.state),
            *(None, *none, *lengths, 0.0, causal),  # no bias, no cumulative lengths, no dropout
            scale=scale,
        )
    elif backend == "flash":
        with deterministic_algorithms():
            grads = aten._scaled_dot_product_flash_attention_backward(
                *(do, *qkv, o, lse, *none, *lengths, 0.0, causal, *merged.state),
                scale=scale,
            )
    elif backend == "cpu":
        do, *qkv, o = widened(do, *qkv, o)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(do, *qkv, o, lse, 0.0, causal), scale=scale
        )
        grads = [grad.to(q_SBND.dtype) for grad in grads]
    else:
        assert backend == "matmul"
        return piece_gradients_ref(
            do_SBND, q_SBND, k_TBGD, v_TBGD, merged, scale=scale, causal=causal
        )
    dq, dk, dv = (x.permute(2, 0, 1, 3) for x in grads)
    return dq, dk, dv


def attend_piece_ref(
    q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, *, scale: float | None, causal: bool
) -> AttendedKeys:
    """The definition of `attend_piece`."""
    logits_BGFST, _, _ = _logits(q_SBND, k_TBGD, scale, causal)
    lse_BGFS = logits_BGFST.logsumexp(-1)
    p_BGFST = (logits_BGFST - lse_BGFS[..., None]).exp().to(v_TBGD.dtype)
    o_SBGFD = torch.einsum("bgfst,tbgd->sbgfd", p_BGFST, v_TBGD)
    return AttendedKeys(o_SBGFD.flatten(2, 3), lse_BGFS.flatten(1, 2))


def piece_gradients_ref(
    do_SBND: Tensor,
    q_SBND: Tensor,
    k_TBGD: Tensor,
    v_TBGD: Tensor,
    merged: AttendedKeys,
    *,
    scale: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of `piece_gradients`."""
    logits_BGFST, scale, heads = _logits(q_SBND, k_TBGD, scale, causal)
    do, o, q = (x.unflatten(2, heads).to(logits_BGFST) for x in (do_SBND, merged.o_SBND, q_SBND))
    k, v = (x.to(logits_BGFST) for x in (k_TBGD, v_TBGD))
    p = (logits_BGFST - merged.lse_BNS.unflatten(1, heads)[..., None]).exp()
    dp = torch.einsum("sbgfd,tbgd->bgfst", do, v)
    ds = scale * p * (dp - torch.einsum("sbgfd,sbgfd->bgfs", do, o)[..., None])
    dq = torch.einsum("bgfst,tbgd->sbgfd", ds, k).flatten(2, 3)
    dk = torch.einsum("bgfst,sbgfd->tbgd", ds, q)
    dv = torch.einsum("bgfst,sbgfd->tbgd", p, do)
    dtype = q_SBND.dtype
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def _logits(
    q_SBND: Tensor, k_TBGD: Tensor, scale: float | None, causal: bool
) -> tuple[Tensor, float, tuple[int, int]]:
    """scale q k^T [B, G, F, S, T] for F query heads per key head, at least in fp32; scale; G, F."""
    kv_heads, wide = k_TBGD.shape[2], wide_dtype(q_SBND)
    heads = (kv_heads, q_SBND.shape[2] // kv_heads)
    scale = q_SBND.shape[-1] ** -0.5 if scale is None else scale
    q, k = q_SBND.unflatten(2, heads).to(wide), k_TBGD.to(wide)
    logits = scale * torch.einsum("sbgfd,tbgd->bgfst", q, k)
    if causal:
        above = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(above, -torch.inf)
    return logits, scale, heads
