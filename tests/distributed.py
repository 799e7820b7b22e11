"""Run test cases in a group of gloo processes.

Starting a process costs about ten seconds (torch, megatron-core). Without a GPU, where forks are
safe, one server imports both and ranks are forks of it; a group runs many cases all the same:
`run_ranks(n, "package.module:function", arguments)` starts n processes, each calls
`function(rank, n, arguments)`, and returns their results in rank order.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600  # seconds

processes: Any  # a context of multiprocessing
if torch.cuda.is_available():
    processes = multiprocessing.get_context("spawn")
else:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["coatlm.train.start", "tests.distributed", "tests.warm"])


def run_ranks(
    size: int, function: str, arguments: Any = None, *, timeout: float = TIMEOUT
) -> list[Any]:
    """Results (JSON) of `function` on each rank; raises with the output of ranks that failed.

    The first to fail ends them all: others would wait for it.
    """
    port, deadline = free_port(), time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as directory:
        logs = [Path(directory) / f"{rank}.log" for rank in range(size)]
        results = [Path(directory) / f"{rank}.json" for rank in range(size)]
        envs = [environment(rank, size, port) for rank in range(size)]
        ranks = [
            start(call, function, json.dumps(arguments), result, env=env, log=log)
            for env, log, result in zip(envs, logs, results, strict=True)
        ]
        try:
            codes = wait(ranks, deadline)
            if not any(codes) and None in codes:
                abort(ranks)  # which leaves stacks
        finally:
            for process in ranks:
                process.kill()
                process.join()
        failed = [rank for rank, code in enumerate(codes) if code]
        late = [rank for rank, code in enumerate(codes) if code is None]
        if failed or late:
            how = "failed" if failed else f"did not end within {timeout} s"
            said = [logs[rank].read_text(errors="replace")[-6000:] for rank in failed or late]
            raise AssertionError(f"ranks {failed or late} of {size} {how}:\n" + "\n".join(said))
        return [json.loads(result.read_text()) for result in results]


class OfSizes(dict[int, list[Any]]):
    """Results of `run_ranks` by number of ranks; a test that asks for another number is skipped."""

    def __missing__(self, size: int) -> list[Any]:
        pytest.skip(f"needs {size} GPUs")


def run_sizes(sizes: Sequence[int], function: str) -> OfSizes:
    """Run `function` on each number of ranks for which there are GPUs."""
    fitting = [size for size in sizes if size <= torch.cuda.device_count()]
    return OfSizes({size: run_ranks(size, function) for size in fitting})


def wait(ranks: Sequence[Any], deadline: float) -> list[int | None]:
    """Exit codes when all have ended, one has failed or time is up; None: still running."""
    while True:
        codes = [process.exitcode for process in ranks]
        left = deadline - time.monotonic()
        if None not in codes or any(codes) or left <= 0:
            return codes
        running = [p.sentinel for p, code in zip(ranks, codes, strict=True) if code is None]
        connection.wait(running, left)


def abort(ranks: Sequence[Any]) -> None:
    for process in ranks:
        if process.is_alive():
            os.kill(process.pid, signal.SIGABRT)
    for process in ranks:
        process.join(10)


def call(function: str, arguments: str, result: Path) -> None:
    """What a rank does."""
    module, name = function.split(":")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    work = getattr(importlib.import_module(module), name)
    gc.freeze()  # what is imported stays, and need not be searched by each `release`
    found = work(rank, size, json.loads(arguments))
    result.write_text(json.dumps(found))
    # a process that was spawned would take down its groups: half a second for each of a hundred
    atexit.register(os._exit, 0)


def release() -> None:
    """Release the groups of a case that has returned, and end their threads. A collective call.

    Each gloo group of several ranks has three threads, one of which polls a hundred times per
    second. Those of a hundred cases would take CPU time from the case that runs.
    """
    from coatlm.parallel.groups import release_groups

    torch.distributed.barrier()  # nobody waits any more for a rank that now closes its connections
    release_groups()


def gloo_threads() -> int:
    """The threads of gloo in this process: three per group of several ranks."""
    count = 0
    for name in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that has just ended
            count += "gloo" in name.read_text()
    return count


def start(
    function: Callable[..., None],
    *arguments: Any,
    env: dict[str, str],
    log: Path,
    cwd: Path = ROOT,
) -> Any:
    """A process that calls `function` with the environment `env`; `log` is appended to."""
    log.touch()
    process = processes.Process(target=_begin, args=(function, arguments, env, log, cwd))
    process.start()
    return process


def _begin(
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    env: dict[str, str],
    log: Path,
    cwd: Path,
) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(2)
    function(*arguments)


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
    """One that nobody has, below those that systems give out: nobody gets it until ranks use it."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", port))  # servers listen on all addresses
            return port
