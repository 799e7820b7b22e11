"""Module specs of a layer: `local`, `te` with TransformerEngine's linears, or COAT's FP8 flow.

All have coatlm's attention and MLP modules inside megatron-core's layer, and the same names in a
checkpoint, so that training can continue from a checkpoint with another spec.
"""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

from coatlm.config import Config
from coatlm.fp8.gemm import Plans
from coatlm.megatron import (
    AttnMaskType,
    ColumnParallelLinear,
    IdentityOp,
    MLPSubmodules,
    ModuleSpec,
    RowParallelLinear,
    SelfAttentionSubmodules,
    TransformerBlockSubmodules,
    TransformerLayer,
    TransformerLayerSubmodules,
    get_bias_dropout_add,
    transformer_engine,
)
from coatlm.model.attention import CoreAttention, SelfAttention
from coatlm.model.coat_layer import CoatTransformerLayer
from coatlm.model.layers import MLP, RMSNorm

CHECKPOINT_NAMES = {  # TransformerEngine, and so megatron, has a norm inside the linear after it
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def block_spec(config: Config, first: int, count: int) -> TransformerBlockSubmodules:
    """The decoder of one model chunk of a pipeline stage: its layers and the final norm.

    The layers are `first` (from 0) to `first + count - 1` of the model.
    """
    m, (head, tail) = config.model, config.precision.bf16_layers
    make = _te_layer if m.spec == "te" else _local_layer
    kinds = {windowed: make(config, windowed) for windowed in (False, True)}
    layers = [kinds[m.window is not None and m.window.covers(first + i)] for i in range(count)]
    if config.precision.flow:
        params = {
            "recipe": config.precision.flow_recipe(),
            "plans": Plans(),  # shared by the layers
            "chunks": config.parallel.tp_chunks,
            "sums": config.parallel.tp_comm_reduce,
        }
        layers = [
            _flow_layer(layer, params) if head <= first + i < m.layers - tail else layer
            for i, layer in enumerate(layers)
        ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _local_layer(config: Config, windowed: bool) -> ModuleSpec:
    return _layer(
        config,
        windowed,
        column=ColumnParallelLinear,
        row=RowParallelLinear,
        norm_before_linear=RMSNorm,
        names=CHECKPOINT_NAMES,
    )


def _flow_layer(local: ModuleSpec, params: dict[str, Any]) -> ModuleSpec:
    """A layer with the modules, parameters and checkpoints of a local one, run as an FP8 flow."""
    return ModuleSpec(
        module=CoatTransformerLayer,
        params=params,
        submodules=local.submodules,
    )


def _te_layer(config: Config, windowed: bool) -> ModuleSpec:
    if importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(
            "model.spec=te needs the package transformer_engine, which is not installed"
        )
    wrappers = transformer_engine()
    return _layer(
        config,
        windowed,
        column=fused_weight_gradient(wrappers.TELayerNormColumnParallelLinear),
        row=fused_weight_gradient(wrappers.TERowParallelLinear),
        norm_before_linear=IdentityOp,
        names={},
    )


def _layer(
    config: Config,
    windowed: bool,
    *,
    column: Any,
    row: Any,
    norm_before_linear: Any,
    names: dict[str, str],
) -> ModuleSpec:
    """A layer with the sliding window of model.window if `windowed`, else without."""
    m = config.model
    window = m.window if windowed else None
    head_norm = RMSNorm if m.qk_norm else None
    branch = {"norm": m.norm_after or m.sandwich_norm, "multiplier": m.residual_multiplier}
    if m.norm_after:
        norm_before_linear, names = IdentityOp, {}
    attention = SelfAttentionSubmodules(
        linear_qkv=column,
        core_attention=ModuleSpec(
            module=CoreAttention,
            params={
                "multiplier": m.attention_multiplier,
                # a window of the whole sequence would only choose a slower kernel
                "window": window.size if window and window.size < config.data.seq_len else None,
                "softcap": m.attention_softcap,
                "comm": config.context_comm,
                "comm_kv": config.parallel.cp_comm_kv,
            },
        ),
        linear_proj=row,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm_before_linear,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={
                    "attn_mask_type": AttnMaskType.causal,
                    "branch": branch,
                    "norm_all_heads": m.qk_norm_width == "all",
                    "window_rotary": window is not None and window.rope_theta is not None,
                },
                submodules=attention,
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm_before_linear,
            mlp=ModuleSpec(
                module=MLP,
                params={"branch": branch, "activation": m.activation},
                submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row),
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=names,
        ),
    )


def fused_weight_gradient(linear: type) -> type:
    """A subclass of a TransformerEngine linear whose wgrad GEMM accumulates into `main_grad`.

    megatron-core's own option applies to all linears, and its own linears then require apex.
    """

    class FusedWeightGradient(linear):
        def __init__(self, *args: Any, config: Any, **kwargs: Any) -> None:
            config = copy.copy(config)
            config.gradient_accumulation_fusion = True
            super().__init__(*args, config=config, **kwargs)

    FusedWeightGradient.__name__ = linear.__name__
    return FusedWeightGradient
