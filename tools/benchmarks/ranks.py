"""Run a row of a benchmark on several processes, one per GPU, with torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = "RANKS "  # prefix of the record that rank 0 prints


def run_ranks(module: str, words: Sequence[str], ranks: int) -> dict[str, Any]:
    """Run `python -m MODULE WORDS` on `ranks` processes; returns the record that one of them sent.

    Raises RuntimeError with the first error if no rank sent one.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *torchrun, "-m", module, *words]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    record = received_record(done.stdout)
    if record is not None:
        return record
    errors = [line for line in done.stderr.splitlines() if "Error: " in line]
    raise RuntimeError((errors or done.stderr.strip().splitlines() or ["no output"])[0])


def received_record(output: str) -> dict[str, Any] | None:
    """The record in the output of the processes; None if there is none."""
    for line in output.splitlines():
        if line.startswith(RESULT):
            return dict(json.loads(line.removeprefix(RESULT)))
    return None


def send_record(record: dict[str, Any]) -> None:
    """Send `record` to the process that started the ranks, from one of them."""
    print(RESULT + json.dumps(record), flush=True)
