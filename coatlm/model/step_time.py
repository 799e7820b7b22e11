"""The time of a training step, from its configuration and the rates of a GPU (rates.py).

    step = m max_s t_s + (sum_s t_s - max_s t_s) / vpp + sends + update + exposed communication

t_s is the time of a microbatch, forward and backward, on pipeline stage s; m is the number of
microbatches. The second term is the pipeline bubble: 1F1B (Narayanan et al. 2021, section 2.2)
fills and drains the other stages once, interleaved stages in pieces of 1 / vpp.

    t_s = max(layers (GEMMs + elementwise + attention) + output layer, launches) + tp + cp

(layer_time.py has what belongs to one layer.)

Exposed: of what layers exchange over tensor- and context-parallel ranks what exceeds the GEMMs or
the attention beside it (layer_comm.py), and all that the embedding and the output layer exchange;
of the reduction of gradients what exceeds the backward passes beside which it runs, and its last
bucket; of the all-gather of weights what exceeds a forward pass, and its first bucket. Overlapped
communication delays computation by `Rates.contention` of its time, and the casts before and after
an all-gather of weights in FP8 by all of theirs. Ranks are numbered tp, cp, dp, pp: a process group
spans nodes as soon as its members do; a reduction over several nodes sums inside each node first,
and each rank then sends its shard of sums over the network. Documents in a sample count as one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from coatlm.config import Config
from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.model.accounting import (
    attention_span,
    flops_per_token,
    layer_matrices,
    query_size,
    rank_parameters,
)
from coatlm.model.grad_memory import EACH
from coatlm.model.layer_comm import (
    NOTHING,
    GroupLink,
    context_copies,
    context_parallel,
    context_way,
    tensor_parallel,
)
from coatlm.model.layer_time import (
    FORWARD,
    TERA,
    kind,
    layer_elementwise,
    layer_gemms,
    output_layer,
    relative_time,
)
from coatlm.model.memory import (
    bf16_share,
    microbatch_tokens,
    optim_state_bytes,
    replaced,
)
from coatlm.model.rates import Link, Rates, interpolated, nearest
from coatlm.model.traffic import step_traffic
from coatlm.parallel.buckets import bucket_elements
from coatlm.parallel.finalize_grads import TensorParallelSums

# bytes on the wire per element of a gradient
GRADIENTS = {"fp32": 4.0, "bf16": 2.0, "fp8-nccl": 1.0, "fp8-a2a": 1 + 4 / SCALE_BLOCK}
WEIGHTS = {"bf16": 2.0, "fp8": 1.0}  # bytes per element of a layer's matrices in an all-gather
CAST_BYTES = 3  # read and written per element that is cast to FP8 before, or decoded after it
MEASURED_GRADS = 2  # bytes of a gradient with which Rates.optimizer is measured
NO_SUMS = TensorParallelSums(gradients=0, mus=0)  # of replicated weights: a few megabytes


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind in equal nodes."""

    rates: Rates
    gpus: int
    per_node: int = 8

    def local(self, inner: int, ranks: int) -> int:
        """How many of `ranks` ranks that are `inner` ranks apart share a node."""
        return max(1, min(ranks, self.per_node // inner))

    def link(self, inner: int, ranks: int) -> Link:
        """The slowest link between `ranks` ranks that are `inner` ranks apart."""
        local = self.local(inner, ranks)
        return nearest(self.rates.nvlink, local) if local == ranks else self.rates.network

    def wire(self, inner: int, ranks: int) -> GroupLink:
        """`link`, and the delay of computation per second of overlapped communication over it."""
        inside = self.local(inner, ranks) == ranks
        return GroupLink(self.link(inner, ranks), self.rates.contention if inside else 0.0)


class Sent(NamedTuple):
    """Bytes that a rank sends in a step."""

    nvlink: float
    network: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what the GPUs of the slowest stage do or wait for; they add up."""

    gemms: float
    elementwise: float
    attention: float
    output_layer: float
    launches: float  # the host is slower than the device
    tensor_parallel: float
    context_parallel: float
    pipeline: float  # bubble and sends
    gradients: float
    weights: float
    update: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Forecast:
    """The predicted time of a step and the bytes that a rank of the slowest stage sends in it."""

    time: StepTime
    sent: Sent
    tokens: int  # of a step
    flops: int  # of the model per token
    gpus: int
    saved_tp: float = 0.0  # seconds by which overlapping tensor-parallel collectives shortens it

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.time.total / self.gpus

    def mfu(self, peak: float) -> float:
        """Model FLOPs utilization at `peak` FLOP/s per GPU."""
        return self.tokens_per_s * self.flops / peak


def forecast(
    config: Config, vocab: int, cluster: Cluster, stages: Stages | None = None
) -> Forecast:
    """Predict a step on `cluster`, whose number of GPUs the configuration has to fit.

    train.logits=auto counts as recompute: call `fits.with_fitting` first, which decides it.
    `stages` are those of `stage_times`, if they are known.
    """
    p = config.parallel
    dp = config.data_parallel_size(cluster.gpus)
    m = config.train.microbatches(dp)
    slow, others = stages or stage_times(config, vocab, cluster)
    move = _move(config, vocab, cluster, dp, slow, m)
    hops = 2 * p.vpp * m if p.pp > 1 else 0
    split = p.tp if p.sequence_parallel else 1
    hidden = microbatch_tokens(config) * config.model.hidden * 2 / split
    between = cluster.link(cluster.gpus // p.pp, p.pp)
    sends = between.seconds(hops * hidden, hops)
    nvlink, network = move.sent
    for inner, ranks, sent in (
        (1, p.tp, m * slow.sent_tp),
        (p.tp, p.cp, m * slow.sent_cp),
        (cluster.gpus // p.pp, p.pp, hops * hidden),
    ):
        inside = cluster.local(inner, ranks) == ranks
        nvlink, network = nvlink + sent * inside, network + sent * (not inside)
    time = StepTime(
        gemms=m * slow.gemms,
        elementwise=m * slow.elementwise,
        attention=m * slow.attention,
        output_layer=m * slow.output,
        launches=m * slow.launches,
        tensor_parallel=m * slow.tensor,
        context_parallel=m * slow.context,
        pipeline=others / p.vpp + sends,
        gradients=move.gradients,
        weights=move.weights,
        update=_update(config, vocab, cluster.rates, dp),
    )
    tokens = config.train.global_batch * config.data.seq_len
    flops = flops_per_token(config.model, vocab, config.data.seq_len)
    saved = m * slow.saved_tp
    return Forecast(time, Sent(nvlink, network), tokens, flops, cluster.gpus, saved)


# --- a microbatch on a stage ---------------------------------------------------------------------


class _Stage(NamedTuple):
    """Seconds of forward and backward of a microbatch, and bytes sent over tp and cp."""

    gemms: float
    elementwise: float
    attention: float
    output: float
    launches: float
    tensor: float
    context: float
    sent_tp: float
    sent_cp: float
    saved_tp: float
    stage: int

    @property
    def total(self) -> float:
        return sum(self[:7])


class Stages(NamedTuple):
    """The stages of a pipeline in a microbatch."""

    slow: _Stage  # the slowest
    others: float  # seconds of all others


def stage_times(config: Config, vocab: int, cluster: Cluster) -> Stages:
    """The stages of `config`, which are the same for every parallel.zero."""
    pp = config.parallel.pp
    first = _stage(config, vocab, cluster, 0)
    last = _stage(config, vocab, cluster, pp - 1) if pp > 1 else first
    slow = max((first, last), key=lambda stage: stage.total)
    middle = _stage(config, vocab, cluster, 1).total * (pp - 2) if pp > 2 else 0.0
    return Stages(slow, first.total + last.total + middle - slow.total if pp > 1 else 0.0)


def _stage(config: Config, vocab: int, cluster: Cluster, stage: int) -> _Stage:
    p, rates = config.parallel, cluster.rates
    layers = config.model.layers // p.pp
    plain = bf16_share(config, stage) if config.precision.flow else 0.0
    gemms = elementwise = launches = 0.0
    for share, recipe in ((1 - plain, config.precision.recipe), (plain, "bf16")):
        if share:
            one = replaced(config, precision={"recipe": recipe})
            repeated = 1 + FORWARD * (config.train.recompute == "full")
            slower = layers * share * relative_time(one, rates)
            gemms += slower * layer_gemms(one, rates)
            elementwise += slower * layer_elementwise(one, rates)
            launches += layers * share * repeated * 1e-6 * rates.launch_us[kind(one)]
    attention = _attention(config, rates, stage)
    output = output_layer(config, vocab, rates) if stage == p.pp - 1 else 0.0
    traffic = step_traffic(config, stage=stage, microbatches=1, once=NO_SUMS).summary()
    sent_tp, sent_cp = traffic["comm_bytes_tp"], traffic.get("comm_bytes_cp", 0)
    tensor = context = NOTHING
    if p.tp > 1:
        tensor = tensor_parallel(config, plain, sent_tp, rates, cluster.wire(1, p.tp))
    if p.cp > 1:
        elementwise += layers * context_copies(config, rates)
        wire = cluster.wire(p.tp, p.cp)
        context = context_parallel(config, plain, sent_cp, attention, wire)
    attention *= 1 + FORWARD * (config.train.recompute != "none")
    busy = gemms + elementwise + attention + output
    waits = 0.0 if config.cuda_graphs else max(0.0, launches - busy)
    computed = gemms, elementwise, attention, output, waits
    sent = sent_tp, sent_cp
    return _Stage(*computed, tensor.seconds, context.seconds, *sent, tensor.saved, stage)


def _attention(config: Config, rates: Rates, stage: int) -> float:
    """Seconds of attention of a stage's layers, forward and backward, without recomputation."""
    m, p = config.model, config.parallel
    count = m.layers // (p.pp * p.vpp)
    firsts = [(chunk * p.pp + stage) * count for chunk in range(p.vpp)]
    seq = config.data.seq_len
    spans = sum(attention_span(m, first + i, seq) for first in firsts for i in range(count))
    flops = 6 * spans * query_size(m) / p.tp * microbatch_tokens(config)
    sizes = rates.attention[min(rates.attention, key=lambda d: abs(d - m.size_per_head))]
    seconds = flops / (TERA * interpolated(sizes, seq))
    if p.cp == 1:
        return seconds
    slower = context_way(config).attention
    return seconds * (rates.context_parallel if slower is None else slower)


# --- once per step -------------------------------------------------------------------------------


class _Move(NamedTuple):
    """Exposed seconds of the reduction of gradients and the all-gather of weights; bytes sent."""

    gradients: float
    weights: float
    sent: Sent


def _move(
    config: Config, vocab: int, cluster: Cluster, dp: int, stage: _Stage, microbatches: int
) -> _Move:
    p, rates = config.parallel, cluster.rates
    ranks = dp * p.cp
    if ranks == 1:
        return _Move(0.0, 0.0, Sent(0.0, 0.0))
    count = rank_parameters(config.model, vocab, tp=p.tp, pp=p.pp, stage=stage.stage)
    matrices = config.model.layers // p.pp * layer_matrices(config.model) // p.tp
    legs = 1 if p.zero else 2
    reductions = microbatches if p.zero >= 2 else 1
    gathers = (2 * microbatches if p.zero == 3 else 1) if p.zero else 0
    grads = legs * GRADIENTS[p.grad_comm] * count
    weights = WEIGHTS["bf16"] * (count - matrices) + WEIGHTS[p.weight_gather] * matrices
    buckets = max(1.0, count / bucket_elements(p.bucket_size, count))
    passes = stage.total * microbatches
    exposed, sent = [], Sent(0.0, 0.0)
    for each, times, overlapped, beside in (
        (grads, reductions, p.overlap_grad_reduce, (1 - FORWARD) * passes),
        (weights, gathers, p.overlap_param_gather, FORWARD * passes * (3 if p.zero == 3 else 1)),
    ):
        one = _spread(cluster, p.tp, ranks, each)
        inside = nearest(rates.nvlink, cluster.local(p.tp, ranks)).seconds(one.nvlink, buckets)
        across = rates.network.seconds(one.network, buckets) if one.network else 0.0
        seconds, window = times * (inside + across), beside
        if times < microbatches:
            window = beside / microbatches  # beside one microbatch
        covered = min(seconds * (1 - 1 / buckets), window) if overlapped else 0.0
        delay = rates.contention * covered * inside / max(inside + across, 1e-12)
        exposed.append(seconds - covered + delay)
        sent = Sent(sent.nvlink + times * one.nvlink, sent.network + times * one.network)
    gradients, gathered = exposed
    if p.weight_gather == "fp8":
        gathered += gathers * CAST_BYTES * matrices / (TERA * rates.tb_per_s)
    return _Move(gradients, gathered, sent)


def _spread(cluster: Cluster, inner: int, ranks: int, size: float) -> Sent:
    """What a rank sends of `size` bytes inside its node, and then between nodes."""
    local = cluster.local(inner, ranks)
    nodes = ranks / local
    return Sent(size * (local - 1) / local, size / local * (nodes - 1) / nodes)


def _update(config: Config, vocab: int, rates: Rates, dp: int) -> float:
    """Seconds from the last gradient to the updated weights: norm, update, and what is fixed."""
    p = config.parallel
    count = max(
        rank_parameters(config.model, vocab, tp=p.tp, pp=p.pp, stage=stage)
        for stage in {0, p.pp - 1}
    )
    shard = count / (dp * p.cp if p.zero else 1)
    grads, _ = EACH[p.main_grads]
    read = (2 * grads - MEASURED_GRADS) / (TERA * rates.tb_per_s)  # the norm reads gradients too
    each = 1e-12 * rates.optimizer[config.optim.recipe] + read
    seconds = shard * each
    if config.optim.offload == "states":  # both directions at once, beside the update
        moved = optim_state_bytes(config, count, dp)
        seconds = max(seconds, moved / (1e9 * rates.host_gb_per_s))
    return seconds + 1e-3 * rates.update_ms
