"""Runs continue exactly: on the same layout bit by bit, on another within fp32 rounding."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from coatlm.config import Config, make_config
from coatlm.parallel.fp8lm_scaling import GROWTH
from coatlm.train.find_checkpoint import read_state
from tests.distributed import run_ranks

STEPS = 10
MODEL = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # name -> processes, parallel
    "single": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "pp2 vpp2": (2, {"pp": 2, "vpp": 2}),
    "dp2": (2, {"zero": 0}),
    "dp2 zero1": (2, {}),
    "dp2 zero3": (2, {"zero": 3}),
    "cp2": (2, {"cp": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    "tp2 dp2 zero1": (4, {"tp": 2}),
    "tp2 cp2": (4, {"tp": 2, "cp": 2}),
    "pp2 dp2": (4, {"pp": 2, "zero": 0}),
    "pp2 dp2 zero3": (4, {"pp": 2, "zero": 3}),
}
KEYS = "cp2, fp8 keys"  # with FP8 layers; four ranks continue it with each of COMMS
FP8_KEYS: dict[str, Any] = {
    "model": {"layers": 2},
    "precision": {"recipe": "coat-lean"},
    "train": {"eval_every": STEPS},
}
COMMS = ("all_gather", "p2p")
AUTOMATIC: dict[str, Any] = {"model": {"layers": 2}, "parallel": {"grad_comm": "fp8-nccl"}}
# Attention over other chunks is rounded to BF16 at other places: measured are 3.0e-5 and 2.7e-4.
# If the gradients of two chunks of keys were swapped, the norm would differ by 3e-3.
KEYS_RELATIVE = {"loss": 2e-4, "grad_norm": 1e-3}
EXACT = (
    "single",
    "dp2",
    "dp2 zero1",
    "dp2 zero3",
    "tp2 pp2",
)  # the layouts that are resumed on themselves


def run_config(directory: Path, layout: str, **changes: Any) -> Config:
    """A small real run: text, evaluation, checkpoints every five steps."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(directory)},
        "model": MODEL,
        "data": {
            "text": [str(directory.parent / "text.txt")],
            "seq_len": 32,
            "cache_dir": str(directory.parent / "cache"),
        },
        "parallel": {"bucket_size": 20000, "grad_comm": "fp32"} | LAYOUTS[layout][1],
        "precision": {"recipe": "fp32"},
        "optim": {"recipe": "adamw-fp32", "lr": 1e-3, "warmup_steps": 2},
        "train": {
            "steps": STEPS,
            "micro_batch": 4,
            "global_batch": 16,
            "eval_every": 5,
            "eval_batches": 1,
        },
        "checkpoint": {"every": 5},
        "log": {"every": 1},
    }
    for section, values in changes.items():
        sections[section] = sections.get(section, {}) | values
    return make_config(sections)


def train_all(rank: int, size: int, jobs: list[dict[str, Any]]) -> None:
    """Run each job's config in one group of processes."""
    from contextlib import ExitStack

    from coatlm.parallel.groups import release_groups
    from coatlm.train import phases, start
    from coatlm.train.setup import Launch

    phases.start_processes = functools.cache(phases.start_processes)  # joined once for all
    for job in jobs:
        with ExitStack() as stack:
            session = start.set_up(make_config(job), Launch.from_environment(), stack)
            assert session.run_steps() == 0
        release_groups()


def start_jobs(size: int, jobs: list[Config]) -> None:
    run_ranks(
        size, "tests.train.test_resume:train_all", [job.model_dump(mode="json") for job in jobs]
    )


def metrics_of(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run, without what a clock measured."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    timed = ("step_ms", "tokens_per_s_per_gpu", "tflops_per_gpu", "slowest")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def step_five(directory: Path) -> str:
    return str(directory / "checkpoints" / "step_00000005")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each layout a straight run, and runs resumed from step 5 of itself and of `single`."""
    root = tmp_path_factory.mktemp("runs")
    text = "".join(f"def f{i}(x):\n    return x * {i} + {i * i}\n\n" for i in range(2000))
    (root / "text.txt").write_text(text)
    for size in (1, 2, 4):
        jobs = []
        for layout in [name for name, (ranks, _) in LAYOUTS.items() if ranks == size]:
            if layout in EXACT:
                straight = root / layout
                jobs.append(run_config(straight, layout))
                resume = {"resume": step_five(straight)}
                jobs.append(run_config(root / f"{layout} resumed", layout, checkpoint=resume))
            if layout != "single":
                resume = {"resume": step_five(root / "single")}
                jobs.append(run_config(root / f"single to {layout}", layout, checkpoint=resume))
        start_jobs(size, jobs + jobs_with_fp8_keys(root, size) + jobs_with_fp8_sums(root, size))
    return root


def jobs_with_fp8_keys(root: Path, size: int) -> list[Config]:
    """Ten steps on two ranks, which two and four continue after five."""
    resume = {"resume": step_five(root / KEYS)}
    if size == 2:
        options = FP8_KEYS | {"parallel": {"cp": 2, "cp_comm_kv": "fp8"}}
        again = run_config(root / f"{KEYS} resumed", "single", **options, checkpoint=resume)
        return [run_config(root / KEYS, "single", **options), again]
    if size == 4:
        return [
            run_config(
                root / f"{KEYS} to {comm}",
                "single",
                **FP8_KEYS,
                parallel={"cp": 4, "cp_comm": comm, "cp_comm_kv": "fp8"},
                checkpoint=resume,
            )
            for comm in COMMS
        ]
    return []


def jobs_with_fp8_sums(root: Path, size: int) -> list[Config]:
    """Ten steps on two ranks, which four continue after five."""
    if size == 2:
        return [run_config(root / "sums", "single", **AUTOMATIC)]
    if size == 4:
        resume = {"resume": step_five(root / "sums")}
        return [run_config(root / "sums to four", "single", **AUTOMATIC, checkpoint=resume)]
    return []


@pytest.mark.parametrize("layout", [*EXACT, KEYS])
def test_five_steps_and_five_more_equal_ten_bit_by_bit(runs: Path, layout: str) -> None:
    from coatlm.train.checkpoint import tensor_checksums

    straight, resumed = runs / layout, runs / f"{layout} resumed"
    later = [line for line in metrics_of(straight) if line["step"] > 5]
    assert len(later) == 6 and metrics_of(resumed) == later  # five steps and an evaluation
    final = Path("checkpoints") / "step_00000010"
    assert tensor_checksums(resumed / final) == tensor_checksums(straight / final)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_another_layout_continues_within_rounding(runs: Path, layout: str) -> None:
    expected = {line["step"]: line for line in metrics_of(runs / "single") if "loss" in line}
    actual = [line for line in metrics_of(runs / f"single to {layout}") if "loss" in line]
    assert [line["step"] for line in actual] == list(range(6, STEPS + 1))
    for line in actual:  # fp32 sums in another order
        for key in ("loss", "grad_norm"):
            assert line[key] == pytest.approx(expected[line["step"]][key], rel=1e-5)


@pytest.mark.parametrize("comm", COMMS)
def test_four_ranks_continue_what_two_began_with_keys_in_fp8(runs: Path, comm: str) -> None:
    """Ranks attend to the same decoded keys, whichever rank holds them."""
    expected = [line for line in metrics_of(runs / KEYS) if "loss" in line and line["step"] > 5]
    actual = [line for line in metrics_of(runs / f"{KEYS} to {comm}") if "loss" in line]
    assert [line["step"] for line in actual] == [line["step"] for line in expected]
    for line, wanted in zip(actual, expected, strict=True):
        for key, relative in KEYS_RELATIVE.items():
            assert line[key] == pytest.approx(wanted[key], rel=relative)


def test_sums_of_more_ranks_begin_with_a_smaller_factor(runs: Path) -> None:
    """Each step mu grows by `GROWTH`, or is halved."""
    before = read_state(Path(step_five(runs / "sums")))
    after = read_state(runs / "sums to four/checkpoints/step_00000010")
    assert (before["summed_ranks"], after["summed_ranks"]) == (2, 4)
    factors = {k: mu / before["automatic_scales"][k] for k, mu in after["automatic_scales"].items()}
    assert len(factors) == 2 * 6 + 3
    assert max(factors.values()) == pytest.approx(0.5 * GROWTH**5, rel=1e-5)


def test_the_loss_falls(runs: Path) -> None:
    losses = [line["loss"] for line in metrics_of(runs / "single") if "loss" in line]
    assert losses[-1] < losses[0] - 0.5


def exchange(rank: int, size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """On each layout of `size` ranks: load the reference, save it; load each source and compare.

    Returns the checksums of what was saved, or whether every source gave the reference's bits.
    """
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.checkpoint import Checkpointer, load, tensor_checksums
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer

    start_processes(Launch.from_environment())
    root = Path(arguments["root"])
    results: dict[str, Any] = {}
    for layout in [name for name, (ranks, _) in LAYOUTS.items() if ranks == size]:
        config = run_config(root / "unused", layout)
        groups = make_groups(config.parallel)
        zero = Trainer(config, groups, vocab=384).zero_checkpoint
        targets = zero.tensors_to_load()
        load(Path(arguments["reference"]), targets, groups.checkpoint)
        if not arguments["sources"]:
            directory = root / f"{layout} from single" / "checkpoints"
            saver = Checkpointer(directory, keep=1, async_save=False, group=groups.checkpoint)
            saver.save(5, zero.tensors_to_save(), {})
            results[layout] = tensor_checksums(directory / "step_00000005") if rank == 0 else {}
        expected = [target.data.clone() for target in targets]
        for source in arguments["sources"]:
            for target in targets:
                target.data.fill_(float("nan"))
            load(Path(source), targets, groups.checkpoint)
            pairs = zip(targets, expected, strict=True)
            results[f"{layout} from {source}"] = all(t.data.equal(e) for t, e in pairs)
        release_groups()
    return results


def test_a_checkpoint_of_any_layout_loads_into_every_other_unchanged(runs: Path) -> None:
    from coatlm.train.checkpoint import tensor_checksums

    reference = step_five(runs / "single")
    expected = tensor_checksums(Path(reference))
    assert len(expected) == 3 * (4 * 6 + 3)  # weight, two moments; 6 tensors per layer, 3 more
    saved = [step_five(runs / f"{name} from single") for name in LAYOUTS]
    arguments = {"root": str(runs), "reference": reference}
    for size in (1, 2, 4):
        function = "tests.train.test_resume:exchange"
        for layout, checksums in run_ranks(size, function, arguments | {"sources": []})[0].items():
            assert checksums == expected, layout
    for size in (1, 2, 4):
        for equal in run_ranks(size, function, arguments | {"sources": saved}):
            assert len(equal) == len(saved) * sum(n == size for n, _ in LAYOUTS.values())
            assert all(equal.values()), [name for name, same in equal.items() if not same]
