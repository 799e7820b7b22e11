"""A row of a benchmark that needs several processes, one a GPU: torchrun starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = "RANKS "  # rank 0 prints its record behind this


def run_ranks(module: str, words: Sequence[str], ranks: int) -> dict[str, Any]:
    """Run `python -m MODULE WORDS` on `ranks` processes; the record that one of them said.

    Raises RuntimeError with the first error where none did.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *torchrun, "-m", module, *words]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            return dict(json.loads(line.removeprefix(RESULT)))
    errors = [line for line in done.stderr.splitlines() if "Error: " in line]
    raise RuntimeError((errors or done.stderr.strip().splitlines() or ["no output"])[0])


def send_record(record: dict[str, Any]) -> None:
    """Give `record` to whoever called `run_ranks`; one rank does."""
    print(RESULT + json.dumps(record), flush=True)
