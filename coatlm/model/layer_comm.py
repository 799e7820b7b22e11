"""What a layer exchanges over tensor- and context-parallel ranks, and how much of it is exposed.

A collective that takes the time t, while GEMMs or attention of the time b run beside it, adds

    t - min(t, b) + contention min(t, b)

to a step. With contention the two share a GPU: over NVLink it is `Rates.contention`, and 0 over the
network. What runs beside a collective is what the code starts between it and the wait for it:

    tensor parallelism                 beside it                and with tp_chunks = N > 1
    forward   all-gather of inputs     nothing                  the GEMM of the rows before
              sum of outputs           nothing                  (N - 1) / N: GEMMs of later columns
    backward  all-gather of gradients  nothing                  dgrad of the rows before, of codes
              all-gather of inputs     dgrad                    dgrad
              sum of dgrad             wgrad                    wgrad

With chunks, codes arrive from one rank after the other, each beside the GEMM of the rows before.
That is the order of an FP8 layer (flow_gemms.py). Layers of megatron-core and TransformerEngine
have that of the column without chunks. Casts of weights, which also run beside some of these, are
short and not counted, and neither are those of keys and values with parallel.cp_comm_kv=fp8. WAYS
has the collectives of context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from coatlm.config import Config
from coatlm.model.accounting import key_size, query_size
from coatlm.model.layer_memory import element_bytes
from coatlm.model.layer_time import (
    FORWARD,
    PARTIAL_SUMS,
    TERA,
    Gemms,
    layer_elementwise,
    layer_gemms,
    linear_gemms,
    relative_time,
)
from coatlm.model.memory import microbatch_tokens, replaced
from coatlm.model.rates import Link, Rates
from coatlm.model.traffic import OperandGather, kv_block_size, layer_gathers
from coatlm.parallel.context import head_parts

ROUNDING = 1000  # bytes per microbatch: less is a rounding error of `traffic`


class Collective(NamedTuple):
    """Equal collectives of a layer in a microbatch."""

    sent: float  # bytes that a rank sends in each
    beside: float = 0.0  # seconds of GEMMs or attention that run beside each
    times: float = 1
    calls: int = 1  # one per tensor, each with the latency of the link


class GroupLink(NamedTuple):
    """The link of a process group."""

    link: Link
    contention: float  # the delay of computation per second of overlapped communication


class Exposed(NamedTuple):
    """Seconds that collectives add to a microbatch, and those that overlapping saves."""

    seconds: float
    saved: float


NOTHING = Exposed(0.0, 0.0)


def exposed(collectives: Iterable[Collective], wire: GroupLink, layers: float = 1) -> Exposed:
    """What the collectives of `layers` equal layers cost."""
    seconds = saved = 0.0
    for one in collectives:
        whole = wire.link.seconds(one.sent, one.calls)
        less = (1 - wire.contention) * min(whole, one.beside)
        seconds, saved = seconds + one.times * (whole - less), saved + one.times * less
    return Exposed(layers * seconds, layers * saved)


# --- tensor parallelism --------------------------------------------------------------------------


def tensor_parallel(
    config: Config, plain: float, sent: float, rates: Rates, wire: GroupLink
) -> Exposed:
    """What a stage that sends `sent` bytes per microbatch over the tensor-parallel ranks exposes.

    `plain`: the share of its layers that `precision.bf16_layers` leaves in BF16. Bytes that are not
    of layers are of the embedding or of the output layer, each with two collectives.
    """
    seconds = saved = 0.0
    for share, recipe in ((1 - plain, config.precision.recipe), (plain, "bf16")):
        if share:
            one, layers = replaced(config, precision={"recipe": recipe}), share * _layers(config)
            found = list(tensor_collectives(one, linear_gemms(one, rates)))
            each = exposed(found, wire, layers)
            seconds, saved = seconds + each.seconds, saved + each.saved
            sent -= layers * sum(one.times * one.sent for one in found)
    ends = wire.link.seconds(sent, 2) if sent > ROUNDING else 0.0
    return Exposed(seconds + ends, saved)


def layer_seconds(config: Config, rates: Rates, wire: GroupLink) -> float:
    """Seconds of a layer without attention in a microbatch, with tensor-parallel collectives."""
    computed = layer_gemms(config, rates) + layer_elementwise(config, rates)
    found = tensor_collectives(config, linear_gemms(config, rates))
    return relative_time(config, rates) * computed + exposed(found, wire).seconds


def _layers(config: Config) -> int:
    return config.model.layers // config.parallel.pp


def tensor_collectives(config: Config, gemms: Mapping[str, Gemms]) -> Iterator[Collective]:
    """Those of a layer of `precision.recipe` over the tensor-parallel ranks.

    `gemms` are those of `linear_gemms`. The bytes are those of `traffic.step_traffic`.
    """
    p = config.parallel
    chunks = p.tp_chunks if config.precision.flow else 1
    one = 1 / p.tp if chunks > 1 else 0.0  # the share of a GEMM that has one rank's rows
    again = 2 if config.train.recompute == "full" else 1
    gathers = layer_gathers(config, current=config.precision.scaling == "current")
    codes = gathers.gradients.dtype is not None
    for column, row in (("qkv", "projection"), ("gate_up", "down")):
        yield from _gather(config, gathers.inputs, one * gemms[column].forward, again, one > 0)
        yield _sum(config, gemms[row].forward / chunks, (chunks - 1) * again, chunks)
        yield _sum(config, 0.0, again, chunks)
        beside = one * codes * gemms[row].dgrad
        yield from _gather(config, gathers.gradients, beside, pieces=beside > 0)
        yield from _gather(config, gathers.again, gemms[column].dgrad)
        yield _sum(config, gemms[column].wgrad)


def _gather(
    config: Config, operand: OperandGather, beside: float, times: int = 1, pieces: bool = False
) -> Iterator[Collective]:
    """An all-gather under sequence parallelism, and before it the all-reduces of its amax.

    In `pieces` there is one exchange per other rank, of codes and of scales.
    """
    p, shape = config.parallel, (microbatch_tokens(config), config.model.hidden)
    if not p.sequence_parallel:
        return
    width = operand.dtype.itemsize if operand.dtype else element_bytes(config)
    total, calls = shape[0] * shape[1] * width, 1
    if operand.scales is not None:
        rows, columns = operand.scales.scale_shape(shape)
        total, calls = total + 4 * rows * columns, 2
    share = (p.tp - 1) / p.tp
    steps = p.tp - 1 if pieces else 1
    yield Collective(share * total / steps, beside, times * steps, calls)
    if operand.amaxes:
        yield Collective(2 * share * 4, 0.0, times * operand.amaxes)


def _sum(config: Config, beside: float, times: int = 1, chunks: int = 1) -> Collective:
    """The sum of one of `chunks` chunks of columns of x [T, H] over the ranks."""
    p = config.parallel
    legs, width = 1 if p.sequence_parallel else 2, float(element_bytes(config))
    if config.precision.flow and p.tp_comm_reduce != "bf16":
        width = PARTIAL_SUMS[p.tp_comm_reduce]
    size = microbatch_tokens(config) * config.model.hidden * width / chunks
    return Collective(legs * size * (p.tp - 1) / p.tp, beside, times)


# --- context parallelism -------------------------------------------------------------------------


class ContextWay(NamedTuple):
    """How context-parallel ranks compute attention."""

    collectives: Callable[[Config, float, float, float, bool], Iterator[Collective]]
    """Those of forward or of backward of a layer, from the bytes that a rank sends in it, the
    seconds of attention, the bytes of an element of keys relative to one of queries, and whether it
    is backward."""

    attention: float | None
    """The time of attention relative to causal kernels of whole samples with the same FLOPs; None:
    `Rates.context_parallel`."""

    copies: int
    """How often queries, keys, values and outputs are copied in forward, beyond the kernels from
    which `Rates.context_parallel` was fitted; as often their gradients in backward."""


def _by_heads(
    config: Config, sent: float, attention: float, keys: float, backward: bool
) -> Iterator[Collective]:
    """All-to-alls of q, k, v and of the output (parallel/context.py), each in parts of the heads.

    The first part to arrive and the last to be sent back are exposed; others overlap with attention
    of one part. In backward it is the same with the gradients, in reverse order.
    """
    m, p, keys = config.model, config.parallel, 1.0 if backward else keys
    parts = head_parts(m.key_value_heads // (p.tp * p.cp))
    outputs = query_size(m) / (2 * query_size(m) + 2 * keys * key_size(m))
    for share, calls in ((1 - outputs, 3), (outputs, 1)):
        yield Collective(share * sent / parts, 0.0, 1, calls)
        yield Collective(share * sent / parts, attention / parts, parts - 1, calls)


def _by_peers(
    config: Config, sent: float, attention: float, keys: float, backward: bool
) -> Iterator[Collective]:
    """Keys and values from one rank after the other (parallel/ring_attention.py).

    Those of the next rank arrive during attention to those of the one before. Their gradients
    return during the piece after theirs, beside the keys of a later piece; the last ones are
    exposed. `sent` is that of the last rank, which returns gradients of half of the keys in every
    step; in each, other ranks return those of all.
    """
    ranks = config.parallel.cp
    piece, each = attention / ranks, sent / (ranks - 1)
    if not backward:
        yield Collective(each, piece, ranks - 1)
        return
    arriving, returning = each * keys / (keys + 0.5), each / (keys + 0.5)
    yield Collective(arriving, piece, min(ranks - 1, 2))
    yield Collective(arriving + returning, piece, max(ranks - 3, 0), 2)
    yield Collective(returning, piece, min(ranks - 2, 1))
    yield Collective(returning)


def _gathered(
    config: Config, sent: float, attention: float, keys: float, backward: bool
) -> Iterator[Collective]:
    """All-gathers of keys and values, or reduce-scatters of their gradients."""
    yield Collective(sent / 2, times=2)


PIECES = 1.25  # measured: 1.19 to 1.37 on two to eight ranks (docs/results/scale.md)
WAYS = {  # parallel.cp_comm
    "a2a": ContextWay(_by_heads, attention=1.0, copies=1),
    "p2p": ContextWay(_by_peers, attention=PIECES, copies=1),
    "all_gather": ContextWay(_gathered, attention=None, copies=0),
}


def context_way(config: Config) -> ContextWay:
    """The row of WAYS for a configuration, with `auto` decided."""
    return WAYS[config.context_comm]


def attention_passes(config: Config) -> tuple[int, int]:
    """How often a layer computes attention forward and backward in a microbatch."""
    return (1 if config.train.recompute == "none" else 2), 1


def context_parallel(
    config: Config, plain: float, sent: float, attention: float, wire: GroupLink
) -> Exposed:
    """What a stage that sends `sent` bytes per microbatch over the context-parallel ranks exposes.

    `plain`: the share of its layers that `precision.bf16_layers` leaves in BF16. `attention`: its
    seconds of forward and backward without recomputation.
    """
    layers, way = _layers(config), context_way(config)
    (forward, backward), found = attention_passes(config), []
    keys, queries = sent_key_bytes(config, plain) / element_bytes(config), 0
    if config.context_comm == "a2a":
        queries = query_size(config.model)
    # forward sends what is proportional to the first of these, backward to the second
    again = keys + 0.5 if config.context_comm == "p2p" else 1.0  # see _by_peers
    weights = [queries + key_size(config.model) * ratio for ratio in (keys, again)]
    unit = sent / layers / (forward * weights[0] + backward * weights[1])
    for times, share, weight, backwards in (
        (forward, FORWARD, weights[0], False),
        (backward, 1 - FORWARD, weights[1], True),
    ):
        beside = share * attention / layers
        for one in way.collectives(config, unit * weight, beside, keys, backwards):
            found.append(one._replace(times=times * one.times))
    return exposed(found, wire, layers)


def sent_key_bytes(config: Config, plain: float) -> float:
    """Bytes per element of the keys and values that layers send, the mean over a stage's layers."""
    columns = kv_block_size(config)
    codes = element_bytes(config) if columns is None else 1 + 1 / columns
    return plain * element_bytes(config) + (1 - plain) * codes


def context_copies(config: Config, rates: Rates) -> float:
    """Seconds of the copies around a layer's exchange, forward and backward."""
    width = 2 * (query_size(config.model) + key_size(config.model)) / config.parallel.tp
    times = context_way(config).copies * sum(attention_passes(config))
    moved = 2 * element_bytes(config) * microbatch_tokens(config) * width  # read and written
    return times * moved / (TERA * rates.tb_per_s)
