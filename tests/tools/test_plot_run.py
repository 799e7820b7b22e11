"""Curves and the table of several runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tools.plot_run import Run, difference, main, read_run


def run_in(directory: Path, losses: Sequence[float | None], *, val: float | None = None) -> Path:
    directory.mkdir()
    records: list[dict[str, Any]] = [
        {"step": step, "loss": loss, "skipped": step // 50} for step, loss in enumerate(losses, 1)
    ]
    if val is not None:
        records += [{"step": 1, "val_loss": 9.0}, {"step": len(losses), "val_loss": val}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return directory


def test_final_loss_is_the_mean_of_the_last_twentieth_of_the_steps(tmp_path: Path) -> None:
    run = read_run(run_in(tmp_path / "a", [*[100.0] * 95, 1.0, 2.0, None, 4.0, 5.0]))
    assert run.final == 3.0  # 96 to 100 without the one that is not finite


def test_difference_is_smoothed_over_the_common_steps() -> None:
    run = Run({1: 2.0, 2: 2.2, 3: 2.4, 4: 2.0, 9: 7.0}, 0, None)
    baseline = Run({step: 2.0 for step in range(1, 7)}, 0, None)
    assert difference(run, baseline, smooth=2) == pytest.approx({2: 5.0, 3: 15.0, 4: 10.0})
    assert difference(run, baseline, smooth=5) == {}


def test_table_and_picture_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_in(tmp_path / "coat", [2.02] * 120), run_in(tmp_path / "bf16", [2.0] * 80, val=2.5)]
    out = tmp_path / "pictures/loss.png"
    assert main([*map(str, runs), "--out", str(out), "--baseline", "bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| coat | 2.0200 | +1.000 % | 2 |  |"
    assert lines[3] == "| bf16 | 2.0000 | +0.000 % | 1 | 2.5000 |"
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["missing"], "no loss in metrics.jsonl"),
        (["a", "--baseline", "b"], "baseline=b: one of a"),
        (["a", "--smooth", "0"], "smooth=0: at least 1"),
        (["a", "a"], "a second run named a"),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    complaint: str,
) -> None:
    run_in(tmp_path / "a", [1.0] * 30)
    monkeypatch.chdir(tmp_path)
    assert main([*options, "--out", "loss.png"]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
