"""Decide what is auto in a configuration: `parallel.layout` and `train.micro_batch`.

The choice is the first of `layouts.ranked`, which depends only on the configuration, the number of
ranks, and the name and memory of the GPU, so it is the same on all ranks. Keys of a layout that are
set stay as they are. On a CPU the others have their defaults, and the microbatch is the smallest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from coatlm.config import LAYOUT, Config, ConfigError, make_config
from coatlm.console import duration
from coatlm.model.layouts import MICRO_BATCH, Choice, describe, notes, predicted, ranked, spare
from coatlm.model.memory import GIB, micro_batches, replaced
from coatlm.model.rates import known, load_rates, rates_of
from coatlm.model.step_time import Cluster

Saved = Mapping[str, Mapping[str, Any]]  # the configuration in a checkpoint


@dataclass(frozen=True)
class Gpu:
    """The GPU of every rank: its name, and its memory in bytes."""

    name: str
    memory: int


def cluster_of(gpu: Gpu | None, ranks: int, per_node: int) -> Cluster | None:
    """The GPUs of a run, `per_node` in each node; None on CPUs and GPUs without rates."""
    rates = None if gpu is None else rates_of(gpu.name)
    if gpu is None or rates is None:
        return None
    return Cluster(rates.model_copy(update={"memory_gib": gpu.memory / GIB}), ranks, per_node)


def decide(
    config: Config,
    vocab: int,
    *,
    ranks: int,
    per_node: int,
    gpu: Gpu | None,
    earlier: Saved | None = None,
) -> tuple[Config, str]:
    """`config` with nothing left to decide, and a sentence that says what was chosen and why.

    `gpu` is None on a CPU. `earlier` is the configuration of the checkpoint from which the run
    resumes: its choices stay if they are still valid and fit. The sentence is empty if nothing was
    auto. Raises ConfigError if no layout is valid or fits, and for a GPU without rates.
    """
    asked = config.undecided
    if not asked:
        return config, ""
    if gpu is None:
        chosen = simplest(config, ranks, earlier)
        said = [f"Chosen for {asked} on a CPU: {describe(chosen, ranks)}."]
        return chosen, " ".join(said + notes(config, [chosen], free_keys(config)))
    cluster = cluster_of(gpu, ranks, per_node)
    if cluster is None:
        names = ", ".join(load_rates(kind).gpu for kind in known())
        raise ConfigError(f"{asked}: must be given on {gpu.name}; auto knows {names}")
    free = free_keys(config)
    if earlier is not None:
        for fixed in (free, free & {MICRO_BATCH}):
            kept = with_saved(config, earlier, fixed)
            choice = next(ranked(kept, vocab, cluster, free - fixed), None) if fixed else None
            if choice is not None:
                what = describe(choice.config, ranks)
                said = [f"Chosen for {asked}: {what}, to continue as before."]
                return choice.config, " ".join(said + notes(config, [choice.config], free))
    found = list(islice(ranked(config, vocab, cluster, free), 2))
    if not found:
        raise ConfigError(refusal(config, cluster, free))
    following = f"; the next is {described(found[1], ranks)}" if found[1:] else ""
    left = f"{spare(ranks):.0%} of {gpu.memory / GIB:.1f} GiB"
    said = [
        f"Chosen for {asked} on {ranks} x {gpu.name}: {described(found[0], ranks)}, the fastest of "
        f"those that are estimated to leave {left}{following}."
    ]
    return found[0].config, " ".join(said + notes(config, [found[0].config], free))


def free_keys(config: Config) -> frozenset[tuple[str, str]]:
    """The keys that are to be chosen: of a layout, those that were not set."""
    free = set()
    if config.parallel.layout == "auto":
        free = {key for key in LAYOUT if key[1] not in getattr(config, key[0]).model_fields_set}
    if not isinstance(config.train.micro_batch, int):
        free.add(MICRO_BATCH)
    return frozenset(free)


def simplest(config: Config, ranks: int, earlier: Saved | None) -> Config:
    """The layout of the keys as they are, with the earlier microbatch or the smallest valid one.

    Options that need tp or cp above 1 are left out where it is 1.
    """
    given = replaced(config, parallel={"layout": "given"} | config.parallel.left_out())
    if isinstance(config.train.micro_batch, int):
        make_config(given.model_dump(mode="json")).data_parallel_size(ranks)
        return given
    one = replaced(given, train={"micro_batch": 1, "update": "step"})  # any number of microbatches
    make_config(one.model_dump(mode="json"))  # raises what no microbatch can mend
    sizes = micro_batches(given, one.data_parallel_size(ranks))[::-1]
    if earlier is not None and (size := earlier["train"].get("micro_batch")) in sizes:
        sizes.insert(0, size)
    for size in sizes:
        with suppress(ConfigError):
            valid = replaced(given, train={"micro_batch": size})
            return make_config(valid.model_dump(mode="json"))
    raise ConfigError(f"train.micro_batch=auto: no size is valid on {ranks} ranks")


def with_saved(config: Config, saved: Saved, keys: Collection[tuple[str, str]]) -> Config:
    """`config` with the values of `keys` that a checkpoint has."""
    changed: dict[str, dict[str, Any]] = {"parallel": {}, "train": {}}
    for section, key in keys:
        if key in saved.get(section, {}):
            changed[section][key] = saved[section][key]
    return replaced(config, **changed)


def described(choice: Choice, ranks: int) -> str:
    """A layout, its speed and its memory in words."""
    speed = f"{choice.forecast.tokens_per_s:,.0f} tokens/s per GPU"
    return f"{describe(choice.config, ranks)} ({speed}, {choice.peak / GIB:.1f} GiB)"


def refusal(config: Config, cluster: Cluster, free: Collection[tuple[str, str]]) -> str:
    """Why nothing could be chosen, and what can be changed."""
    sections = {name: getattr(config, name) for name in ("parallel", "train")}
    given = [
        f"{section}.{key}={str(getattr(sections[section], key)).lower()}"
        for section, key in (*LAYOUT, MICRO_BATCH)
        if (section, key) not in free and key in sections[section].model_fields_set
    ]
    limits = f" with {', '.join(given)}" if given else ""
    return (
        f"{config.undecided}{limits}: no layout of {cluster.gpus} GPUs divides the model and "
        f"train.global_batch={config.train.global_batch} and fits {cluster.rates.memory_gib:.1f} "
        f"GiB; allowed are more GPUs, {'fewer given keys, ' if given else ''}or formats that need "
        "less memory"
    )


def expectation(
    config: Config, vocab: int, *, ranks: int, per_node: int, gpu: Gpu | None, done: int = 0
) -> str:
    """A sentence with the predicted speed, memory, and time of the steps after the first `done`.

    For a GPU without rates the sentence says how to measure them. On a CPU it is empty.
    """
    if gpu is None:
        return ""
    cluster = cluster_of(gpu, ranks, per_node)
    if cluster is None:
        return (
            f"Speed and time on {gpu.name} are not predicted, as coatlm/rates/ has no rates of it; "
            "`python tools/bench.py rates --out coatlm/rates/NAME.yaml` in a checkout measures "
            "them."
        )
    choice = predicted(config, vocab, cluster)
    speed, time = choice.forecast.tokens_per_s, choice.forecast.time.total
    steps = config.train.steps - done
    which = f"{steps:,} remaining" if done else f"{steps:,}"
    return (
        f"Expected on {ranks} x {gpu.name}: {speed:,.0f} tokens/s per GPU, {speed * ranks:,.0f} in "
        f"all, {choice.peak / GIB:.1f} GiB; {which} steps of {time:.3g} s take "
        f"{duration(steps * time)}, without evaluations and checkpoints."
    )
