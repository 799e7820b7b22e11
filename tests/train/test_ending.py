"""The last line of a run: where the results are, and how to train on."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coatlm import files
from coatlm.config import Config, make_config
from coatlm.train import ending
from coatlm.train.checkpoint import verify
from coatlm.train.ending import finish, how_to_train_on
from coatlm.train.faults import ExitCode, NonFiniteGuard
from coatlm.train.resume import Progress


def config(steps: int, directory: Path | None = None, **optim: Any) -> Config:
    return make_config(
        {
            "run": {"dir": str(directory or "runs/x")},
            "data": {"text": "x"},
            "optim": {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 20, **optim},
            "train": {"steps": steps},
        }
    )


def test_the_hint_has_the_rates_of_the_last_update_and_of_the_next_one() -> None:
    # linear: n = 121 of 240 with 20 of warm-up is t = 101 / 220; 1e-4 + 9e-4 (1 - t) = 5.9e-4
    assert how_to_train_on(config(120, schedule="linear"), 120) == (
        "to train on, run again with train.steps=240, "
        "which changes the schedule (lr 1.0e-04 -> 5.9e-04)"
    )


def test_a_schedule_that_does_not_jump_is_not_spoken_of() -> None:
    hint = "to train on, run again with train.steps=240"
    assert how_to_train_on(config(120, schedule="constant"), 120) == hint


def test_a_run_beyond_its_steps_is_not_told_to_do_fewer_than_are_done() -> None:
    assert "run again with train.steps=300" in how_to_train_on(config(100), 150)


def test_a_plot_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0, "lr": 1e-3}) + "\n")
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "0badcafe")
    (tmp_path / ".tmp-loss.png-0badcafe").mkdir()  # in the place of what becomes loss.png
    caplog.set_level(logging.INFO, logger="coatlm")
    finish(config(1, tmp_path), Progress(NonFiniteGuard(1), step=1), ExitCode.OK)
    warning, last = [record.getMessage() for record in caplog.records if record.name == "coatlm"]
    problem = f"{tmp_path}/loss.png: cannot be written: Is a directory"
    assert warning == f"loss.png could not be drawn: {problem}"
    assert last.startswith(f"done: step 1, see {tmp_path}/{{metrics.jsonl}}; to train on")
    monkeypatch.setattr(ending, "loss_plot", lambda _: 1 / 0)
    finish(config(1, tmp_path), Progress(NonFiniteGuard(1), step=1), ExitCode.INTERRUPTED)
    assert "could not be drawn: division by zero" in caplog.text
    assert "stopped at step 1" in caplog.text


SABOTAGE = """
import sys, time
from coatlm.commands.train import main
from coatlm.train import checkpoint, step

write, train, steps = checkpoint.write_tensors, step.Trainer.train_step, []

def write_slowly(*arguments):
    time.sleep(1.5)
    return write(*arguments)

def fail_in_step_3(*arguments, **options):
    steps.append(1)
    if len(steps) == 3:
        raise RuntimeError("sabotage")
    return train(*arguments, **options)

checkpoint.write_tensors, step.Trainer.train_step = write_slowly, fail_in_step_3
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_that_ends_with_an_error_completes_the_checkpoint_that_it_was_writing(
    tmp_path: Path,
) -> None:
    words = ["quickstart", f"run.dir={tmp_path}", "data.text=[configs/*.yaml]", "data.seq_len=16"]
    words += ["train.steps=9", "train.eval_every=0", "checkpoint.every=2"]
    command = [sys.executable, "-W", "ignore", "-c", SABOTAGE, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "sabotage" in done.stderr, done.stderr
    assert "saved step_00000002" in done.stdout + done.stderr
    saved = tmp_path / "checkpoints" / "step_00000002"
    assert saved.is_dir() and verify(saved) == []
