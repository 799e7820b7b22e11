"""Peers of a coatlm layer: TransformerEngine's TransformerLayer, torch.compile, torchao.

Each is configured as its documentation recommends for a Llama layer: no biases, RMSNorm, SwiGLU,
rotary embeddings, cuDNN attention. TransformerEngine adds its weight gradients to fp32 `main_grad`
buffers, or with grads=bf16 computes BF16 gradients, as all other peers do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.benchmarks.clock import DEVICE
from tools.benchmarks.layer_stacks import (
    INIT_STD,
    NORM_EPS,
    SEED,
    LayerShape,
    PlainLayer,
    Stack,
    plain_stack,
)

TE_RECIPES = {
    "te bf16": None,
    "te delayed": "delayed",
    "te current": "current",
    "te block": "block",
}
PEERS = (*TE_RECIPES, "torchao tensorwise", "torch.compile bf16", "torch eager")
ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def prepare(row: str) -> None:
    """Import what the row needs, before its measurement. Raises ImportError."""
    if row in TE_RECIPES:
        # only cuDNN's fused attention: the row fails rather than measure another backend
        os.environ |= {"NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
        import transformer_engine.pytorch  # noqa: F401
    elif row == "torchao tensorwise":
        import torchao.float8  # type: ignore[import-not-found]  # noqa: F401


def peer_stack(row: str, shape: LayerShape, layers: int, *, fp32_grads: bool = True) -> Stack:
    """Build `layers` layers of a peer. Raises ImportError if it is not installed."""
    prepare(row)
    if row in TE_RECIPES:
        return _transformer_engine(TE_RECIPES[row], shape, layers, fp32_grads)
    if row == "torch eager":
        one = plain_stack(shape)
    else:
        one = plain_stack(shape, compiled=_float8 if row.startswith("torchao") else _compiled)
    return one.repeated(layers)


def _transformer_engine(
    kind: str | None, shape: LayerShape, layers: int, fp32_grads: bool
) -> Stack:
    import transformer_engine.pytorch as te

    torch.manual_seed(SEED)

    def init(weight: Tensor) -> Tensor:
        return nn.init.normal_(weight, 0.0, INIT_STD)

    stack = [
        te.TransformerLayer(
            shape.hidden,
            shape.ffn,
            shape.heads,
            layernorm_epsilon=NORM_EPS,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            init_method=init,
            output_layer_init_method=init,
            layer_number=number + 1,
            self_attn_mask_type="causal",
            params_dtype=torch.bfloat16,
            fuse_wgrad_accumulation=fp32_grads,
            fuse_qkv_params=True,
            bias=False,
            activation="swiglu",
            normalization="RMSNorm",
            device=DEVICE,
            attn_input_format="sbhd",
        )
        for number in range(layers)
    ]
    parameters = [p for layer in stack for p in layer.parameters()]
    if fp32_grads:
        for parameter in parameters:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    angles = te.RotaryPositionEmbedding(shape.head_dim).to(DEVICE)(shape.seq)
    recipe = _te_recipe(kind)

    def forward(x_SBH: Tensor) -> Tensor:
        with te.autocast(recipe=recipe) if recipe is not None else nullcontext():
            for layer in stack:
                x_SBH = layer(x_SBH, rotary_pos_emb=angles)
        return x_SBH

    return Stack(
        forward=forward,
        input_shape=lambda batch: (shape.seq, batch, shape.hidden),
        dtype=torch.bfloat16,
        parameters=parameters,
    )


def _te_recipe(kind: str | None) -> Any:
    from transformer_engine.common.recipe import (
        DelayedScaling,
        Float8BlockScaling,
        Float8CurrentScaling,
        Format,
    )

    recipes: dict[str | None, Callable[[], Any]] = {
        None: lambda: None,
        "delayed": lambda: DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16),
        "current": lambda: Float8CurrentScaling(fp8_format=Format.HYBRID),
        "block": Float8BlockScaling,
    }
    return recipes[kind]()


def _compiled(layer: PlainLayer) -> Callable[..., Tensor]:
    torch._dynamo.reset()  # so that layers of other shapes do not count against its cache limit
    compiled = torch.compile(layer, dynamic=False, fullgraph=True)

    def run(*args: Tensor) -> Tensor:
        with sdpa_kernel(ATTENTION, set_priority=True):  # takes effect while tracing
            return compiled(*args)

    return run


def _float8(layer: PlainLayer) -> Callable[..., Tensor]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name("tensorwise"))
    return _compiled(layer)
