"""How a run stops: on signals, on hangs, after too many skipped steps; and its exit codes.

Signals only set a flag; the loop asks between steps, saves and leaves with the code of the signal.
Ranks may get a signal at different times, or only one of them may: they act on the most urgent one
that any of them has, in the same step, because a checkpoint is collective. What will happen is said
at once, by a thread, as the main thread may be in the middle of a long step.

Workers of torchrun whose agent was killed would train on for good, so each watches its parent.

A rank that waits for a collective which will never complete cannot notice by itself. The watchdog
thread does: without a beat for `timeout_s` it writes every thread's stack and ends the process.
torch releases the interpreter lock while it waits for a device or a collective, so the thread runs.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from coatlm.process import Interrupted, Wakeup, exit_after, handled, say
from coatlm.train.lock import LostLockError

logger = logging.getLogger("coatlm")

STDERR = 2  # the descriptor: sys.stderr may be replaced by an object without one
TICKS = 10  # parts of the timeout that the watchdog sleeps
FLIGHT = "flight_rank_"  # torchfrtrace RUN --prefix flight_rank_
QUIT_S = 2.0  # seconds in which a second SIGINT lets go of what the run holds
PARENT_S = 1.0  # seconds between looks at the parent process
REPORT_S = 10.0  # seconds; a hung file system must not keep a hung process alive


class ExitCode(IntEnum):
    """How a run's process ends. Launchers may hide it: torchrun exits with 1 if a worker fails.

    1 stays Python's own code for an uncaught exception, here also for a missing rank, and 2 is
    argparse's for a wrong call. Signals follow the shell, 128 + number, for runs that saved and
    were told to stop, also where nothing was saved because the signal came before the first step
    (SIGUSR1 then gives 138) or Ctrl-C was pressed twice. SIGUSR1 is what batch systems send ahead
    of a time limit; its code is the one that HTCondor's manual uses for jobs that saved themselves
    and want to run again, outside the ranges of shells (126 on) and of BSD's sysexits.h (64 to 78).
    """

    OK = 0  # all steps done; with torchrun --max-restarts also: saved on a signal
    USER_ERROR = 2  # a configuration or an input that cannot be used
    NONFINITE = 3  # train.max_skipped steps in a row were skipped: NaN, Inf or spikes
    # the disk is full, a checkpoint could not be written, none could be read or it is of another
    # model, or another run took run.dir over
    CHECKPOINT = 4
    HANG = 5  # no step within log.hang_timeout
    REQUEUE = 85  # SIGUSR1: saved, start me again
    HUNG_UP = 128 + 1  # SIGHUP: saved, with the exceptions above
    INTERRUPTED = 128 + 2  # SIGINT: likewise
    TERMINATED = 128 + 15  # SIGTERM: likewise


# From the least to the most urgent: Ctrl-C (SIGINT), a time limit is near (SIGUSR1), the terminal
# was closed (SIGHUP), the process is about to be killed (SIGTERM).
SIGNALS = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGUSR1: ExitCode.REQUEUE,
    signal.SIGHUP: ExitCode.HUNG_UP,
    signal.SIGTERM: ExitCode.TERMINATED,
}
URGENCY = tuple(SIGNALS)
LOST = len(URGENCY)  # more urgent than any signal: the run directory is another run's
PLAN = "finishing this step, then saving"


class StopSignal:
    """Remembers SIGINT, SIGUSR1, SIGHUP and SIGTERM until `close`; a second SIGINT ends the run.

    Each is answered by one line on stderr from the process that `speaks`, which is rank 0. A second
    SIGINT raises Interrupted, and ends a process that has not left QUIT_S seconds later. A SIGHUP
    that is ignored (nohup) stays so.

    Use it as a context manager in the main thread, the only one that Python lets handle signals.
    """

    def __init__(self, *, speaks: bool = True) -> None:
        self.received: signal.Signals | None = None
        self._speaks = speaks
        self._leaving = self._interrupted = False
        self._answered: set[int] = set()
        self._wakeup = Wakeup(self._answer)
        self._previous = {s: signal.signal(s, self._handle) for s in handled(URGENCY)}

    def agreed(
        self, group: dist.ProcessGroup | None = None, *, lost: bool = False
    ) -> signal.Signals | None:
        """The most urgent signal that any rank of `group` has received, the same on all of them.

        Every rank calls it in the same step. `group` is a gloo group, so no device is waited for;
        None means this process alone. Where a rank has `lost` the run directory to another run,
        LostLockError is raised on all of them.
        """
        urgency = -1 if self.received is None else URGENCY.index(self.received)
        urgency = LOST if lost else urgency
        if group is not None:
            highest = torch.tensor(urgency, dtype=torch.int32)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            urgency = int(highest)
        if urgency == LOST:
            raise LostLockError
        self._leaving = urgency >= 0
        if urgency >= 0 and self.received is None:
            self._say(f"{URGENCY[urgency].name} came to another rank: saving and leaving")
        return None if urgency < 0 else URGENCY[urgency]

    def leave(self) -> None:
        """Say that the run is over, as `agreed` does for a run that a signal ends."""
        self._leaving = True

    def close(self) -> None:
        """Put the previous handlers back.

        In a process that is about to leave all but SIGINT are ignored: launchers repeat them, and
        one that came now would hide the exit code, and on other ranks look like a lost peer.
        """
        for number, handler in self._previous.items():
            deaf = self._leaving and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if deaf else handler)
        if self._previous:
            self._wakeup.close()
        self._previous = {}

    def __enter__(self) -> StopSignal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Assignments only: logging could wait for a lock that the interrupted code holds.
        received = signal.Signals(number)
        if received is signal.SIGINT:
            if self._interrupted:
                raise Interrupted(number)
            self._interrupted = True
        known = -1 if self.received is None else URGENCY.index(self.received)
        self.received = URGENCY[max(known, URGENCY.index(received))]

    def _answer(self, number: int) -> None:
        """In the thread of `Wakeup`: say what follows, and see to it that a second SIGINT ends."""
        if number not in SIGNALS:
            return
        if number not in self._answered:
            self._answered.add(number)
            again = "; again to quit now" if number == signal.SIGINT else " and leaving"
            self._say(f"{signal.Signals(number).name}: {PLAN}{again}")
        elif number == signal.SIGINT:
            self._say("error: interrupted twice: left without saving this step")
            exit_after(QUIT_S, ExitCode.INTERRUPTED)

    def _say(self, line: str) -> None:
        if self._speaks:
            say(line)


def end_with(parent: int) -> None:
    """Start a thread that ends this process when `parent` is no longer its parent.

    torchrun's agent ends its workers unless it is killed itself. They would train on then, beside
    those of the next start.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_S)
        say(f"error: pid {os.getpid()}: its launcher, pid {parent}, has gone: leaving")
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


class HangWatchdog:
    """Ends the process when nothing has called `beat` for `timeout_s` seconds; 0 switches it off.

    It counts from its creation, so the first step is watched too. On a hang all stacks go to stderr
    and to `run_dir`/hang_rank<rank>.txt, what `flight` returns (torch's record of the latest
    collectives) to `run_dir`/flight_rank_<rank>, then `action` runs, by default an exit with
    ExitCode.HANG that skips every clean-up (clean-up would wait for the same hung peers).

    Time is counted in ticks of this process rather than by the clock: a job that its scheduler
    suspends and continues has not hung. Detection takes between one and 1 + 1/TICKS timeouts.
    """

    def __init__(
        self,
        timeout_s: float,
        action: Callable[[], Any] = lambda: os._exit(ExitCode.HANG),
        *,
        run_dir: Path,
        rank: int = 0,
        flight: Callable[[], bytes] | None = None,
    ) -> None:
        self.timeout_s, self.action, self.run_dir, self.rank = timeout_s, action, run_dir, rank
        self.flight = flight
        self._ticks = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang watchdog", daemon=True)
        if timeout_s > 0:
            self._thread.start()

    def beat(self) -> None:
        """Say that the run moves on: after each step, evaluation batch and checkpoint."""
        self._ticks = 0

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(self.timeout_s / TICKS):
            self._ticks += 1
            if self._ticks > TICKS:
                report = threading.Thread(target=self._report, name="hang report", daemon=True)
                report.start()
                report.join(REPORT_S)
                self.action()
                return

    def _report(self) -> None:
        faulthandler.dump_traceback(STDERR, all_threads=True)
        path = self.run_dir / f"hang_rank{self.rank}.txt"
        logger.error(
            "rank %d: no step for %g s; stacks are above and in %s; exit code %d",
            self.rank,
            self.timeout_s,
            path,
            ExitCode.HANG,
        )
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        if self.flight is not None:
            path.with_name(f"{FLIGHT}{self.rank}").write_bytes(self.flight())


class NonFiniteError(ArithmeticError):
    """Too many steps in a row were skipped, the last of them `step`."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class NonFiniteGuard:
    """Counts the steps that the optimizer skipped, and ends a run that only skips.

    `total` and `in_row` start at what a resumed run had counted.
    """

    def __init__(self, max_in_row: int, total: int = 0, in_row: int = 0) -> None:
        self.max_in_row, self.total, self.in_row = max_in_row, total, in_row

    def observe(
        self, last_step: int, grad_norms: Sequence[float], spikes: Sequence[bool] | None = None
    ) -> None:
        """Take the gradient norms of the steps up to `last_step` that were not observed yet.

        A step was skipped if and only if its norm is NaN or Inf or it was a spike. Norms may come
        in one by one or be fetched together on log steps. Raises NonFiniteError at `max_in_row`
        skipped steps in a row.
        """
        first = last_step - len(grad_norms) + 1
        spikes = spikes or [False] * len(grad_norms)
        for step, (norm, spike) in enumerate(zip(grad_norms, spikes, strict=True), start=first):
            if math.isfinite(norm) and not spike:
                self.in_row = 0
                continue
            self.total += 1
            self.in_row += 1
            reason = "a spike, " if spike else ""
            logger.warning("step %d skipped: %sgradient norm %g", step, reason, norm)
            if self.in_row >= self.max_in_row:
                raise NonFiniteError(
                    f"gradient norm {norm:g} at step {step}: train.max_skipped={self.max_in_row} "
                    "steps in a row were skipped. The weights are those of step "
                    f"{step - self.in_row}; a lower optim.lr or a longer warm-up may help",
                    step,
                )
