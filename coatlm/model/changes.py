"""What to change in a run of which no layout fits: the cheapest changes with which one does.

The changes are those of `capacity.CHANGES` that no layout tries already, first each alone, in the
order of their cost, then all that save memory together, one more at a time, without those that turn
out not to be needed. Changes of a key replace each other. Where all of them do not suffice, steps
of one microbatch are tried, which can update in backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

from coatlm.config import Config
from coatlm.model.capacity import CHANGES, largest_states
from coatlm.model.layouts import EVERY, Choice, lowest_peak, ranked, usable
from coatlm.model.memory import GIB, replaced
from coatlm.model.step_time import Cluster, forecast

KeyChange = tuple[str, str, Any]  # section, key, value
GLOBAL_BATCH = ("train", "global_batch")
COSTS = {  # by section and key
    GLOBAL_BATCH: "a step has so few samples that it is one microbatch",
    ("parallel", "main_grads"): "the sum of gradients over microbatches is rounded to this format",
    ("train", "update"): "gradients are clipped by the norm of the step before",
    ("optim", "recipe"): "the update reads and writes states and weights in these formats",
    ("precision", "recipe"): "layers compute, and save for backward, in these formats",
}


class Remedy(NamedTuple):
    """Changes with which layouts fit."""

    changes: tuple[KeyChange, ...]
    choices: list[Choice]  # the fastest first, at least one


def proposal(config: Config, vocab: int, cluster: Cluster, most: int = 1) -> Remedy | None:
    """The cheapest changes with which layouts fit, and up to `most` of these; None without any."""
    return _cheapest(config, vocab, cluster, most) or _one_microbatch(config, vocab, cluster, most)


def _one_microbatch(config: Config, vocab: int, cluster: Cluster, most: int) -> Remedy | None:
    """As `proposal`, with the largest train.global_batch of one sample per data-parallel rank."""
    if config.train.update == "backward":
        return None
    for samples in (cluster.gpus // n for n in range(1, cluster.gpus + 1) if cluster.gpus % n == 0):
        if samples < config.train.global_batch:
            smaller = (*GLOBAL_BATCH, samples)
            found = _cheapest(changed(config, [smaller]), vocab, cluster, most)
            if found:
                return Remedy((smaller, *found.changes), found.choices)
    return None


def _cheapest(config: Config, vocab: int, cluster: Cluster, most: int) -> Remedy | None:
    before = lowest_peak(config, vocab, cluster)
    helpful = []
    for change in CHANGES:
        section, key, value = change
        if (section, key) in EVERY or getattr(getattr(config, section), key) == value:
            continue
        peak = lowest_peak(changed(config, [change]), vocab, cluster)
        if peak < before:
            helpful.append((change, peak))

    def fits(changes: list[KeyChange]) -> bool:
        return lowest_peak(changed(config, changes), vocab, cluster) <= usable(cluster)

    alone = ([change] for change, peak in helpful if peak <= usable(cluster))
    for changes in chain(alone, filter(fits, together(helpful))):
        for extra in changes[-2::-1]:  # without the last one they do not fit
            fewer = [change for change in changes if change != extra]
            changes = fewer if fits(fewer) else changes
        if choices := list(islice(ranked(changed(config, changes), vocab, cluster), most)):
            return Remedy(tuple(changes), choices)
    return None


def together(helpful: list[tuple[KeyChange, float]]) -> Iterator[list[KeyChange]]:
    """Yield two changes or more: each step adds one, replacing an earlier change of the same key if
    that one saved less. `helpful` has the peak of each.
    """
    used: dict[tuple[str, str], tuple[KeyChange, float]] = {}
    for change, peak in helpful:
        key = change[:2]
        if key in used and used[key][1] <= peak:
            continue
        used.pop(key, None)
        used[key] = change, peak
        if len(used) > 1:
            yield [each for each, _ in used.values()]


def changed(config: Config, changes: Iterable[KeyChange]) -> Config:
    """`config` with `changes`, without validation."""
    for section, key, value in changes:
        config = replaced(config, **{section: {key: value}})
    return config


def words(changes: Iterable[KeyChange]) -> list[str]:
    """The changes as overrides."""
    return [f"{section}.{key}={value}" for section, key, value in changes]


def costs(config: Config, vocab: int, cluster: Cluster, found: Remedy) -> Iterator[str]:
    """Lines that say what each change of a proposal for `config` does, and what a step costs more.

    The time is compared with that of the same layout without the changes, as if it fit.
    """
    best = found.choices[0].config
    for change, word in zip(found.changes, words(found.changes), strict=True):
        yield f"{word}: {COSTS.get(change[:2]) or _offloaded(best, vocab, cluster)}"
    asked = [
        (section, key, getattr(getattr(config, section), key))
        for section, key, _ in found.changes
        if (section, key) != GLOBAL_BATCH  # a step of another size has another time
    ]
    logits = "recompute" if config.train.logits == "auto" else config.train.logits
    before, after = (
        forecast(replaced(each, train={"logits": logits}), vocab, cluster).time.total
        for each in (changed(best, asked), best)
    )
    others = "the other changes" if len(asked) < len(found.changes) else "the changes"
    yield (
        f"A step of the first layout takes {after:.3g} s; without {others} it would take "
        f"{before:.3g} s ({round(after / before - 1, 3) + 0.0:+.1%}) in enough memory."
    )


def _offloaded(config: Config, vocab: int, cluster: Cluster) -> str:
    """What optim.offload=states moves."""
    size = largest_states(config, vocab, config.data_parallel_size(cluster.gpus)) / GIB
    return f"{size:.1f} GiB of states per GPU are in host memory, and cross the link in every step"
