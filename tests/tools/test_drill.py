"""A drill of twenty faults, and what it would find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import ROOT
from tools.drill import main
from tools.drilling.report import Round
from tools.drilling.run import DrilledRun

pytestmark = pytest.mark.slow

LINES = [{"step": step, "loss": 1.0 / step, "grad_norm": 1.0, "lr": 1e-3} for step in (1, 2, 3)]


def run_of(tmp_path: Path, lines: list[object], *, torn: str = "") -> DrilledRun:
    run = DrilledRun(tmp_path / "run", tmp_path / "config.yaml", many=False)
    run.directory.mkdir()
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    return run


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (LINES, None),
        (LINES[:2], None),
        ([*LINES, LINES[2]], "step 3 is logged twice"),
        ([LINES[0], LINES[2]], "step 2 of 3 is not logged"),
        ([LINES[0], LINES[1] | {"loss": 0.5 + 2**-53}], "step 2 is (0.5"),
        ([*LINES, {"step": 4, "loss": 1.0}], "step 4 is not in the undisturbed run"),
    ],
)
def test_a_history_is_the_beginning_of_the_undisturbed_one_or_a_problem(
    tmp_path: Path, lines: list[object], problem: str | None
) -> None:
    undisturbed = dict(run_of(tmp_path, list(LINES)).records())
    (tmp_path / "run").rename(tmp_path / "undisturbed")
    found = run_of(tmp_path, lines, torn='{"step": 4, "lo').problem(undisturbed)
    assert found == problem or (problem and found and found.startswith(problem))


def test_the_table_counts_rounds_and_failures_by_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = [
        Round(1, "SIGTERM", "training", "process", "", [143], 9, 9, 1.0, 0, "ok"),
        Round(2, "SIGTERM", "saving", "ranks", "", [143], 9, 5, 3.0, 4, "ok"),
        Round(3, "disk full", "saving", "ranks", "", [1], 9, None, None, None, "no step"),
    ]
    path = tmp_path / "rounds.jsonl"
    path.write_text("".join(json.dumps(vars(found)) + "\n" for found in rounds))
    assert main(["--table", str(path)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert "| SIGTERM | 2 | 2.0 | 3.0 | 2 | 4 | 0 |" in table
    assert "| disk full | 1 |  |  |  |  | 1 |" in table
    assert table[-1] == "| all | 3 | 2.0 | 3.0 | 2 | 4 | 1 |"


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_unknown_fault_is_refused_before_a_drill_starts(
    jobs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["--rounds=2", f"--jobs={jobs}", f"--out={out}", "--faults", "flood"]) == 2
    assert "--faults flood: one of kill -9 of a rank, " in capsys.readouterr().err
    assert not out.exists()


def test_a_file_in_place_of_the_directory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["--rounds=2", f"--out={tmp_path / 'file'}"]) == 2
    assert f"--out {tmp_path / 'file'}: File exists" in capsys.readouterr().err


def test_twenty_faults_cost_the_steps_since_a_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    words = ["tools/drill.py", "--rounds=20", "--seed=1", f"--out={tmp_path}"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert len(lines) == 20
    assert len({json.loads(line)["fault"] for line in lines}) >= 15  # those drawn least come next
