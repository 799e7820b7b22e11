"""Peak device memory of each rank of a run, in bytes, from its configuration alone.

    peak = weights + FP8 weights + gradients + states + activations + max(loss, backward) + buffers
           + graphs

Building the model may take more (construction_memory.py).

Activations are what autograd saves of every layer and microbatch in flight (layer_memory.py). The
peak is at the start of backward, in the loss or in the last layer, whichever adds more to the
activations. Not counted are the CUDA context, buffers that NCCL allocates outside of torch, buffers
of gradient buckets that are being reduced, the amax histories of delayed scaling (0.3 kB per
layer), and fragmentation.

CUDA graphs (train.cuda_graphs) allocate activations and temporaries in a private memory pool. Those
of microbatches share one, because no two run at the same time. Once every kind of microbatch has
its graph, graphs add only their static inputs. Before that, the pool exists beside the memory of a
microbatch that runs eagerly: a step of four or more microbatches captures its third, and then runs
its last one eagerly, the first that reduces gradients. A microbatch whose numerics are measured
always runs eagerly. The graph of a whole step has static inputs of all its microbatches, and its
pool exists beside an eager step whose numerics or optimizer states are measured. torch counts a
pool as reserved memory, not as allocated: peak_mem_gib of a run does not include it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from coatlm.config import Config, ConfigError
from coatlm.model.accounting import layer_matrices, rank_parameters
from coatlm.model.construction_memory import construction_bytes
from coatlm.model.grad_memory import grad_buffer_bytes, returned_grad_bytes
from coatlm.model.layer_memory import (
    STATISTIC,
    element_bytes,
    layer_activation_bytes,
    layer_backward_bytes,
    layer_input_bytes,
    precision_memory,
    weight_dtype,
)
from coatlm.model.loss import default_chunk
from coatlm.model.rotary import rotary_bytes
from coatlm.optim.offload import BUFFERS, PIECE
from coatlm.optim.recipes import find_recipe
from coatlm.optim.shards import bytes_per_parameter

GIB = 2**30
CUBLAS_WORKSPACE = 32 * 2**20  # bytes on Hopper, from torch; per thread: forward, backward
GRAPH_INPUTS = 8 + 8 + 4  # bytes per token: int64 tokens and labels, fp32 loss mask
BF16_GEMM = 2 + 4 + 4  # bytes per element of a matrix in a GEMM with an operand in BF16
EAGER_AFTER_CAPTURE = 4  # microbatches per step from which one runs eagerly beside a graph


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
    graphs: int = 0
    initial: int = 0  # while the model is built, before there are states and activations

    @property
    def total(self) -> int:
        """The peak; `loss` is freed before `backward` is allocated, so only the larger counts."""
        everything = sum(getattr(self, kind) for kind in self.kinds())
        return max(everything - min(self.loss, self.backward), self.initial)

    @classmethod
    def kinds(cls) -> list[str]:
        """The names of what is allocated at the same time."""
        return [field.name for field in fields(cls) if field.name != "initial"]


def replaced(config: Config, **sections: dict[str, Any]) -> Config:
    """A copy of `config` with some values of `sections` changed, without validation."""
    updated = {
        name: getattr(config, name).model_copy(update=values) for name, values in sections.items()
    }
    return config.model_copy(update=updated)


# --- a pipeline stage ----------------------------------------------------------------------------


def weight_bytes(config: Config, count: int, vocab: int, *, stage: int, data_parallel: int) -> int:
    """Bytes of `count` weights of a stage.

    With zero=3 they are a shard and what is all-gathered at the peak: two layers or, with the
    output layer, this and one. An FP8 all-gather also has a layer's codes in flight.
    """
    p, ranks = config.parallel, data_parallel * config.parallel.cp
    if p.zero < 3 or ranks == 1:
        return count * element_bytes(config)
    layer = layer_matrices(config.model) // p.tp
    last = vocab * config.model.hidden // p.tp if stage == p.pp - 1 else 0
    tied = config.model.tie_embeddings and p.pp == 1  # whole until the embedding's gradient
    elements = math.ceil(count / ranks) + layer + (layer + last if tied else max(layer, last))
    return elements * element_bytes(config) + (layer if p.weight_gather == "fp8" else 0)


def fp8_weight_bytes(config: Config) -> int:
    """Bytes of the FP8 copies of a rank's matrices."""
    p, copies = config.parallel, precision_memory(config).weight_copies
    copies += 2 * config.precision.keep_weights
    return copies * (config.model.layers // p.pp) * layer_matrices(config.model) // p.tp


def optim_state_bytes(config: Config, count: int, data_parallel: int) -> int:
    """Bytes of the states of `count` parameters; zero > 0 shards them over dp and cp ranks."""
    each = bytes_per_parameter(config.optim.recipe, weight_dtype(config))
    ranks = data_parallel * config.parallel.cp if config.parallel.zero else 1
    return math.ceil(count * each / ranks)


def device_state_bytes(config: Config, count: int, vocab: int, data_parallel: int) -> int:
    """What of `optim_state_bytes` is on the GPU: with offload=states the buffers of pieces.

    With tensor-wise scales a piece may be the largest parameter, an embedding or the MLP's first.
    """
    states = optim_state_bytes(config, count, data_parallel)
    if config.optim.offload == "none":
        return states
    longest, m = PIECE, config.model
    if find_recipe(config.optim.recipe).tensor_scaled:
        longest = max(PIECE, m.hidden * max(vocab, 2 * m.ffn) // config.parallel.tp)
    each = bytes_per_parameter(config.optim.recipe, weight_dtype(config))
    return min(states, math.ceil(BUFFERS * longest * each))


def chunks_in_flight(config: Config, stage: int, microbatches: int) -> int:
    """The model chunks whose activations a stage holds at its peak; a chunk is L / (pp vpp) layers.

    1F1B (Narayanan et al. 2021, section 2.2) lets stage p start pp - p microbatches before its
    first backward pass. Interleaved: 2 (pp - p - 1) + (vpp - 1) pp chunks to warm up, and one more.
    """
    p = config.parallel
    if p.vpp == 1:
        return min(p.pp - stage, microbatches)
    return min(2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp + 1, microbatches * p.vpp)


def bf16_share(config: Config, stage: int, fallen: Collection[int] = ()) -> float:
    """The share of a stage's layers that `precision.bf16_layers` leaves in BF16.

    The layers `fallen`, numbered from 1, are in BF16 as well (`precision.guard`).
    """
    m, p, (head, tail) = config.model, config.parallel, config.precision.bf16_layers
    count = m.layers // (p.pp * p.vpp)
    firsts = [(chunk * p.pp + stage) * count for chunk in range(p.vpp)]
    layers = [first + i for first in firsts for i in range(count)]
    plain = [not head <= n < m.layers - tail or n + 1 in fallen for n in layers]
    return sum(plain) / len(layers)


def activation_bytes(
    config: Config, stage: int, microbatches: int, fallen: Collection[int] = ()
) -> int:
    """Bytes of a stage's activations at its peak: layers, final norm, output layer."""
    m, p = config.model, config.parallel
    layers = chunks_in_flight(config, stage, microbatches) * m.layers // (p.pp * p.vpp)
    full = config.train.recompute == "full"
    each_token = layers * (layer_input_bytes(config) if full else layer_activation_bytes(config))
    if not full:
        plain = replaced(config, precision={"recipe": "bf16"})
        more = layer_activation_bytes(plain) - layer_activation_bytes(config)
        each_token += layers * bf16_share(config, stage, fallen) * more
    if stage == p.pp - 1:
        statistics = STATISTIC / (p.tp if p.sequence_parallel else 1)
        each_token += layer_input_bytes(config) + statistics + m.hidden * element_bytes(config)
    return round(microbatch_tokens(config) * each_token)


def loss_bytes(config: Config, vocab: int) -> int:
    """Bytes that `loss.py` holds on the last stage as backward begins.

    They are the logits, of one chunk of the vocabulary or with logits=save all, and the gradient of
    the last hidden state, in fp32 and in the dtype in which it is returned. With gradients in FP8
    there are also their codes of a chunk, direct and transposed, and fp32 sums of each 128 tokens,
    the transposed codes of the hidden states and those of a chunk of the weight; where logits are
    of FP8 or INT8 operands too, the direct codes of the hidden states.
    """
    m, e, tokens = config.model, element_bytes(config), microbatch_tokens(config)
    rows = vocab // config.parallel.tp
    chunk = min(rows, default_chunk(tokens, weight_dtype(config)))
    held = rows if config.train.logits == "save" else chunk
    size = tokens * (held * e + m.hidden * (4 + e))
    layer = config.precision.output_layer
    if layer != "bf16":
        hidden_codes = m.hidden * (1 if layer == "fp8-gradients" else 2)
        size += tokens * (2 * chunk + hidden_codes) + chunk * (m.hidden + tokens // 128 * 4)
    return size


def fallback_bytes(
    config: Config, fallen: Collection[int], *, stage: int, data_parallel: int
) -> int:
    """Bytes that a stage's peak grows by when the layers `fallen`, numbered from 1, are in BF16.

    They save what a BF16 layer saves; with recompute=full one of them recomputes it in backward.
    """
    microbatches = config.train.microbatches(data_parallel)
    if config.train.recompute != "full":
        before = activation_bytes(config, stage, microbatches)
        return activation_bytes(config, stage, microbatches, fallen) - before
    if bf16_share(config, stage, fallen) == 0:
        return 0
    plain = replaced(config, precision={"recipe": "bf16"})
    return max(0, backward_bytes(plain) - backward_bytes(config))


def backward_bytes(config: Config) -> int:
    """Bytes that the backward pass of a layer holds on top of what was saved.

    With full recomputation that includes everything that the layer saves. Its input, which counts
    among the activations too, is counted here in place of its output.
    """
    each_token = layer_backward_bytes(config)
    if config.train.recompute == "full":
        each_token += layer_activation_bytes(config)
    return round(microbatch_tokens(config) * each_token) + bf16_gemm_bytes(config)


def bf16_gemm_bytes(config: Config) -> int:
    """At most what the largest GEMM allocates for operands that `precision.bf16_operands` names.

    Its operands and result are x [T, H], W [2F, H] and y [T, 2F], in any order. Of each there are
    BF16 values, and for a time two copies in fp32, of which one is dequantized or added to.
    """
    if not config.precision.flow or not config.precision.flow_recipe().bf16:
        return 0
    h, f, tokens = config.model.hidden, config.model.ffn, microbatch_tokens(config)
    return BF16_GEMM * (tokens * h + 2 * f * h + tokens * 2 * f)


def buffer_bytes(config: Config) -> int:
    """Bytes that are allocated once: cuBLAS's workspaces, tables of RoPE, hidden states in transit.

    Pipeline stages receive and send hidden states; sequence parallelism all-gathers them.
    """
    m, p = config.model, config.parallel
    hidden = microbatch_tokens(config) * m.hidden * element_bytes(config)
    between = 2 * round(hidden / (p.tp if p.sequence_parallel else 1)) if p.pp > 1 else 0
    return 2 * CUBLAS_WORKSPACE + rotary_bytes(config) + between + hidden * p.sequence_parallel


def graph_bytes(config: Config, data_parallel: int, microbatch: int) -> int:
    """Bytes that CUDA graphs add: static inputs, and the pool beside an eager microbatch.

    `microbatch`: bytes of activations and temporaries at the peak of a microbatch.
    """
    if not config.cuda_graphs:
        return 0
    log, count = config.log, config.train.microbatches(data_parallel)
    steps = config.captures_steps(data_parallel)
    reduces, eager = data_parallel * config.parallel.cp > 1, count >= EAGER_AFTER_CAPTURE
    measured = config.precision.guard != "off" or log.numerics_every or (steps and log.states_every)
    beside = microbatch if measured or (reduces and eager) else 0
    return microbatch_tokens(config) * GRAPH_INPUTS * (count if steps else 1) + beside


# --- a rank -------------------------------------------------------------------------------------


def microbatch_tokens(config: Config) -> int:
    """Tokens of a microbatch on one rank; context parallelism divides them."""
    return config.train.micro_batch * config.data.seq_len // config.parallel.cp


def rank_bytes(config: Config, vocab: int, *, stage: int, data_parallel: int) -> RankBytes:
    """Bytes by kind on every rank of a pipeline stage."""
    p = config.parallel
    count = rank_parameters(config.model, vocab, tp=p.tp, pp=p.pp, stage=stage)
    activations = activation_bytes(config, stage, config.train.microbatches(data_parallel))
    loss = loss_bytes(config, vocab) if stage == p.pp - 1 else 0
    layer = layer_matrices(config.model) // p.tp
    backward = backward_bytes(config) + returned_grad_bytes(config, layer, data_parallel)
    if loss:
        loss += returned_grad_bytes(config, vocab * config.model.hidden // p.tp, data_parallel)
    return RankBytes(
        weights=weight_bytes(config, count, vocab, stage=stage, data_parallel=data_parallel),
        fp8_weights=fp8_weight_bytes(config),
        main_grads=grad_buffer_bytes(config, count, vocab, data_parallel),
        optim_states=device_state_bytes(config, count, vocab, data_parallel),
        activations=activations,
        loss=loss,
        backward=backward,
        buffers=buffer_bytes(config),
        graphs=graph_bytes(config, data_parallel, activations + max(loss, backward)),
        initial=construction_bytes(config, count, vocab, stage=stage, data_parallel=data_parallel),
    )


def stage_bytes(config: Config, vocab: int, data_parallel: int) -> list[RankBytes]:
    """`rank_bytes` of every pipeline stage."""
    stages = range(config.parallel.pp)
    return [rank_bytes(config, vocab, stage=s, data_parallel=data_parallel) for s in stages]


def highest_stage(config: Config, vocab: int, data_parallel: int) -> int:
    """The pipeline stage whose ranks have the highest peak."""
    sizes = [rank.total for rank in stage_bytes(config, vocab, data_parallel)]
    return sizes.index(max(sizes))


def peak_bytes(config: Config, vocab: int, data_parallel: int) -> int:
    """The peak of the rank with the highest peak."""
    return max(rank.total for rank in stage_bytes(config, vocab, data_parallel))


def micro_batches(config: Config, data_parallel: int) -> list[int]:
    """Every micro_batch that divides a replica's share of the global batch, the largest first.

    Interleaved stages need a multiple of pp microbatches, train.update=backward a single one.
    """
    share, p = config.train.global_batch // data_parallel, config.parallel
    small = [n for n in range(1, math.isqrt(share) + 1) if share % n == 0]
    divisors = sorted({*small, *(share // n for n in small)}, reverse=True)
    if config.train.update == "backward":
        divisors = [share]
    return [n for n in divisors if p.vpp == 1 or share // n % p.pp == 0]


def largest_micro_batch(config: Config, vocab: int, data_parallel: int, memory: float) -> int:
    """The largest of `micro_batches` whose peak is within `memory` bytes; 0 if none is."""
    if config.train.global_batch % data_parallel:
        raise ConfigError(
            f"train.global_batch={config.train.global_batch} is not a multiple of the "
            f"data-parallel size {data_parallel}"
        )
    for size in micro_batches(config, data_parallel):
        smaller = replaced(config, train={"micro_batch": size})
        if peak_bytes(smaller, vocab, data_parallel) <= memory:
            return size
    return 0
