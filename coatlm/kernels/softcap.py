"""The soft cap of logits, c tanh(logits / c), which keeps them within (-c, c) (Gemma 2, s2)."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """c tanh(logits / c) in the dtype of the logits; the logits themselves without a cap."""
    return logits if cap is None else (cap * torch.tanh(logits.float() / cap)).to(logits.dtype)


@triton.jit
def tanh(x):
    """tanh of fp32; near 0 its absolute error is a few 2^-24, which the cap multiplies."""
    return 2 * tl.sigmoid(2 * x) - 1
