"""Changes that make a run fit, and the values of a layout that the search decides."""

from __future__ import annotations

import re
from functools import cache

import pytest

from coatlm.config import Config, make_config
from coatlm.hf.run_config import load_run_config
from coatlm.model.capacity import CHANGES
from coatlm.model.changes import Remedy, changed, costs, proposal, together, words
from coatlm.model.layouts import (
    CHUNKS,
    describe,
    held_bytes,
    highest_peak,
    layouts,
    lowest_peak,
    predicted,
    ranked,
    usable,
)
from coatlm.model.memory import replaced
from coatlm.model.rates import load_rates
from coatlm.model.step_time import Cluster, forecast, stage_times

ONE = Cluster(load_rates("h100"), 1)
VOCAB = 151936


def searched(name: str, *more: str) -> Config:
    config = load_run_config(name, ["train.global_batch=8", "train.micro_batch=1", *more])
    return replaced(config, parallel={"layout": "given"}, train={"micro_batch": 1})


@cache
def found(*more: str) -> Remedy | None:
    return proposal(searched("qwen3-14b", *more), VOCAB, ONE)


def test_two_changes_are_proposed_where_none_suffices_alone_and_none_without_need() -> None:
    config, best = searched("qwen3-14b"), found()
    assert best is not None and next(ranked(config, VOCAB, ONE), None) is None
    assert words(best.changes) == ["parallel.main_grads=bf16", "optim.offload=states"]
    for change in CHANGES:
        assert lowest_peak(changed(config, [change]), VOCAB, ONE) > usable(ONE)
    choice = best.choices[0]
    assert make_config(choice.config.model_dump(mode="json")).optim.offload == "states"
    assert choice.peak <= usable(ONE)


def test_one_change_is_proposed_where_it_suffices_the_cheapest_first() -> None:
    best = found("parallel.main_grads=bf16")
    assert best is not None and words(best.changes) == ["optim.offload=states"]
    offloaded = found("optim.offload=states")
    assert offloaded is not None and words(offloaded.changes) == ["parallel.main_grads=bf16"]


def test_updates_in_backward_are_proposed_where_a_step_has_one_microbatch() -> None:
    given = ("parallel.main_grads=bf16", "optim.offload=states", "model.layers=70")
    several, one = found(*given), found(*given, "train.global_batch=1")
    assert several is not None and "train.global_batch=1" in words(several.changes)
    assert one is not None and "train.update=backward" in words(one.changes)
    assert one.choices[0].config.train.update == "backward"


def test_steps_of_one_microbatch_are_proposed_where_nothing_else_suffices() -> None:
    best = found("model.layers=88")
    assert best is not None and best.changes[0] == ("train", "global_batch", 1)
    assert "train.update=backward" in words(best.changes)
    assert best.choices[0].config.train.global_batch == 1
    head, *_, step = costs(searched("qwen3-14b", "model.layers=88"), VOCAB, ONE, best)
    assert head == "train.global_batch=1: a step has so few samples that it is one microbatch"
    slow, fast = (float(x) for x in re.findall(r"([\d.]+) s[; ]", step))
    assert fast < slow < 10 * fast  # both of one sample


def test_changes_are_added_up_and_of_a_key_the_one_that_saves_the_most_stays() -> None:
    grads, lean = ("parallel", "main_grads", "bf16"), ("optim", "recipe", "coat-lean")
    coat, offload = ("optim", "recipe", "coat"), ("optim", "offload", "states")
    several = [(grads, 90.0), (lean, 70.0), (coat, 80.0), (offload, 60.0)]
    assert list(together(several)) == [[grads, lean], [grads, lean, offload]]
    several[2] = coat, 65.0
    assert list(together(several))[1:] == [[grads, coat], [grads, coat, offload]]


def test_the_lowest_peak_is_that_of_a_valid_layout() -> None:
    words = ("train.update=backward", "model.kv_heads=1", "data.seq_len=2048")
    config, cluster = searched("llama3-8b", *words), Cluster(load_rates("h100"), 8)
    peaks = [  # no tp or cp divides the model, and updates in backward exclude pp
        highest_peak(
            replaced(
                config,
                parallel={"zero": zero},
                train={"recompute": mode, "logits": "recompute", "micro_batch": 1},
            ),
            128256,
            8,
        )
        for zero in (1, 2, 3)
        for mode in ("none", "selective", "full")
    ]
    assert lowest_peak(config, 128256, cluster) == min(peaks)


def test_nothing_is_proposed_where_no_change_suffices() -> None:
    assert found("model.layers=400") is None


def test_the_costs_are_those_of_the_same_layout_without_the_changes() -> None:
    best, config = found("parallel.main_grads=bf16"), searched("qwen3-14b")
    assert best is not None
    config = replaced(config, parallel={"main_grads": "bf16"})
    offload, step = costs(config, VOCAB, ONE, best)
    layout = best.choices[0].config
    states = 14_768_307_200 * (4 + 10 / 128) / 2**30
    assert offload.startswith(f"optim.offload=states: {states:.1f} GiB of states per GPU ")
    slow, fast = (
        forecast(replaced(c, train={"logits": "recompute"}), VOCAB, ONE).time.total
        for c in (layout, replaced(layout, optim={"offload": "none"}))
    )
    assert slow > fast
    assert f"takes {slow:.3g} s; " in step and f"take {fast:.3g} s ({slow / fast - 1:+.1%})" in step


@cache
def choices() -> list[Config]:
    return list(layouts(searched("llama3-8b"), 128256, Cluster(load_rates("h200"), 8)))


def test_chunks_of_a_layout_are_those_with_which_its_step_is_the_fastest() -> None:
    cluster, several = Cluster(load_rates("h200"), 8), set()
    for layout in choices()[::40]:
        times = {
            chunks: forecast(replaced(layout, parallel={"tp_chunks": chunks}), 128256, cluster)
            for chunks in (CHUNKS if layout.parallel.tp > 1 else (1,))
        }
        best = min(times, key=lambda chunks: times[chunks].time.total)
        assert layout.parallel.tp_chunks == best
        assert (f"tp_chunks {best}" in describe(layout, 8)) == (best > 1)
        several.add(best)
    assert len(several) > 1


def test_keys_are_all_gathered_in_some_layouts_where_ranks_can_exchange_heads() -> None:
    ways = {(c.parallel.tp * c.parallel.cp, c.parallel.cp_comm) for c in choices()}
    assert ("cp_comm all_gather" in describe(choices()[-1], 8)) == (
        choices()[-1].parallel.cp_comm == "all_gather"
    )
    assert {(4, "auto"), (4, "all_gather"), (8, "all_gather"), (1, "auto")} <= ways
    assert (1, "all_gather") not in ways
    few = searched("llama3-8b", "model.kv_heads=1")
    found = list(layouts(few, 128256, Cluster(load_rates("h200"), 8)))
    assert {c.parallel.cp for c in found} > {1}
    assert {c.parallel.cp_comm for c in found} == {"auto"}


def test_keys_travel_by_p2p_in_some_layouts_where_nothing_masks_them() -> None:
    config = searched("llama3-8b", "data.reset_attention_mask=false")
    found = list(layouts(config, 128256, Cluster(load_rates("h200"), 8)))
    ways = {(c.parallel.cp > 1, c.parallel.cp_comm) for c in found}
    assert ways == {(False, "auto"), *((True, way) for way in ("auto", "p2p", "all_gather"))}
    assert all(c.context_comm == "a2a" for c in found if c.parallel.cp_comm == "auto")
    assert {c.parallel.cp_comm for c in choices()} == {"auto", "all_gather"}  # documents


def test_what_a_rank_holds_is_less_than_its_peak_and_layouts_beyond_it_are_skipped() -> None:
    config = searched("llama3-8b")
    some = choices()[::60]
    for layout in some:
        dp = layout.data_parallel_size(8)
        assert held_bytes(layout, 128256, dp) < highest_peak(layout, 128256, dp)
    small = Cluster(load_rates("h200").model_copy(update={"memory_gib": 30.0}), 8)
    left = list(layouts(config, 128256, small))
    assert 0 < len(left) < len(choices())
    best = next(ranked(config, 128256, small))
    assert best.config in left and best.peak <= usable(small)
    fitting = [
        choice.forecast.time.total
        for choice in (predicted(layout, 128256, small) for layout in choices()[::40])
        if choice.peak <= usable(small)
    ]
    assert min(fitting) >= best.forecast.time.total


@pytest.mark.parametrize("zero", [2, 3])
def test_stages_are_the_same_for_every_zero(zero: int) -> None:
    cluster = Cluster(load_rates("h200"), 8)
    layout = replaced(choices()[-1], parallel={"zero": zero})
    known = stage_times(replaced(layout, parallel={"zero": 1}), 128256, cluster)
    assert forecast(layout, 128256, cluster, known) == forecast(layout, 128256, cluster)
