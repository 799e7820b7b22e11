"""Bytes that each rank of a run takes at its peak, from its configuration alone.

    peak = weights + FP8 weights + gradients + states + activations + max(loss, backward) + buffers

Activations are what autograd keeps of every layer and microbatch in flight. The peak is reached as
backward begins, in the loss or in the last layer: whichever of the two holds more on top of that.
With recompute=full the layer's own activations are made again there, and belong to `backward`.

Legend, in elements: h hidden, f ffn, q = heads head_dim, k = kv_heads head_dim. A layer keeps, in
bytes a token, of norms | attention | the MLP, and fp32 statistics of norms and softmax:

    bf16          inputs 4h, outputs 4h | q, k, v 2(q + 2k), output 2q | gate, up 4f, SwiGLU 2f
    FP8 linears   inputs 4h, outputs 2h | the same, and a copy 1q      | gate, up 4f, SwiGLU 1f
    coat          inputs 2 (1 + 1/G) h  | as in bf16                   | 2 (1 + 1/G) f
    coat-lean     inputs 2 (1 + 1/G) h  | (1 + 1/G) (2q + 2k)          | 2 (1 + 1/G) f

COAT (arXiv 2410.19313, s5) keeps groups of G = 16 in FP8 with a scale each, here of one byte; norm
and SwiGLU outputs are made again from their inputs. coatlm's FP8 layers also keep the row scales of
four linear inputs. What is not counted: the CUDA context, buffers that NCCL takes outside of torch,
scales of weights, amaxes that delayed scales remember (0.3 kB a layer), and fragmentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from coatlm.config import Config, ConfigError
from coatlm.config.recipes import ROW, TE_RECIPES, FlowRecipe, Operand
from coatlm.model.accounting import key_size, layer_matrices, query_size, rank_parameters
from coatlm.model.loss import default_chunk
from coatlm.optim.adamw import bytes_per_parameter
from coatlm.parallel.buckets import bucket_elements
from coatlm.parallel.grad_reduction import IN_FLIGHT

GIB = 2**30
STATISTIC = 4  # bytes of an fp32 number that a kernel keeps a row
ROW_SCALES = 4 * STATISTIC  # bytes a token of a flow's linear inputs, kept on every rank
WORKSPACE = 32 * 2**20  # of cuBLAS on Hopper, one for each of the threads of forward and backward


@dataclass(frozen=True)
class RankBytes:
    """Device memory of one rank at its peak, in bytes by kind."""

    weights: int
    fp8_weights: int
    main_grads: int
    optim_states: int
    activations: int
    loss: int
    backward: int
    buffers: int

    @property
    def total(self) -> int:
        """The peak; `loss` is over as `backward` begins, so the larger of the two counts."""
        everything = sum(getattr(self, field.name) for field in fields(self))
        return everything - min(self.loss, self.backward)


def weight_dtype(config: Config) -> torch.dtype:
    """Of weights, and of activations between layers."""
    return torch.float32 if config.precision.recipe == "fp32" else torch.bfloat16


def element_bytes(config: Config) -> int:
    """Bytes of a weight, and of an activation between layers."""
    return weight_dtype(config).itemsize


def replaced(config: Config, **sections: dict[str, Any]) -> Config:
    """`config` with some values changed, section by section, without validation."""
    updated = {
        name: getattr(config, name).model_copy(update=values) for name, values in sections.items()
    }
    return config.model_copy(update=updated)


# --- a layer ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerBytes:
    """Bytes a token that a layer keeps for its backward pass, before any division over ranks."""

    stream: float  # as wide as the residual stream: sequence parallelism divides it
    inner: float  # between the matrices: tensor parallelism divides it
    swiglu: float = 0  # of `inner`, the SwiGLU's output: the first to be let go
    scales: float = 0  # of the rows of linear inputs: every rank keeps those of all its tokens


def bf16_layer(config: Config) -> LayerBytes:
    """Every tensor that a backward pass reads, in the model's dtype."""
    return _plain_layer(config, element_bytes(config))


def fp8_linear_layer(config: Config) -> LayerBytes:
    """The same, and in FP8 with one scale a tensor what linear layers keep of their inputs."""
    return _plain_layer(config, 1)


def _plain_layer(config: Config, x: int) -> LayerBytes:
    m, e = config.model, element_bytes(config)
    inner = attention(config, e, x) + 2 * m.ffn * e + m.ffn * x
    return LayerBytes(2 * m.hidden * (e + x) + 2 * STATISTIC, inner, swiglu=m.ffn * x)


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
    inner = attention(config, attended, projected) + (2 * gate_up + inputs) * m.ffn
    stream = 2 * m.hidden * (norm_input + inputs) + 2 * STATISTIC
    return LayerBytes(stream, inner, swiglu=inputs * m.ffn, scales=_row_scales(recipe))


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
    """Bytes a token that attention keeps between the output of qkv and the input of the projection.

    Kept are q, k, v after RoPE and the output, `e` bytes an element, and what the projection keeps
    of it: the same tensor where its elements too have `e` = `x` bytes. Norms of queries and keys
    add their inputs. Context parallelism gathers keys and values and keeps the output in two parts
    beside the whole. An attention mask becomes a bias of S elements a token. `selective` keeps the
    output of qkv alone, and an FP8 flow q, k, v and what their norms need.
    """
    m, cp, width = config.model, config.parallel.cp, element_bytes(config)
    q, k = query_size(m), key_size(m)
    norms = ((q + k) * width + STATISTIC * (m.heads + m.queries_groups)) if m.qk_norm else 0
    if config.train.recompute == "selective":
        return (q + 2 * k) * e + q * x + (norms if config.precision.flow else 0)
    kept = (q + 2 * k * cp) * e + STATISTIC * m.heads + q * x + norms
    if cp > 1 or x != e:
        kept += q * e
    if config.data.reset_attention_mask:
        kept += config.data.seq_len * width
    return kept


@dataclass(frozen=True)
class Recipe:
    """What a precision recipe means for memory."""

    layer: Callable[[Config], LayerBytes]
    weight_copies: int  # FP8 copies of each matrix that always live: W, its transpose


def recipe_of(config: Config) -> Recipe:
    """What `precision.recipe` means for memory: a corrected formula changes one function."""
    if config.precision.flow:
        return Recipe(flow_layer, 0)
    if config.precision.recipe in TE_RECIPES:
        return Recipe(fp8_linear_layer, 2)
    return Recipe(bf16_layer, 0)


def layer_activation_bytes(config: Config) -> float:
    """Bytes a token that one layer keeps on a rank, without full recomputation."""
    p, kept = config.parallel, recipe_of(config).layer(config)
    stream = kept.stream / (p.tp if p.sequence_parallel else 1)
    return stream + kept.inner / p.tp + kept.scales


def layer_input_bytes(config: Config) -> float:
    """Bytes a token of a layer's input: all that full recomputation keeps of a layer."""
    p = config.parallel
    return config.model.hidden * element_bytes(config) / (p.tp if p.sequence_parallel else 1)


# --- what a stage keeps -------------------------------------------------------------------------


def fp8_weight_bytes(config: Config) -> int:
    """FP8 copies of the matrices of a rank."""
    p, copies = config.parallel, recipe_of(config).weight_copies
    copies += 2 * config.precision.keep_weights
    return copies * (config.model.layers // p.pp) * layer_matrices(config.model) // p.tp


def main_grad_bytes(config: Config, count: int, data_parallel: int) -> int:
    """The buffers that `count` gradients are accumulated and reduced in.

    Whole on every rank; with zero=2 a shard of them, one bucket that fills and those that travel.
    """
    p = config.parallel
    each = 4 if p.main_grads == "fp32" else 2
    ranks = data_parallel * p.cp
    if p.zero < 2 or ranks == 1:
        return count * each
    moving = (IN_FLIGHT + 1) * bucket_elements(p.bucket_size, count)
    return (math.ceil(count / ranks) + min(moving, count)) * each


def optim_state_bytes(config: Config, count: int, data_parallel: int) -> int:
    """States of `count` parameters; with zero > 0 divided over data- and context-parallel ranks."""
    each = bytes_per_parameter(config.optim.recipe, weight_dtype(config))
    ranks = data_parallel * config.parallel.cp if config.parallel.zero else 1
    return math.ceil(count * each / ranks)


def chunks_in_flight(config: Config, stage: int, microbatches: int) -> int:
    """Model chunks whose activations a stage holds at its peak; a chunk is L / (pp vpp) layers.

    1F1B (Narayanan et al. 2021, section 2.2) lets stage p start pp - p microbatches before its
    first backward pass. Interleaved: 2 (pp - p - 1) + (vpp - 1) pp chunks to warm up, and one more.
    """
    p = config.parallel
    if p.vpp == 1:
        return min(p.pp - stage, microbatches)
    return min(2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp + 1, microbatches * p.vpp)


def bf16_share(config: Config, stage: int) -> float:
    """Of a stage's layers, the part that `precision.bf16_layers` leaves in BF16."""
    m, p, (head, tail) = config.model, config.parallel, config.precision.bf16_layers
    count = m.layers // (p.pp * p.vpp)
    firsts = [(chunk * p.pp + stage) * count for chunk in range(p.vpp)]
    layers = [first + i for first in firsts for i in range(count)]
    return sum(not head <= layer < m.layers - tail for layer in layers) / len(layers)


def activation_bytes(config: Config, stage: int, microbatches: int) -> int:
    """Activations on a stage at its peak: of layers, and on the last one of norm and output."""
    m, p = config.model, config.parallel
    layers = chunks_in_flight(config, stage, microbatches) * m.layers // (p.pp * p.vpp)
    full = config.train.recompute == "full"
    each_token = layers * (layer_input_bytes(config) if full else layer_activation_bytes(config))
    if not full:
        plain = replaced(config, precision={"recipe": "bf16"})
        more = layer_activation_bytes(plain) - layer_activation_bytes(config)
        each_token += layers * bf16_share(config, stage) * more
    if stage == p.pp - 1:
        statistics = STATISTIC / (p.tp if p.sequence_parallel else 1)
        each_token += layer_input_bytes(config) + statistics + m.hidden * element_bytes(config)
    return round(microbatch_tokens(config) * each_token)


def loss_bytes(config: Config, vocab: int) -> int:
    """What `loss.py` holds on the last stage as backward begins.

    Logits of one chunk of the vocabulary, and the gradient of the last hidden state, once in fp32
    and once as it is handed on.
    """
    m, e, tokens = config.model, element_bytes(config), microbatch_tokens(config)
    rows = default_chunk(tokens, weight_dtype(config))
    return tokens * (min(rows, vocab // config.parallel.tp) * e + m.hidden * (4 + e))


def backward_bytes(config: Config) -> int:
    """What the backward pass of a layer holds on top of what was kept.

    The most is there within the MLP: the gradients of the residual stream, of the SwiGLU's output
    and of gate and up, while the SwiGLU's output itself has been let go. With full recomputation
    also everything that the layer keeps; its input, counted before, stands for its output here.
    """
    p, kept = config.parallel, recipe_of(config).layer(config)
    gradients = 3 * config.model.ffn * element_bytes(config) - kept.swiglu
    each_token = layer_input_bytes(config) + gradients / p.tp
    if config.train.recompute == "full":
        each_token += layer_activation_bytes(config)
    return round(microbatch_tokens(config) * each_token)


def buffer_bytes(config: Config) -> int:
    """What is allocated once: cuBLAS's workspaces, tables of RoPE, and hidden states on their way.

    Those are received and sent between pipeline stages, and gathered whole from the parts that
    sequence parallelism makes of them.
    """
    m, p = config.model, config.parallel
    hidden = microbatch_tokens(config) * m.hidden * element_bytes(config)
    tables = config.data.seq_len // p.cp * m.size_per_head * 4
    between = 2 * round(hidden / (p.tp if p.sequence_parallel else 1)) if p.pp > 1 else 0
    return 2 * WORKSPACE + tables + between + (hidden if p.sequence_parallel else 0)


# --- a rank -------------------------------------------------------------------------------------


def microbatch_tokens(config: Config) -> int:
    """Tokens of a forward pass on one rank; context parallelism divides them."""
    return config.train.micro_batch * config.data.seq_len // config.parallel.cp


def microbatches_per_step(config: Config, data_parallel: int) -> int:
    """Forward passes of a rank in one step."""
    return config.train.global_batch // (config.train.micro_batch * data_parallel)


def rank_bytes(config: Config, vocab: int, *, stage: int, data_parallel: int) -> RankBytes:
    """Bytes by kind on every rank of a pipeline stage."""
    p = config.parallel
    count = rank_parameters(config.model, vocab, tp=p.tp, pp=p.pp, stage=stage)
    microbatches = microbatches_per_step(config, data_parallel)
    return RankBytes(
        weights=count * element_bytes(config),
        fp8_weights=fp8_weight_bytes(config),
        main_grads=main_grad_bytes(config, count, data_parallel),
        optim_states=optim_state_bytes(config, count, data_parallel),
        activations=activation_bytes(config, stage, microbatches),
        loss=loss_bytes(config, vocab) if stage == p.pp - 1 else 0,
        backward=backward_bytes(config),
        buffers=buffer_bytes(config),
    )


def stage_bytes(config: Config, vocab: int, data_parallel: int) -> list[RankBytes]:
    """`rank_bytes` of every pipeline stage."""
    stages = range(config.parallel.pp)
    return [rank_bytes(config, vocab, stage=s, data_parallel=data_parallel) for s in stages]


def fullest_stage(config: Config, vocab: int, data_parallel: int) -> int:
    """The pipeline stage whose ranks need most memory."""
    sizes = [kept.total for kept in stage_bytes(config, vocab, data_parallel)]
    return sizes.index(max(sizes))


def peak_bytes(config: Config, vocab: int, data_parallel: int) -> int:
    """Of the fullest rank."""
    return max(kept.total for kept in stage_bytes(config, vocab, data_parallel))


def micro_batches(config: Config, data_parallel: int) -> list[int]:
    """Every micro batch that divides a replica's share of the global batch, the largest first.

    Interleaved stages need a number of microbatches that is a multiple of pp; one more microbatch
    than there is never helps.
    """
    share, p = config.train.global_batch // data_parallel, config.parallel
    small = [n for n in range(1, math.isqrt(share) + 1) if share % n == 0]
    divisors = sorted({*small, *(share // n for n in small)}, reverse=True)
    return [n for n in divisors if p.vpp == 1 or share // n % p.pp == 0]


def largest_micro_batch(config: Config, vocab: int, data_parallel: int, memory: float) -> int:
    """The largest train.micro_batch whose peak is within `memory` bytes; 0 if none is.

    The global batch stays: of its divisions over `data_parallel` replicas, all are tried.
    """
    if config.train.global_batch % data_parallel:
        raise ConfigError(
            f"train.global_batch={config.train.global_batch} is not a multiple of the "
            f"data-parallel size {data_parallel}"
        )
    for size in micro_batches(config, data_parallel):
        if (
            peak_bytes(replaced(config, train={"micro_batch": size}), vocab, data_parallel)
            <= memory
        ):
            return size
    return 0
