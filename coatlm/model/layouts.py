"""Search the layouts of a run on given GPUs: those that fit, by predicted tokens per second.

A layout is tp (within a node, with sequence parallelism), cp, pp, vpp, zero, recompute and the
microbatch, or some of these keys; the global batch and all number formats stay as they are. Each
has the tp_chunks with which its layers are the fastest. Where context-parallel ranks can exchange
heads, cp_comm all_gather is tried too, and p2p where it is possible. Where tp or cp is 1, options
that only larger ones have a use for (ONLY_ABOVE_1) are left out. A layout is valid if `Config`
accepts it, and fits if the estimated peak (memory.py) is at most what is `usable`. Logits are saved
where a run with train.logits=auto would save them (fits.py).
Candidates are ordered by their predicted time (step_time.py), equal ones by their position in
`layouts`, which begins with the simplest, so the order is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from math import inf

from coatlm.config import LAYOUT, ONLY_ABOVE_1, Config, ConfigError, make_config
from coatlm.config.obstacles import auto_p2p_obstacles
from coatlm.model.fits import with_fitting
from coatlm.model.layer_comm import layer_seconds
from coatlm.model.memory import GIB, micro_batches, rank_bytes, replaced
from coatlm.model.step_time import Cluster, Forecast, Stages, forecast, stage_times

# Shares of the memory that a peak leaves: for the CUDA context and fragments, and, where there are
# several ranks, for NCCL's buffers. On 80 GB a single rank has run with a peak of 94 % (8B, samples
# of 8192 tokens, states of `coat-lean`: tests/model/measured_steps.yaml), and two ranks with 91 %
# have run out of memory (7B, 16,384 tokens).
SPARE_ALONE, SPARE = 0.06, 0.1
LARGEST_MICRO_BATCH = 64
MOST_CHUNKS = 8  # per pipeline stage
SHORTEST = 2048  # tokens of a sample per context-parallel rank
ZERO = (1, 2, 3)
RECOMPUTE = ("none", "selective", "full")
CHUNKS = (1, 2, 4)  # of tp_chunks
CHUNK_MULTIPLE = 128  # columns: what any scale granularity of weights divides
TP_CHUNKS = ("parallel", "tp_chunks")
MICRO_BATCH = ("train", "micro_batch")
# The keys of a layout. A run with parallel.layout=auto does not choose TP_CHUNKS, whose predicted
# gain no GPU has confirmed.
EVERY = frozenset({*LAYOUT, TP_CHUNKS, MICRO_BATCH})


@dataclass(frozen=True)
class Choice:
    """A layout that fits: its configuration, forecast and peak in bytes."""

    config: Config
    forecast: Forecast
    peak: int


def describe(config: Config, ranks: int) -> str:
    """The layout in words: `tp 2 (sp) x pp 4 x dp 8, zero 1, recompute none, micro_batch 2`."""
    p, t = config.parallel, config.train
    dp = config.data_parallel_size(ranks)
    sizes = [("tp", p.tp), ("cp", p.cp), ("pp", p.pp), ("dp", dp)]
    shown = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one rank"
    more = f", tp_chunks {p.tp_chunks}" if p.tp_chunks > 1 else ""
    more += f", tp_comm_reduce {p.tp_comm_reduce}" if p.tp_comm_reduce != "bf16" else ""
    more += f", cp_comm {p.cp_comm}" if p.cp_comm != "auto" else ""
    more += f", cp_comm_kv {p.cp_comm_kv}" if p.cp_comm_kv != "bf16" else ""
    more += f", vpp {p.vpp}" if p.vpp > 1 else ""
    return f"{shown}{more}, zero {p.zero}, recompute {t.recompute}, micro_batch {t.micro_batch}"


def notes(
    asked: Config, found: Iterable[Config], free: Collection[tuple[str, str]] = EVERY
) -> list[str]:
    """A sentence for tp and one for cp, if `asked` sets options that need it above 1, and it is 1.

    `found` are the layouts that were chosen for `asked`, one of which has the size 1. `free`: the
    keys that were chosen with the layout, which are not options.
    """
    lines = []
    sizes = [layout.parallel for layout in found]
    for size, keys in ONLY_ABOVE_1.items():
        given = {key: getattr(asked.parallel, key) for key in keys if ("parallel", key) not in free}
        words = [f"parallel.{key}={value}" for key, value in given.items() if value != keys[key]]
        if words and any(getattr(parallel, size) == 1 for parallel in sizes):
            verb = "applies" if len(words) == 1 else "apply"
            lines.append(f"{' and '.join(words)} {verb} only to layouts with {size} above 1.")
    return lines


def ranked(
    config: Config, vocab: int, cluster: Cluster, free: Collection[tuple[str, str]] = EVERY
) -> Iterator[Choice]:
    """Yield the layouts that fit the memory of a GPU, the fastest first.

    `free`: the keys, as (section, key), whose values may differ from those in `config`.
    """
    saving = {"logits": "save" if config.train.logits == "auto" else config.train.logits}
    bounds = []  # the time with saved logits, a lower bound: whether they fit takes longer to tell
    known: dict[tuple[object, ...], Stages] = {}
    for number, layout in enumerate(layouts(config, vocab, cluster, free)):
        fastest = replaced(layout, train=saving)
        same = _without_zero(layout)
        if same not in known:
            known[same] = stage_times(fastest, vocab, cluster)
        time = forecast(fastest, vocab, cluster, known[same]).time
        bounds.append((time.total, number, layout))
    found: list[tuple[float, int, Choice]] = []
    for bound, number, layout in sorted(bounds, key=lambda row: row[:2]):
        while found and found[0][0] <= bound:
            yield heappop(found)[2]
        choice = predicted(layout, vocab, cluster)
        if choice.peak <= usable(cluster) and _valid(layout):
            heappush(found, (choice.forecast.time.total, number, choice))
    yield from (choice for _, _, choice in sorted(found, key=lambda row: row[:2]))


def _without_zero(config: Config) -> tuple[object, ...]:
    """The values of a layout's keys but zero."""
    return tuple(
        getattr(getattr(config, section), key)
        for section, key in (*LAYOUT, MICRO_BATCH)
        if key != "zero"
    )


def spare(ranks: int) -> float:
    """The share of a GPU's memory that a peak has to leave."""
    return SPARE if ranks > 1 else SPARE_ALONE


def any_valid(config: Config, cluster: Cluster) -> bool:
    """Whether any layout of these GPUs divides the model and the batch, and is valid."""
    return next(_shapes(config, cluster, EVERY), None) is not None


def usable(cluster: Cluster) -> float:
    """The bytes of a GPU that a peak may have."""
    return cluster.rates.memory_gib * GIB * (1 - spare(cluster.gpus))


def predicted(config: Config, vocab: int, cluster: Cluster) -> Choice:
    """The forecast and the peak of a layout, with `train.logits` decided."""
    dp = config.data_parallel_size(cluster.gpus)
    decided = with_fitting(config, vocab, dp, cluster.rates.memory_gib * GIB)
    return Choice(config, forecast(decided, vocab, cluster), highest_peak(decided, vocab, dp))


def _valid(config: Config) -> bool:
    """Whether zero and recompute agree with the other keys."""
    with suppress(ConfigError):
        make_config(config.model_dump(mode="json"))
        return True
    return False


def highest_peak(config: Config, vocab: int, dp: int) -> int:
    """The peak of the rank with the highest: of the first pipeline stage or of the last.

    The stages between them hold fewer microbatches than the first, and neither embedding.
    """
    stages = {0, config.parallel.pp - 1}
    return max(rank_bytes(config, vocab, stage=s, data_parallel=dp).total for s in stages)


def held_bytes(config: Config, vocab: int, dp: int) -> int:
    """What a rank holds for any microbatch and recompute mode: a lower bound of `highest_peak`."""
    stages = {0, config.parallel.pp - 1}
    ranks = [rank_bytes(config, vocab, stage=stage, data_parallel=dp) for stage in stages]
    held = (r.weights + r.fp8_weights + r.main_grads + r.optim_states for r in ranks)
    return max(*held, *(r.initial for r in ranks))


def lowest_peak(config: Config, vocab: int, cluster: Cluster) -> float:
    """The lowest peak of the layouts with the smallest microbatch; infinite without any."""
    peaks: list[tuple[int, int, Config]] = []
    for base in _shapes(config, cluster, EVERY):
        dp = cluster.gpus // _model_ranks(base)
        sizes = micro_batches(base, dp)[-1:]
        for size, zero, mode in product(sizes, ZERO, RECOMPUTE):
            train = {"micro_batch": size, "recompute": mode}
            layout = replaced(base, parallel={"zero": zero}, train=train)
            decided = with_fitting(layout, vocab, dp, memory=0)
            peaks.append((highest_peak(decided, vocab, dp), len(peaks), layout))
    for peak, _, layout in sorted(peaks, key=lambda row: row[:2]):
        if _valid(layout):
            return peak
    return inf


def layouts(
    config: Config, vocab: int, cluster: Cluster, free: Collection[tuple[str, str]] = EVERY
) -> Iterator[Config]:
    """Yield the layouts of `config` whose weights, gradients and states fit, the simplest first.

    zero and recompute are not yet compared with other keys.
    """
    t = config.train
    chunks: dict[tuple[int, int, int, bool], int] = {}  # by all that they depend on
    for base in _shapes(config, cluster, free):
        p, dp = base.parallel, cluster.gpus // _model_ranks(base)
        several = dp * p.cp > 1 and ("parallel", "zero") in free
        stages = [
            zero
            for zero in (ZERO if several else [p.zero])
            if held_bytes(replaced(base, parallel={"zero": zero}), vocab, dp) <= usable(cluster)
        ]
        for size in reversed(micro_batches(base, dp)) if stages else ():
            if size > LARGEST_MICRO_BATCH if MICRO_BATCH in free else size != t.micro_batch:
                continue
            modes = []
            for mode in RECOMPUTE if ("train", "recompute") in free else [t.recompute]:
                each = replaced(base, train={"micro_batch": size, "recompute": mode})
                same = p.tp, p.cp, size, mode == "full"
                if same not in chunks:
                    chunks[same] = _fastest_chunks(each, cluster, free)
                modes.append(replaced(each, parallel={"tp_chunks": chunks[same]}))
            for zero, each in product(stages, modes):
                yield replaced(each, parallel={"zero": zero})


def _fastest_chunks(config: Config, cluster: Cluster, free: Collection[tuple[str, str]]) -> int:
    """The number of CHUNKS with which a layer is the fastest, the fewest of equals."""
    p = config.parallel
    if p.tp == 1 or not config.precision.flow or TP_CHUNKS not in free:
        return p.tp_chunks
    wire, columns = cluster.wire(1, p.tp), config.model.hidden // CHUNK_MULTIPLE

    def seconds(chunks: int) -> float:
        split = replaced(config, parallel={"tp_chunks": chunks})
        return layer_seconds(split, cluster.rates, wire)

    return min((n for n in CHUNKS if n == 1 or columns % n == 0), key=seconds)


def _model_ranks(config: Config) -> int:
    p = config.parallel
    return p.tp * p.pp * p.cp


def _shapes(
    config: Config, cluster: Cluster, free: Collection[tuple[str, str]]
) -> Iterator[Config]:
    """Yield `config` with each valid tp, cp, pp, vpp, cp_comm, and a microbatch of one sample."""
    p, gpus = config.parallel, cluster.gpus
    data = replaced(config, train={"micro_batch": 1}).model_dump(mode="json")
    data["parallel"]["layout"] = "given"
    data["train"]["update"] = "step"  # the number of microbatches is not known yet
    for key, simplest in (("zero", 1), ("tp_chunks", 1), ("cp_comm", "auto")):
        if ("parallel", key) in free:
            data["parallel"][key] = simplest
    asked = data["parallel"]

    def sizes(key: str, choices: list[int]) -> list[int]:
        return choices if ("parallel", key) in free else [getattr(p, key)]

    for tp in sizes("tp", _divisors(min(cluster.per_node, gpus))):
        for cp in sizes("cp", _divisors(max(1, config.data.seq_len // SHORTEST))):
            for pp in sizes("pp", _divisors(config.model.layers)):
                ranks = tp * cp * pp
                if gpus % ranks or config.train.global_batch % (gpus // ranks):
                    continue
                chunks = [n for n in _divisors(config.model.layers // pp) if n <= MOST_CHUNKS]
                for vpp in sizes("vpp", chunks if pp > 1 else [1]):
                    data["parallel"] = asked | {"tp": tp, "cp": cp, "pp": pp, "vpp": vpp}
                    for size in (size for size, n in (("tp", tp), ("cp", cp)) if n == 1):
                        data["parallel"] |= ONLY_ABOVE_1[size]
                    if ("parallel", "sequence_parallel") in free:
                        data["parallel"]["sequence_parallel"] = tp > 1
                    if ("train", "recompute") in free:
                        data["train"]["recompute"] = "none"
                    with suppress(ConfigError):
                        valid = make_config(data)
                        valid.data_parallel_size(gpus)
                        valid = replaced(valid, train={"update": config.train.update})
                        yield valid
                        exchanges = cp > 1 and valid.context_comm == "a2a"
                        if ("parallel", "cp_comm") in free and exchanges:
                            yield replaced(valid, parallel={"cp_comm": "all_gather"})
                            if not any(auto_p2p_obstacles(valid)):
                                yield replaced(valid, parallel={"cp_comm": "p2p"})


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
