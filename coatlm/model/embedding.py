"""The embedding, hidden = weight[token], with a gradient of the same bits in every run.

    dweight[v] = sum of dhidden[t] over the tokens t of entry v

On a GPU torch sorts the tokens by entry and sums in that order, in fp32. For tables of fewer than 4
rows per multiprocessor, newer versions split these sums over thread blocks, which add their parts
with atomics, in any order. Gradients of smaller tables are therefore computed with more rows, which
stay zero. On a CPU torch would round a sum to BF16 after every token, so dhidden is in fp32 there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from coatlm.megatron import tensor_parallel

ROWS = 1024  # 4 per multiprocessor of GPUs with up to 256


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight_VH: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.V = len(weight_VH)
        return F.embedding(tokens, weight_VH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dhidden: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        rows = max(ctx.V, ROWS) if dhidden.is_cuda else ctx.V
        summed = dhidden if dhidden.is_cuda else dhidden.float()
        dweight = torch.ops.aten.embedding_dense_backward(summed, tokens, rows, -1, False)
        return None, dweight[: ctx.V].to(dhidden.dtype)


def lookup(tokens: Tensor, weight_VH: Tensor) -> Tensor:
    """Rows of `weight` by int64 `tokens` of any shape: [..., H], differentiable in the weight."""
    found: Tensor = _Lookup.apply(tokens, weight_VH)
    return found


class Embedding(tensor_parallel.VocabParallelEmbedding):
    """megatron-core's embedding, of the vocabulary entries of this tensor-parallel rank."""

    def forward(self, input_: Tensor) -> Tensor:
        """tokens [B, S] -> [B, S, H]; with sequence parallelism this rank's part of [S, B, H]."""
        if self.tp_group.size() == 1:
            return lookup(input_, self.weight)
        first, end = self.vocab_start_index, self.vocab_end_index
        outside = (input_ < first) | (input_ >= end)
        rows = (input_ - first).masked_fill(outside, 0)
        hidden = lookup(rows, self.weight).masked_fill(outside[..., None], 0.0)
        if not self.reduce_scatter_embeddings:
            return tensor_parallel.reduce_from_tensor_model_parallel_region(hidden, self.tp_group)
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region(
            hidden.transpose(0, 1).contiguous(), group=self.tp_group
        )
