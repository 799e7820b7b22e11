"""Runs whose gradient sums have delayed scales: they continue exactly, and in other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coatlm.train.checkpoint import read_state, tensor_checksums
from tests.train.test_resume import metrics_of, run_config, start_jobs, step_five

FINAL = Path("checkpoints") / "step_00000010"
DELAYED = {"grad_comm": "fp8-a2a", "grad_comm_scale": "bucket", "grad_comm_scaling": "delayed"}
RUNS: dict[str, tuple[str, dict[str, Any], str]] = {  # layout, parallel, the run to resume from
    "delayed": ("dp2 zero1", DELAYED, ""),
    "resumed": ("dp2 zero1", DELAYED, "delayed"),
    "zero3": ("dp2 zero3", DELAYED, "delayed"),
    "cp2": ("cp2", DELAYED, "delayed"),
    "smaller buckets": ("dp2 zero1", DELAYED | {"bucket_size": 5000}, "delayed"),
    "current": ("dp2 zero1", DELAYED | {"grad_comm_scaling": "current"}, ""),
    "from current": ("dp2 zero1", DELAYED, "current"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten straight steps, and five from step 5 of these."""
    root = tmp_path_factory.mktemp("delayed")
    (root / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(6000)))
    jobs = []
    for name, (layout, parallel, source) in RUNS.items():
        resume = {"checkpoint": {"resume": step_five(root / source)}} if source else {}
        jobs.append(run_config(root / name, layout, parallel=parallel, **resume))
    start_jobs(2, jobs)
    return root


def histories(directory: Path) -> dict[str, list[float]]:
    return read_state(directory)["reduction_amaxes"]


def test_five_steps_and_five_more_equal_ten_bit_by_bit(runs: Path) -> None:
    straight, resumed = runs / "delayed", runs / "resumed"
    later = [line for line in metrics_of(straight) if line["step"] > 5]
    assert len(later) == 6 and metrics_of(resumed) == later
    assert tensor_checksums(resumed / FINAL) == tensor_checksums(straight / FINAL)
    assert histories(resumed / FINAL) == histories(straight / FINAL)


@pytest.mark.parametrize("name", ["zero3", "cp2", "smaller buckets"])
def test_another_layout_continues_the_history_of_every_parameter(runs: Path, name: str) -> None:
    before, after = histories(Path(step_five(runs / "delayed"))), histories(runs / name / FINAL)
    assert len(before) == 4 * 6 + 3 and after.keys() == before.keys()
    for key, amaxes in after.items():
        assert amaxes[5:10] == before[key][:5] and all(amaxes[:10]) and not any(amaxes[10:])


def test_a_checkpoint_without_histories_continues_with_a_current_step(runs: Path) -> None:
    assert histories(runs / "current" / FINAL) == {}
    for amaxes in histories(runs / "from current" / FINAL).values():
        assert [amax > 0 for amax in amaxes] == [True] * 5 + [False] * 11
    resumed, straight = (
        [(line["loss"], line["grad_norm"]) for line in metrics_of(runs / name) if "loss" in line]
        for name in ("from current", "current")
    )
    (first, second), expected = resumed[:2], straight[5:7]
    assert first == expected[0] and second[0] == expected[1][0] and second[1] != expected[1][1]
