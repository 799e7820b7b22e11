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
from coatlm.model.memory import microbatch_tokens
from coatlm.model.rates import Link, Rates, interpolated

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


def layer_gemms(config: Config, rates: Rates) -> float:
    """Seconds of the GEMMs of a layer on a rank, forward and backward."""
    return sum(linear_gemms(config, rates).values())


def linear_gemms(config: Config, rates: Rates) -> dict[str, float]:
    """Seconds of the three GEMMs of each linear of a layer on a rank."""
    m, p, tokens = config.model, config.parallel, microbatch_tokens(config)
    q, k = query_size(m) // p.tp, key_size(m) // p.tp
    ffn, table = m.ffn // p.tp, rates.gemm[kind(config)]
    shapes = {
        "qkv": (q + 2 * k, m.hidden),
        "projection": (m.hidden, q),
        "gate_up": (2 * ffn, m.hidden),
        "down": (m.hidden, ffn),
    }
    return {
        name: 6 * tokens * n * k / (TERA * interpolated(table, min(tokens, n, k)))
        for name, (n, k) in shapes.items()
    }


def overlapped_by_chunks(config: Config, rates: Rates, link: Link) -> float:
    """Seconds per layer of tensor-parallel collectives that tp_chunks overlaps with GEMMs.

    The gather of codes is overlapped with the GEMMs of all rows but the last rank's, and a
    reduce-scatter of forward, except for its last chunk, with the GEMMs of later chunks. GEMMs of
    chunks are taken to be as fast as whole ones. Without sequence parallelism neither exists.
    """
    p, ranks = config.parallel, config.parallel.tp
    if p.tp_chunks == 1 or not p.sequence_parallel:
        return 0.0
    gemm = {name: FORWARD * time for name, time in linear_gemms(config, rates).items()}
    codes = link.seconds(microbatch_tokens(config) * config.model.hidden * (ranks - 1) / ranks)
    gathered = ["qkv", "gate_up"]
    if config.precision.flow_recipe().tensor_wise_gradients:
        gathered += ["projection", "down"]  # their gradients, in backward
    earlier = sum(min(codes, gemm[name] * (1 - 1 / ranks)) for name in gathered)
    later = 1 - 1 / p.tp_chunks
    sums = codes * PARTIAL_SUMS[p.tp_comm_reduce]
    summed = sum(later * min(sums, gemm[name]) for name in ("projection", "down"))
    return (1 - rates.contention) * (earlier + summed)


def layer_elementwise(config: Config, rates: Rates) -> float:
    """Seconds of the other kernels of a layer but attention, forward and backward."""
    m, p, tokens = config.model, config.parallel, microbatch_tokens(config)
    passes = PASSES[kind(config)]
    split = p.tp if p.sequence_parallel else 1
    qkv = (query_size(m) + 2 * key_size(m)) / p.tp
    each = passes.stream * m.hidden / split + passes.qkv * qkv + passes.mlp * m.ffn / p.tp
    moved = tokens * each + passes.weights * layer_matrices(m) / p.tp
    return moved / (TERA * rates.tb_per_s)


def output_layer(config: Config, vocab: int, rates: Rates) -> float:
    """Seconds of the output layer and the loss of a microbatch, forward and backward."""
    h, tokens = config.model.hidden, microbatch_tokens(config)
    gemms = 3 if config.train.logits == "save" else 4
    flops = 2 * gemms * tokens * h * vocab / config.parallel.tp
    return flops / (TERA * interpolated(rates.output[config.precision.output_layer], h))
