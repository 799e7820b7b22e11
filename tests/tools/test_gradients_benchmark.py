"""`tools/bench.py gradients`: its smoke run on a CPU, and the length and error that it computes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from coatlm.config.recipes import GEMMS
from tests.distributed import run_ranks
from tools.benchmarks import gradients

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records of a smoke run of some rows."""
    out = tmp_path_factory.mktemp("gradients") / "found.json"
    command = [sys.executable, "tools/bench.py", "gradients", "--smoke", "hidden=128", "steps=2"]
    command += ["--only", "mbs4", "rowwise", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
    found: list[dict[str, Any]] = json.loads(out.read_text())["gradients"]
    return found


def test_every_row_has_lengths_near_zero_and_the_errors_of_fp8(
    records: list[dict[str, Any]],
) -> None:
    names = ["bf16", "coat mbs4 fast", "coat mbs4", "coat mbs4 slow forward dgrad wgrad"]
    names += ["rowwise mbs1"]
    assert [(r["steps"], r["row"]) for r in records] == [
        (n, name) for n in (0, 2) for name in names
    ]
    for record in records:
        if record["row"] == "bf16":
            continue
        assert abs(record["all length"]) < 4
        assert 1 < record["all error"] < 20
        assert all(record[f"{kind} error"] > 0 for kind in gradients.KINDS)


def test_training_changes_the_weights_that_rows_are_measured_with(
    records: list[dict[str, Any]],
) -> None:
    first, second = (r["loss"] for r in records if r["row"] == "bf16")
    assert second < first
    for record in records:  # the same weights and tokens as bf16's
        assert math.isclose(record["loss"], (first, second)[record["steps"] > 0], rel_tol=2e-2)


def reloaded(rank: int, size: int, _: None) -> list[bool]:
    """Whether each weight that is loaded is the same after a step at a learning rate of zero."""
    from coatlm.parallel.groups import make_groups
    from coatlm.train.setup import Launch, start_processes

    start_processes(Launch.from_environment())
    sizes = {"batch": 2, "seq": 32, "hidden": 128, "layers": 1, "steps": 1}
    config = gradients.configuration("bf16 mbs2", sizes)
    run = gradients.GradientModel(config, make_groups(config.parallel), gradients.Source(2, 32))
    weights = {name: torch.randn_like(p) for name, p in run.params.items()}
    run.load(weights)
    run.step(0, 0.0)
    return [torch.equal(p, weights[name]) for name, p in run.params.items()]


def test_a_step_that_only_fills_amax_histories_leaves_the_loaded_weights() -> None:
    (same,) = run_ranks(1, f"{__name__}:reloaded")
    assert same and all(same)


def test_length_and_error_are_those_of_their_definition() -> None:
    names = [f"{kind}.weight" for kind in gradients.KINDS]
    expected = {name: torch.tensor([3.0, 4.0]) for name in names}
    found = {name: torch.tensor([1.5, 2.0]) for name in names}
    found["linear_qkv.weight"] = torch.tensor([3.0, 4.0]) + torch.tensor([-4.0, 3.0]) / 5
    result = gradients.differences(found, expected)
    assert (result["embedding length"], result["embedding error"]) == (-50, 50)
    assert (result["linear_qkv length"], result["linear_qkv error"]) == (0, 20)
    assert result["all length"] == pytest.approx(-100 * 5 / 12, abs=0.01)


def test_rows_say_which_gemms_accumulate_fast() -> None:
    size = gradients.sizes({"smoke": "1"})
    fast = {
        name: gradients.configuration(name, size).precision.fast_accumulation
        for name in gradients.rows({"smoke": "1"})[:3]
    }
    assert list(fast.values()) == [GEMMS, ("forward", "dgrad"), ()]
