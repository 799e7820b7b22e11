"""The rounds of a drill: a job reaches a phase, a fault is injected, and the run must continue."""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from tools.drilling import disk, report
from tools.drilling.clock import Clock
from tools.drilling.faults import FAULTS, FILLER, Fault, Phase, Scene
from tools.drilling.jobs import Job, JobKind, Machine
from tools.drilling.run import STEPS, DrilledRun, History, RunProgress, until, write_config

NEXT_STEP_S = 120.0  # seconds for a start and a step
LIMITED = 4096  # bytes per file, if no file system can be filled


class Drill:
    """Runs the rounds of a drill. Use it in `with`, since it mounts and starts processes."""

    def __init__(self, options: argparse.Namespace, out: Path) -> None:
        self.options, self.out, self.work = options, out.absolute(), out.absolute() / "work"
        self.random = random.Random(options.seed)
        self.job: Job | None = None
        self.starts = [1.0]  # seconds that the starts so far took
        self.runs = 0
        self.drawn: Counter[str] = Counter()  # how often each fault was drawn

    def __enter__(self) -> Drill:
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        self.disk = self.work / "disk"
        if not disk.mount(self.disk):
            disk.enter_namespace(self.disk)  # does not return if it succeeds
            say("no small file system can be mounted: the size of files is limited instead")
            self.disk.mkdir(exist_ok=True)
            self.limited = True
        else:
            say("the run directory is on its own tmpfs, which faults can fill")
            self.limited = False
        os.environ["PYTHONWARNINGS"] = "ignore"  # of libraries, and of killed processes' semaphores
        self.clock = self._make_clock()
        self.machine = Machine.of(self.options.device, self.work / "jobs.log")
        self.config = self.work / "config.yaml"
        write_config(self.config, ranks=self.options.ranks)
        self.undisturbed = self._undisturbed()
        self.current = self._new_run()
        return self

    def __exit__(self, *_: object) -> None:
        if self.job is not None:
            self.job.kill()
        disk.unmount(self.disk)

    def run_rounds(self) -> int:
        """Run all rounds; returns how many failed."""
        (self.out / report.ROUNDS).unlink(missing_ok=True)
        failed = 0
        for number in range(1, self.options.rounds + 1):
            try:
                found = self._round(number)
            except Unprovoked as end:
                done = self.current.last_step()
                found = report.Round(
                    number, "none", "", "", "", [], done, None, None, None, str(end)
                )
            report.append(self.out / report.ROUNDS, found)
            if found.verdict != "ok":
                failed += 1
                say(f"round {number}: {found.fault}, {found.phase}: {found.verdict}")
                self._keep(number)
        return failed

    def _make_clock(self) -> Clock | None:
        """Create the clock of all jobs; None without a C compiler."""
        try:
            clock = Clock(self.work)
        except ValueError as error:
            say(f"the clock is not moved: {error}")
            return None
        os.environ |= clock.variables  # for the server, which starts with the first process
        return clock

    def _layouts(self) -> tuple[bool, ...]:
        """The values of `many` to alternate: whether a run has several ranks."""
        return (False, True) if self.options.ranks > 1 else (False,)

    def _undisturbed(self) -> dict[bool, History]:
        """Train undisturbed runs; returns their logs for one rank (False) and several (True)."""
        names = {many: self.work / f"undisturbed{many:d}" for many in self._layouts()}
        runs = [DrilledRun(directory, self.config, many) for many, directory in names.items()]
        jobs = [self._job(run, "ranks" if run.many else "process") for run in runs]
        for job in jobs:
            if not job.wait(600) or any(job.codes):
                job.kill()
                raise ValueError(f"the undisturbed run ended with {job.codes}: {self.machine.log}")
        return {run.many: dict(run.records()) for run in runs}

    def _new_run(self) -> DrilledRun:
        """Replace the run directory by a new one; every other run has several ranks."""
        if self.runs:
            shutil.rmtree(self.current.directory, ignore_errors=True)
        self.runs += 1
        many = self._layouts()[self.runs % len(self._layouts())]
        return DrilledRun(self.disk / f"run{self.runs}", self.config, many)

    def _job(self, run: DrilledRun, kind: JobKind) -> Job:
        size = self.options.ranks if run.many else 1
        return Job(self.machine, kind, [str(run.config), f"run.dir={run.directory}"], size)

    def _start(self) -> Job:
        """Create a job of the current run."""
        kind: JobKind = (
            self.random.choice(("ranks", "launcher")) if self.current.many else "process"
        )
        self.since = self.current.size_of_log()
        return self._job(self.current, kind)

    def _round(self, number: int) -> report.Round:
        """Inject one fault; returns the record of the round."""
        phase, job = self._reach()
        while (fault := self._draw(phase, job.kind)) is None:
            phase, job = self._reach()
        early = phase == "starting"
        scene = Scene(job, self.current, self.random, self._start, self.disk, self.clock, early)
        done, since = self.current.last_step(), self.current.size_of_log()
        codes = self._act(fault, scene)
        self._check(scene)
        resumed, seconds = self._go_on(fault, scene, since)
        self._check(scene)
        return report.Round(
            number,
            fault.name,
            phase,
            job.kind,
            "; ".join(scene.notes),
            codes,
            done,
            resumed,
            None if seconds is None else round(seconds, 3),
            None if resumed is None else max(0, done - resumed),
            "; ".join(dict.fromkeys(scene.problems)) or "ok",
        )

    def _check(self, scene: Scene) -> None:
        """Check that the log equals that of the undisturbed run."""
        if problem := self.current.problem(self.undisturbed[self.current.many]):
            scene.problems.append(problem)

    def _go_on(self, fault: Fault, scene: Scene, since: int) -> tuple[int | None, float | None]:
        """Wait for the next step. Returns the step of the resume and the seconds since the restart.

        `since` is the size of train.log before the fault. Returns None, None if the run has reached
        its last step or no step follows.
        """
        begin = time.monotonic()
        if self.job is None:
            self.job = self._start()
            since = self.since
        lives = 0 if fault.then == "goes on" else 1
        ended = False
        while not ended and time.monotonic() - begin < NEXT_STEP_S:
            ended = self.job.ended  # before the log is read, which is then complete
            progress = RunProgress.of(self.current, since)
            if progress.lives >= lives and progress.steps:
                break
            time.sleep(0.005)
        if progress.lives >= lives and progress.steps:
            seconds = time.monotonic() - begin
            if fault.then != "goes on":
                self.starts.append(seconds)
            return progress.steps[0] - 1, seconds
        if not self._finished():
            ended_with = f"the restarted job ended with {self.job.codes}"
            scene.problems.append(ended_with if self.job.ended else f"no step in {NEXT_STEP_S:g} s")
            self.job.kill()
        return None, None

    def _draw(self, phase: Phase, kind: JobKind) -> Fault | None:
        """A fault for this phase and kind of job, of those drawn least; None if there is none."""
        possible = [f for f in self._faults() if phase in f.phases and kind in f.kinds]
        fewest = min((self.drawn[f.name] for f in possible), default=0)
        rarest = [f for f in possible if self.drawn[f.name] == fewest]
        if not rarest:
            return None
        fault = self.random.choice(rarest)
        self.drawn[fault.name] += 1
        return fault

    def _faults(self) -> Iterator[Fault]:
        """The requested faults that are possible on this machine."""
        for fault in FAULTS:
            if self.options.faults and fault.name not in self.options.faults:
                continue
            if fault.needs == "clock" and self.clock is None:
                continue
            yield fault

    def _reach(self) -> tuple[Phase, Job]:
        """Let a job reach a random phase; if its run ends before that, start another run."""
        while True:
            phase: Phase = self.random.choice(("starting", "training", "training", "saving"))
            if phase == "starting" and self.job is not None:
                self.job.kill()
                self.job = None
            if self.job is None:
                self.job = self._start()
            if phase == "starting":
                time.sleep(self.random.uniform(0.0, statistics.median(self.starts[-20:])))
            else:
                steps = self.random.randrange(8)
                last = self.current.last_step()
                until(lambda at=last + steps: self.job.ended or self._at(at), NEXT_STEP_S)
                if phase == "saving":
                    until(lambda: self.job.ended or self.current.saving(), 20, pause=0.0005)
                time.sleep(self.random.uniform(0.0, 0.01))
            if not self.job.ended:
                return phase, self.job
            problem = self.current.problem(self.undisturbed[self.current.many])
            if problem or not self._finished():
                raise Unprovoked(f"ended without a fault, with {self.job.codes}: {problem}")
            self.job = None
            self.current = self._new_run()

    def _at(self, step: int) -> bool:
        """Whether the current start of this job has reached `step`."""
        steps = RunProgress.of(self.current, self.since).steps
        return bool(steps) and steps[-1] >= step

    def _finished(self) -> bool:
        """Whether the job has ended because its run is complete."""
        assert self.job is not None
        # a damaged last line does not matter: a run does not train after its last checkpoint
        saved = f"step_{STEPS:08d}" in {path.name for path in self.current.whole_checkpoints()}
        done = saved or self.current.last_step() == STEPS
        return done and self.job.ended and not any(self.job.codes)

    def _act(self, fault: Fault, scene: Scene) -> list[int | None]:
        """Inject the fault and wait for its effect; returns exit codes if the job has ended."""
        if fault.needs == "disk" and self.limited:
            scene.notes.append("with a limit on the size of files")
            for pid in scene.job.ranks:
                with suppress(psutil.Error):
                    psutil.Process(pid).rlimit(resource.RLIMIT_FSIZE, (LIMITED, LIMITED))
        else:
            fault.act(scene)
        self.job = scene.job
        if fault.then != "ends":
            return [code for code in self.job.codes if code is not None]
        if not self.job.wait(fault.within):
            scene.problems.append(f"not ended {fault.within:g} s after the fault: {self.job.codes}")
            self.job.kill()
        (self.disk / FILLER).unlink(missing_ok=True)
        codes = self.job.codes
        ends = {code for code in codes if code is not None}
        if self.job.kind != "launcher":  # a launcher has its own codes
            known = {-9, 0, *fault.codes}
            signals = (1, 2, 10, 15)
            early = {code for n in signals for code in (-n, 128 + n)} if scene.early else set()
            if scene.early:
                early.add(1)  # of a rank that lost its peer, or a fork before process.run
            scene.problems += [f"exit code {code}" for code in sorted(ends - known - early)]
        self.job = None
        return codes

    def _keep(self, number: int) -> None:
        """Move a failed run aside for inspection and start another one."""
        if self.job is not None:
            self.job.kill()
            self.job = None
        place = self.out / f"failed-{number}"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.current.directory, place, ignore_dangling_symlinks=True)
        shutil.copy(self.machine.log, place / "jobs.log")
        shutil.rmtree(self.work / "cache", ignore_errors=True)
        self.current = self._new_run()


class Unprovoked(RuntimeError):
    """A job ended without a fault."""


def say(text: str) -> None:
    print(f"drill: {text}", flush=True)
