"""A job of a run: one process, several ranks, or several ranks under torchrun's agent.

Importing torch takes seconds, so on a CPU a server imports it once and processes are forks of it;
CUDA does not survive a fork, so with a GPU they are spawned. The agent is torchrun's own, runs in
such a process, and forks or spawns its ranks likewise.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
RESTARTS = 1000  # --max-restarts of the agent, more than it ever needs

JobKind = Literal["process", "ranks", "launcher"]


@dataclass(frozen=True)
class Machine:
    """Starts the processes of jobs."""

    cuda: bool
    log: Path  # output of all processes
    variables: dict[str, str]  # added to the environment
    context: Any  # multiprocessing context

    @classmethod
    def of(cls, device: str, log: Path) -> Machine:
        """Create a machine; all processes inherit the environment at the start of the first one."""
        if device == "cuda":
            return cls(True, log, {}, multiprocessing.get_context("spawn"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["coatlm.train.start", "torch.distributed.run"])
        return cls(False, log, {"CUDA_VISIBLE_DEVICES": ""}, context)

    def process(self, function: Any, *arguments: Any, env: dict[str, str] | None = None) -> Any:
        """Start a process that calls `function` and appends its output to the log."""
        whole = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        whole |= self.variables | (env or {})
        process = self.context.Process(target=begin, args=(function, arguments, whole, self.log))
        process.start()
        return process


def begin(function: Any, arguments: Sequence[Any], env: dict[str, str], log: Path) -> None:
    """Set up environment, directory and output of this process, then call `function`."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    function(*arguments)


def pretrain(words: Sequence[str]) -> None:
    """Run pretrain.py in this process, as one rank."""
    sys.path[:0] = [str(ROOT)]
    from coatlm import process
    from coatlm.commands import train as pretrain

    warnings.simplefilter("ignore")
    process.run(lambda: pretrain.main(list(words)), signal.SIGUSR1)


def rank_of_agent(words: Sequence[str]) -> None:
    """Run one rank under the agent, which treats any exit but a return as a failure."""
    try:
        pretrain(words)
    except SystemExit as end:
        if end.code:
            raise


def agent(words: Sequence[str], size: int, start_method: str) -> None:
    """Run torchrun's agent, as `--standalone --nproc-per-node=SIZE --max-restarts=RESTARTS`."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=RESTARTS,
        start_method=start_method,
    )
    try:
        elastic_launch(config, rank_of_agent)(list(words))
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


class Job:
    """`python pretrain.py WORDS` as one process, as `size` ranks, or under the agent."""

    def __init__(self, machine: Machine, kind: JobKind, words: Sequence[str], size: int) -> None:
        self.kind, self.size, self.begin = kind, size, time.monotonic()
        self._seen: dict[int, psutil.Process] = {}
        if kind == "process":
            self.processes = [machine.process(pretrain, words)]
        elif kind == "launcher":
            method = "spawn" if machine.cuda else "fork"
            self.processes = [machine.process(agent, words, size, method)]
        else:
            common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
            common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            each = [common | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(size)]
            self.processes = [machine.process(pretrain, words, env=env) for env in each]

    @property
    def ranks(self) -> list[int]:
        """The process ids of live ranks; an agent may be just starting them."""
        if self.kind != "launcher":
            return [p.pid for p in self.processes if p.is_alive()]
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.processes[0].pid).children():
                self._seen[child.pid] = child
        return [pid for pid, child in self._seen.items() if alive(child)]

    @property
    def leader(self) -> int:
        """The process to which a user sends signals: the launcher, or rank 0."""
        return int(self.processes[0].pid)

    @property
    def ended(self) -> bool:
        """Whether all processes have ended, including ranks whose launcher has ended."""
        return not any(p.is_alive() for p in self.processes) and not self.ranks

    @property
    def codes(self) -> list[int | None]:
        """Exit codes of the started processes (an agent, not its ranks); negative for a signal."""
        return [process.exitcode for process in self.processes]

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; returns whether the job has ended."""
        end = time.monotonic() + seconds
        while not self.ended:
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

    def kill(self) -> None:
        """Kill all processes of the job."""
        send(signal.SIGKILL, *[p.pid for p in self.processes], *self.ranks)
        for process in self.processes:
            process.join()
        send(signal.SIGKILL, *self.ranks)  # those that the agent had started meanwhile
        self.wait(30)


def send(number: signal.Signals, *pids: int) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def free_port() -> int:
    """A free port below the ephemeral range, so that no other program gets it before the ranks."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))  # servers listen on all addresses
            return port
