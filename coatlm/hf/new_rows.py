"""Rows that the vocabulary of a Hugging Face model lacks: new ids of its tokenizer, and padding.

An id of the tokenizer begins with the mean of the stored rows, around which transformers draws such
rows, in the embedding and in the output layer. A row of zeros would be a bad start: the gradient of
RMSNorm at zero is 1 / sqrt(eps), so the new tokens alone would decide the norm by which gradients
are clipped. Rows of padding are zero, since no token uses them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 4096  # rows that are summed at once


def mean_row(read: Callable[[int, int], Tensor], rows: int) -> Tensor:
    """The mean of the `rows` rows of a matrix, fp64; `read` returns those in [first, stop).

    An error in fp64 hardly ever changes a rounded BF16 or fp32 value, whatever the order of a sum.
    """
    total: Tensor | float = 0.0
    for first in range(0, rows, CHUNK):
        total = total + read(first, min(first + CHUNK, rows)).double().sum(0)
    assert isinstance(total, Tensor)
    return total / rows


def with_rows(tensor: Tensor, rows: int, ids: int = 0) -> Tensor:
    """Pad a tensor to `rows` rows: those below `ids` with the mean of its rows, others with zeros.

    A tensor that has `rows` rows is returned as it is.
    """
    stored = tensor.shape[0]
    if rows == stored:
        return tensor
    added = tensor.new_zeros(rows - stored, *tensor.shape[1:])
    if ids > stored:
        added[: ids - stored] = mean_row(lambda a, b: tensor[a:b], stored)
    return torch.cat([tensor, added])
