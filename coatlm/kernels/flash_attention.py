"""Causal FlashAttention-2 (arXiv 2307.08691) with gradients of the same bits in every run.

    o = softmax(scale q k^T, masked) v        query i attends to the keys j <= i

A thread block of backward has a block of keys, and finds their gradients and a share of dq. By
default the shares are added to one fp32 sum with atomics, in any order. With torch's deterministic
algorithms a thread block instead works through every n-th block of keys, in order, and adds to a
sum of its own; the n sums are then added in order:

    n = ceil(multiprocessors / (B N))        fp32 dq [n, B, S, N, D]

torch has no argument for that, only a mode of the process, which is set here while backward
launches its kernels and restored after it. Forward has the same bits in either mode.

Shapes: S tokens, B samples, N query heads, G key/value heads, D elements per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils import deterministic as torch_deterministic

deterministic: Any = torch_deterministic  # Any: torch gives the module a class with properties
DETERMINISTIC = 2  # torch's debug mode "error": deterministic algorithms, or an error without one


def flash_attention(
    q_BSND: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, *, scale: float | None = None
) -> Tensor:
    """Attention as the module's docstring defines it, on a GPU; returns [B, S, N, D].

    `scale` is 1 / sqrt(D) unless given. Tensors are BF16 or FP16, D is a multiple of 8 up to 256;
    torch raises RuntimeError for others.
    """
    if has_torch_function((q_BSND, k_BSGD, v_BSGD)):  # a mode such as SavedInFp8, which watches
        qkv = (q_BSND, k_BSGD, v_BSGD)
        return handle_torch_function(flash_attention, qkv, *qkv, scale=scale)
    return _FlashAttention.apply(q_BSND, k_BSGD, v_BSGD, scale)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BSND: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, scale: float | None
    ) -> Tensor:
        length = q_BSND.shape[1]
        o_BSND, lse_BNS, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            *(q_BSND, k_BSGD, v_BSGD, None, None),  # no cumulative lengths
            *(length, length, 0.0, True, False),  # dropout, causal, debug mask
            scale=scale,
        )
        ctx.save_for_backward(q_BSND, k_BSGD, v_BSGD, o_BSND, lse_BNS, seed, offset)
        ctx.scale = scale
        return o_BSND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BSND: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        *saved, seed, offset = ctx.saved_tensors  # of dropout, which is off: unused
        length = do_BSND.shape[1]
        with deterministic_algorithms():
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                *(do_BSND, *saved, None, None),
                *(length, length, 0.0, True, seed, offset),
                scale=ctx.scale,
            )
        return dq, dk, dv, None


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """A context in which torch's operations take their deterministic algorithms.

    This is a mode of the process: leave the context as soon as the kernels are launched. The mode
    would also fill every new tensor with NaN, which is switched off here.
    """
    mode, fills = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False
    torch.set_deterministic_debug_mode(DETERMINISTIC)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = fills
