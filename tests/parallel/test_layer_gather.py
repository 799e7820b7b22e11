"""ZeRO stage 3 computes what stages 1 and 2 compute, bit by bit, with the weights of two units.

It begins with the same weights, of which construction holds one unit at a time.

The stage that a case is compared with has the same buckets: which values a rank sends in FP8, and
the order in which squares are added to a norm, depend on where buckets begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._C._profiler import _EventType

from coatlm.config import Config, make_config
from coatlm.model.memory import replaced
from tests.distributed import run_ranks

pytestmark = pytest.mark.slow

STEPS, LAYERS = 2, 4
MODEL = {"layers": LAYERS, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96}
TIED = {"model": {"tie_embeddings": True}}
RECOMPUTE = {"train": {"recompute": "full"}}
ONE = {"train": {"global_batch": 4}}  # one microbatch: stage 1 then adds as stage 2 does
SIZES = {"single": 1, "dp2": 2, "cp2": 2, "dp4": 4, "tp2 dp2": 4, "pp2 dp2": 4, "pp2 vpp2 dp2": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "dp2": {},
    "cp2": {"cp": 2},
    "dp4": {},
    "tp2 dp2": {"tp": 2, "sequence_parallel": True},
    "pp2 dp2": {"pp": 2},
    "pp2 vpp2 dp2": {"pp": 2, "vpp": 2},
}
FP8 = {"weight_gather": "fp8"}
DEEP, VOCAB = 24, 512  # layers and vocabulary of the models whose construction is measured
BUILT = ["bf16", "tied", "tp2", "pp2", "pp2 vpp2"]
BESIDE = 80_000  # bytes
Case = tuple[str, str, int, dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {  # layout, recipe, stage to compare with, parallel, other sections
    "one rank": ("single", "bf16", 1, {}, {}),
    "bf16": ("dp2", "bf16", 1, {}, ONE),
    "coat": ("dp2", "coat", 1, {}, ONE),
    "fp8 gather": ("dp2", "coat", 1, FP8, ONE),
    "accumulation": ("dp2", "coat-lean", 2, FP8, {}),
    "tied": ("dp2", "bf16", 2, {}, TIED),
    "recompute": ("dp2", "bf16", 2, {}, RECOMPUTE),
    "recompute, fp8 gather": ("dp2", "coat", 2, FP8, RECOMPUTE),
    "recompute attention": ("dp2", "coat", 2, {}, {"train": {"recompute": "selective"}}),
    "gathers not overlapped": ("dp2", "rowwise", 2, {"overlap_param_gather": False}, {}),
    "whole tensors": ("dp2", "bf16", 2, {"partition": "whole-tensor"}, {}),
    "several buckets per layer": ("dp2", "bf16", 2, {"bucket_size": 10000}, {}),
    "cp2": ("cp2", "coat", 2, {}, {}),
    "cp2 by all-gather, fp8 gather": (
        "cp2",
        "coat-lean",
        2,
        FP8 | {"cp_comm": "all_gather"},
        {},
    ),
    "dp4": ("dp4", "coat", 2, FP8, {}),
    "tp2": ("tp2 dp2", "coat", 2, FP8, TIED),
    "pp2": ("pp2 dp2", "bf16", 2, {}, TIED),
    "pp2 vpp2": ("pp2 vpp2 dp2", "coat", 2, FP8, RECOMPUTE),
}


def config_of(name: str, stage: int) -> Config:
    layout, recipe, _, parallel, extra = CASES[name]
    return make_config(
        {
            "model": MODEL | {"tie_embeddings": False} | extra.get("model", {}),
            "data": {"text": ["unused"], "seq_len": 32},
            "parallel": LAYOUTS[layout] | parallel | {"zero": stage},
            "precision": {"recipe": recipe},
            "optim": {"recipe": "coat-lean", "lr": 1e-3, "clip_grad": 0.5},
            "train": {"micro_batch": 2, "global_batch": 16} | extra.get("train", {}),
        }
    )


@contextmanager
def buckets_of_stage_3() -> Iterator[None]:
    """Let every stage have the buckets of stage 3."""
    from coatlm.parallel.flat_model import FlatModel

    original = FlatModel.__init__

    def by_unit(self: Any, module: Any, *, cut: Any, **options: Any) -> None:
        unit = {}
        for key, param in module.named_parameters():
            parts = key.split(".")
            layer = 1 + int(parts[2]) if parts[1] == "layers" else LAYERS + 1
            unit[param] = 0 if parts[0] == "embedding" else layer
        original(self, module, cut=replace(cut, unit=unit), **options)

    with mock.patch.object(FlatModel, "__init__", by_unit):
        yield


def watch(trainer: Any) -> list[set[int]]:
    """The numbers of the units that are gathered, each time that a unit has been acquired."""
    seen: list[set[int]] = []
    for chunk in trainer.chunks:

        def acquire(*arguments: Any, weights: Any = chunk.weights) -> None:
            type(weights)._acquire(weights, *arguments)
            units = enumerate(weights.units)
            seen.append({i for i, unit in units if any(b.gathered for b in unit.buckets)})

        if hasattr(chunk.weights, "units"):
            chunk.weights._acquire = acquire
    return seen


def train(name: str, stage: int, groups: Any) -> tuple[Any, dict[str, Any]]:
    """What must be equal, and what is checked of stage 3 alone."""
    from coatlm.parallel.layer_gather import LayerGather
    from coatlm.train.step import Trainer
    from tests.parallel.test_parity import batches

    config = config_of(name, stage)
    trainer = Trainer(config, groups, vocab=128)
    buckets = [bucket for chunk in trainer.chunks for bucket in chunk.buckets]
    initial = [bucket.shard.tolist() for bucket in buckets]
    seen, curve, sent = watch(trainer), [], {}
    for step in range(STEPS):
        placed = trainer.place(batches(config, groups, step))
        loss, norm = trainer.train_step(placed, lr=1e-3)
        sent = sent or trainer.comm_bytes
        held_out = trainer.place(batches(config, groups, 99))
        curve.append((float(loss), float(norm), float(trainer.evaluate(held_out))))
    for chunk in trainer.chunks:
        chunk.finish_param_sync()
    shards = [bucket.shard.tolist() for bucket in buckets]
    gathers = [isinstance(chunk.weights, LayerGather) for chunk in trainer.chunks]
    return (curve, shards, initial), {
        "gathers": all(gathers),
        "freed": not any(bucket.gathered for bucket in buckets),
        "clipped": all(norm > config.optim.clip_grad for _, norm, _ in curve),
        "most units": max(map(len, seen), default=0),
        "sent": {key: value for key, value in sent.items() if "weights" in key},
        "drawn": any(any(shard) for shard in initial),
        "numels": [(b.fp8, b.weights.numel(), [p.dim() for p in b.params]) for b in buckets],
    }


def construct(name: str, groups: Any) -> dict[str, int]:
    """Bytes on a rank while a deeper model is built, by the profiler, and what they consist of."""
    from coatlm.model.memory import rank_bytes
    from coatlm.train.chunks import make_chunks
    from coatlm.train.step import Trainer

    config = config_of(name, 3)
    config = replaced(
        config,
        model={"layers": DEEP, "vocab": VOCAB},
        parallel={"main_grads": "fp8"},
    )
    cpu = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=cpu, profile_memory=True)
    done: list[int] = []

    def built(modules: Any, *rest: Any, **options: Any) -> Any:
        done.append(sum(not p.is_meta for m in modules for p in m.parameters()))
        return make_chunks(config, modules, *rest, **options)

    def lap(part: str) -> None:
        if part == "model":
            profiler.__exit__(None, None, None)

    with mock.patch("coatlm.train.step.make_chunks", lambda _, *a, **k: built(*a, **k)):
        profiler.__enter__()
        trainer = Trainer(config, groups, vocab=VOCAB, lap=lap)
    weights = [p for chunk in trainer.chunks for p in chunk.module.parameters()]
    buckets = [bucket for chunk in trainer.chunks for bucket in chunk.buckets]
    zero = trainer.zero_checkpoint
    loaded = zero.tensors_to_load(weights_only=True)
    zero.finish_load()
    trainer.optimizer.optimizer.reload_from_weights()
    stage, dp = groups.pp.rank(), groups.dp.size()
    return {
        "allocated": done[0],
        "peak": peak_of(profiler.profiler.kineto_results.experimental_event_tree()),
        "weights": sum(p.nbytes for p in weights),
        "loaded": sum(tensor.data.nbytes for tensor in loaded),
        "whole": sum(bucket.gathered for bucket in buckets),
        "planned": rank_bytes(config, VOCAB, stage=stage, data_parallel=dp).initial,
    }


def peak_of(events: list[Any]) -> int:
    """The most bytes that were allocated at once; what was there before does not count."""
    changes, waiting = [], list(events)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields))
    live: dict[int, int] = {}
    total = peak = 0
    for _, change in sorted(changes, key=lambda each: each[0]):
        if change.alloc_size > 0:
            live[change.ptr] = change.alloc_size
            total += change.alloc_size
        else:
            total -= live.pop(change.ptr, 0)
        peak = max(peak, total)
    return peak


def compare(rank: int, size: int, names: list[str]) -> dict[str, Any]:
    """For each case whether stage 3 gave the bits of the other stage, and what it held and sent."""
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes

    start_processes(Launch.from_environment())
    found: dict[str, Any] = {}
    layout, groups = "", None
    for name in sorted(names, key=lambda name: CASES[name][0]):
        if CASES[name][0] != layout:  # groups cost more than a case
            if layout:
                release_groups()
            layout, groups = CASES[name][0], make_groups(config_of(name, 3).parallel)
        sharded, checked = train(name, 3, groups)
        with buckets_of_stage_3():
            whole, _ = train(name, CASES[name][2], groups)
        curves = {"curve": sharded[0], "expected": whole[0]}
        found[name] = checked | curves | {"equal": sharded == whole}
        if name in BUILT and not torch.cuda.is_available():
            found[name]["built"] = construct(name, groups)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {}
    for size in (1, 2, 4):
        names = [name for name, case in CASES.items() if SIZES[case[0]] == size]
        ranks = run_ranks(size, "tests.parallel.test_layer_gather:compare", names)
        results |= {name: [rank[name] for rank in ranks] for name in names}
    return results


@pytest.mark.parametrize("name", BUILT)
def test_construction_holds_shards_and_one_unit_as_the_planner_says(found: Any, name: str) -> None:
    """Beyond that there are tables of RoPE and the statistics of buckets."""
    for rank in found[name]:
        built = rank["built"]
        assert built["allocated"] == 0
        assert built["planned"] <= built["peak"] < built["planned"] + BESIDE
        assert built["peak"] < built["weights"]


@pytest.mark.parametrize("name", BUILT)
def test_a_checkpoint_is_loaded_into_shards_alone(found: Any, name: str) -> None:
    built = [rank["built"] for rank in found[name]]
    assert sum(b["loaded"] for b in built) == sum(b["weights"] for b in built) // 2
    assert not any(b["whole"] for b in built)


each = pytest.mark.parametrize("name", CASES)


@each
def test_stage_3_has_the_bits_of_stages_that_hold_whole_weights(found: Any, name: str) -> None:
    for rank in found[name]:
        assert rank["clipped"] and rank["drawn"] and rank["equal"], rank["curve"]


@each
def test_only_two_units_are_gathered_at_a_time(found: Any, name: str) -> None:
    """A tied embedding is part of the last unit too, and stays to the end of backward."""
    most = {"one rank": 0, "gathers not overlapped": 1, "tied": 4, "tp2": 4}.get(name, 2)
    for rank in found[name]:
        assert rank["gathers"] == (name != "one rank")
        assert rank["freed"] == (name != "one rank")
        assert rank["most units"] == most


def test_layers_are_gathered_twice_per_microbatch_and_ends_once(found: Any) -> None:
    """Four microbatches on two ranks. Half of every gathered byte is sent."""
    for name, microbatches in (("bf16", 1), ("recompute", 4)):
        for rank in found[name]:
            ends, *layers, last = [n for _, n, _ in reversed(rank["numels"])]
            assert len(layers) == LAYERS
            elements = ends + last + 2 * sum(layers)
            assert rank["sent"]["comm_bytes_weights"] == microbatches * elements * 2 / 2


def test_matrices_of_fp8_layers_take_one_byte_and_one_amax_per_step(found: Any) -> None:
    for rank in found["accumulation"]:
        sent = rank["sent"]
        codes = sum(n for fp8, n, _ in rank["numels"] if fp8)
        rows = LAYERS * (4 * 32 + 2 * 2 * 32 + 64 + 2 * 96 + 64)
        assert sent["comm_bytes_weights_fp8"] == 4 * 2 * codes / 2
        assert sent["comm_bytes_weights_amax"] == 2 * 4 * rows / 2
