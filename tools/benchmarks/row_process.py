"""The process of a row of a benchmark: it starts early, has a time limit and leaves none behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from typing import Any

from tools.benchmarks.ranks import ROOT, end_tree

RESULT = "RESULT "  # prefix of a record in the output of a row's process
EXCEPTION = re.compile(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception|Exit|Interrupt)\b")
NO_TIME = "no time left"
POLL = 0.5  # seconds


class RowProcess:
    """The process of a row. It starts and imports immediately, and measures on demand."""

    def __init__(self, benchmark: str, row: str, options: list[str]) -> None:
        self.row = row
        command = [sys.executable, str(ROOT / "tools" / "bench.py"), benchmark, "--row", row]
        self.process = subprocess.Popen(
            [*command, *options],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def leave_out(self) -> list[dict[str, Any]]:
        """End the process; returns a record with the reason."""
        self.process.communicate("")
        return [{"row": self.row, "missing": NO_TIME}]

    def measure(self, limit: float | None = None) -> list[dict[str, Any]]:
        """Measure; returns the row's records, and after a failure one with the reason.

        After `limit` seconds the process and all that it started are killed, which is a failure.
        """
        late = ""
        try:
            output, errors = self.process.communicate("go\n", timeout=limit)
        except subprocess.TimeoutExpired:
            late = f"did not end within {limit:.0f} s"
            end_tree(self.process.pid)
            output, errors = self.process.communicate()
        records = []
        for line in output.splitlines():
            if line.startswith(RESULT):
                records.append(json.loads(line.removeprefix(RESULT)))
        if self.process.returncode or not records:
            records.append({"row": self.row, "missing": late or last_error(errors)[:300]})
        return records


def last_error(errors: str) -> str:
    """The last line of `errors` that starts with the name of an exception, else the last line.

    At exit libraries may print warnings after a traceback.
    """
    lines = errors.strip().splitlines() or ["no output"]
    return next((line for line in reversed(lines) if EXCEPTION.match(line)), lines[-1])


def end_with_parent() -> None:
    """Let this process and its descendants end when its parent does.

    They would hold the GPUs of a call that was killed.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL)
        end_tree(os.getpid())

    threading.Thread(target=watch, name="parent", daemon=True).start()
