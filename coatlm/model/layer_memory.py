"""Bytes per token that one layer saves for backward, and that its backward holds on top of them.

Legend, in elements: h hidden, f ffn, q = heads head_dim, k = kv_heads head_dim. Saved are, by part
of the layer, and besides fp32 statistics of norms and softmax:

    recipe        norms                   attention                           MLP
    bf16          inputs 4h, outputs 4h   q, k, v 2(q + 2k), output 2q        gate, up 4f, SwiGLU 2f
    FP8 linears   inputs 4h, outputs 2h   the same, and a copy of q in FP8    gate, up 4f, SwiGLU 1f
    coat          inputs 2 (1 + 1/G) h    as in bf16                          2 (1 + 1/G) f
    coat-lean     inputs 2 (1 + 1/G) h    (1 + 1/G) (2q + 2k)                 2 (1 + 1/G) f

COAT (arXiv 2410.19313, s5) saves FP8 codes with a scale per block of G = 16, here of one byte; norm
and SwiGLU outputs are recomputed from their inputs. coatlm's FP8 layers also save a scale per row
of four linear inputs. Scales of weights are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from coatlm.config import Config
from coatlm.config.recipes import ROW, TE_RECIPES, FlowRecipe, Operand
from coatlm.model.accounting import key_size, query_size

STATISTIC = 4  # bytes of an fp32 number that a kernel saves per row
ROW_SCALES = 4 * STATISTIC  # bytes per token of a flow's linear inputs, saved on every rank


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token that a layer saves for backward, before any division over ranks."""

    stream: float  # as wide as the residual stream: sequence parallelism divides it
    attention: float  # between its two linears: tensor parallelism divides it
    mlp: float  # between its two linears: tensor parallelism divides it
    swiglu: float = 0  # of `mlp`, the SwiGLU's output, which backward frees first
    scales: float = 0  # of the rows of linear inputs: every rank saves those of all its tokens


def weight_dtype(config: Config) -> torch.dtype:
    """The dtype of weights, and of activations between layers."""
    return torch.float32 if config.precision.recipe == "fp32" else torch.bfloat16


def element_bytes(config: Config) -> int:
    """Bytes of a weight, and of an activation between layers."""
    return weight_dtype(config).itemsize


def bf16_layer(config: Config) -> LayerBytes:
    """A layer that saves every tensor that backward reads in the model's dtype."""
    return _plain_layer(config, element_bytes(config))


def fp8_linear_layer(config: Config) -> LayerBytes:
    """A layer whose linears save their inputs in FP8 with one scale per tensor."""
    return _plain_layer(config, 1)


def _plain_layer(config: Config, x: int) -> LayerBytes:
    m, e = config.model, element_bytes(config)
    return LayerBytes(
        stream=2 * m.hidden * (e + x) + 2 * STATISTIC,
        attention=attention(config, e, x),
        mlp=2 * m.ffn * e + m.ffn * x,
        swiglu=m.ffn * x,
    )


def flow_layer(config: Config) -> LayerBytes:
    """An FP8 flow: every saved tensor as its recipe says (coatlm/config/recipes.py)."""
    m, recipe, e = config.model, config.precision.flow_recipe(), element_bytes(config)
    saved, code = recipe.saved, _code_bytes(recipe.forward.activation)
    norm_input, gate_up, attended = (
        e if operand is None else operand.bytes_per_element
        for operand in (saved.norm_input, saved.gate_up, saved.attention)
    )
    inputs = code if saved.linear_input else 0  # bytes of norm and SwiGLU outputs
    projected = code if saved.projection_input else attended
    return LayerBytes(
        stream=2 * m.hidden * (norm_input + inputs) + 2 * STATISTIC,
        attention=attention(config, attended, projected),
        mlp=(2 * gate_up + inputs) * m.ffn,
        swiglu=inputs * m.ffn,
        scales=_row_scales(recipe),
    )


def _code_bytes(operand: Operand) -> float:
    """Bytes per element of an operand of a GEMM, whose scales are fp32; those per row left out."""
    columns = operand.granularity.columns
    return 1 + STATISTIC / columns if columns else 1


def _row_scales(recipe: FlowRecipe) -> int:
    """Bytes per token of row scales that are saved: with the codes, or alone for wgrad."""
    if recipe.forward.activation.granularity != ROW:
        return 0
    if recipe.wgrad.activation.scaling == "forward":
        return ROW_SCALES
    saved = 3 * recipe.saved.linear_input + recipe.saved.projection_input
    return saved * ROW_SCALES // 4


def attention(config: Config, e: float, x: float) -> float:
    """Bytes per token that attention saves between the output of qkv and the input of projection.

    Saved are q, k, v after RoPE and the output, `e` bytes per element, and what the projection
    saves of the output, `x` bytes per element: the same tensor where `x` = `e`, but for context
    parallelism, whose output is joined from two halves. Norms of queries and keys add their inputs,
    an attention mask a bias of S elements per token. With recompute=selective only the output of
    qkv is saved, and in an FP8 flow the inputs of norms of queries and keys besides.
    """
    m, width = config.model, element_bytes(config)
    q, k = query_size(m), key_size(m)
    norms = ((q + k) * width + STATISTIC * (m.heads + m.queries_groups)) if m.qk_norm else 0
    if config.train.recompute == "selective":
        return (q + 2 * k) * e + q * x + (norms if config.precision.flow else 0)
    saved = (q + 2 * k) * e + gathered_keys(config, e) + STATISTIC * m.heads + q * x + norms
    if x != e or in_prefixes(config):
        saved += q * e
    return saved + (config.data.seq_len * width if config.data.reset_attention_mask else 0)


def in_prefixes(config: Config) -> bool:
    """Whether each half of a rank's queries attends to a prefix of the gathered keys."""
    return config.parallel.cp > 1 and not config.data.reset_attention_mask


def gathered_keys(config: Config, e: float) -> float:
    """Bytes per token that context parallelism adds to the keys and values that are saved.

    Those of all ranks are gathered into new tensors. Prefixes are views of them, r + 1 and 2 cp - r
    of 2 cp chunks long on rank r, but in FP8 each has codes of its own. A rank's own keys and
    values are of no further use, but share their memory with the queries where an FP8 flow rotates
    q, k and v in place.
    """
    m, cp = config.model, config.parallel.cp
    if cp == 1:
        return 0.0
    in_place = config.precision.flow and m.heads == m.queries_groups and not m.qk_norm
    copies = cp - 1 + (in_place if e == element_bytes(config) else in_prefixes(config) / 2)
    return 2 * key_size(m) * e * copies


@dataclass(frozen=True)
class PrecisionMemory:
    """What a precision recipe means for memory."""

    layer: Callable[[Config], LayerBytes]
    weight_copies: int  # FP8 copies of each matrix that always live: W, its transpose


def precision_memory(config: Config) -> PrecisionMemory:
    """What `precision.recipe` means for memory: a corrected formula changes one function."""
    if config.precision.flow:
        return PrecisionMemory(flow_layer, 0)
    if config.precision.recipe in TE_RECIPES:
        return PrecisionMemory(fp8_linear_layer, 2)
    return PrecisionMemory(bf16_layer, 0)


def saved_bytes(config: Config) -> LayerBytes:
    """What a layer of the configured precision saves."""
    return precision_memory(config).layer(config)


def layer_activation_bytes(config: Config) -> float:
    """Bytes per token that one layer saves on a rank, without full recomputation."""
    p, saved = config.parallel, saved_bytes(config)
    stream = saved.stream / (p.tp if p.sequence_parallel else 1)
    return stream + (saved.attention + saved.mlp) / p.tp + saved.scales


def layer_input_bytes(config: Config) -> float:
    """Bytes per token of a layer's input: all that full recomputation saves of a layer."""
    p = config.parallel
    return config.model.hidden * element_bytes(config) / (p.tp if p.sequence_parallel else 1)


def layer_backward_bytes(config: Config) -> float:
    """Bytes per token that the backward pass of a layer holds on top of what was saved.

    Besides the gradient of the residual stream, the MLP's backward holds those of the SwiGLU's
    output and of gate and up, while the SwiGLU's output itself has been freed. The backward of
    attention holds `attention_gradients`, while all has been freed that the MLP and the norm before
    it had saved. The larger of the two counts.
    """
    p, saved = config.parallel, saved_bytes(config)
    mlp = (3 * config.model.ffn * element_bytes(config) - saved.swiglu) / p.tp
    if config.precision.flow and not config.precision.flow_recipe().fused_gradients:
        # gate | up decoded, and its gradient before it is quantized
        mlp += 4 * config.model.ffn * element_bytes(config) / p.tp
    freed = saved.mlp / p.tp + saved.stream / 2 / (p.tp if p.sequence_parallel else 1)
    inside = attention_gradients(config) / p.tp - freed
    return layer_input_bytes(config) + max(mlp, inside)


def attention_gradients(config: Config) -> float:
    """Bytes per token of the gradients within attention at their peak: of the output, q, k and v.

    Context parallelism has those of all keys and values on every rank. The second prefix in the
    order of backward, at most half of the sequence, adds its own before they are summed; the output
    and the statistics of the first, half of a rank's, have been freed by then.
    """
    m, e = config.model, element_bytes(config)
    q, keys = query_size(m), 2 * key_size(m) * config.parallel.cp
    if not in_prefixes(config):
        return (2 * q + keys) * e
    return (2 * q + 1.5 * keys) * e - (q * e + STATISTIC * m.heads) / 2
