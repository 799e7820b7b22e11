"""Exit codes of a run, and what stops it: signals, hangs, a lost launcher, too many skipped steps.

A signal only sets a flag. Between steps, and between the batches of an evaluation, the loop checks
it, saves, and exits with the code of the signal. Ranks may receive a signal at different times, or
only one may receive it. A checkpoint is collective, so all ranks act in the same step on the most
urgent signal that any of them has. A thread prints immediately what will happen, since the main
thread may be inside a long step.

If torchrun's agent is killed, its workers would continue to train, so each watches its parent.

A rank blocked in a collective that never completes cannot detect this itself. A watchdog thread
does: after `timeout_s` seconds without a call of `beat` it writes the stack of every thread and
ends the process. torch releases the GIL while it waits for a device or a collective, so the thread
can run.
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
whole_run = logging.getLogger("coatlm.run")

STDERR = 2  # file descriptor; sys.stderr may be replaced by an object without one
TICKS = 10  # parts of the timeout that the watchdog sleeps
FLIGHT = "flight_rank_"  # torchfrtrace RUN --prefix flight_rank_
QUIT_S = 2.0  # seconds for the clean-up after a second SIGINT
PARENT_S = 1.0  # seconds between looks at the parent process
REPORT_S = 10.0  # seconds to write the report, since the file system may hang too


class ExitCode(IntEnum):
    """The exit code of a run's process. torchrun hides it: it exits with 1 if any worker fails.

    1 is Python's code for an uncaught exception, here also for a missing rank, and 2 is argparse's
    for invalid arguments. A run that a signal stops ends with 128 + number as in shells, after
    saving; nothing is saved if the signal came before the first step (SIGUSR1 then gives 138) or
    SIGINT came twice. Batch systems send SIGUSR1 ahead of a time limit; its code is the one that
    HTCondor's manual uses for jobs that saved a checkpoint and should run again. It lies outside
    the ranges of shells (126 and above) and of BSD's sysexits.h (64 to 78).
    """

    OK = 0  # all steps are done; under torchrun --max-restarts also: saved after a signal
    USER_ERROR = 2  # an invalid configuration or input
    NONFINITE = 3  # train.max_skipped consecutive steps were skipped: NaN, Inf or spikes
    # the disk is full; a checkpoint could not be written or read, or belongs to another model; or
    # another run took run.dir over
    CHECKPOINT = 4
    HANG = 5  # no progress within log.hang_timeout
    REQUEUE = 85  # SIGUSR1: saved; the run should be started again
    HUNG_UP = 128 + 1  # SIGHUP: saved, with the exceptions above
    INTERRUPTED = 128 + 2  # SIGINT: the same
    TERMINATED = 128 + 15  # SIGTERM: the same


# From the least to the most urgent: Ctrl-C (SIGINT), a time limit is near (SIGUSR1), the terminal
# was closed (SIGHUP), the process is about to be killed (SIGTERM).
SIGNALS = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGUSR1: ExitCode.REQUEUE,
    signal.SIGHUP: ExitCode.HUNG_UP,
    signal.SIGTERM: ExitCode.TERMINATED,
}
URGENCY = tuple(SIGNALS)
LOST = len(URGENCY)  # more urgent than any signal: another run has the lock of the run directory
PLAN = "finishing this step, then saving"


class StopSignal:
    """Records SIGINT, SIGUSR1, SIGHUP and SIGTERM until `close`; a second SIGINT ends the run.

    With `speaks` (on rank 0) it prints one line on stderr for each signal. A second SIGINT
    raises Interrupted, and ends the process if it has not exited after QUIT_S seconds. A SIGHUP
    that is ignored (nohup) stays ignored.

    Use it as a context manager in the main thread, where Python runs signal handlers.
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

        Every rank calls it at the same place of the same step. `group` is a gloo group, so the
        device is not synchronized; None means a single process. If any rank has `lost` the lock of
        the run directory to another run, all ranks raise LostLockError.
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
            self._say(f"another rank received {URGENCY[urgency].name}: saving and leaving")
        return None if urgency < 0 else URGENCY[urgency]

    def leave(self) -> None:
        """Mark the run as over, as `agreed` does for a run that a signal stops; see `close`."""
        self._leaving = True

    def close(self) -> None:
        """Restore the previous handlers.

        If the run is over, all signals but SIGINT are ignored instead: launchers repeat them, and a
        late one would replace the exit code and look like a lost peer to other ranks.
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
        # Only assignments: logging could deadlock on a lock that the interrupted code holds.
        received = signal.Signals(number)
        if received is signal.SIGINT:
            if self._interrupted:
                raise Interrupted(number)
            self._interrupted = True
        known = -1 if self.received is None else URGENCY.index(self.received)
        self.received = URGENCY[max(known, URGENCY.index(received))]

    def _answer(self, number: int) -> None:
        """Print how the run reacts to a signal; end the process after a second SIGINT.

        Wakeup calls this in its thread.
        """
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
    """Start a thread that ends this process once `parent` is no longer its parent.

    torchrun's agent ends its workers when it exits, but not when it is killed. They would then
    continue to train beside the workers of the next start.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_S)
        say(f"error: pid {os.getpid()}: exiting, as its launcher, pid {parent}, has exited")
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


class HangWatchdog:
    """Ends the process after `timeout_s` seconds without a call of `beat`; 0 means off.

    Counting starts at construction, so the first step is covered too. On a hang, the stacks of all
    threads are written to stderr and `run_dir`/hang_rank<rank>.txt, and what `flight` returns
    (torch's flight recorder of the latest collectives) to `run_dir`/flight_rank_<rank>. Then
    `action` runs: by default an exit with ExitCode.HANG without clean-up, which would hang too.

    Time is counted in ticks of this process, not by a clock, so a job that its scheduler suspends
    and continues does not count as hung. Detection takes between 1 and 1 + 1/TICKS timeouts.
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
        """Reset the timeout; called after each step and its save, and each evaluation batch."""
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
    """Too many consecutive steps were skipped, the last of them `step`."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class NonFiniteGuard:
    """Counts the steps that the optimizer skipped, and raises after too many consecutive ones.

    `total` and `in_row` (consecutive skipped steps) start at the counts of a resumed run. It also
    warns, once, of a step in which no token counts.
    """

    def __init__(self, max_in_row: int, total: int = 0, in_row: int = 0) -> None:
        self.max_in_row, self.total, self.in_row = max_in_row, total, in_row
        self.warned = False

    def observe(
        self,
        last_step: int,
        grad_norms: Sequence[float],
        spikes: Sequence[bool] | None = None,
        losses: Sequence[float] = (),
    ) -> None:
        """Observe the gradient norms, and losses, of the steps since the last call to `last_step`.

        A step was skipped if and only if its norm is NaN or Inf or it was a spike. Norms may be
        passed one by one or together on log steps. Raises NonFiniteError at `max_in_row`
        consecutive skipped steps.
        """
        first = last_step - len(grad_norms) + 1
        spikes = spikes or [False] * len(grad_norms)
        for step, (loss, norm) in enumerate(zip(losses, grad_norms, strict=False), start=first):
            if math.isnan(loss) and norm == 0 and not self.warned:
                self.warned = True
                whole_run.warning(
                    "step %d: no token of the batch counts (data.loss_mask), so it has no loss and "
                    "gradients of 0; are prompts longer than data.seq_len?",
                    step,
                )
        for step, (norm, spike) in enumerate(zip(grad_norms, spikes, strict=True), start=first):
            if math.isfinite(norm) and not spike:
                self.in_row = 0
                continue
            self.total += 1
            self.in_row += 1
            reason = "a spike, " if spike else ""
            whole_run.warning("step %d skipped: %sgradient norm %g", step, reason, norm)
            if self.in_row >= self.max_in_row:
                raise NonFiniteError(
                    f"gradient norm {norm:g} at step {step}: train.max_skipped={self.max_in_row} "
                    f"consecutive steps were skipped, from {step - self.in_row + 1} on; a lower "
                    "optim.lr or a longer warm-up may help",
                    step,
                )
