"""Parameters, FLOPs and bytes of a run, from its configuration alone.

Legend: h hidden, f ffn, q = heads head_dim, k = kv_heads head_dim, L layers, V vocabulary,
s sequence length, all in elements.

    matrices of a layer   h (q + 2k) + q h + 3 h f      qkv, projection, gate | up, down
    vectors of a layer    2 h [+ q + 2k] [+ 2 head_dim] two norms [qkv bias] [query, key norm]
    parameters            L (matrices + vectors) + h V + h [+ h V]
                          embedding, final norm [output layer, unless tied]
    FLOPs a token         6 (L matrices + h V) + 6 L s q

A multiply-add is two FLOPs; the backward pass costs twice the forward pass, hence 6 a weight
(Kaplan et al. 2020, section 2.1). Attention takes 2 s q for the scores and 2 s q for their use,
halved because a causal mask leaves half of them, times 3 for forward and backward. Counted: every
matrix product of the model, the output layer included. Not counted: the embedding lookup, norms,
activations, and what recomputation does again. This is the convention of MFU (Chowdhery et al.
2022, appendix B) with causal attention.

Bytes are those that the framework allocates and keeps: no CUDA context, communication buffers,
temporary workspaces or fragmentation. The memory plan and the reported MFU share these formulas.
"""

from __future__ import annotations

import math
import re
from dataclasses import astuple, dataclass

import torch

from coatlm.config import Config, ConfigError, Model
from coatlm.model.loss import default_chunk
from coatlm.optim.adamw import bytes_per_parameter
from coatlm.parallel.buffers import IN_FLIGHT

VOCAB_MULTIPLE = 128  # rows of the embedding: full GEMM tiles
STATISTIC = 4  # bytes of an fp32 number that a kernel keeps a row
GIB = 2**30

# Dense BF16 FLOP/s from the data sheets (half the figure with sparsity); the first match counts.
PEAK_BF16 = tuple(
    (re.compile(pattern), peak)
    for pattern, peak in (
        (r"\bMIG\b", None),  # a slice of a GPU has no published peak
        (r"\bGB[23]00\b", 2500e12),
        (r"\bB[23]00\b", 2250e12),
        (r"\bB100\b", 1750e12),
        (r"\bH[12]00 NVL\b", 835e12),
        (r"\bH[18]00 PCIe\b", 756e12),
        (r"\bH20\b", 148e12),
        (r"\b(H100|H200|H800|GH200)\b", 989e12),
        (r"\bA[18]00\b", 312e12),
        (r"\bL40S\b", 362e12),
        (r"\bL40\b", 181e12),
        (r"\bA30\b", 165e12),
        (r"\bA40\b", 150e12),
        (r"\bA10\b", 125e12),
        (r"\bL4\b", 121e12),
    )
)


# --- parameters ---------------------------------------------------------------------------------


def padded_vocab(vocab: int) -> int:
    """The smallest multiple of 128 that holds `vocab` tokens.

    It does not depend on the layout, so that a checkpoint fits every number of ranks.
    """
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def model_vocab(config: Config, tokenizer_vocab: int | None = None) -> int:
    """Rows of the embedding: `model.vocab` as given, else the tokenizer's vocabulary, padded.

    Raises ConfigError where neither is known, the tokenizer has more tokens, or tp does not divide.
    """
    given, tp = config.model.vocab, config.parallel.tp
    if given is None and tokenizer_vocab is None:
        raise ConfigError(
            f"model.vocab=null: the vocabulary of data.tokenizer={config.data.tokenizer} is not "
            "known here; give model.vocab or the tokenizer's size"
        )
    if given is not None and tokenizer_vocab is not None and given < tokenizer_vocab:
        raise ConfigError(
            f"model.vocab={given}: data.tokenizer={config.data.tokenizer} has {tokenizer_vocab} "
            "tokens; give at least as many or null"
        )
    vocab = given if given is not None else padded_vocab(tokenizer_vocab or 0)
    if vocab % tp:
        raise ConfigError(f"a vocabulary of {vocab} is not a multiple of parallel.tp={tp}")
    return vocab


def query_size(m: Model) -> int:
    """q: elements of all queries of a token."""
    return m.heads * m.size_per_head


def key_size(m: Model) -> int:
    """k: elements of all keys, or of all values, of a token."""
    return m.queries_groups * m.size_per_head


def layer_matrices(m: Model) -> int:
    """Weights of a layer that enter matrix products; divided over tensor-parallel ranks."""
    attention = m.hidden * (query_size(m) + 2 * key_size(m)) + query_size(m) * m.hidden
    return attention + 3 * m.hidden * m.ffn


def layer_biases(m: Model) -> int:
    """The bias of qkv; divided over tensor-parallel ranks as its matrix is."""
    return query_size(m) + 2 * key_size(m) if m.qkv_bias else 0


def layer_norms(m: Model) -> int:
    """Weights of the norms of a layer; the same on every tensor-parallel rank."""
    return 2 * m.hidden + (2 * m.size_per_head if m.qk_norm else 0)


def parameters(m: Model, vocab: int) -> int:
    """Parameters of the model; tied embeddings count once."""
    layer = layer_matrices(m) + layer_biases(m) + layer_norms(m)
    embeddings = m.hidden * vocab * (1 if m.tie_embeddings else 2)
    return m.layers * layer + m.hidden + embeddings


def matmul_parameters(m: Model, vocab: int) -> int:
    """Weights that every token is multiplied with: the layers and the output layer."""
    return m.layers * layer_matrices(m) + m.hidden * vocab


def rank_parameters(m: Model, vocab: int, *, tp: int = 1, pp: int = 1, stage: int = 0) -> int:
    """Parameters that a tensor-parallel rank of pipeline stage `stage` (0 .. pp - 1) holds.

    Tied embeddings in a pipeline are held twice, by the first and by the last stage.
    """
    layer = (layer_matrices(m) + layer_biases(m)) // tp + layer_norms(m)
    count = m.layers // pp * layer
    first, last = stage == 0, stage == pp - 1
    if first:
        count += m.hidden * vocab // tp
    if last:
        count += m.hidden
    if last and not (m.tie_embeddings and first):
        count += m.hidden * vocab // tp
    return count


# --- FLOPs --------------------------------------------------------------------------------------


def flops_per_token(m: Model, vocab: int, seq_len: int) -> int:
    """FLOPs of forward and backward for one token, without recomputation."""
    return 6 * matmul_parameters(m, vocab) + 6 * m.layers * seq_len * query_size(m)


def peak_flops(device_name: str | None) -> float | None:
    """Dense BF16 FLOP/s of a GPU as torch names it; None for CPUs and unknown devices."""
    for pattern, peak in PEAK_BF16:
        if device_name and pattern.search(device_name):
            return peak
    return None


def mfu(flops_per_s: float, device_name: str | None) -> float | None:
    """Model FLOPs utilisation of one GPU as a fraction; None where the peak is not known.

    The peak is BF16's for every recipe, so that recipes compare; FP8 may pass 1.
    """
    peak = peak_flops(device_name)
    return flops_per_s / peak if peak else None


# --- bytes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankBytes:
    """What one rank keeps in device memory, in bytes by kind."""

    weights: int
    fp8_weights: int
    main_grads: int
    optim_states: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        return sum(astuple(self))


def weight_dtype(config: Config) -> torch.dtype:
    """Of weights, and of activations between layers."""
    return torch.float32 if config.precision.recipe == "fp32" else torch.bfloat16


def element_bytes(config: Config) -> int:
    """Bytes of a weight, and of an activation between layers."""
    return weight_dtype(config).itemsize


def linear_input_bytes(config: Config) -> int:
    """Bytes of an element that a linear layer keeps for its weight gradient."""
    return 1 if config.precision.recipe.startswith("te-") else element_bytes(config)


def fp8_weight_bytes(config: Config) -> int:
    """FP8 copies of the matrices: W and its transpose, as TransformerEngine keeps them."""
    m, p = config.model, config.parallel
    if not config.precision.recipe.startswith("te-"):
        return 0
    return 2 * (m.layers // p.pp) * layer_matrices(m) // p.tp


def main_grad_bytes(config: Config, count: int, data_parallel: int) -> int:
    """The buffers that `count` gradients are accumulated and reduced in.

    Whole on every rank; with zero=2 a shard of them, one bucket that fills and those that travel.
    """
    p = config.parallel
    each = 4 if p.main_grads == "fp32" else 2
    ranks = data_parallel * p.cp
    if p.zero < 2 or ranks == 1:
        return count * each
    return (math.ceil(count / ranks) + min((IN_FLIGHT + 1) * p.bucket_size, count)) * each


def optim_state_bytes(config: Config, count: int, data_parallel: int) -> int:
    """States of `count` parameters; with zero > 0 divided over data- and context-parallel ranks."""
    each = bytes_per_parameter(config.optim.recipe, weight_dtype(config))
    ranks = data_parallel * config.parallel.cp if config.parallel.zero else 1
    return math.ceil(count * each / ranks)


def layer_activation_bytes(config: Config) -> float:
    """Bytes a token that one layer keeps for its backward pass, without full recomputation.

    In BF16 with k = q = h, without the four bytes of each fp32 statistic of a norm or a softmax:

        norm inputs 4h, their outputs 4h, q k v 6h, attention output 2h    = 16h
        fc1 output 4f, SwiGLU output 2f                                    =  6f

    With FP8 linear layers their inputs take one byte.
    """
    m, p = config.model, config.parallel
    e, x = element_bytes(config), linear_input_bytes(config)
    norms = 2 * m.hidden * (e + x) + 2 * STATISTIC
    mlp = 2 * m.ffn * e + m.ffn * x
    local = attention_activation_bytes(config) + mlp
    return norms / (p.tp if p.sequence_parallel else 1) + local / p.tp


def attention_activation_bytes(config: Config) -> int:
    """Bytes a token that attention keeps between the output of qkv and the input of the projection.

    Kept are q, k, v after RoPE, the output, and what the projection keeps of it. Norms of queries
    and keys add their inputs. Context parallelism gathers keys and values and keeps the output in
    two parts beside the whole. An attention mask becomes a bias of S elements a token. `selective`
    keeps the output of qkv alone.
    """
    m, p = config.model, config.parallel
    e, x = element_bytes(config), linear_input_bytes(config)
    q, k = query_size(m), key_size(m)
    if config.train.recompute == "selective":
        return (q + 2 * k) * e + q * x
    kept = (q + 2 * k * p.cp) * e + STATISTIC * m.heads + q * x
    if p.cp > 1 or x != e:
        kept += q * e
    if m.qk_norm:
        kept += (q + k) * e + STATISTIC * (m.heads + m.queries_groups)
    if config.data.reset_attention_mask:
        kept += config.data.seq_len * e
    return kept


def layer_input_bytes(config: Config) -> float:
    """Bytes a token of a layer's input: all that full recomputation keeps of a layer."""
    p = config.parallel
    return config.model.hidden * element_bytes(config) / (p.tp if p.sequence_parallel else 1)


def chunks_in_flight(config: Config, stage: int, microbatches: int) -> int:
    """Model chunks whose activations a stage holds at its peak; a chunk is L / (pp vpp) layers.

    1F1B (Narayanan et al. 2021, section 2.2) lets stage p start pp - p microbatches before its
    first backward pass. Interleaved: 2 (pp - p - 1) + (vpp - 1) pp chunks to warm up, and one more.
    """
    p = config.parallel
    if p.vpp == 1:
        return min(p.pp - stage, microbatches)
    return min(2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp + 1, microbatches * p.vpp)


def activation_bytes(config: Config, stage: int, microbatches: int) -> int:
    """Activations on a stage at its peak: of layers, and on the last one of norm and output."""
    m, p = config.model, config.parallel
    layers = chunks_in_flight(config, stage, microbatches) * m.layers // (p.pp * p.vpp)
    if config.train.recompute == "full":  # one layer at a time is whole again
        each_token = layers * layer_input_bytes(config) + layer_activation_bytes(config)
    else:
        each_token = layers * layer_activation_bytes(config)
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
    )


def fullest_stage(config: Config, vocab: int, data_parallel: int) -> int:
    """The pipeline stage whose ranks need most memory."""
    stages = range(config.parallel.pp)
    sizes = [rank_bytes(config, vocab, stage=s, data_parallel=data_parallel).total for s in stages]
    return sizes.index(max(sizes))


# --- the plan -----------------------------------------------------------------------------------


def plan(
    config: Config, world_size: int | None = None, *, tokenizer_vocab: int | None = None
) -> str:
    """What the run will be, as a table of several lines without a final newline.

    `world_size=None` plans for the fewest processes that hold the model, tp * pp * cp.
    `tokenizer_vocab` is used where `model.vocab` is null. Raises ConfigError where `world_size`
    does not fit the configuration or the vocabulary is not known.
    """
    m, p, t = config.model, config.parallel, config.train
    world_size = p.tp * p.pp * p.cp if world_size is None else world_size
    dp = config.data_parallel_size(world_size)
    vocab = model_vocab(config, tokenizer_vocab)
    tokens = t.global_batch * config.data.seq_len
    flops = flops_per_token(m, vocab, config.data.seq_len)
    total, active = parameters(m, vocab), matmul_parameters(m, vocab)
    heads = f"{m.heads} heads of {m.size_per_head} ({m.queries_groups} kv)"
    chunks = f", {p.vpp} chunks of {m.layers // (p.pp * p.vpp)}" if p.vpp > 1 else ""
    microbatches = f"microbatches: {microbatches_per_step(config, dp)} of {t.micro_batch} a rank"
    batch = f"{t.global_batch} samples x {config.data.seq_len}"
    work = [f"{_short(flops * n)}FLOP" for n in (1, tokens, tokens * t.steps)]
    rows = [
        ("model", f"{m.layers} layers, hidden {m.hidden}, {heads}, ffn {m.ffn}, vocab {vocab}"),
        ("parameters", f"{total:,} ({_short(total)}); {_short(active)} multiply each token"),
        ("ranks", f"{world_size} = tp {p.tp} x pp {p.pp} x cp {p.cp} x dp {dp}"),
        ("stages", f"{m.layers // p.pp} layers a stage{chunks}"),
        ("step", f"{tokens:,} tokens = {batch}; {microbatches}"),
        ("run", f"{t.steps:,} steps, {_short(t.steps * tokens)} tokens"),
        ("compute", f"{work[0]} a token, {work[1]} a step, {work[2]} in total"),
    ]
    lines = [f"{name:<14}{text}" for name, text in rows]
    return "\n".join(lines + _memory_table(config, vocab, dp))


def _memory_table(config: Config, vocab: int, dp: int) -> list[str]:
    """The lines about bytes of the fullest rank."""
    p, t = config.parallel, config.train
    stage = fullest_stage(config, vocab, dp)
    kept = rank_bytes(config, vocab, stage=stage, data_parallel=dp)
    in_flight = chunks_in_flight(config, stage, microbatches_per_step(config, dp)) / p.vpp
    held = f"microbatches in flight: {in_flight:g}, recompute {t.recompute}"
    shards = dp * p.cp if p.zero else 1
    rows = [
        ("weights", kept.weights, "fp32" if config.precision.recipe == "fp32" else "bf16"),
        ("fp8 weights", kept.fp8_weights, "W and its transpose"),
        ("main grads", kept.main_grads, p.main_grads),
        ("optim states", kept.optim_states, f"{config.optim.recipe}, cut in {shards}"),
        ("activations", kept.activations, held),
        ("loss", kept.loss, "a chunk of logits, the gradient of the hidden state"),
        ("sum", kept.total, "without CUDA context, communication and temporary buffers"),
    ]
    head = f"{'memory':<14}GiB on a rank of stage {stage}" + (", the fullest" if p.pp > 1 else "")
    return [head] + [f"  {name:<12}{size / GIB:10.3f}  {note}" for name, size, note in rows if size]


def _short(count: float) -> str:
    """Three digits and a decimal prefix: 8030261248 -> '8.03 G'."""
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if count < 999.5:
            return f"{count:.3g} {prefix}"
        count /= 1000
    return f"{count:.3g} Z"
