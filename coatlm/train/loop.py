"""The steps of a run, and everything that happens between them.

Within a step the host never waits for the device. Losses and gradient norms stay on the device and
are fetched together on log steps; the optimizer decides on the device whether a step had NaN or
Inf. Between steps the ranks agree over gloo on signals, so that all ranks save the same step. What
is due between two steps is done in the order: save, evaluate.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coatlm.config import Config
from coatlm.data.batches import BatchIterator
from coatlm.data.dataset import Datasets
from coatlm.model.numerics import NumericsRecord, Probe
from coatlm.optim.schedule import learning_rate
from coatlm.parallel.groups import Groups
from coatlm.train import attempts, checkpoint
from coatlm.train.agreement import together
from coatlm.train.evaluations import LOSS, Evaluations, StoppedError, batch_share, due, is_due
from coatlm.train.faults import SIGNALS, ExitCode, HangWatchdog, NonFiniteError, StopSignal
from coatlm.train.lock import RunLock
from coatlm.train.metrics import MetricsLogger
from coatlm.train.resume import Known, Progress, restore, state_to_save
from coatlm.train.startup import Startup
from coatlm.train.state import read_run_state
from coatlm.train.step import Trainer
from coatlm.train.stragglers import compare

if TYPE_CHECKING:
    from coatlm.train.harness import Tasks

logger = logging.getLogger("coatlm")
whole_run = logging.getLogger("coatlm.run")


class Loop:
    """Runs the steps of a run; between them logs, evaluates, saves, and reacts to signals."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        data: Datasets,
        run: Progress,
        open_metrics: Callable[..., MetricsLogger],
        signals: StopSignal,
        watchdog: HangWatchdog,
        known: Known,
        hosts: Sequence[str],  # of each rank
        lock: RunLock | None = None,  # of the run directory, on rank 0
        tasks: Tasks | None = None,
        startup: Startup | None = None,
        missing: Sequence[str] = (),
    ) -> None:
        self.config, self.trainer, self.data, self.run = config, trainer, data, run
        self.open_metrics, self.metrics = open_metrics, open_metrics(resume_step=run.step)
        self.signals, self.watchdog = signals, watchdog
        self.known, self.hosts, self.lock = known, hosts, lock  # known is saved in checkpoints
        self.groups: Groups = trainer.groups
        self.startup = startup
        self.missing = missing  # evaluations that are still due at the step the run resumed from
        self.evaluations = Evaluations(
            config, trainer, data.validation, tasks, check=self._check_evaluation
        )
        self.checkpoints = checkpoint.Checkpointer(
            config.run.dir / "checkpoints",
            keep=config.checkpoint.keep,
            async_save=config.checkpoint.async_save,
            upload=config.checkpoint.upload,
            after=run.continued,
            needed=before_skips if config.train.rollbacks else lambda state: False,
            group=self.groups.checkpoint,
            before_commit=lambda: lock.require() if lock is not None else None,
        )
        trainer.optimizer.before_update = self.checkpoints.wait_for_copies

    def run_steps(self) -> ExitCode:
        """Run up to train.steps, or until the ranks agree on a signal. Raises NonFiniteError."""
        if (stop := self._evaluate(self.missing)) is not None:
            return self._leave(stop)
        if self.startup is not None:
            self.startup.lap("evaluation")
        while self.run.step < self.config.train.steps:
            try:
                return self._run_steps()
            except NonFiniteError as error:
                self._roll_back(error)
        return ExitCode.OK

    def _run_steps(self) -> ExitCode:
        steps = self.config.train.steps
        with self._batches() as batches, self._profiler() as profiler:
            while self.run.step < steps:
                self.trainer.timer.enter("data")
                self._step(next(batches))
                if profiler is not None:
                    profiler.step()
                stop = self._agreed()
                every = self.config.checkpoint.every
                saved = stop is not None or is_due(every, self.run.step, steps)
                if saved:
                    self._save()
                evaluations = due(self.config, self.run.step)
                if stop is None:
                    stop = self._evaluate(evaluations)
                    if stop is not None and not saved:
                        self._save()
                self.checkpoints.poll()
                self.watchdog.beat()
                if stop is not None and (self.run.step < steps or evaluations):
                    return self._leave(stop)
        self.checkpoints.wait()
        return ExitCode.OK

    def _leave(self, number: signal.Signals) -> ExitCode:
        """Finish saving; returns the exit code of a run that a signal stops."""
        self.checkpoints.wait()
        logger.info("%s: saved step %d, leaving", number.name, self.run.step)
        return SIGNALS[number]

    def _agreed(self) -> signal.Signals | None:
        """The signal that the ranks agree on, if any rank has received one."""
        return self.signals.agreed(self.groups.control, lost=self._lost())

    def _check_evaluation(self) -> None:
        """Reset the watchdog's timeout; raise StoppedError if the ranks agree on a signal."""
        self.watchdog.beat()
        if (number := self._agreed()) is not None:
            raise StoppedError(number)

    def _lost(self) -> bool:
        """Whether another run has taken over the run directory; if so, metrics are closed."""
        lost = self.lock is not None and not self.lock.held()
        if lost:
            self.metrics.close()
        return lost

    def _step(self, batches: Any) -> None:
        config, run = self.config, self.run
        rate = learning_rate(run.step, config.optim, config.train.steps)
        observe = partial(self._log_states, rate) if self._states_due() else None
        placed = self.trainer.place(batches)
        due, guarded = self._numerics_due(), self._guard_due()
        watch = self.trainer.watch_numerics(sampled=not due) if due or guarded else nullcontext()
        with watch as probes:
            loss, norm = self.trainer.train_step(placed, rate, observe=observe)
        self._lost()
        if probes is not None:
            records = self._log_numerics(probes) if due else self.trainer.measure_numerics(probes)
            if guarded and self.trainer.guard is not None:
                findings = self.trainer.guard.observe(records, self.groups.control)
                self.metrics.log_guard(run.step + 1, findings)
        run.pending.append((loss, norm, self.trainer.spike))
        run.step += 1
        run.samples += config.train.global_batch
        run.tokens += config.train.global_batch * config.data.seq_len
        self.metrics.advance()  # waits for the first step after a start
        startup, self.startup = self.startup, None
        if startup is not None:
            startup.lap("first step")
            logger.info("%s", startup)
            self.trainer.timer.read()  # discarded: a first step compiles
        if run.step == 1 or run.step == config.train.steps or run.step % config.log.every == 0:
            last_loss, last_norm = self._fetch()
            window, run.window = run.window, []
            self.metrics.log_step(
                run.step,
                loss=last_loss,
                loss_mean=math.fsum(window) / len(window) if window else math.nan,
                grad_norm=last_norm,
                lr=rate,
                tokens=run.tokens,
                slowest=None if startup is not None else self._slowest(),
                skipped=run.guard.total,
                peak_mem_gib=peak_memory(),
                comm_bytes=self.trainer.comm_bytes,
                guard=None if self.trainer.guard is None else self.trainer.guard.counts(),
            )
        if startup is not None and config.checkpoint.every:  # may gather weights, for the next step
            self.checkpoints.reserve(self.trainer.zero_checkpoint.tensors_to_save())

    def _slowest(self) -> dict[str, Any] | None:
        """Compare the ranks' times since the last log step; rank 0 warns of a straggler."""
        factor, group = self.config.log.straggler_factor, self.groups.control
        times = self.trainer.timer.read()
        if not factor or group.size() == 1:
            return None
        found = compare(times, group)
        if found.ms > factor * found.median_ms:
            whole_run.warning(
                "step %d: rank %d (%s) is slow in %s: %.1f ms of work per step, "
                "the median is %.1f ms",
                self.run.step,
                found.rank,
                self.hosts[found.rank],
                *found[1:],
            )
        return found._asdict()

    def _states_due(self) -> bool:
        every = self.config.log.states_every
        return bool(every) and (self.run.step + 1) % every == 0

    def _log_states(self, rate: float, clip_coefficient: Tensor) -> None:
        """Log the errors of stored states. Called in a step, between backward and the update."""
        self._lost()
        with self.metrics.throughput.paused():
            values = self.trainer.measure_states(rate, clip_coefficient)
        self.metrics.log_states(self.run.step + 1, values)

    def _numerics_due(self) -> bool:
        every = self.config.log.numerics_every
        return bool(every) and (self.run.step + 1) % every == 0

    def _guard_due(self) -> bool:
        every = self.config.precision.guard_every
        return self.trainer.guard is not None and (self.run.step + 1) % every == 0

    def _log_numerics(self, probes: dict[int, Probe]) -> list[NumericsRecord]:
        """Log and return what the probes measured in this step; the list is empty where dp > 0.

        The report is excluded from the throughput; the probes inside the step are not.
        """
        with self.metrics.throughput.paused():
            records = self.trainer.measure_numerics(probes)
        self.metrics.log_numerics(self.run.step + 1, records)
        return records

    def _fetch(self) -> tuple[float, float]:
        """Fetch the losses and gradient norms since the last call; waits for the device.

        Skipped steps are counted and finite losses added to the window. Returns those of the last.
        """
        run = self.run
        losses, norms, spikes = torch.stack([torch.stack(x) for x in run.pending]).T.tolist()
        run.pending.clear()
        run.window += filter(math.isfinite, losses)
        run.guard.observe(run.step, norms, [bool(spike) for spike in spikes], losses)
        return losses[-1], norms[-1]

    def _evaluate(self, kinds: Sequence[str]) -> signal.Signals | None:
        """Evaluate and log. Returns the signal that ended this early, if there was one."""
        for kind in kinds:
            try:
                with self.metrics.throughput.paused():
                    values = self.evaluations.evaluate(kind)
            except StoppedError as stopped:
                return stopped.signal
            self._lost()
            if kind == LOSS:
                self.metrics.log_eval(self.run.step, values[LOSS])
            else:
                self.metrics.log_tasks(self.run.step, values)
        return None

    def _save(self) -> None:
        with self.metrics.throughput.paused():
            if self.run.pending:
                self._fetch()
            state = state_to_save(self.config, self.trainer, self.run, **self.known)
            tensors = self.trainer.zero_checkpoint.tensors_to_save()
            self.checkpoints.save(self.run.step, tensors, state)

    def _roll_back(self, error: NonFiniteError) -> None:
        """Continue from the newest checkpoint before the skipped steps; leave out batches since.

        Raises `error` if train.rollbacks is exhausted or there is no such checkpoint.
        """
        run = self.run
        if len(run.left_out) - run.inherited >= self.config.train.rollbacks:
            raise error
        self.checkpoints.wait()
        self.watchdog.beat()
        path = checkpoint.find_checkpoint(
            "auto",
            self.config.run.dir / "checkpoints",
            logger,
            self.groups.checkpoint,
            wanted=before_skips,
        )
        if path is None:
            raise error
        self.watchdog.beat()
        together(lambda: self._make_newest(path), self.groups.checkpoint)
        # samples of steps after error.step do not count: these steps would have been skipped too
        samples = run.samples - (run.step - error.step) * self.config.train.global_batch
        left_out, run.step = run.left_out, error.step
        stop = run.batch
        run.pending.clear()
        restore(path, read_run_state(path), self.trainer, run)
        run.left_out = left_out  # the checkpoint was saved before the rollback to it
        run.left_out = [*left_out, window := (run.batch, stop)]
        run.samples = samples
        self._agreed()
        self.watchdog.beat()
        earlier = self.metrics.rollbacks_after(run.step)
        self.metrics.close()
        self.metrics = self.open_metrics(resume_step=run.step)
        self.metrics.log_rollback(run.step, failed_step=error.step, left_out=window, after=earlier)
        whole_run.warning("%s", error)
        whole_run.warning(
            "back to step %d; batches %d to %d are left out", run.step, window[0], stop - 1
        )

    def _make_newest(self, path: Path) -> None:
        """On rank 0, let a start before the next save resume from the checkpoint at `path` too."""
        if self.groups.world.rank() == 0:
            if self.lock is not None:
                self.lock.require()
            attempts.make_newest(path)

    def _batches(self) -> BatchIterator:
        share = batch_share(self.config, self.trainer)
        return BatchIterator(self.data.train, first_sample=self.run.samples, **share)

    def _profiler(self) -> Any:
        """torch's profiler for the steps of log.profile on rank 0, which writes to traces/."""
        window = self.config.log.profile
        if window is None or window[1] <= self.run.step or self.groups.world.rank() != 0:
            return nullcontext()
        first, last = (max(0, step - 1 - self.run.step) for step in window)
        directory = self.config.run.dir / "traces"
        return torch.profiler.profile(
            schedule=torch.profiler.schedule(
                wait=first, warmup=0, active=last - first + 1, repeat=1
            ),
            on_trace_ready=torch.profiler.tensorboard_trace_handler(str(directory)),
        )


def before_skips(state: Mapping[str, Any]) -> bool:
    """Whether the last step before a checkpoint, by its state, was not skipped."""
    return not state.get("skipped_in_row", 0)


def peak_memory() -> float | None:
    """The peak memory of tensors on this GPU since the start, in GiB; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
