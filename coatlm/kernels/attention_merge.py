"""Sum of two attentions of the same queries to disjoint keys (arXiv 2307.08691, section 3.1).

With the log-sum-exp of the logits of each part, and w the share of the second part of the sum,

    w = exp(lse_2) / (exp(lse_1) + exp(lse_2)) = 1 / (1 + exp(lse_1 - lse_2))
    o = o_1 + w (o_2 - o_1)        lse = log(exp(lse_1) + exp(lse_2))

Arithmetic is in fp32, rounded once to the dtype of o. Shapes: S queries, B samples, N heads, D
elements per head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 2048, 4  # elements per program: with WARPS, a thread holds 32 bytes of BF16


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which shares of x are summed: fp32, or that of x if it is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def merge_ref_(o_SBND: Tensor, lse_BNS: Tensor, other_SBND: Tensor, other_lse_BNS: Tensor) -> None:
    """The definition of o, in place; lse stays as it is."""
    wide = wide_dtype(o_SBND)
    w_SBN1 = torch.sigmoid(other_lse_BNS - lse_BNS).permute(2, 0, 1)[..., None]
    o_SBND.copy_(torch.lerp(o_SBND.to(wide), other_SBND.to(wide), w_SBN1.to(wide)))


@triton.jit
def _merge_kernel(
    o_ptr,
    lse_ptr,
    other_ptr,
    other_lse_ptr,
    rows,  # S B N
    B,
    N,
    o_s,
    o_b,
    o_n,
    lse_b,
    lse_n,
    other_s,
    other_b,
    other_n,
    other_lse_b,
    other_lse_n,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # the power of two from D
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n, b, s = row % N, row // N % B, row // N // B
    d = tl.arange(0, WIDTH)[None, :]
    inside = row < rows
    mask = inside[:, None] & (d < D)
    lse = tl.load(lse_ptr + b * lse_b + n * lse_n + s, mask=inside, other=0.0)
    at = other_lse_ptr + b * other_lse_b + n * other_lse_n + s
    w = 1.0 / (1.0 + tl.exp(lse - tl.load(at, mask=inside, other=0.0)))
    o_at = o_ptr + (s * o_s + b * o_b + n * o_n)[:, None] + d
    other_at = other_ptr + (s * other_s + b * other_b + n * other_n)[:, None] + d
    o = tl.load(o_at, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(other_at, mask=mask, other=0.0).to(tl.float32)
    o += w[:, None] * (other - o)
    tl.store(o_at, o.to(o_ptr.dtype.element_ty), mask=mask)


def _tile(head_dim: int) -> dict[str, int]:
    width = triton.next_power_of_2(head_dim)
    return {"D": head_dim, "WIDTH": width, "ROWS": max(TILE // width, 1)}


def _launch(o_SBND: Tensor, lse_BNS: Tensor, other_SBND: Tensor, other_lse_BNS: Tensor) -> None:
    tokens, samples, heads, head_dim = o_SBND.shape
    assert all(x.stride(-1) == 1 for x in (o_SBND, lse_BNS, other_SBND, other_lse_BNS))
    rows, tile = tokens * samples * heads, _tile(head_dim)
    _merge_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
        o_SBND,
        lse_BNS,
        other_SBND,
        other_lse_BNS,
        *(rows, samples, heads),
        *o_SBND.stride()[:3],
        *lse_BNS.stride()[:2],
        *other_SBND.stride()[:3],
        *other_lse_BNS.stride()[:2],
        **tile,
        num_warps=WARPS,
    )


def merge_(o_SBND: Tensor, lse_BNS: Tensor, other_SBND: Tensor, other_lse_BNS: Tensor) -> None:
    """Add attention to other keys to o and lse, in place, as the module's docstring defines it.

    Statistics are fp32, or as wide as o. All tensors may be views with contiguous last dimensions.
    """
    merge = _launch if o_SBND.is_cuda else merge_ref_
    merge(o_SBND, lse_BNS, other_SBND, other_lse_BNS)
    lse_BNS.copy_(torch.logaddexp(lse_BNS, other_lse_BNS))
