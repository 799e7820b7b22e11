"""Run test cases in a group of gloo processes.

Starting a process costs about ten seconds (torch, megatron-core). Without a GPU, where forks are
safe, one server imports both and ranks are forks of it; a group runs many cases all the same:
`run_ranks(n, "package.module:function", arguments)` starts n processes, each calls
`function(rank, n, arguments)`, and returns their results in rank order.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600  # seconds

processes: Any  # a context of multiprocessing
if torch.cuda.is_available():
    processes = multiprocessing.get_context("spawn")
else:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["coatlm.train.loop"])


def run_ranks(
    size: int, function: str, arguments: Any = None, *, timeout: float = TIMEOUT
) -> list[Any]:
    """Results (JSON) of `function` on each rank; raises with the output of a rank that failed."""
    port, deadline = free_port(), time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            processes.Process(
                target=run_rank,
                args=(function, json.dumps(arguments), environment(rank, size, port), directory),
            )
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in ranks]  # None: still running
        for process in ranks:
            process.kill()
            process.join()
        for rank, code in enumerate(codes):
            if code != 0:
                log = (Path(directory) / f"{rank}.log").read_text(errors="replace")
                how = f"did not end within {timeout} s" if code is None else f"failed ({code})"
                raise AssertionError(f"rank {rank} of {size} {how}:\n{log[-6000:]}")
        return [json.loads((Path(directory) / f"{r}.json").read_text()) for r in range(size)]


def run_rank(function: str, arguments: str, env: dict[str, str], directory: str) -> None:
    """What a process of `run_ranks` does: its output goes to RANK.log, its result to RANK.json."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    output = os.open(f"{directory}/{rank}.log", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)(rank, size, json.loads(arguments))
    (Path(directory) / f"{rank}.json").write_text(json.dumps(result))


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
