"""states.jsonl: what storing a step loses, the same on every layout, at no cost to the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from coatlm.config import Config
from coatlm.train.checkpoint import tensor_checksums
from tests.distributed import run_ranks
from tests.train.test_resume import MODEL, metrics_of, run_config, start_jobs, step_five

pytestmark = pytest.mark.slow

# all rows are multiples of 128, also on two tensor-parallel ranks: blocks of 128 are the same
SIZES = MODEL | {"hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 256, "layers": 2}
LAYOUTS = ("dp2 zero1", "dp2", "tp2", "pp2")
ON = {"every": 1, "states_every": 2}


def states_config(directory: Path, layout: str, recipe: str, **changes: Any) -> Config:
    changes = {"log": ON} | changes
    return run_config(directory, layout, model=SIZES, optim={"recipe": recipe}, **changes)


def states_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "states.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps of COAT on one rank, asked and not asked, resumed, and on two ranks."""
    root = tmp_path_factory.mktemp("states")
    (root / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(6000)))
    resume = {"resume": step_five(root / "asked"), "every": 5}
    jobs = [
        states_config(root / "asked", "single", "coat"),
        states_config(root / "not asked", "single", "coat", log={"every": 1}),
        states_config(root / "resumed", "single", "coat", checkpoint=resume),
        states_config(root / "adamw-fp32", "single", "adamw-fp32", train={"steps": 2}),
    ]
    start_jobs(1, jobs)
    start_jobs(2, [states_config(root / name, name, "coat") for name in LAYOUTS])
    return root


def test_asking_changes_no_bit_of_the_training(runs: Path) -> None:
    assert metrics_of(runs / "asked") == metrics_of(runs / "not asked")
    final = Path("checkpoints") / "step_00000010"
    assert tensor_checksums(runs / "asked" / final) == tensor_checksums(runs / "not asked" / final)
    assert not (runs / "not asked" / "states.jsonl").exists()


def test_lines_come_on_the_steps_asked_for(runs: Path) -> None:
    assert [line["step"] for line in states_of(runs / "asked")] == [2, 4, 6, 8, 10]


def test_a_resumed_run_writes_the_lines_of_a_straight_one(runs: Path) -> None:
    later = [line for line in states_of(runs / "asked") if line["step"] > 5]
    assert len(later) == 3 and states_of(runs / "resumed") == later


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_report_what_one_does(runs: Path, layout: str) -> None:
    """Gradients are sums in another order, which also differs between instruction sets: a few of
    3845 blocks may have another k, and the errors of rounding, of which the blocks of the largest
    moments make most, differ there. 1.1 % has been seen; a rank whose share were missing or counted
    twice would change each of them by tens of percent. A percentile of k is a multiple of 1/16, and
    one block can move it to the next one. Of the shares, 5e-3 is 20 blocks; 6 have been seen.
    """
    expected, actual = states_of(runs / "asked"), states_of(runs / layout)
    assert [line["step"] for line in actual] == [line["step"] for line in expected]
    for line, other in zip(expected, actual, strict=True):
        assert line.keys() == other.keys() and "nonfinite" not in line
        percentiles = [key for key in line if "_k_p" in key]
        assert len(percentiles) == 6
        for key in percentiles:
            assert abs(other.pop(key) - line.pop(key)) <= 1 / 16, key
        assert other == pytest.approx(line, rel=2e-3, abs=5e-3)
        for key in ("edq", "edq_ratio", "edq_weight", "exp_avg_error", "exp_avg_sq_error"):
            assert other[key] == pytest.approx(line[key], rel=5e-2), key


def test_states_in_fp32_lose_nothing_and_those_in_fp8_little(runs: Path) -> None:
    (exact,), coat = states_of(runs / "adamw-fp32"), states_of(runs / "asked")[-1]
    for name in ("exp_avg", "exp_avg_sq"):
        assert exact[f"{name}_error"] < 2.0**-23 < coat[f"{name}_error"] < 2.0**-4
        assert 1 / 128 <= coat[f"{name}_saturated"] < 0.1
        assert 1 <= coat[f"{name}_k_p05"] <= coat[f"{name}_k_p50"] <= coat[f"{name}_k_p95"] < 16
    assert exact["edq_ratio"] == pytest.approx(1, abs=1e-3)


def owned_elements(rank: int, size: int, layouts: list[str]) -> dict[str, int]:
    """For each layout the elements that are measured, over the ranks whose sums are added."""
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer

    start_processes(Launch.from_environment())
    found = {}
    for layout in layouts:
        config = states_config(Path("unused"), layout, "coat")
        zero = Trainer(config, make_groups(config.parallel), vocab=384).optimizer
        count = torch.tensor(sum(stop - start for runs in zero.unshared for start, stop in runs))
        torch.distributed.all_reduce(count, group=zero.norm_group)
        found[layout] = int(count)
        release_groups()
    return found


def test_every_element_counts_once_and_copies_do_not() -> None:
    """Norms under tp are copies, and so is everything under zero=0."""
    function = "tests.train.test_states_log:owned_elements"
    (one,) = run_ranks(1, function, ["single"])
    for two in run_ranks(2, function, list(LAYOUTS)):
        assert two == dict.fromkeys(LAYOUTS, one["single"])
