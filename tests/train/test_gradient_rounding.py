"""Runs whose gradients are rounded stochastically continue exactly, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coatlm.config import Config
from coatlm.train.checkpoint import tensor_checksums
from tests.train.test_delayed_scaling import FINAL, SIZES
from tests.train.test_resume import metrics_of, run_config, start_jobs, step_five


def rounded_config(directory: Path, layout: str, **changes: Any) -> Config:
    sections: dict[str, Any] = {
        "model": SIZES,
        "precision": {"recipe": "coat", "scaling": "delayed", "grad_rounding": "stochastic"},
        "optim": {"recipe": "adamw-bf16-fp32state"},
    }
    return run_config(directory, layout, **(sections | changes))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten straight steps and five from step 5, by layout; the same rounded to the nearest."""
    root = tmp_path_factory.mktemp("rounding")
    (root / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(6000)))
    for size, layouts in {1: ("single",), 2: ("dp2", "tp2 sp")}.items():
        jobs = []
        for layout in layouts:
            jobs.append(rounded_config(root / layout, layout))
            resume = {"checkpoint": {"resume": step_five(root / layout)}}
            jobs.append(rounded_config(root / f"{layout} resumed", layout, **resume))
        if size == 1:
            nearest = {"recipe": "coat", "scaling": "delayed"}
            jobs.append(rounded_config(root / "nearest", "single", precision=nearest))
        start_jobs(size, jobs)
    return root


@pytest.mark.parametrize("layout", ["single", "dp2", "tp2 sp"])
def test_five_steps_and_five_more_equal_ten_bit_by_bit(runs: Path, layout: str) -> None:
    straight, resumed = runs / layout, runs / f"{layout} resumed"
    later = [line for line in metrics_of(straight) if line["step"] > 5]
    assert len(later) == 6 and metrics_of(resumed) == later
    assert tensor_checksums(resumed / FINAL) == tensor_checksums(straight / FINAL)


def test_a_run_trains_as_one_that_rounds_to_the_nearest(runs: Path) -> None:
    losses = [
        [line["loss"] for line in metrics_of(runs / name) if "loss" in line]
        for name in ("single", "nearest")
    ]
    assert losses[0][0] == losses[1][0]  # forward has no part in it
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)  # measured are 4e-3
