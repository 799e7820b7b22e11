"""A megatron-core transformer layer whose forward pass is the FP8 flow of flow.py.

Its modules, parameters and checkpoints are those of a `local` layer; only what runs differs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from coatlm.fp8.attention import attend_keeping_fp8
from coatlm.fp8.gemm import Plans
from coatlm.fp8.recipe import FlowRecipe
from coatlm.megatron import TransformerLayer, tensor_parallel
from coatlm.model.flow import Flow, NormQKV, ProjMLP
from coatlm.parallel.tensor import TensorParallel, Wire


class CoatTransformerLayer(TransformerLayer):
    """megatron's layer, its parameters and checkpoints, with the FP8 flow as its forward pass."""

    def __init__(
        self, *args: Any, recipe: FlowRecipe, wire: Wire, plans: Plans, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        group = self.self_attention.linear_qkv.tp_group
        parallel = TensorParallel(group, self.config.sequence_parallel, wire)
        self.flow = Flow(recipe, parallel, self.config.layernorm_epsilon, plans)
        for weight in self.linear_weights():
            weight.main_grad_stale = False  # type: ignore[attr-defined]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """hidden [S(/tp), B, H], rotary_pos_emb = (cos, sin) as [2, S, D/2]."""
        flow, attention = self.flow, self.self_attention
        flow.keeping = flow.recipe.keep_weights and self.training
        if not self.training:
            self.forget_weights()
        assert rotary_pos_emb is not None
        cos, sin = rotary_pos_emb
        head_dim = attention.hidden_size_per_attention_head
        groups = attention.num_query_groups_per_partition
        heads_per_group = attention.num_attention_heads_per_partition // groups
        fused = attention.q_layernorm is None
        linear = attention.linear_qkv
        *made, residual = NormQKV.apply(
            hidden_states,
            self.input_layernorm.weight,
            linear.weight,
            linear.bias,
            cos if fused else None,
            sin if fused else None,
            heads_per_group,
            head_dim,
            flow,
            torch.is_grad_enabled(),
        )
        q, k, v = made if fused else attention.split_rotated(made[0], rotary_pos_emb)
        context, codes, scale = self._attend(q, k, v, attention_mask)
        out = ProjMLP.apply(
            context,
            codes,
            scale,
            residual,
            attention.linear_proj.weight,
            self.pre_mlp_layernorm.weight,
            self.mlp.linear_fc1.weight,
            self.mlp.linear_fc2.weight,
            flow,
            torch.is_grad_enabled(),
        )
        return out, None

    def linear_weights(self) -> list[nn.Parameter]:
        """Those of the FP8 GEMMs, [out, in] of this rank, in the order of their use.

        Who sets `main_grad_stale` on one has its next gradient written over `main_grad`.
        """
        attention, mlp = self.self_attention, self.mlp
        linears = (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
        return [linear.weight for linear in linears]

    def forget_weights(self) -> None:
        """Weights are new: what was kept of them in FP8 is not theirs any more."""
        self.flow.kept.clear()

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The attention output [S, B, N*D], and its FP8 codes and scales where they are kept."""
        attention, size = self.self_attention, self.flow.recipe.attention_group

        def attend() -> Tensor:
            core = attention.core_attention
            if attention.checkpoint_core_attention and self.training:
                return tensor_parallel.checkpoint(core, False, q, k, v, attention_mask)
            return core(q, k, v, attention_mask)

        if not size or not torch.is_grad_enabled():
            return attend(), None, None
        out, kept = attend_keeping_fp8(attend, size, q.shape[-1])
        return out, kept.codes, kept.scale


def flows_of(layers: Iterable[nn.Module]) -> dict[int, Flow]:
    """Those of the FP8 layers among these, by number in the whole model, from 1."""
    return {
        layer.layer_number: layer.flow
        for layer in layers
        if isinstance(layer, CoatTransformerLayer)
    }


def tune_layers(layers: Iterable[nn.Module], tokens: int, grad_dtype: torch.dtype) -> None:
    """Before training on a GPU: let FP8 layers choose their GEMMs for microbatches of `tokens`.

    `grad_dtype`: of main gradients. Other layers, and a CPU, have nothing to choose.
    """
    for layer in layers:
        if not isinstance(layer, CoatTransformerLayer) or not torch.cuda.is_available():
            continue
        layer.flow.tune(layer.linear_weights(), tokens, grad_dtype)
