"""Parameters and FLOPs of a run, from its configuration alone; bytes are in `memory.py`.

Legend: h hidden, f ffn, q = heads head_dim, k = kv_heads head_dim, L layers, V vocabulary,
s sequence length, all in elements.

    matrices of a layer   h (q + 2k) + q h + 3 h f      qkv, projection, gate | up, down
    vectors of a layer    2 h [+ q + 2k] [+ 2 head_dim] two norms [qkv bias] [query, key norm];
                          4 h with norms on both sides (sandwich_norm)
    parameters            L (matrices + vectors) + h V + h [+ h V]
                          embedding, final norm [output layer, unless tied]
    FLOPs per token       6 (L matrices + h V) + 6 q (sum of spans over the layers)
    span of a layer       s, or 2 w - w^2 / s with a sliding window of w < s tokens: twice the mean
                          number of tokens that a token attends to

A multiply-add is two FLOPs; the backward pass costs twice the forward pass, hence 6 per weight
(Kaplan et al. 2020, section 2.1). Attention takes 2 s q for Q K^T and 2 s q for P V, halved
because of the causal mask, times 3 for forward and backward. Every GEMM of the model counts, the
output layer included; the embedding lookup, norms, activations and recomputation do not. This is
the convention of MFU (Chowdhery et al. 2022, appendix B) with causal attention.
"""

from __future__ import annotations

import re

from coatlm.config import Config, ConfigError, Model

VOCAB_MULTIPLE = 128  # rows of the embedding: full GEMM tiles

# Dense BF16 FLOP/s from the data sheets (half of the sparse figure); the first match counts.
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

    It does not depend on the parallel layout, so that a checkpoint loads on any number of ranks.
    """
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def model_vocab(config: Config, tokenizer_vocab: int | None = None) -> int:
    """Rows of the embedding: `model.vocab` as given, else the tokenizer's vocabulary, padded.

    Raises ConfigError if neither is known, if the tokenizer has more tokens than `model.vocab`, or
    if the number of rows is not a multiple of `parallel.tp`.
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
    """Elements of the queries of all heads, per token."""
    return m.heads * m.size_per_head


def key_size(m: Model) -> int:
    """Elements of the keys of all kv_heads, per token; the values have as many."""
    return m.key_value_heads * m.size_per_head


def layer_matrices(m: Model) -> int:
    """Number of weights in the matrices of a layer, which tensor parallelism shards."""
    attention = m.hidden * (query_size(m) + 2 * key_size(m)) + query_size(m) * m.hidden
    return attention + 3 * m.hidden * m.ffn


def layer_biases(m: Model) -> int:
    """Number of biases of a layer, all of them of qkv; sharded as the qkv matrix is."""
    return query_size(m) + 2 * key_size(m) if m.qkv_bias else 0


def layer_norms(m: Model) -> int:
    """Number of norm weights of a layer, which are replicated over tensor-parallel ranks."""
    heads = query_size(m) + key_size(m) if m.qk_norm_width == "all" else 2 * m.size_per_head
    return (4 if m.sandwich_norm else 2) * m.hidden + (heads if m.qk_norm else 0)


def parameters(m: Model, vocab: int) -> int:
    """Number of parameters of the model; tied embeddings count once."""
    layer = layer_matrices(m) + layer_biases(m) + layer_norms(m)
    embeddings = m.hidden * vocab * (1 if m.tie_embeddings else 2)
    return m.layers * layer + m.hidden + embeddings


def matmul_parameters(m: Model, vocab: int) -> int:
    """Number of weights in GEMMs, per token: the layers' matrices and the output layer."""
    return m.layers * layer_matrices(m) + m.hidden * vocab


def rank_parameters(m: Model, vocab: int, *, tp: int = 1, pp: int = 1, stage: int = 0) -> int:
    """Number of parameters on a rank of pipeline stage `stage`, 0 to pp - 1.

    With pp > 1 tied embeddings have two copies, on the first and on the last stage.
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
    spans = sum(attention_span(m, layer, seq_len) for layer in range(m.layers))
    return 6 * matmul_parameters(m, vocab) + round(6 * spans * query_size(m))


def attention_span(m: Model, layer: int, seq_len: int) -> float:
    """Twice the mean number of tokens that a token of a layer, numbered from 0, attends to."""
    window = m.window_of(layer)
    if window is None or window >= seq_len:
        return seq_len
    return 2 * window - window**2 / seq_len


def peak_flops(device_name: str | None) -> float | None:
    """Peak dense BF16 FLOP/s of a GPU by its name in torch; None for a CPU or an unknown device."""
    for pattern, peak in PEAK_BF16:
        if device_name and pattern.search(device_name):
            return peak
    return None


def mfu(flops_per_s: float, device_name: str | None) -> float | None:
    """Model FLOPs utilization of one GPU as a fraction; None where the peak is not known.

    The peak is that of BF16 for every recipe, so that recipes can be compared; FP8 may exceed 1.
    """
    peak = peak_flops(device_name)
    return flops_per_s / peak if peak else None
