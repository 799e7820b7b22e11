"""Runs with optimizer states in host memory have the losses and checkpoints of runs without.

They save while they train on, and the runs without do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coatlm.train.checkpoint import tensor_checksums
from tests.train.test_resume import metrics_of, start_jobs, step_five
from tests.train.test_resume_recipes import recipe_config

CASES = (("dp2", "coat-lean"), ("dp2 zero1", "fp8lm"), ("dp2 zero3", "coat-lean"))  # zero 0, 1, 3
FIFTH, FINAL = (Path("checkpoints") / f"step_000000{step:02}" for step in (5, 10))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps without and with offload, and a run with it from step five of the one without."""
    root = tmp_path_factory.mktemp("offload")
    (root / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(6000)))
    jobs = []
    for layout, recipe in CASES:
        for kind, offload in (("plain", "none"), ("offloaded", "states"), ("resumed", "states")):
            options: dict[str, Any] = {}
            if kind == "plain":
                options["checkpoint"] = {"async_save": False}
            if kind == "resumed":
                options["checkpoint"] = {"resume": step_five(root / f"{layout} plain")}
            job = recipe_config(root / f"{layout} {kind}", layout, recipe, **options)
            jobs.append(
                job.model_copy(update={"optim": job.optim.model_copy(update={"offload": offload})})
            )
    start_jobs(2, jobs)
    return root


@pytest.mark.parametrize("layout", [layout for layout, _ in CASES])
def test_losses_and_checkpoints_are_those_without_offload(runs: Path, layout: str) -> None:
    plain, offloaded = (runs / f"{layout} {kind}" for kind in ("plain", "offloaded"))
    assert len(metrics_of(plain)) >= 10 and metrics_of(offloaded) == metrics_of(plain)
    for checkpoint in (FIFTH, FINAL):
        assert tensor_checksums(offloaded / checkpoint) == tensor_checksums(plain / checkpoint)


@pytest.mark.parametrize("layout", [layout for layout, _ in CASES])
def test_a_run_resumes_with_offload_where_one_without_it_was(runs: Path, layout: str) -> None:
    plain, resumed = (runs / f"{layout} {kind}" for kind in ("plain", "resumed"))
    assert metrics_of(resumed) == [line for line in metrics_of(plain) if line["step"] > 5]
    assert tensor_checksums(resumed / FINAL) == tensor_checksums(plain / FINAL)
