"""Run test cases in a group of gloo processes.

Starting a process costs about ten seconds (torch, megatron-core), so one group runs many cases:
`run_ranks(n, "package.module:function", arguments)` starts n processes, each calls
`function(rank, n, arguments)`, and returns their results in rank order.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600  # seconds


def run_ranks(
    size: int, function: str, arguments: Any = None, *, timeout: float = TIMEOUT
) -> list[Any]:
    """Results (JSON) of `function` on each rank; raises with the output of the rank that failed."""
    with tempfile.TemporaryDirectory() as directory:
        processes = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__)), function, json.dumps(arguments), directory],
                env=environment(rank, size, port),
                stdout=open(Path(directory) / f"{rank}.log", "wb"),  # noqa: SIM115
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )
            for port in [free_port()]
            for rank in range(size)
        ]
        failed = []
        try:
            for process in processes:
                process.wait(timeout)
            failed = [r for r, p in enumerate(processes) if p.returncode]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failed:
            log = (Path(directory) / f"{failed[0]}.log").read_text(errors="replace")
            raise AssertionError(f"rank {failed[0]} of {size} failed:\n{log[-6000:]}")
        return [json.loads((Path(directory) / f"{r}.json").read_text()) for r in range(size)]


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
    }


def python_path() -> str:
    """The repository before whatever the environment has."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    function, arguments, directory = sys.argv[1:]
    module, name = function.split(":")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    result = getattr(importlib.import_module(module), name)(rank, size, json.loads(arguments))
    (Path(directory) / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
