"""A megatron-core transformer layer whose forward pass is the FP8 flow of flow.py.

Its modules, parameters and checkpoints are those of a `local` layer; only the computation differs.
So a layer can change to BF16 between two steps (`compute_in_bf16`): it then runs the forward pass
of the local layer on its own modules. Or single tensors of it change (`Flow.bf16_tensors`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from coatlm.config import TpCommReduce
from coatlm.config.recipes import FlowRecipe
from coatlm.fp8.attention import attend_saving_fp8, quantize_blocks
from coatlm.fp8.formats import E4M3
from coatlm.fp8.gemm import Plans
from coatlm.fp8.operand import format_of, padded
from coatlm.megatron import TransformerLayer, tensor_parallel
from coatlm.model.bf16_tensors import names_in
from coatlm.model.flow import NormQKV, ProjMLP
from coatlm.model.flow_gemms import Flow
from coatlm.parallel.tensor import TensorParallel


class CoatTransformerLayer(TransformerLayer):
    """megatron-core's layer, with its parameters and checkpoints, whose forward is the FP8 flow."""

    def __init__(
        self,
        *args: Any,
        recipe: FlowRecipe,
        plans: Plans,
        chunks: int = 1,
        sums: TpCommReduce = "bf16",
        **kwargs: Any,
    ) -> None:
        """`chunks`, `sums`: those of `TensorParallel`."""
        super().__init__(*args, **kwargs)
        group = self.self_attention.linear_qkv.tp_group
        parallel = TensorParallel(group, self.config.sequence_parallel, chunks, sums)
        self.flow = Flow(recipe, parallel, self.config.layernorm_epsilon, plans)
        self.in_bf16 = False
        for weight in self.linear_weights():
            weight.main_grad_stale = False  # type: ignore[attr-defined]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """hidden [S(/tp), B, H], rotary_pos_emb as `SelfAttention.own_tables` takes it."""
        if self.in_bf16:
            out, _ = super().forward(
                hidden_states, attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb
            )
            return out, None
        flow, attention = self.flow, self.self_attention
        flow.holds_weights = flow.recipe.keep_weights and self.training
        if not self.training:
            self.forget_weights()
        assert rotary_pos_emb is not None
        cos, sin = cos_sin = attention.own_tables(rotary_pos_emb)
        head_dim = attention.hidden_size_per_attention_head
        kv_heads = attention.num_query_groups_per_partition
        queries_per_kv_head = attention.num_attention_heads_per_partition // kv_heads
        fused = attention.q_layernorm is None
        linear = attention.linear_qkv
        *parts, residual = NormQKV.apply(
            hidden_states,
            self.input_layernorm.weight,
            linear.weight,
            linear.bias,
            cos if fused else None,
            sin if fused else None,
            queries_per_kv_head,
            head_dim,
            flow,
            torch.is_grad_enabled(),
        )
        q, k, v = parts if fused else attention.split_rotated(parts[0], cos_sin)
        context, codes, scale = self._attend(q, k, v, attention_mask)
        del parts, q, k, v  # of which coat-lean has saved codes
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
        """The weights of the FP8 GEMMs, [out, in] of this rank, in the order of their use.

        If a weight has `main_grad_stale` set, its next gradient overwrites `main_grad`.
        """
        attention, mlp = self.self_attention, self.mlp
        linears = (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2)
        return [linear.weight for linear in linears]

    def compute_in_bf16(self, in_bf16: bool) -> None:
        """Choose between the FP8 flow and the local layer. Call it between two steps only."""
        self.in_bf16 = in_bf16
        self.forget_weights()
        for weight in self.linear_weights():
            weight.main_grad_accumulates = in_bf16  # type: ignore[attr-defined]

    def forget_weights(self) -> None:
        """Drop the cached FP8 weights, which an optimizer step or a load has made stale."""
        self.flow.weights.clear()

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The attention output [S, B, N*D], and its FP8 codes and scales if they are saved."""
        attention, saved = self.self_attention, self.flow.attention_in_fp8()
        size = None
        if saved:
            (operand,) = set(saved.values())
            size = operand.granularity.columns
        core = partial(attention.core_attention, block_size=size)

        def attend() -> Tensor:
            if attention.checkpoint_core_attention and self.training:
                return tensor_parallel.checkpoint(core, False, q, k, v, attention_mask)
            return core(q, k, v, attention_mask)

        if size is None or not torch.is_grad_enabled():
            return attend(), None, None
        for name, x in (("q", q), ("k", k), ("v", v)) if self.flow.probe else ():
            if name in saved:
                rows = x.detach().flatten(2).flatten(0, 1)
                self.flow.record(f"{name}_saved", rows, quantize_blocks(rows, size))
        out, o = attend_saving_fp8(attend, size, q, k, v, names=saved)
        return (out, None, None) if o is None else (out, o.codes, o.scale)


def change_layers(
    layers: Iterable[nn.Module], in_bf16: Collection[int], tensors: Collection[str] = ()
) -> None:
    """Let the FP8 layers with the numbers `in_bf16`, and no others, compute in BF16.

    In the others the `tensors`, keys LAYER/TENSOR, and no others are in BF16 (bf16_tensors.py).
    """
    for layer in layers:
        if isinstance(layer, CoatTransformerLayer):
            layer.compute_in_bf16(layer.layer_number in in_bf16)
            layer.flow.bf16_tensors = names_in(tensors, layer.layer_number)


def flows_of(layers: Iterable[nn.Module]) -> dict[int, Flow]:
    """The flows of the FP8 layers among `layers`, by the layer's number in the model, from 1."""
    return {
        layer.layer_number: layer.flow
        for layer in layers
        if isinstance(layer, CoatTransformerLayer)
    }


def tune_layers(
    layers: Iterable[nn.Module], tokens: int, grad_dtype: torch.dtype, choices: dict[str, str]
) -> None:
    """Choose the algorithms of the FP8 layers' GEMMs for microbatches of `tokens` tokens, on a GPU.

    `grad_dtype` is the dtype of main gradients, `choices` as for `Plans.tune`. Other layers are
    skipped.
    """
    for layer in layers:
        if isinstance(layer, CoatTransformerLayer):
            _tune(layer.flow, layer.linear_weights(), tokens, grad_dtype, choices)


def _tune(
    flow: Flow,
    weights: Sequence[Tensor],
    tokens: int,
    grad_dtype: torch.dtype,
    choices: dict[str, str],
) -> None:
    """`tune_layers` for one layer, whose linears have these weights.

    The algorithms in `choices` are used, others are timed and added. Only FP8 GEMMs whose operands
    have tensor-wise scales have a choice of algorithms.
    """
    recipe, parallel = flow.recipe, flow.parallel
    if not recipe.tensor_wise_gradients:
        return
    bf16 = {name.partition(".")[0] for name in recipe.bf16}
    kinds: dict[str, Any] = {"a_fmt": format_of(recipe.dgrad.gradient), "b_fmt": E4M3}
    kinds["choices"] = choices
    own = tokens // parallel.size if parallel.scattered else tokens
    pieces = {piece.stop - piece.start for piece in parallel.row_pieces(own)}
    for weight in weights:
        kinds["device"] = weight.device.index
        n, k = weight.shape
        kinds |= {"fast": "dgrad" in recipe.fast, "accumulate": False}
        for m in sorted({tokens, *pieces}) if "dgrad" not in bf16 else ():
            flow.plans.tune(m, k, n, out_dtype=torch.bfloat16, **kinds)
        kinds |= {"fast": "wgrad" in recipe.fast, "accumulate": True}
        summed = padded(tokens, recipe.wgrad.gradient.granularity)
        if "wgrad" not in bf16:
            flow.plans.tune(n, k, summed, out_dtype=grad_dtype, **kinds)
