"""Search the layouts of a run on given GPUs: those that fit, by predicted tokens per second.

A layout is tp (within a node, with sequence parallelism), cp, pp, vpp, zero, recompute and the
microbatch, or some of these keys; the global batch and all number formats stay as they are. A
layout is valid if `Config` accepts it, and fits if the estimated peak (memory.py) leaves SPARE of
the memory. Logits are saved where a run with train.logits=auto would save them (fits.py).
Candidates are ordered by their predicted time (step_time.py), equal ones by their position in
`layouts`, which begins with the simplest, so the order is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush

from coatlm.config import LAYOUT, Config, ConfigError, make_config
from coatlm.model.fits import with_logits
from coatlm.model.memory import GIB, micro_batches, rank_bytes, replaced
from coatlm.model.step_time import Cluster, Forecast, forecast

SPARE = 0.08  # of the memory: CUDA context, NCCL's buffers, fragmentation
LARGEST_MICRO_BATCH = 64
MOST_CHUNKS = 8  # per pipeline stage
SHORTEST = 2048  # tokens of a sample per context-parallel rank
ZERO = (1, 2, 3)
RECOMPUTE = ("none", "selective", "full")
MICRO_BATCH = ("train", "micro_batch")
EVERY = frozenset({*LAYOUT, MICRO_BATCH})  # the keys of a layout


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
    chunks = f", vpp {p.vpp}" if p.vpp > 1 else ""
    return f"{shown}{chunks}, zero {p.zero}, recompute {t.recompute}, micro_batch {t.micro_batch}"


def ranked(
    config: Config, vocab: int, cluster: Cluster, free: Collection[tuple[str, str]] = EVERY
) -> Iterator[Choice]:
    """Yield the layouts that fit the memory of a GPU, the fastest first.

    `free`: the keys, as (section, key), whose values may differ from those in `config`.
    """
    saving = {"logits": "save" if config.train.logits == "auto" else config.train.logits}
    bounds = []  # the time with saved logits, a lower bound: whether they fit takes longer to tell
    for number, layout in enumerate(layouts(config, cluster, free)):
        fastest = forecast(replaced(layout, train=saving), vocab, cluster)
        bounds.append((fastest.time.total, number, layout))
    found: list[tuple[float, int, Choice]] = []
    for bound, number, layout in sorted(bounds, key=lambda row: row[:2]):
        while found and found[0][0] <= bound:
            yield heappop(found)[2]
        choice = predicted(layout, vocab, cluster)
        if choice.peak <= cluster.rates.memory_gib * GIB * (1 - SPARE) and _valid(layout):
            heappush(found, (choice.forecast.time.total, number, choice))
    yield from (choice for _, _, choice in sorted(found, key=lambda row: row[:2]))


def predicted(config: Config, vocab: int, cluster: Cluster) -> Choice:
    """The forecast and the peak of a layout, with `train.logits` decided."""
    dp = config.data_parallel_size(cluster.gpus)
    decided = with_logits(config, vocab, dp, cluster.rates.memory_gib * GIB)
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


def layouts(
    config: Config, cluster: Cluster, free: Collection[tuple[str, str]] = EVERY
) -> Iterator[Config]:
    """Yield the layouts of `config`, the simplest first.

    zero and recompute are not yet compared with other keys.
    """
    t = config.train
    for base in _shapes(config, cluster, free):
        p, dp = base.parallel, cluster.gpus // _model_ranks(base)
        several = dp * p.cp > 1 and ("parallel", "zero") in free
        for size in reversed(micro_batches(base, dp)):
            if size > LARGEST_MICRO_BATCH if MICRO_BATCH in free else size != t.micro_batch:
                continue
            for zero in ZERO if several else [p.zero]:
                for recompute in RECOMPUTE if ("train", "recompute") in free else [t.recompute]:
                    yield replaced(
                        base,
                        parallel={"zero": zero},
                        train={"micro_batch": size, "recompute": recompute},
                    )


def _model_ranks(config: Config) -> int:
    p = config.parallel
    return p.tp * p.pp * p.cp


def _shapes(
    config: Config, cluster: Cluster, free: Collection[tuple[str, str]]
) -> Iterator[Config]:
    """Yield `config` with each valid tp, cp, pp and vpp, and a microbatch of one sample."""
    p, gpus = config.parallel, cluster.gpus
    data = replaced(config, train={"micro_batch": 1}).model_dump(mode="json")
    data["parallel"]["layout"] = "given"
    data["train"]["update"] = "step"  # the number of microbatches is not known yet
    if ("parallel", "zero") in free:
        data["parallel"]["zero"] = 1

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
                    data["parallel"] |= {"tp": tp, "cp": cp, "pp": pp, "vpp": vpp}
                    if ("parallel", "sequence_parallel") in free:
                        data["parallel"]["sequence_parallel"] = tp > 1
                    if ("train", "recompute") in free:
                        data["train"]["recompute"] = "none"
                    with suppress(ConfigError):
                        valid = make_config(data)
                        valid.data_parallel_size(gpus)
                        yield replaced(valid, train={"update": config.train.update})


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
