"""What the loss computes from a chunk of logits: statistics of its rows, and their gradient.

Shapes: T tokens, C columns, which are entries `first` to `first` + C of the vocabulary. `cap` is a
soft cap (kernels/softcap.py). Formulas are in loss.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatlm.kernels.softcap import soft_capped, tanh

BLOCK = 4096  # logits per iteration of a Triton program
WARPS = 8


def row_stats_ref(
    logits_TC: Tensor, labels_T: Tensor, first: int, cap: float | None = None
) -> Tensor:
    """[3, T]: max, sum of exp(logit - max), and the label's logit, 0 if it is in another chunk."""
    logits, column = soft_capped(logits_TC.float(), cap), labels_T - first
    here = (column >= 0) & (column < logits.shape[1])
    top = logits.amax(1)
    total = (logits - top[:, None]).exp().sum(1)
    target = logits.gather(1, column.where(here, 0)[:, None])[:, 0].where(here, 0.0)
    return torch.stack((top, total, target))


def logits_grad_ref(
    logits_TC: Tensor,
    labels_T: Tensor,
    lse_T: Tensor,
    dloss_T: Tensor,
    first: int,
    slope_T: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """dlogits of a chunk, in the dtype of the logits. `slope` is 1 + 2 z lse; None without z."""
    columns = torch.arange(first, first + logits_TC.shape[1], device=logits_TC.device)
    logits = soft_capped(logits_TC.float(), cap)
    softmax = (logits - lse_T[:, None]).exp()
    if slope_T is not None:
        softmax *= slope_T[:, None]
    onehot = labels_T[:, None] == columns
    d_TC = (softmax - onehot.float()) * dloss_T[:, None]
    if cap is not None:
        d_TC *= 1 - (logits / cap).square()
    return d_TC.to(logits_TC.dtype)


@triton.jit
def _row_stats_kernel(
    logits_ptr, label_ptr, stats_ptr, T, C, first, BLOCK: tl.constexpr, CAP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * C
    col = tl.arange(0, BLOCK)
    # every lane has its own maximum and sum, so that nothing synchronizes inside the loop; the
    # start is finite because the difference of two infinities is not a number
    top = tl.full([BLOCK], -3.4028234663852886e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, C, BLOCK, num_stages=3):
        at = start + col
        x = tl.load(logits_ptr + at, mask=at < C, other=float("-inf")).to(tl.float32)
        if CAP is not None:
            x = tl.where(at < C, CAP * tanh(x / CAP), float("-inf"))
        scale = tl.exp(-tl.abs(x - top))  # factor of the smaller: old sum or new term
        total = tl.where(x > top, total * scale + 1, total + scale)
        top = tl.maximum(top, x)
    peak = tl.max(top, 0)
    column = tl.load(label_ptr + row) - first
    target = tl.load(logits_ptr + column, mask=(column >= 0) & (column < C), other=0.0)
    target = target.to(tl.float32)
    if CAP is not None:
        target = CAP * tanh(target / CAP)
    tl.store(stats_ptr + row, peak)
    tl.store(stats_ptr + T + row, tl.sum(total * tl.exp(top - peak), 0))
    tl.store(stats_ptr + 2 * T + row, target)


@triton.jit
def _logits_grad_kernel(
    logits_ptr,
    label_ptr,
    lse_ptr,
    dloss_ptr,
    slope_ptr,
    C,
    first,
    BLOCK: tl.constexpr,
    CAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits_ptr + row * C + col
    x = tl.load(at, mask=col < C, other=0.0).to(tl.float32)
    column = (tl.load(label_ptr + row) - first).to(tl.int32)
    if CAP is not None:
        t = tanh(x / CAP)
        x = CAP * t
    softmax = tl.exp(x - tl.load(lse_ptr + row))
    if slope_ptr is not None:
        softmax *= tl.load(slope_ptr + row)
    d = tl.where(col == column, softmax - 1, softmax) * tl.load(dloss_ptr + row)
    if CAP is not None:
        d *= 1 - t * t
    tl.store(at, d.to(logits_ptr.dtype.element_ty), mask=col < C)


def row_stats(logits_TC: Tensor, labels_T: Tensor, first: int, cap: float | None = None) -> Tensor:
    """`row_stats_ref` on a GPU."""
    T, C = logits_TC.shape
    stats_3T = torch.empty((3, T), dtype=torch.float32, device=logits_TC.device)
    _row_stats_kernel[(T,)](
        logits_TC, labels_T, stats_3T, T, C, first, BLOCK=BLOCK, CAP=cap, num_warps=WARPS
    )
    return stats_3T


def logits_grad_(
    logits_TC: Tensor,
    labels_T: Tensor,
    lse_T: Tensor,
    dloss_T: Tensor,
    first: int,
    slope_T: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """`logits_grad_ref` on a GPU; overwrites the logits and returns them."""
    T, C = logits_TC.shape
    rows = logits_TC, labels_T, lse_T, dloss_T, slope_T
    grid = (T, triton.cdiv(C, BLOCK))
    _logits_grad_kernel[grid](*rows, C, first, BLOCK=BLOCK, CAP=cap, num_warps=WARPS)
    return logits_TC
