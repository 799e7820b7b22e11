"""How Megatron splits the tensors of a model over tensor-parallel ranks.

    embedding, output layer, linear_qkv     rows
    linear_fc1                              rows of gate and rows of up
    linear_proj, linear_fc2                 columns

Within a rank, linear_fc1 is gate|up again. Norms are not split: every rank has the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
GATE_UP = "mlp.linear_fc1.weight"
SPLIT_ROWS = (EMBEDDING, HEAD, GATE_UP, "linear_qkv.weight", "linear_qkv.bias")
SPLIT_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def split_axis(key: str) -> int | None:
    """The axis along which a tensor is split; None for one that every rank has."""
    if key.endswith(SPLIT_ROWS):
        return 0
    return 1 if key.endswith(SPLIT_COLUMNS) else None


def join(key: str, parts: Sequence[Tensor]) -> Tensor:
    """The whole tensor, in memory of its own, from the parts of all ranks."""
    if key.endswith(GATE_UP):
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[i] for i in (0, 1) for half in halves])
    axis = split_axis(key)
    return parts[0].clone() if axis is None else torch.cat(list(parts), axis)
