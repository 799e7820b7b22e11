"""`tools/bench.py restart`: what it measures of a run, and a run of its smallest model."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from coatlm.config import load_config
from tests.tools.test_command_lines import run
from tools.benchmarks import restart
from tools.benchmarks.restart import WatchedRun

STEPS = """if True:
    import sys, time
    def step(n, seconds):
        time.sleep(seconds)
        print(f"step {n}/9 | loss 1.0 | lr 1e-3", flush=True)
    time.sleep(0.4)
    print("0.5 s to the end of the first step: imports 0.3 s, first step 0.2 s", flush=True)
    step(1, 0.1)
    for n in (2, 3, 4):
        step(n, 0.1)
    step(5, 0.4)  # while the checkpoint is written
    step(6, 0.1)
    print("saved step_00000004: 5.0 KiB in 0.4 s", flush=True)
    step(7, 1.0)
    time.sleep(60)
"""


def watched(script: str) -> WatchedRun:
    return WatchedRun([sys.executable, "-c", script], {})


def test_the_stall_of_a_save_is_the_longest_step_until_it_is_complete() -> None:
    with restart.ended(watched(STEPS)) as started:
        at, step, parts = started.first()
        save = restart.until_saved(started, 3)
    assert at - started.began > 0.5 and step == 1 and parts == "imports 0.3 s, first step 0.2 s"
    assert save.save == 0.4 and save.step == pytest.approx(0.1, abs=0.08)
    assert save.stalls[0] == pytest.approx(0.3, abs=0.15)
    assert len(save.stalls) == 2  # not the second of step 7
    assert restart.longest([0.1, 0.5, 0.0, 0.2]) == [(2, 0.5), (4, 0.2), (1, 0.1)]
    assert started.process.poll() == -9


def test_a_run_that_ends_by_itself_is_an_error_with_its_last_lines() -> None:
    script = "print('step 1/9 | loss 1.0 |'); print('error: no memory')"
    with (
        restart.ended(watched(script)) as started,
        pytest.raises(RuntimeError, match=r"the run ended: step 1/9 .* \| error: no memory"),
    ):
        restart.until_saved(started, 4)


def test_rates_are_bytes_of_the_checkpoint_per_second() -> None:
    assert restart.rates(3 << 30, 4.0, 2.0) == {
        "checkpoint_gib": 3.0,
        "plain_gb_per_s": 1.611,
        "save_gb_per_s": 0.805,
        "write_ratio": 0.5,
    }
    assert "write_ratio" not in restart.rates(1 << 20, 0.0, 1.0)


def test_a_plain_write_writes_all_bytes(tmp_path: Path) -> None:
    size = restart.BLOCK + 12345
    assert restart.plain_write(tmp_path / "plain", size) > 0
    assert (tmp_path / "plain").stat().st_size == size


@pytest.mark.parametrize("row", restart.MODELS)
def test_the_run_of_a_row_is_valid(row: str, tmp_path: Path) -> None:
    words = restart.command(row, tmp_path, tmp_path / "run", 40, ["optim.lr=0.5"])
    config = load_config(Path(words[2]), words[3:])
    assert (config.optim.lr, config.checkpoint.every, config.log.every) == (0.5, 40, 1)
    assert config.run.dir == tmp_path / "run" and config.checkpoint.resume == "auto"
    assert config.data.cache_dir.is_relative_to(tmp_path)  # a first start is cold
    microbatches = config.train.global_batch / config.train.micro_batch
    assert microbatches == (1 if row == "tiny" else 2)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["model=7b"], "model=7b: one of 3.37b, 0.5b, tiny"),
        (["model=tiny", "every=2"], "every=2: must be at least 3 steps"),
        (["model=tiny,0.5b"], "restart: needs 1 GPU, this machine has 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert run(monkeypatch, "bench", "restart", *words) == 2
    assert problem in capsys.readouterr().err


def test_the_smallest_model_starts_saves_dies_and_resumes(tmp_path: Path) -> None:
    begin = time.perf_counter()
    options = {"model": "tiny", "every": "5", "dir": str(tmp_path)}
    found: dict[str, Any] = restart.measure("tiny", options)
    starts = [found[f"{name}_s"] for name in ("first_loss_cold", "first_loss_warm", "restart")]
    assert min(starts) > 0.5 and sum(starts) < time.perf_counter() - begin
    for start in ("cold", "warm", "restart"):  # parts below 0.05 s are left out of the line
        assert found[f"{start}_parts"].startswith("imports ")
    assert 0 < found["step_s"] < min(starts)
    assert 0 < found["checkpoint_gib"] < 0.01 and found["plain_gb_per_s"] > 0
    assert list(tmp_path.iterdir()) == []
