"""Run a row of a benchmark on several processes, one per GPU, with torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
RESULT = "RANKS "  # prefix of the record that rank 0 prints
GO = "BENCH_GO"  # the environment variable with the file that exists once ranks may measure


class StartedRanks:
    """Processes of `python -m MODULE WORDS`, which import what they need and wait to be called.

    A module that waits calls `wait_to_measure` after its imports; others begin at once.
    """

    def __init__(self, module: str, words: Sequence[str], ranks: int) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="ranks-")
        here = Path(self.directory.name)
        self.go, self.output, self.errors = here / "go", here / "output", here / "errors"
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with self.output.open("w") as output, self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *torchrun, "-m", module, *words],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", GO: str(self.go)},
                stdin=subprocess.PIPE,
                stdout=output,  # files, because nobody would empty pipes while they wait
                stderr=errors,
                text=True,
            )

    def __call__(self) -> dict[str, Any]:
        """Let them measure; returns the record that one of them sent.

        Raises RuntimeError with the first error if no rank sent one.
        """
        self.go.touch()
        try:
            self.process.communicate("")
        except BaseException:
            end_tree(self.process.pid)
            raise
        record = received_record(self.output.read_text(errors="replace"))
        errors = self.errors.read_text(errors="replace")
        self.directory.cleanup()
        if record is not None:
            return record
        named = [line for line in errors.splitlines() if "Error: " in line]
        raise RuntimeError((named or errors.strip().splitlines() or ["no output"])[0])


def wait_to_measure() -> None:
    """Wait until the process that started this rank calls `StartedRanks`, or exit if it ended.

    All ranks read the same pipe, so they wait for its end rather than for a line.
    """
    if GO in os.environ:
        sys.stdin.read()
        if not Path(os.environ[GO]).exists():
            sys.exit()


def run_ranks(module: str, words: Sequence[str], ranks: int) -> dict[str, Any]:
    """Run `python -m MODULE WORDS` on `ranks` processes; returns the record that one of them sent.

    Raises RuntimeError with the first error if no rank sent one.
    """
    return StartedRanks(module, words, ranks)()


def received_record(output: str) -> dict[str, Any] | None:
    """The record in the output of the processes; None if there is none."""
    for line in output.splitlines():
        if line.startswith(RESULT):
            return dict(json.loads(line.removeprefix(RESULT)))
    return None


def send_record(record: dict[str, Any]) -> None:
    """Send `record` to the process that started the ranks, from one of them."""
    print(RESULT + json.dumps(record), flush=True)


def end_tree(pid: int) -> None:
    """Kill a process and its descendants, which torchrun puts into sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in (*reversed(top.children(recursive=True)), top):
            with suppress(psutil.NoSuchProcess):
                process.kill()
