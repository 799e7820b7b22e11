"""Rotation of rows: x[..., K] -> x H, one Hadamard matrix of size n for each n elements of a row.

    n = 64, or 16 where 64 does not divide K
    H[i, j] = (-1)^b / sqrt(n), b the number of bits that i and j have in common; 0 <= i, j < n

H is symmetric and orthogonal, H H = 1. So a rotation is its own inverse, lengths and products of
rows do not change, (x H)(w H)^T = x w^T, and an element far above the others of its n is spread
over all of them. Rows that are rounded to integers lose less then, because their scale is that of
their largest element (QuaRot, arXiv 2404.00456, section 3, has such rotations for inference).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def span_of(k: int) -> int:
    """n for rows of k elements. Raises ValueError unless they are multiples of 16."""
    if k % 16:
        raise ValueError(f"rows of {k}: must be multiples of 16 long")
    return 64 if k % 64 == 0 else 16


@functools.cache
def hadamard(n: int, device: torch.device) -> Tensor:
    """H, fp32 [n, n]."""
    h = torch.ones(1, 1, device=device)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / n**0.5


def rotate(x: Tensor) -> Tensor:
    """x H in fp32. Raises ValueError unless rows are multiples of 16 long."""
    n = span_of(x.shape[-1])
    return (x.float().unflatten(-1, (-1, n)) @ hadamard(n, x.device)).flatten(-2)
