"""Bytes per token that one layer saves for backward, and that its backward pass adds to them.

Legend, in elements: h hidden, f ffn, q = heads head_dim, k = kv_heads head_dim. A layer saves, in
bytes per token and besides the fp32 statistics of norms and softmax:

    recipe        norms                   attention                           MLP
    bf16          inputs 4h, outputs 4h   q, k, v 2(q + 2k), output 2q        gate, up 4f, SwiGLU 2f
    FP8 linears   inputs 4h, outputs 2h   the same, output in FP8 too, 1q     gate, up 4f, SwiGLU 1f
    coat          inputs 2 (1 + 1/G) h    as in bf16                          2 (1 + 1/G) f
    coat-lean     inputs 2 (1 + 1/G) h    (1 + 1/G) (2q + 2k)                 2 (1 + 1/G) f

COAT (arXiv 2410.19313, s5) saves FP8 codes with a scale per block of G = 16, here of one byte; norm
and SwiGLU outputs are recomputed from their inputs. coatlm's FP8 layers also save the row scales of
their four linear inputs. Scales of weights are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from coatlm.config import Config
from coatlm.config.operands import ROW, Operand
from coatlm.config.recipes import TE_RECIPES, FlowRecipe
from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.model.accounting import key_size, query_size
from coatlm.parallel.context import head_parts

STATISTIC = 4  # bytes of an fp32 statistic or scale of a row
ROW_SCALES = 4 * STATISTIC  # bytes per token of the scales of four linear inputs


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token that a layer saves for backward, before any division over ranks."""

    stream: float  # tensors as wide as the residual stream: sequence parallelism divides them
    attention: float  # between its two linears: tensor parallelism divides it
    mlp: float  # between its two linears: tensor parallelism divides it
    swiglu: float = 0  # the part of `mlp` for the SwiGLU output, which backward frees first
    scales: float = 0  # row scales of linear inputs: every rank saves those of all tokens


def weight_dtype(config: Config) -> torch.dtype:
    """The dtype of weights, and of activations between layers."""
    return torch.float32 if config.precision.recipe == "fp32" else torch.bfloat16


def element_bytes(config: Config) -> int:
    """Bytes of a weight, and of an activation between layers."""
    return weight_dtype(config).itemsize


def bf16_layer(config: Config) -> LayerBytes:
    """A layer that saves in the model's dtype every tensor that backward reads."""
    return _plain_layer(config, element_bytes(config))


def fp8_linear_layer(config: Config) -> LayerBytes:
    """A layer whose linears save their inputs in FP8 with one scale per tensor."""
    return _plain_layer(config, 1)


def _plain_layer(config: Config, x: int) -> LayerBytes:
    m, e = config.model, element_bytes(config)
    outputs = 2 * (m.hidden * e + STATISTIC) if m.sandwich_norm else 0  # inputs of norms after
    return LayerBytes(
        stream=2 * m.hidden * (e + x) + 2 * STATISTIC + outputs,
        attention=attention(config, AttentionBytes(e, e, e, e), x),
        mlp=2 * m.ffn * e + m.ffn * x,
        swiglu=m.ffn * x,
    )


def flow_layer(config: Config) -> LayerBytes:
    """An FP8 flow layer: the recipe has the format of every saved tensor (config/recipes.py)."""
    m, recipe, e = config.model, config.precision.flow_recipe(), element_bytes(config)
    saved, code = recipe.saved, _code_bytes(recipe.forward.activation)
    norm_input, gate_up, *attended = (
        e if operand is None else operand.bytes_per_element
        for operand in (saved.norm_input, saved.gate_up, saved.q, saved.k, saved.v, saved.o)
    )
    inputs = code if saved.linear_input else 0  # bytes of norm and SwiGLU outputs
    projected = code if saved.projection_input else attended[-1]
    return LayerBytes(
        stream=2 * m.hidden * (norm_input + inputs) + 2 * STATISTIC,
        attention=attention(config, AttentionBytes(*attended), projected),
        mlp=(2 * gate_up + inputs) * m.ffn,
        swiglu=inputs * m.ffn,
        scales=_row_scales(recipe),
    )


def _code_bytes(operand: Operand) -> float:
    """Bytes per element of a GEMM operand with its fp32 scales; row scales are not included."""
    columns = operand.granularity.columns
    return 1 + STATISTIC / columns if columns else 1


def _row_scales(recipe: FlowRecipe) -> int:
    """Bytes per token of the row scales that are saved, with their codes or alone for wgrad."""
    if recipe.forward.activation.granularity != ROW:
        return 0
    if recipe.wgrad.activation.scaling == "forward":
        return ROW_SCALES
    saved = 3 * recipe.saved.linear_input + recipe.saved.projection_input
    return saved * ROW_SCALES // 4


class AttentionBytes(NamedTuple):
    """Bytes per element of each tensor that attention saves."""

    q: float
    k: float
    v: float
    o: float


def attention(config: Config, e: AttentionBytes, x: float) -> float:
    """Bytes per token that attention saves between the output of qkv and the input of projection.

    Attention saves q, k and v after RoPE and its output, `e` bytes per element; the projection
    saves its input, `x` bytes per element. Both are the same tensor if `x` = `e.o`, except under
    context parallelism by a2a and all_gather, where the output is copied into one tensor. The norms
    of queries and keys save their inputs. With recompute=selective attention saves the output of
    qkv alone, and in an FP8 flow also the inputs of the norms of queries and keys. Not counted are
    document bounds, and the logits of a block of queries where attention runs by blocks
    (kernels/block_attention.py).
    """
    m, width = config.model, element_bytes(config)
    q, k = query_size(m), key_size(m)
    statistics = 2 if m.qk_norm_width == "all" else m.heads + m.key_value_heads
    norms = ((q + k) * width + STATISTIC * statistics) if m.qk_norm else 0
    inputs = q * e.q + k * (e.k + e.v)
    if config.train.recompute == "selective":
        return inputs + q * x + (norms if config.precision.flow else 0)
    saved = inputs + gathered_keys(config, e) + STATISTIC * m.heads + q * x + norms
    copied = config.parallel.cp > 1 and config.context_comm != "p2p"
    return saved + (q * e.o if x != e.o or copied else 0)


def gathered_keys(config: Config, e: AttentionBytes) -> float:
    """Bytes per token that context parallelism adds to the keys and values that are saved.

    Ranks that exchange heads save as many as without context parallelism, and so do ranks that send
    each other keys and values, in backward once more. The all-gather writes the keys and values of
    all ranks to new tensors. The two prefixes that queries attend to, r + 1 and 2 cp - r of 2 cp
    chunks long on rank r, are views of these tensors in BF16, and of their codes if those were
    gathered; but if FP8 is saved of gathered BF16, or of prefixes that are copied, as a GPU does
    with documents in several samples, each prefix has its own codes. A rank's own keys and values
    are freed, except where an FP8 flow applies RoPE in place, which it does if q, k and v are saved
    in BF16: there they share memory with the queries.
    """
    m, cp = config.model, config.parallel.cp
    if cp == 1 or config.context_comm != "all_gather":
        return 0.0
    width = element_bytes(config)
    in_place = config.precision.flow and m.heads == m.key_value_heads and not m.qk_norm
    in_place = in_place and e[:3] == (width, width, width)
    copied = config.data.reset_attention_mask and config.train.micro_batch != 1
    own_codes = 0 if config.parallel.cp_comm_kv == "fp8" and not copied else 1 / 2
    return sum(
        key_size(m) * each * (cp - 1 + (in_place if each == width else own_codes))
        for each in (e.k, e.v)
    )


def _gradients_of_peers(config: Config) -> float:
    """Bytes per token of what ranks that send each other keys hold to compute gradients.

    The gradients of all queries, keys and values of the rank are summed in fp32. Beside these sums
    are at most, of keys and values:

        first                      its own, the next to arrive, gradients of its own
        a piece, with 2 ranks      of the piece, gradients of the piece
            with 3                 and its own, the next to arrive
            with more              and gradients that are sent, gradients that arrive

    and the gradients of a piece's queries, half of the rank's with both chunks of keys or all with
    one chunk. Two ranks hold exactly this, more at most this.
    """
    m, e = config.model, element_bytes(config)
    q, keys, tensors = query_size(m), 2 * key_size(m), {2: 2, 3: 4}.get(config.parallel.cp, 6)
    half = (q / 2 + tensors * keys) * e + STATISTIC * m.heads / 2  # a copy of the statistics
    return STATISTIC * (q + keys) + max(3 * keys * e, half, (q + (tensors - 1) * keys) * e)


@dataclass(frozen=True)
class PrecisionMemory:
    """The memory formulas of a precision recipe."""

    layer: Callable[[Config], LayerBytes]
    weight_copies: int  # permanent FP8 copies of each matrix: W and its transpose


def precision_memory(config: Config) -> PrecisionMemory:
    """The memory formulas of `precision.recipe`."""
    if config.precision.flow:
        return PrecisionMemory(flow_layer, 0)
    if config.precision.recipe in TE_RECIPES:
        return PrecisionMemory(fp8_linear_layer, 2)
    return PrecisionMemory(bf16_layer, 0)


def saved_bytes(config: Config) -> LayerBytes:
    """Bytes per token that a layer of the configured precision saves."""
    return precision_memory(config).layer(config)


def layer_activation_bytes(config: Config) -> float:
    """Bytes per token that one layer saves on a rank, without full recomputation."""
    p, saved = config.parallel, saved_bytes(config)
    stream = saved.stream / (p.tp if p.sequence_parallel else 1)
    return stream + (saved.attention + saved.mlp) / p.tp + saved.scales


def layer_input_bytes(config: Config) -> float:
    """Bytes per token of a layer's input, the only tensor that recompute=full saves."""
    p = config.parallel
    return config.model.hidden * element_bytes(config) / (p.tp if p.sequence_parallel else 1)


def layer_backward_bytes(config: Config) -> float:
    """Bytes per token that the backward pass of a layer holds on top of what was saved.

    These are the gradient of the residual stream and the largest of three sums:

        SwiGLU      the gradients of its output and of gate and up; the output itself is freed;
                    without fused kernels also gate | up dequantized and its gradient in 16 bits
        dgrad of    the gradients of gate and up; the unsummed dx, which has the full hidden size on
        gate, up    every tensor-parallel rank; under sequence parallelism the rank's tokens of its
                    sum; with parallel.tp_comm_reduce=fp8 also the codes sent and received
        attention   `attention_gradients`; all that the MLP and the norm before it saved is freed

    What sequence parallelism all-gathers is counted among the buffers (memory.py).
    """
    p, saved, width = config.parallel, saved_bytes(config), layer_input_bytes(config)
    element, m = element_bytes(config), config.model
    swiglu = (3 * m.ffn * element - saved.swiglu) / p.tp
    if config.precision.flow and not config.precision.flow_recipe().fused_gradients:
        # dequantized gate | up, and its gradient before quantization
        swiglu += 4 * m.ffn * element / p.tp
    dgrad = (2 * m.ffn * element - saved.swiglu) / p.tp + m.hidden * element
    if p.sequence_parallel:
        dgrad += width
    if p.tp_comm_reduce == "fp8":
        dgrad += 2 * (1 + STATISTIC / SCALE_BLOCK) * m.hidden
    freed = saved.mlp / p.tp + saved.stream / 2 / (p.tp if p.sequence_parallel else 1)
    inside = attention_gradients(config) / p.tp - freed
    return width + max(swiglu, dgrad, inside)


def attention_gradients(config: Config) -> float:
    """Bytes per token of the gradients within attention at their peak: of the output, q, k and v.

    Ranks that exchange heads also hold the gradient of the output as it is received and, but for
    the first part of the heads, as it is sent, and the other gradients of a part. Where keys and
    values are all-gathered, every rank holds the gradients of all of them. The second prefix in the
    order of backward, at most half of the sequence, has gradients of its own until they are added;
    by then the output and the statistics of the first prefix, half of those of a rank, have been
    freed.
    """
    m, p, e = config.model, config.parallel, element_bytes(config)
    q, keys = query_size(m), 2 * key_size(m)
    if p.cp == 1:
        return (2 * q + keys) * e
    if config.context_comm == "p2p":
        return q * e + _gradients_of_peers(config)
    if config.context_comm == "a2a":
        return (3 * q + keys / head_parts(m.key_value_heads // (p.tp * p.cp))) * e
    return (2 * q + 1.5 * keys * p.cp) * e - (q * e + STATISTIC * m.heads) / 2
