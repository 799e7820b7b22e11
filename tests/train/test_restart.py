"""torchrun starts a group again after a rank was killed; tools/elastic.py passes signals on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed import ROOT, free_port, python_path
from tests.forks import Forks

pytestmark = pytest.mark.slow

STEPS, EVERY, RANKS = 20, 4, 4
SMALL: dict[str, dict[str, Any]] = {
    "model": {"layers": 2, "hidden": 64, "heads": 4, "ffn": 96},
    "data": {"seq_len": 32},
    "parallel": {"tp": 2},
    "precision": {"recipe": "fp32"},
    "train": {"steps": STEPS, "micro_batch": 4, "global_batch": 32, "eval_every": 0},
    "checkpoint": {"every": EVERY},
    "log": {"every": 1},
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(3000)))
    sections = json.loads(json.dumps(SMALL))
    sections["run"] = {"dir": str(tmp_path / "run")}
    sections["data"] |= {"text": [str(text)], "cache_dir": str(tmp_path / "cache"), "workers": 1}
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(sections))
    return str(path)


@contextmanager
def started(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher with its output in a file; what is left of it is killed at the end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=output, stderr=output, env=environment
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            for left in (*psutil.Process(process.pid).children(recursive=True), process):
                left.kill()
        process.wait()


def until_step(step: int, run: Path, log: Path, timeout: float = 240.0) -> None:
    """Until metrics.jsonl has a line of `step`."""
    end = time.monotonic() + timeout
    while not (run / "metrics.jsonl").exists() or all(s < step for s, _ in losses(run)):
        assert time.monotonic() < end, log.read_text(errors="replace")[-6000:]
        time.sleep(0.02)


def losses(run: Path) -> list[Any]:
    """(step, loss) of every whole line."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(record["step"], record["loss"]) for record in records]


def undisturbed(config: str, directory: Path, tmp_path: Path) -> list[Any]:
    """The losses of the same run on as many ranks, without a launcher."""
    common = {"WORLD_SIZE": str(RANKS), "MASTER_PORT": str(free_port())}
    forks = Forks(tmp_path)
    ranks = [
        forks.start(
            config,
            f"run.dir={directory}",
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(RANKS)
    ]
    assert [rank.wait() for rank in ranks] == [0] * RANKS, ranks[0].text()
    return losses(directory)


def test_a_killed_rank_costs_the_steps_since_the_checkpoint_and_nothing_else(
    config: str, tmp_path: Path
) -> None:
    run, log = tmp_path / "run", tmp_path / "log.txt"
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
    with started(log, *torchrun, "--max-restarts=1", "pretrain.py", config) as launcher:
        until_step(2 * EVERY + 2, run, log)
        rank = psutil.Process(launcher.pid).children()[2]
        rank.send_signal(signal.SIGKILL)
        assert launcher.wait(240) == 0, log.read_text(errors="replace")[-6000:]
    text = (run / "train.log").read_text()
    assert "step_00000008 at step 8" in text or "step_00000012 at step 12" in text
    assert losses(run) == undisturbed(config, tmp_path / "undisturbed", tmp_path)


def test_ranks_end_when_their_launcher_is_killed(config: str, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log.txt"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    with started(log, *torchrun, "pretrain.py", config, "train.steps=100000") as launcher:
        until_step(1, run, log)
        ranks = psutil.Process(launcher.pid).children()
        launcher.kill()
        launcher.wait()
        _, left = psutil.wait_procs(ranks, timeout=60)
        for rank in left:
            rank.kill()
    assert len(ranks) == 2 and not left, log.read_text(errors="replace")[-6000:]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 85), (signal.SIGINT, 130)])
def test_signals_to_the_launcher_save_and_are_no_reason_to_restart(
    config: str, tmp_path: Path, number: int, code: int
) -> None:
    run, log = tmp_path / "run", tmp_path / "log.txt"
    elastic = ("tools/elastic.py", "--standalone", "--nproc-per-node=2", "--max-restarts=3")
    arguments = ("pretrain.py", config, "train.steps=100000", "checkpoint.every=0")
    with started(log, *elastic, *arguments) as launcher:
        until_step(2, run, log)
        launcher.send_signal(number)
        assert launcher.wait(120) == code, log.read_text(errors="replace")[-6000:]
    latest = (run / "checkpoints" / "latest").read_text().strip()
    assert latest == f"step_{losses(run)[-1][0]:08d}"
    assert log.read_text().count("model         2 layers") == 1  # started once
    assert log.read_text().count("finishing this step, then saving") == 1  # rank 0 speaks for all
    assert not (run / "lock.json").exists()


def test_ranks_that_are_told_to_stop_while_they_start_do_not_come_back(
    config: str, tmp_path: Path
) -> None:
    log = tmp_path / "log.txt"
    elastic = ("tools/elastic.py", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    with started(log, *elastic, "pretrain.py", config, "train.steps=100000") as launcher:
        end = time.monotonic() + 120
        while not any(
            "pretrain.py" in c.cmdline() for c in psutil.Process(launcher.pid).children()
        ):
            assert time.monotonic() < end, log.read_text(errors="replace")
            time.sleep(0.02)
        launcher.send_signal(signal.SIGUSR1)  # no rank has imported torch yet
        assert launcher.wait(120) == 85, log.read_text(errors="replace")[-6000:]
