"""What is done to a job and to its files.

A fault is named after what happens; `act` does it. Most end the job, after some of those its files
are damaged; after the others it must go on by itself, or its launcher must start its ranks again.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tools.drilling.clock import Clock
from tools.drilling.jobs import Job, Kind, send
from tools.drilling.run import STEPS, DrilledRun, until

Phase = Literal["starting", "training", "saving"]
Then = Literal["ends", "goes on", "restarts"]  # the job; restarts: by its launcher

FILLER = "filler"  # what takes the rest of the disk
DROPPED_S = 0.5  # seconds that a rank stands still before it is killed
PAUSES_S = (0.2, 0.5, 1.5)  # that a process is stopped for
END_S = 90.0  # from a fault to the job's end; more than log.hang_timeout
ORPHANS_S = 30.0  # from a launcher's death to that of its ranks
LONG_PAUSE_S = 25.0  # longer than a lock's heartbeat; log.hang_timeout is longer
LONG_PAUSES = 0.03  # share of the pauses that are as long
CLOCK_JUMPS = (3, -3, 3600, -3600, 400 * 86400, -400 * 86400)  # seconds
ALL_KINDS: tuple[Kind, ...] = ("process", "ranks", "launcher")


@dataclass
class Scene:
    """What a fault is done to."""

    job: Job
    run: DrilledRun
    random: random.Random
    restart: Callable[[], Job]  # start the same command, beside the job
    disk: Path | None = None  # the small file system that the run lies on
    clock: Clock | None = None
    early: bool = False  # the job may not listen to signals yet
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def one_rank(self) -> list[int]:
        """A rank of those that live."""
        ranks = self.job.ranks
        return [self.random.choice(ranks)] if ranks else []


@dataclass(frozen=True)
class Fault:
    """`codes`: how the processes that were started may end, besides by SIGKILL."""

    name: str
    act: Callable[[Scene], None]
    then: Then = "ends"
    codes: tuple[int, ...] = ()
    kinds: tuple[Kind, ...] = ALL_KINDS
    phases: tuple[Phase, ...] = ("starting", "training", "saving")
    needs: Literal["", "disk", "clock"] = ""
    within: float = END_S  # seconds until the job has ended


def kill_rank(scene: Scene) -> None:
    send(signal.SIGKILL, *scene.one_rank())


def kill_all(scene: Scene) -> None:
    scene.job.kill()


def kill_launcher(scene: Scene) -> None:
    """Its ranks must end by themselves."""
    scene.notes.append(f"{len(scene.job.ranks)} ranks without it")  # which are known from now on
    send(signal.SIGKILL, scene.job.leader)


def drop_rank(scene: Scene) -> None:
    """A node that stands still, and is then gone."""
    chosen = scene.one_rank()
    send(signal.SIGSTOP, *chosen)
    time.sleep(DROPPED_S)
    send(signal.SIGKILL, *chosen)


def pause(scene: Scene) -> None:
    """A scheduler suspends and continues a rank, or all of them."""
    chosen = scene.one_rank() if scene.random.random() < 0.5 else scene.job.ranks
    seconds = scene.random.choice(PAUSES_S)
    if scene.random.random() < LONG_PAUSES:
        seconds = LONG_PAUSE_S
    scene.notes.append(f"{len(chosen)} ranks stopped for {seconds} s")
    send(signal.SIGSTOP, *chosen)
    time.sleep(seconds)
    send(signal.SIGCONT, *chosen)


def tell(number: signal.Signals, *, twice: bool = False) -> Callable[[Scene], None]:
    """Send a signal to one rank or to all; to a launcher where it passes signals on."""

    def act(scene: Scene) -> None:
        passed_on = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
        if scene.job.kind == "launcher" and number in passed_on:
            chosen = [scene.job.leader]
        else:
            chosen = scene.one_rank() if scene.random.random() < 0.5 else scene.job.ranks
        scene.notes.append(f"to {len(chosen)} of {scene.job.size}")
        send(number, *chosen)
        if twice:
            time.sleep(scene.random.uniform(0.0, 0.05))
            send(number, *chosen)

    return act


def fill_disk(scene: Scene) -> None:
    """Nothing more can be written until the job has ended by that."""
    assert scene.disk is not None
    with suppress(OSError), (scene.disk / FILLER).open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)


def fill_for_a_while(scene: Scene) -> None:
    """Until the ranks have ended by that, and their launcher starts them again."""
    assert scene.disk is not None
    before = set(scene.job.ranks)
    fill_disk(scene)
    until(lambda: not before & set(scene.job.ranks), END_S)
    (scene.disk / FILLER).unlink(missing_ok=True)


def second_job(scene: Scene) -> None:
    """The same command once more: one of the two must be refused, and the other unharmed."""
    second = scene.restart()
    begin = time.monotonic()
    while not second.ended and not scene.job.ended and time.monotonic() - begin < 60:
        time.sleep(0.01)
    refused, other = (second, scene.job) if second.ended else (scene.job, second)
    refused.wait(30)  # its other ranks
    if not refused.ended:
        scene.problems.append("two jobs train in one run directory")
        refused.kill()
    elif not any(refused.codes) and scene.run.last_step() == STEPS:
        scene.notes.append("the run came to its end meanwhile")
    elif 2 not in refused.codes and not (refused.kind == "launcher" and any(refused.codes)):
        scene.problems.append(f"the second job ended with {refused.codes}, not with 2")
    scene.job = other


def damage_checkpoint(scene: Scene) -> None:
    """The job is killed, then a file of its newest checkpoint is no longer what was written."""
    scene.job.kill()
    checkpoints = scene.run.whole_checkpoints()
    if len(checkpoints) < 2:
        scene.notes.append("nothing damaged: there was no older checkpoint")
        return
    files = sorted(path for path in checkpoints[-1].iterdir() if path.is_file())
    scene.notes.append(damage(scene.random.choice(files), scene.random))


def damage_metrics(scene: Scene) -> None:
    """The job is killed, then the tail of metrics.jsonl is no longer what was written."""
    scene.job.kill()
    path = scene.run.metrics
    if not path.exists():
        return
    before = {key for key, _ in scene.run.records()}
    content = path.read_bytes()
    kind = scene.random.choice(("cut", "zeros", "garbage", "text"))
    tail = scene.random.randrange(1, 400)
    if kind == "cut":
        content = content[:-tail]
    elif kind == "zeros":
        content = content[:-tail] + bytes(tail)
    elif kind == "garbage":
        content += scene.random.randbytes(tail)
    else:
        content += b'{"step": 3, "loss"'
    path.write_bytes(content)
    scene.run.lost |= before - {key for key, _ in scene.run.records()}
    scene.notes.append(f"metrics.jsonl: {kind}")


def damage_cache(scene: Scene) -> None:
    """The job is killed, then a file of the data cache is no longer what was written."""
    scene.job.kill()
    cache = scene.run.config.with_name("cache")
    files = sorted(path for path in cache.rglob("text.*") if path.is_file())
    if files:
        scene.notes.append(damage(scene.random.choice(files), scene.random))


def move_clock(scene: Scene) -> None:
    """The system's clock is set, and files get times that do not fit."""
    assert scene.clock is not None
    jump = scene.random.choice(CLOCK_JUMPS)
    scene.clock.move(jump)
    scene.notes.append(f"{jump:+d} s")
    directories = (scene.run.directory, scene.run.checkpoints)
    files = [p for d in directories if d.is_dir() for p in d.iterdir() if p.is_file()]
    for path in scene.random.sample(files, min(3, len(files))):
        moved = time.time() + scene.random.choice((-1, 1)) * 10 ** scene.random.randrange(1, 9)
        with suppress(OSError):  # it may have been replaced meanwhile
            os.utime(path, (moved, moved))


def damage(path: Path, random: random.Random) -> str:
    """A byte flipped, the end cut off, or the file removed; says which."""
    kind = random.choice(("flipped", "cut", "removed"))
    content = bytearray(path.read_bytes())
    if kind == "removed" or not content:
        path.unlink()
    elif kind == "cut":
        path.write_bytes(content[: random.randrange(len(content))])
    else:
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(content)
    return f"{path.name}: {kind}"


ALONE: tuple[Kind, ...] = ("process", "ranks")  # nothing starts them again
RUNNING: tuple[Phase, ...] = ("training", "saving")
FAULTS = (
    Fault("kill -9 of a rank", kill_rank, codes=(1, 4, 5), kinds=ALONE),
    Fault("kill -9 of a rank, restarted", kill_rank, "restarts", kinds=("launcher",)),
    Fault("kill -9 of all ranks", kill_all),
    Fault("kill -9 of the launcher", kill_launcher, kinds=("launcher",), within=ORPHANS_S),
    Fault("a rank dropped", drop_rank, codes=(1, 4, 5), kinds=("ranks",)),
    Fault("SIGTERM", tell(signal.SIGTERM), codes=(143,)),
    Fault("SIGUSR1", tell(signal.SIGUSR1), codes=(85,), kinds=ALONE),
    Fault("SIGINT", tell(signal.SIGINT), codes=(130,)),
    Fault("SIGINT twice", tell(signal.SIGINT, twice=True), codes=(1, 4, 130)),
    Fault("SIGHUP", tell(signal.SIGHUP), codes=(129, 143)),
    Fault("stopped and continued", pause, "goes on", phases=RUNNING),
    Fault("disk full", fill_disk, codes=(1, 4), kinds=ALONE, phases=RUNNING, needs="disk"),
    Fault(
        "disk full for a while",
        fill_for_a_while,
        "restarts",
        kinds=("launcher",),
        phases=RUNNING,
        needs="disk",
    ),
    Fault("checkpoint damaged", damage_checkpoint),
    Fault("metrics.jsonl damaged", damage_metrics),
    Fault("data cache damaged", damage_cache),
    Fault("clock moved", move_clock, "goes on", phases=RUNNING, needs="clock"),
    Fault("second job", second_job, "goes on"),
)
