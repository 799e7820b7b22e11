"""The faults that are injected into a job and its files.

Most faults end the job, and some of these then damage its files. After the other faults the job
must continue by itself, or its launcher must restart the ranks.
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
from tools.drilling.jobs import Job, JobKind, send
from tools.drilling.run import STEPS, DrilledRun, until

Phase = Literal["starting", "training", "saving"]
Then = Literal["ends", "goes on", "restarts"]  # the effect on the job; its launcher restarts it

FILLER = "filler"  # a file that fills the disk
DROPPED_S = 0.5  # seconds that a rank is stopped before it is killed
PAUSES_S = (0.2, 0.5, 1.5)  # seconds that a process is stopped
END_S = 90.0  # seconds from a fault to the job's end; longer than log.hang_timeout
ORPHANS_S = 30.0  # seconds from a launcher's death to that of its ranks
LONG_PAUSE_S = 25.0  # longer than a lock's heartbeat, shorter than log.hang_timeout
LONG_PAUSES = 0.03  # share of the pauses that take LONG_PAUSE_S
CLOCK_JUMPS = (3, -3, 3600, -3600, 400 * 86400, -400 * 86400)  # seconds
ALL_KINDS: tuple[JobKind, ...] = ("process", "ranks", "launcher")


@dataclass
class Scene:
    """The job that a fault acts on, and its surroundings."""

    job: Job
    run: DrilledRun
    random: random.Random
    restart: Callable[[], Job]  # starts the same command while the job runs
    disk: Path | None = None  # the small file system that holds the run
    clock: Clock | None = None
    early: bool = False  # whether the job may not handle signals yet
    notes: list[str] = field(default_factory=list)  # what was done, for the report
    problems: list[str] = field(default_factory=list)  # what must not happen; any fails the round

    def one_rank(self) -> list[int]:
        """A random live rank."""
        ranks = self.job.ranks
        return [self.random.choice(ranks)] if ranks else []


@dataclass(frozen=True)
class Fault:
    """A fault, named after what happens, and its expected effect.

    `codes` are the allowed exit codes besides 0 and SIGKILL's.
    """

    name: str
    act: Callable[[Scene], None]
    then: Then = "ends"
    codes: tuple[int, ...] = ()
    kinds: tuple[JobKind, ...] = ALL_KINDS
    phases: tuple[Phase, ...] = ("starting", "training", "saving")
    needs: Literal["", "disk", "clock"] = ""
    within: float = END_S  # seconds until the job has ended


def kill_rank(scene: Scene) -> None:
    send(signal.SIGKILL, *scene.one_rank())


def kill_all(scene: Scene) -> None:
    scene.job.kill()


def kill_launcher(scene: Scene) -> None:
    """Kill the launcher; its ranks must end by themselves."""
    scene.notes.append(f"{len(scene.job.ranks)} ranks")  # `ranks` also remembers them for later
    send(signal.SIGKILL, scene.job.leader)


def drop_rank(scene: Scene) -> None:
    """Stop a rank, then kill it, like a node that hangs and disappears."""
    chosen = scene.one_rank()
    send(signal.SIGSTOP, *chosen)
    time.sleep(DROPPED_S)
    send(signal.SIGKILL, *chosen)


def pause(scene: Scene) -> None:
    """Suspend and continue one rank or all of them, as a scheduler does."""
    chosen = scene.one_rank() if scene.random.random() < 0.5 else scene.job.ranks
    seconds = scene.random.choice(PAUSES_S)
    if scene.random.random() < LONG_PAUSES:
        seconds = LONG_PAUSE_S
    scene.notes.append(f"{len(chosen)} ranks stopped for {seconds} s")
    send(signal.SIGSTOP, *chosen)
    time.sleep(seconds)
    send(signal.SIGCONT, *chosen)


def tell(number: signal.Signals, *, twice: bool = False) -> Callable[[Scene], None]:
    """Send a signal to one rank or all, or to a launcher that forwards signals."""

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
    """Fill the disk, which ends the job; the drill frees it afterwards."""
    assert scene.disk is not None
    with suppress(OSError), (scene.disk / FILLER).open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)


def fill_for_a_while(scene: Scene) -> None:
    """Fill the disk until all ranks have ended; their launcher then restarts them."""
    assert scene.disk is not None
    before = set(scene.job.ranks)
    fill_disk(scene)
    until(lambda: not before & set(scene.job.ranks), END_S)
    (scene.disk / FILLER).unlink(missing_ok=True)


def second_job(scene: Scene) -> None:
    """Start the same command again; one of the two must be refused, the other must continue."""
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
    """Kill the job, then damage a file of its newest checkpoint."""
    scene.job.kill()
    checkpoints = scene.run.whole_checkpoints()
    if len(checkpoints) < 2:
        scene.notes.append("nothing damaged: there was no older checkpoint")
        return
    files = sorted(path for path in checkpoints[-1].iterdir() if path.is_file())
    scene.notes.append(damage(scene.random.choice(files), scene.random))


def damage_metrics(scene: Scene) -> None:
    """Kill the job, then damage the end of metrics.jsonl."""
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
    """Kill the job, then damage a file of the data cache."""
    scene.job.kill()
    cache = scene.run.config.with_name("cache")
    files = sorted(path for path in cache.rglob("text.*") if path.is_file())
    if files:
        scene.notes.append(damage(scene.random.choice(files), scene.random))


def move_clock(scene: Scene) -> None:
    """Move the clock of the job, and set the mtimes of some files far away from it."""
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
    """Flip a byte, truncate the file, or remove it; returns which."""
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


ALONE: tuple[JobKind, ...] = ("process", "ranks")  # jobs without a launcher that restarts them
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
