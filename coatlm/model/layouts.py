"""Search the layouts of a run on given GPUs: those that fit, by predicted tokens per second.

A layout is tp (within a node, with sequence parallelism), cp, pp, vpp, zero, recompute and the
microbatch; the global batch and all number formats stay as they are. A layout is valid if `Config`
accepts it, and fits if the estimated peak (memory.py) leaves SPARE of the memory. Candidates are
ordered by their predicted time (step_time.py), equal ones by their position in `layouts`, which
begins with the simplest, so the order is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from coatlm.config import Config, ConfigError, make_config
from coatlm.model.memory import GIB, micro_batches, rank_bytes, replaced
from coatlm.model.step_time import Cluster, Forecast, forecast

SPARE = 0.08  # of the memory: CUDA context, NCCL's buffers, fragmentation
LARGEST_MICRO_BATCH = 64
MOST_CHUNKS = 8  # per pipeline stage
SHORTEST = 2048  # tokens of a sample per context-parallel rank
ZERO = (1, 2, 3)
RECOMPUTE = ("none", "selective", "full")


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


def ranked(config: Config, vocab: int, cluster: Cluster) -> Iterator[Choice]:
    """Yield the layouts that fit the memory of a GPU, the fastest first."""
    memory = cluster.rates.memory_gib * GIB
    found = []
    for number, candidate in enumerate(layouts(config, cluster)):
        predicted = forecast(candidate, vocab, cluster)
        found.append((predicted.time.total, number, candidate, predicted))
    for _, _, candidate, predicted in sorted(found, key=lambda row: row[:2]):
        dp = candidate.data_parallel_size(cluster.gpus)
        peak = highest_peak(candidate, vocab, dp)
        if peak <= memory * (1 - SPARE):
            yield Choice(candidate, predicted, peak)


def highest_peak(config: Config, vocab: int, dp: int) -> int:
    """The peak of the rank with the highest: of the first pipeline stage or of the last.

    The stages between them hold fewer microbatches than the first, and neither embedding.
    """
    stages = {0, config.parallel.pp - 1}
    return max(rank_bytes(config, vocab, stage=s, data_parallel=dp).total for s in stages)


def layouts(config: Config, cluster: Cluster) -> Iterator[Config]:
    """Yield the valid layouts of `config`, the simplest first."""
    for base in _shapes(config, cluster):
        p, dp = base.parallel, cluster.gpus // _model_ranks(base)
        sizes = [n for n in reversed(micro_batches(base, dp)) if n <= LARGEST_MICRO_BATCH]
        several = dp * p.cp > 1
        for size in sizes:
            for zero in ZERO if several else [p.zero]:
                for recompute in RECOMPUTE:
                    yield replaced(
                        base,
                        parallel={"zero": zero},
                        train={"micro_batch": size, "recompute": recompute},
                    )


def _model_ranks(config: Config) -> int:
    p = config.parallel
    return p.tp * p.pp * p.cp


def _shapes(config: Config, cluster: Cluster) -> Iterator[Config]:
    """Yield `config` with each valid tp, cp, pp and vpp, and a microbatch of one sample."""
    m, gpus, data = config.model, cluster.gpus, config.model_dump(mode="json")
    data["train"] |= {"micro_batch": 1, "cuda_graphs": _graphs(config)}
    for tp in _divisors(min(cluster.per_node, gpus)):
        for cp in _divisors(max(1, config.data.seq_len // SHORTEST)):
            for pp in _divisors(m.layers):
                ranks = tp * cp * pp
                if gpus % ranks or config.train.global_batch % (gpus // ranks):
                    continue
                for vpp in _divisors(m.layers // pp) if pp > 1 else [1]:
                    if vpp > MOST_CHUNKS:
                        continue
                    shape = {"tp": tp, "cp": cp, "pp": pp, "vpp": vpp}
                    data["parallel"] |= {**shape, "sequence_parallel": tp > 1, "zero": 1}
                    data["train"]["recompute"] = "none"
                    with suppress(ConfigError):
                        valid = make_config(data)
                        valid.data_parallel_size(gpus)
                        yield valid


def _graphs(config: Config) -> bool | str:
    """CUDA graphs that a layout without them does not exclude: `true` becomes `auto`."""
    return "auto" if config.train.cuda_graphs is True else config.train.cuda_graphs


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
