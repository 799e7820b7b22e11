"""Run the jobs of a loss study on the GPUs of a machine, several at once, until a deadline.

    place   a share of a GPU: `per_gpu` jobs run on a GPU at once; without GPUs, of the CPU
    job     pretrain.py with one configuration, on a place of each of `ranks` GPUs

Jobs start in their order; one that needs several GPUs waits for them, and later jobs with it. At
the deadline, or on SIGINT, SIGTERM or SIGHUP, all jobs get SIGTERM, at which pretrain.py saves a
checkpoint. Processes end by themselves if this one is killed (TORCHELASTIC_RUN_ID says that their
parent is their launcher).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

from coatlm import process
from coatlm.config import Config
from coatlm.train.run_directory import write_atomically
from tools.drilling.jobs import ROOT, free_port

POLL_S = 0.05
SAVING_S = 90.0  # seconds from SIGTERM to SIGKILL
PEERS_S = 30.0  # seconds that the other ranks of a failed one have to end
CPU = ""  # in place of a GPU's name
# exit codes of a run that a signal has stopped: after its start, and before it reacts to signals
STOPPED = {code for n in process.INTERRUPTS for code in (128 + n, -n)} | {-signal.SIGKILL}


@dataclass(frozen=True)
class StudyJob:
    """One run of a study."""

    recipe: str
    seed: int
    config: Config
    ranks: int = 1

    @property
    def files(self) -> Path:
        """The prefix of the job's own files: .yaml, .log and .pieces."""
        return self.config.run.dir.parent / "jobs" / self.config.run.dir.name

    def pieces(self) -> list[float]:
        """The wall times in seconds of the job's processes, one per start."""
        path = Path(f"{self.files}.pieces")
        return json.loads(path.read_text()) if path.exists() else []


@dataclass(frozen=True)
class Ended:
    """How the processes of a job ended."""

    code: int  # 0, or the exit code of the first rank that failed; negative for a signal
    last_line: str  # of the log


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; [CPU] if none."""
    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(index) for index in range(count)]
    return names[:count] or [CPU]


def pretrain(job: StudyJob) -> list[str]:
    """The command of a job's ranks."""
    return [sys.executable, str(ROOT / "pretrain.py"), f"{job.files}.yaml"]


@dataclass
class Places:
    """The free places of each GPU."""

    free: dict[str, int]

    @classmethod
    def of(cls, names: Sequence[str], per_gpu: int) -> Places:
        return cls(dict.fromkeys(names, per_gpu))

    def check(self, job: StudyJob) -> None:
        """Raise ValueError unless a job fits if nothing else runs. On a CPU ranks share it."""
        room = sum(self.free.values()) if CPU in self.free else len(self.free)
        if job.ranks > room:
            what = "--per-gpu places on the CPU" if CPU in self.free else "GPUs"
            raise ValueError(
                f"recipes.{job.recipe}.ranks={job.ranks}: there are {room} {what}; choose others "
                "with --recipes"
            )

    def take(self, ranks: int) -> list[str] | None:
        """Take a place on each of the `ranks` emptiest GPUs; None if there are not as many."""
        if CPU in self.free:
            taken = [CPU] * ranks if self.free[CPU] >= ranks else []
        else:
            emptiest = sorted(self.free, key=lambda name: -self.free[name])
            taken = [name for name in emptiest if self.free[name]][:ranks]
        if len(taken) < ranks:
            return None
        for name in taken:
            self.free[name] -= 1
        return taken

    def release(self, names: Sequence[str]) -> None:
        for name in names:
            self.free[name] += 1


@dataclass(eq=False)
class Running:
    """The processes of a job."""

    job: StudyJob
    names: list[str]  # GPUs
    processes: list[subprocess.Popen[bytes]]
    begin: float = field(default_factory=time.monotonic)
    failed: tuple[int, float] | None = None  # exit code of the first rank that failed, and when

    @classmethod
    def start(cls, job: StudyJob, names: list[str], command: Sequence[str]) -> Running:
        """Start the ranks of a job on these GPUs; their output is appended to the job's log."""
        job.files.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(f"{job.files}.yaml"), job.config.to_yaml())
        visible = list(dict.fromkeys(names))
        common = os.environ | {
            "CUDA_VISIBLE_DEVICES": ",".join(visible),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "WORLD_SIZE": str(job.ranks),
            "LOCAL_WORLD_SIZE": str(job.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TORCHELASTIC_RUN_ID": f"study-{os.getpid()}",
        }
        with Path(f"{job.files}.log").open("ab") as log:
            ranks = [
                subprocess.Popen(
                    command,
                    env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches this process only, which sends SIGTERM
                )
                for rank in range(job.ranks)
            ]
        return cls(job, names, ranks)

    def ended(self) -> bool:
        """Whether all ranks have ended; kills those that hang after another has failed."""
        codes = [process.poll() for process in self.processes]
        if self.failed is None and any(codes):
            self.failed = next(code for code in codes if code), time.monotonic()
        if self.failed is not None and time.monotonic() - self.failed[1] > PEERS_S:
            self.send(signal.SIGKILL)
        return None not in codes

    def send(self, number: signal.Signals) -> None:
        for rank in self.processes:
            with contextlib.suppress(ProcessLookupError):
                rank.send_signal(number)

    def close(self) -> Ended:
        """How the job ended; notes the seconds of this start."""
        code = 0 if self.failed is None else self.failed[0]
        seconds = [*self.job.pieces(), round(time.monotonic() - self.begin, 3)]
        write_atomically(Path(f"{self.job.files}.pieces"), json.dumps(seconds))
        log = Path(f"{self.job.files}.log").read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        return Ended(code, lines[-1] if lines else "")


def run_jobs(
    jobs: Sequence[StudyJob],
    places: Places,
    on_end: Callable[[StudyJob, Ended], None],
    *,
    end: float | None = None,
    command: Callable[[StudyJob], Sequence[str]] = pretrain,
) -> bool:
    """Run jobs and call `on_end` for each that ended and was not stopped; whether all have ended.

    At the time `end` of time.monotonic() all are stopped; None means never.
    """
    waiting, running, stopped_jobs = list(jobs), list[Running](), 0
    kill_at: float | None = None  # set when the jobs are being stopped
    with stopping() as signals:
        try:
            while running or (waiting and kill_at is None):
                now = time.monotonic()
                if kill_at is None and (signals or (end is not None and now > end)):
                    kill_at = now + SAVING_S
                    _send(running, signal.SIGTERM)
                if kill_at is not None and now > kill_at:
                    _send(running, signal.SIGKILL)
                while waiting and kill_at is None:
                    names = places.take(waiting[0].ranks)
                    if names is None:
                        break
                    job = waiting.pop(0)
                    running.append(Running.start(job, names, command(job)))
                for run in [run for run in running if run.ended()]:
                    running.remove(run)
                    places.release(run.names)
                    ended = run.close()
                    if ended.code in STOPPED:  # by this process or by another
                        stopped_jobs += 1
                    else:
                        on_end(run.job, ended)
                time.sleep(POLL_S)
        finally:
            _send(running, signal.SIGKILL)  # after an error of `on_end`, for example a full disk
    return not waiting and not stopped_jobs


def _send(running: Sequence[Running], number: signal.Signals) -> None:
    for run in running:
        run.send(number)


@contextlib.contextmanager
def stopping() -> Iterator[list[int]]:
    """Yield a list to which SIGINT, SIGTERM and SIGHUP add their numbers, instead of ending."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if not received:
            process.say(f"{signal.Signals(number).name}: stopping the runs, which save checkpoints")
        received.append(number)

    signals = process.handled(process.INTERRUPTS)
    before = {number: signal.signal(number, receive) for number in signals}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
