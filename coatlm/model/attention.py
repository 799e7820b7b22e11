"""Causal self-attention of a Llama layer: QKV -> RoPE -> softmax(Q K^T / sqrt(d)) V -> output.

Shapes: S tokens of this rank, B samples, N query heads, G key/value heads, D elements per head, T
tokens of a whole sample. Causal attention to whole samples has several backends on a GPU, between
which a run chooses by time (attention_backends.py).

Context parallelism. Ranks exchange heads where their number allows it (coatlm/parallel/context.py):
each attends with some heads of whole samples, as without context parallelism. Else rank r of n
holds the chunks r and 2n-1-r of 2n (zigzag), which balances the causal work. Keys and values are
all-gathered. Each of the two query chunks attends to the prefix of the sequence that ends with this
chunk: causal attention aligned at the lower right corner. With cp_comm=p2p ranks send each other
keys and values instead, and attend to those of one rank at a time
(coatlm/parallel/ring_attention.py). With cp_comm_kv=fp8 keys and values are sent in FP8, and every
rank attends to what is decoded from that, its own keys included: the result does not depend on
which rank holds a key.

Documents, windows and soft caps are as coatlm/kernels/document_attention.py defines them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from coatlm.config import CpCommKv
from coatlm.kernels.document_attention import document_attention
from coatlm.kernels.rope import rope, split_qkv_rope
from coatlm.megatron import SelfAttention as MegatronSelfAttention
from coatlm.megatron import tensor_parallel
from coatlm.model.attention_backends import (
    Shape,
    causal_attention,
    chosen_backend,
    torch_attention,
)
from coatlm.model.layers import Branch, RMSNorm
from coatlm.parallel.context import (
    attend_with_own_heads,
    gather_zigzag,
    gather_zigzag_codes,
    head_parts,
)
from coatlm.parallel.ring_attention import zigzag_attention


class CoreAttention(nn.Module):
    """Causal softmax(Q K^T / sqrt(D)) V on one or more cp ranks.

    `multiplier` replaces 1 / sqrt(D). A query attends to the last `window` keys up to its own, or
    to all. `softcap` bounds the logits: x becomes softcap tanh(x / softcap). `comm` is what ranks
    exchange: a2a: heads, and each holds one chunk of a sample; p2p and all_gather: keys, and each
    holds two chunks. p2p is for causal attention to whole samples. With `comm_kv` fp8 ranks send
    keys and values in FP8, in calls that give the block size.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *_: Any,
        pg_collection: Any,
        multiplier: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        comm: str = "all_gather",
        comm_kv: CpCommKv = "bf16",
        **__: Any,
    ):
        super().__init__()
        if window is not None and window < 1:
            raise ValueError(f"window={window} keys: must be at least 1, the query's own position")
        if softcap is not None and not 0 < softcap < math.inf:
            raise ValueError(f"softcap={softcap}: must be above 0 and finite")
        self.cp_group, self.multiplier = pg_collection.cp, multiplier
        self.window, self.softcap = window, softcap
        self.comm, self.comm_kv = comm, comm_kv
        self.backends: Mapping[Shape, str] = {}  # those that were chosen by time

    def forward(
        self,
        q_SBND: Tensor,
        k_SBGD: Tensor,
        v_SBGD: Tensor,
        attention_mask: Tensor | None = None,
        block_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Returns [S, B, N*D]. In place of a mask there may be document bounds [B, E].

        With documents the samples lie one behind the other: all tensors are [B S, 1, ...].
        `block_size`: the elements per scale of keys and values that are saved in FP8 for backward.
        """
        size_sent = block_size if self.comm_kv == "fp8" else None
        bounds_BE, rank, size = attention_mask, self.cp_group.rank(), self.cp_group.size()
        if bounds_BE is not None:
            samples = bounds_BE.shape[0]
            q_SBND, k_SBGD, v_SBGD = (
                x.view(samples, -1, *x.shape[2:]).transpose(0, 1) for x in (q_SBND, k_SBGD, v_SBGD)
            )
        if size == 1:
            o_SBND = self._attend(q_SBND, k_SBGD, v_SBGD, bounds_BE)
        elif self.comm == "a2a":
            attend = partial(self._attend, bounds_BE=bounds_BE)
            o_SBND = attend_with_own_heads(
                attend, q_SBND, k_SBGD, v_SBGD, self.cp_group, block_size=size_sent
            )
        elif self.comm == "p2p" and not self._masked(bounds_BE):
            backend = self._chosen(q_SBND, k_SBGD)
            o_SBND = zigzag_attention(
                *(q_SBND, k_SBGD, v_SBGD, self.cp_group),
                scale=self.multiplier,
                backend=backend,
                block_size=size_sent,
            )
        else:
            gather = gather_zigzag
            if size_sent is not None:
                gather = partial(gather_zigzag_codes, block_size=size_sent)
            k_TBGD, v_TBGD = (gather(x, self.cp_group) for x in (k_SBGD, v_SBGD))
            length = q_SBND.shape[0] // 2
            outputs = []
            for chunk, q in zip((rank, 2 * size - 1 - rank), q_SBND.chunk(2), strict=True):
                end = (chunk + 1) * length
                outputs.append(self._attend(q, k_TBGD[:end], v_TBGD[:end], bounds_BE))
            o_SBND = torch.cat(outputs)
        if bounds_BE is not None:
            o_SBND = o_SBND.transpose(0, 1).flatten(0, 1)[:, None]
        return o_SBND.flatten(2)

    def shapes(
        self, samples: int, tokens: int, *, heads: int, kv_heads: int, head_dim: int
    ) -> list[Shape]:
        """The shapes for which this rank has a choice of backends, given those of q, k and v.

        None with documents, windows or soft caps, and none for a chunk of queries that attends to
        more keys than the chunk's own. Where ranks send each other keys, the shape is that of the
        attention of a rank's queries to its own keys.
        """
        rank, size = self.cp_group.rank(), self.cp_group.size()
        if self._masked(None):
            return []
        if size > 1 and self.comm == "a2a":
            shares = size * head_parts(kv_heads // size)
            tokens, heads, kv_heads = size * tokens, heads // shares, kv_heads // shares
        elif size > 1 and self.comm != "p2p":
            if rank > 0:
                return []
            tokens //= 2  # the chunk 0, the only one with as many keys as queries
        return [Shape(samples, tokens, heads, kv_heads, head_dim, self.multiplier)]

    def _chosen(self, q_SBND: Tensor, k_SBGD: Tensor) -> str | None:
        """The backend that was chosen by time for pieces of attention, if it computes them."""
        name = chosen_backend(q_SBND, k_SBGD, self.multiplier, self.backends)
        return None if name == "efficient" else name

    def _masked(self, bounds_BE: Tensor | None) -> bool:
        return bounds_BE is not None or self.window is not None or self.softcap is not None

    def _attend(
        self, q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, bounds_BE: Tensor | None
    ) -> Tensor:
        """Attention [S, B, N, D] of the last S of T positions."""
        if self._masked(bounds_BE):
            o_BSND = document_attention(
                q_SBND.transpose(0, 1),
                k_TBGD.transpose(0, 1),
                v_TBGD.transpose(0, 1),
                bounds_BE,
                scale=self.multiplier,
                window=self.window,
                softcap=self.softcap,
            )
            return o_BSND.transpose(0, 1)
        queries, keys = q_SBND.shape[0], k_TBGD.shape[0]
        if queries == keys:
            return causal_attention(q_SBND, k_TBGD, v_TBGD, self.multiplier, self.backends)
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler

        mask = causal_lower_right(queries, keys)
        return torch_attention(q_SBND, k_TBGD, v_TBGD, self.multiplier, mask=mask)


class SelfAttention(MegatronSelfAttention):
    """megatron-core's self-attention, with a fused split, norm and RoPE between its linears.

    Parameter names and checkpoints are those of megatron-core, but for the norm of the `Branch`,
    whose options are `branch`. With `norm_all_heads` the norms of queries and keys are over the
    elements of all heads. With `window_rotary` the layer has the rotary tables of layers with a
    sliding window.
    """

    def __init__(
        self,
        config: Any,
        *args: Any,
        branch: Mapping[str, Any] | None = None,
        norm_all_heads: bool = False,
        window_rotary: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.window_rotary = window_rotary
        self.branch = Branch(config, **(branch or {}))
        self.norm_all_heads = norm_all_heads
        if norm_all_heads:
            head_dim, eps = self.hidden_size_per_attention_head, config.layernorm_epsilon
            heads, kv_heads = config.num_attention_heads, config.num_query_groups
            self.q_layernorm = RMSNorm(config, heads * head_dim, eps)
            self.k_layernorm = RMSNorm(config, kv_heads * head_dim, eps)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [S(/tp), B, H], rotary_pos_emb as `own_tables` takes it -> [S(/tp), B, H]."""
        qkv_SBW, _ = self.linear_qkv(hidden_states)
        assert rotary_pos_emb is not None
        cos_sin = self.own_tables(rotary_pos_emb)
        if self.checkpoint_core_attention and self.training:
            context = tensor_parallel.checkpoint(
                self._attend, False, qkv_SBW, cos_sin, attention_mask
            )
        else:
            context = self._attend(qkv_SBW, cos_sin, attention_mask)
        out, bias = self.linear_proj(context)
        return self.branch(out), bias

    def core_shapes(self, samples: int, tokens: int) -> list[Shape]:
        """`CoreAttention.shapes` of samples of which this rank holds `tokens` tokens each."""
        return self.core_attention.shapes(
            samples,
            tokens,
            heads=self.num_attention_heads_per_partition,
            kv_heads=self.num_query_groups_per_partition,
            head_dim=self.hidden_size_per_attention_head,
        )

    def _attend(self, qkv_SBW: Tensor, cos_sin: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.core_attention(*self.split_rotated(qkv_SBW, cos_sin), attention_mask)

    def own_tables(self, rotary_pos_emb: Tensor) -> Tensor:
        """cos and sin of this layer, [2, S, D/2].

        `rotary_pos_emb` is [2, S, D/2], or [4, S, D/2] with those of layers with a window last.
        """
        return rotary_pos_emb[2:] if self.window_rotary else rotary_pos_emb[:2]

    def split_rotated(self, qkv_SBW: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the QKV output into q [S, B, N, D], k and v [S, B, G, D]; apply norm and RoPE."""
        kv_heads = self.num_query_groups_per_partition
        queries_per_kv_head = self.num_attention_heads_per_partition // kv_heads
        head_dim = self.hidden_size_per_attention_head
        qkv_SBGW = qkv_SBW.unflatten(-1, (kv_heads, (queries_per_kv_head + 2) * head_dim))
        cos, sin = cos_sin
        if self.q_layernorm is None:
            return split_qkv_rope(
                qkv_SBGW, cos, sin, queries_per_kv_head=queries_per_kv_head, head_dim=head_dim
            )
        sizes = [queries_per_kv_head * head_dim, head_dim, head_dim]
        # copies: a view that is saved for backward would hold the memory of all of qkv
        q, k, v = (part.contiguous() for part in qkv_SBGW.split(sizes, dim=-1))
        q = q.unflatten(-1, (queries_per_kv_head, head_dim)).flatten(2, 3)
        q, k = self._normalized(q, self.q_layernorm), self._normalized(k, self.k_layernorm)
        return rope(q, cos, sin), rope(k, cos, sin), v

    def _normalized(self, x_SBND: Tensor, norm: nn.Module) -> Tensor:
        """Normalize each head, or all heads at once."""
        if not self.norm_all_heads:
            return norm(x_SBND)
        return norm(x_SBND.flatten(2)).view_as(x_SBND)
