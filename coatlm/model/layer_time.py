"""The time of the parts of a layer, and of the output layer, from the rates of a GPU (rates.py).

The rate of a GEMM depends on its format and on the smallest of its three sizes. Other kernels are
limited by the memory's bandwidth; PASSES counts the bytes per element that those of
docs/results/layer.md read and write in forward and backward.
"""

from __future__ import annotations

from typing import NamedTuple

from coatlm.config import Config
from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.model.accounting import key_size, layer_matrices, query_size
from coatlm.model.layer_memory import element_bytes
from coatlm.model.memory import microbatch_tokens
from coatlm.model.rates import Rates, interpolated

TERA = 1e12
FORWARD = 1 / 3  # the share of a layer's GEMMs and elementwise bytes that forward has


class Passes(NamedTuple):
    """Bytes that elementwise kernels move per microbatch, in forward and backward together."""

    stream: float  # per token and element of the residual stream
    qkv: float  # per token and element of queries, keys and values
    mlp: float  # per token and element of ffn
    weights: float  # per weight of a matrix: casts, transposes, sums of gradients


# bytes on the wire per element of a partial sum of a layer
PARTIAL_SUMS = {"bf16": 2.0, "fp8": 1 + 4 / SCALE_BLOCK}
PASSES = {"fp8": Passes(45, 7, 18, 5), "bf16": Passes(40, 8, 16, 12)}


def kind(config: Config) -> str:
    """The key of a recipe in tables by format: fp8 or bf16."""
    return "bf16" if config.precision.recipe in ("bf16", "fp32") else "fp8"


def relative_time(config: Config, rates: Rates) -> float:
    """The time of GEMMs and elementwise kernels of all layers' passes, relative to `layer_gemms`
    and `layer_elementwise`: what the recipe costs, and a second forward with recompute=full.
    """
    repeated = 1 + FORWARD * (config.train.recompute == "full")
    slower = rates.layer.get(config.precision.recipe, 1.0)
    current = config.precision.flow and config.precision.scaling == "current"
    return repeated * slower * (rates.layer["current"] if current else 1.0)


class Gemms(NamedTuple):
    """Seconds of the three GEMMs of a linear on a rank, each of all tokens."""

    forward: float
    dgrad: float
    wgrad: float


def layer_gemms(config: Config, rates: Rates) -> float:
    """Seconds of the GEMMs of a layer on a rank, forward and backward."""
    return sum(sum(gemms) for gemms in linear_gemms(config, rates).values())


def linear_gemms(config: Config, rates: Rates) -> dict[str, Gemms]:
    """The GEMMs of each linear of a layer, at the rates of the pieces that tp_chunks makes of them.

    With tp_chunks > 1, GEMMs of an all-gathered operand are split into the rows of each rank, and a
    row-parallel GEMM in forward into tp_chunks chunks of columns (flow_gemms.py).
    """
    m, p, tokens = config.model, config.parallel, microbatch_tokens(config)
    q, k = query_size(m) // p.tp, key_size(m) // p.tp
    ffn, table = m.ffn // p.tp, rates.gemm[kind(config)]
    split = p.tp_chunks > 1 and config.precision.flow
    rows = tokens // p.tp if split and p.sequence_parallel else tokens
    columns = m.hidden // p.tp_chunks if split else m.hidden

    def linear(n: int, k: int, forward: int, dgrad: int) -> Gemms:
        """`forward` and `dgrad`: the smallest size of these GEMMs beside n and k."""
        flops = 2 * tokens * n * k
        sizes = (min(size, n, k) for size in (forward, dgrad, tokens))
        return Gemms(*(flops / (TERA * interpolated(table, size)) for size in sizes))

    gradients = rows if split and config.precision.flow_recipe().tensor_wise_gradients else tokens
    return {
        "qkv": linear(q + 2 * k, m.hidden, rows, tokens),
        "projection": linear(m.hidden, q, min(tokens, columns), gradients),
        "gate_up": linear(2 * ffn, m.hidden, rows, tokens),
        "down": linear(m.hidden, ffn, min(tokens, columns), gradients),
    }


def layer_elementwise(config: Config, rates: Rates) -> float:
    """Seconds of the other kernels of a layer but attention, forward and backward."""
    m, p, tokens = config.model, config.parallel, microbatch_tokens(config)
    passes = PASSES[kind(config)]
    split = p.tp if p.sequence_parallel else 1
    qkv = (query_size(m) + 2 * key_size(m)) / p.tp
    each = passes.stream * m.hidden / split + passes.qkv * qkv + passes.mlp * m.ffn / p.tp
    if p.tp_chunks > 1 and config.precision.flow:  # two sums of forward are copied into one tensor
        each += 2 * 2 * element_bytes(config) * m.hidden / split
    moved = tokens * each + passes.weights * layer_matrices(m) / p.tp
    return moved / (TERA * rates.tb_per_s)


def output_layer(config: Config, vocab: int, rates: Rates) -> float:
    """Seconds of the output layer and the loss of a microbatch, forward and backward."""
    h, tokens = config.model.hidden, microbatch_tokens(config)
    gemms = 3 if config.train.logits == "save" else 4
    flops = 2 * gemms * tokens * h * vocab / config.parallel.tp
    measured = rates.output.get(config.precision.output_layer, rates.output["fp8"])
    return flops / (TERA * interpolated(measured, h))
