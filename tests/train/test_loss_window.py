"""`loss_mean`: the mean since the last line, bit by bit the same where a run resumes inside it."""

from __future__ import annotations

import functools
import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.train.test_resume import run_config

STEPS, EVERY, NAN = 10, 4, 5  # lines at 1, 4, 8 and 10; the batch of step 6 has no finite loss


def train_all(rank: int, size: int, root: str) -> None:
    """An undisturbed run, one that logs each step, and one resumed inside a window."""
    from coatlm.parallel.groups import release_groups
    from coatlm.train import phases, start
    from coatlm.train.setup import Launch

    phases.start_processes = functools.cache(phases.start_processes)  # joined once for all
    middle = str(Path(root) / "straight" / "checkpoints" / "step_00000007")
    for name, every, resume in [
        ("each", 1, "auto"),
        ("straight", EVERY, "auto"),
        ("resumed", EVERY, middle),
    ]:
        config = run_config(
            Path(root) / name,
            "single",
            train={"steps": STEPS, "micro_batch": 2, "global_batch": 2, "eval_every": 0},
            checkpoint={"every": 7, "keep": 9, "resume": resume},
            log={"every": every},
        )
        with ExitStack() as stack:
            session = start.set_up(config, Launch.from_environment(), stack)
            place = session.trainer.place

            def spoilt(batches: Any, place: Any = place, session: Any = session) -> Any:
                placed = place(batches)
                if session.run.batch == NAN:
                    for batch in placed:
                        batch["loss_mask"] = batch["loss_mask"] * math.nan
                return placed

            session.trainer.place = spoilt
            assert session.run_steps() == 0
        release_groups()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    (directory / "text.txt").write_text("one two three four\n" * 2000)
    run_ranks(1, f"{__name__}:train_all", str(directory))
    return directory


def lines(root: Path, name: str) -> dict[int, dict[str, Any]]:
    records = [json.loads(line) for line in (root / name / "metrics.jsonl").open()]
    return {record["step"]: record for record in records}


def test_the_mean_is_that_of_the_finite_losses_since_the_last_line(root: Path) -> None:
    each, found = lines(root, "each"), lines(root, "straight")
    assert list(found) == [1, 4, 8, 10] and each[NAN + 1]["loss"] is None
    for last, step in ((0, 1), (1, 4), (4, 8), (8, 10)):
        losses = [each[n]["loss"] for n in range(last + 1, step + 1) if n != NAN + 1]
        assert found[step]["loss_mean"] == math.fsum(losses) / len(losses)
        assert found[step]["loss"] == each[step]["loss"]


def test_a_line_without_a_finite_loss_has_no_mean(root: Path) -> None:
    line = lines(root, "each")[NAN + 1]
    assert line["loss_mean"] is None and "loss_mean" in line["nonfinite"]


def test_a_resume_inside_a_window_gives_the_same_mean_bit_by_bit(root: Path) -> None:
    straight, resumed = lines(root, "straight"), lines(root, "resumed")
    assert list(resumed) == [8, 10]
    for step in resumed:
        for key in ("loss", "loss_mean", "grad_norm"):
            assert resumed[step][key] == straight[step][key]
    state = root / "straight" / "checkpoints" / "step_00000007" / "state.json"
    assert len(json.loads(state.read_text())["window"]) == 2  # steps 5 and 7


def test_the_console_has_the_mean_and_the_saved_checkpoints(root: Path) -> None:
    log = (root / "straight" / "train.log").read_text()
    assert f"step 8/10 | loss {lines(root, 'straight')[8]['loss_mean']:.4f} | " in log
    assert "saved step_00000007: " in log and "saved step_00000010: " in log
