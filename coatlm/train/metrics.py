"""What a run reports of its steps: numbers to a file, trackers and the console.

    metrics.jsonl   one JSON object a logged step, in the order of steps:
                    step loss loss_mean grad_norm lr tokens step_ms tokens_per_s_per_gpu
                    tflops_per_gpu mfu peak_mem_gib skipped comm_bytes_{grad,weights,tp}[_FORMAT];
                    after an evaluation step val_loss val_ppl;
                    with several ranks slowest: {rank phase ms median_ms} (train.stragglers)
    states.jsonl    with log.states_every, what storing the optimizer's step loses: step and what
                    optim.edq.report says
    numerics.jsonl  with log.numerics_every, what FP8 loses in the layers of a step: step and what
                    model.numerics.report says, one line a layer and tensor
    tb/             the same for TensorBoard, when asked; wandb likewise

Steps count from 1 here: `step` is the number of updates done. null means not known (mfu and memory
on a CPU). A value that is NaN or Inf is null too, as JSON has neither, and its name stands in the
list `nonfinite`, a key that only such lines have.

    loss                 = of the last step
    loss_mean            = mean of the finite losses of all steps since the line before
    tokens_per_s_per_gpu = tokens a step / seconds a step / processes
    tflops_per_gpu       = tokens_per_s_per_gpu * FLOPs a token / 1e12      (model.accounting)
    mfu                  = tflops_per_gpu / peak dense BF16 TFLOP/s of the GPU
    comm_bytes           = what rank 0 sends in a step (parallel.collectives)

Nothing here reads a device: numbers arrive as floats, on log steps only.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from coatlm.config import Config
from coatlm.model import accounting
from coatlm.train.run_directory import METRICS, NUMERICS, STATES, Record, repair_metrics
from coatlm.train.sinks import Console, JsonLines, Sink, TensorBoard, Wandb


class Throughput:
    """Seconds a step of training alone: evaluations and checkpoints do not count.

    The first `warmup` steps (compilation, caches, first allocations) stay out of the mean.
    `synchronize` waits for the device; it is called where the clock stops outside a log step: once
    after warm-up and before a pause, so that queued work counts as training.
    """

    def __init__(
        self,
        *,
        warmup: int = 1,
        synchronize: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.warmup, self.synchronize, self.clock = warmup, synchronize, clock
        self.mean = 0.0  # seconds a step after warm-up; 0 until there is one
        self._steps = self._total_steps = 0
        self._total = 0.0
        self._lap = 0.0  # seconds a step of the last lap
        self._start = clock()

    def step(self) -> None:
        """A step was launched."""
        self._steps += 1
        if self.warmup:
            self.warmup -= 1
            if not self.warmup:
                self.synchronize()
                self.lap()
                self._total, self._total_steps, self.mean = 0.0, 0, 0.0

    def lap(self) -> float:
        """Seconds a step since the last lap; without a step since, the last lap's again."""
        now = self.clock()
        if self._steps:
            elapsed = now - self._start
            self._lap = elapsed / self._steps
            self._total += elapsed
            self._total_steps += self._steps
            self.mean = self._total / self._total_steps
            self._start, self._steps = now, 0
        return self._lap

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside is not training."""
        self.synchronize()
        stopped = self.clock()
        try:
            yield
        finally:
            self._start += self.clock() - stopped


class MetricsLogger:
    """Turns what the loop knows into records for every sink; silent on ranks other than 0.

    `flops_per_token` is accounting.flops_per_token, `device_name` the GPU's name (None on a CPU),
    `resume_step` the number of updates done before this start, `synchronize` torch.cuda.synchronize
    on a GPU. Call `start_logging` before. Raises ValueError where a tracker is not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        *,
        rank: int,
        world_size: int,
        flops_per_token: float,
        device_name: str | None = None,
        resume_step: int = 0,
        synchronize: Callable[[], None] = lambda: None,
        stream: TextIO | None = None,
    ) -> None:
        self.tokens_per_step = config.train.global_batch * config.data.seq_len
        self.world_size, self.flops_per_token = world_size, flops_per_token
        self.device_name = device_name
        self.throughput = Throughput(synchronize=synchronize)
        self.sinks: list[Sink] = []
        self.states: JsonLines | None = None
        self.numerics: JsonLines | None = None
        self.bar: tqdm[Any] | None = None
        if rank != 0:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        self.sinks.append(JsonLines(run_dir / METRICS, resume_step))
        if config.log.states_every:
            self.states = JsonLines(run_dir / STATES, resume_step)
        else:
            repair_metrics(run_dir / STATES, resume_step)  # a later start may continue it
        if config.log.numerics_every:
            self.numerics = JsonLines(run_dir / NUMERICS, resume_step)
        else:
            repair_metrics(run_dir / NUMERICS, resume_step)
        if config.log.tensorboard:
            self.sinks.append(TensorBoard(run_dir, resume_step))
        if config.log.wandb_project:
            self.sinks.append(Wandb(run_dir, config))
        console = Console(config, resume_step, stream or sys.stdout)
        self.sinks.append(console)
        self.bar = console.bar

    def advance(self) -> None:
        """After every step: moves the bar and the clock, waits for nothing."""
        self.throughput.step()
        if self.bar is not None:
            self.bar.update()

    def log_step(
        self,
        step: int,
        *,
        loss: float,
        loss_mean: float,
        grad_norm: float,
        lr: float,
        tokens: int,
        skipped: int = 0,
        peak_mem_gib: float | None = None,
        comm_bytes: Mapping[str, int] | None = None,
        slowest: Record | None = None,
    ) -> None:
        """Record the state after update `step`: after `advance`, the floats already fetched.

        `loss` is that of update `step`, `loss_mean` the mean over the updates since the last call,
        `tokens` the number of tokens that the run has trained on so far.
        """
        seconds = self.throughput.lap()
        assert seconds > 0, "advance() comes before log_step()"
        rate = self.tokens_per_step / seconds / self.world_size
        flops = rate * self.flops_per_token
        self._write(
            {
                "step": step,
                "loss": loss,
                "loss_mean": loss_mean,
                "grad_norm": grad_norm,
                "lr": lr,
                "tokens": tokens,
                "step_ms": 1000 * seconds,
                "tokens_per_s_per_gpu": rate,
                "tflops_per_gpu": flops / 1e12,
                "mfu": accounting.mfu(flops, self.device_name),
                "peak_mem_gib": peak_mem_gib,
                "skipped": skipped,
                **(comm_bytes or {}),
                **({} if slowest is None else {"slowest": slowest}),
            }
        )

    def log_eval(self, step: int, val_loss: float) -> None:
        """Record an evaluation; perplexity is exp(loss), Inf where that overflows."""
        val_ppl = math.exp(val_loss) if val_loss < 700 else val_loss * math.inf
        self._write({"step": step, "val_loss": val_loss, "val_ppl": val_ppl})

    def log_rollback(self, step: int, *, failed_step: int, left_out: tuple[int, int]) -> None:
        """Record that a run went back to `step` and leaves out batches [first, stop).

        Only metrics.jsonl has it: no curve shows it. A resume at `step` or before drops the line,
        as the rollback then happens again.
        """
        for sink in self.sinks:
            if isinstance(sink, JsonLines):
                sink.write(
                    {"step": step + 1, "rolled_back_from": failed_step, "left_out": list(left_out)}
                )

    def log_states(self, step: int, values: Record) -> None:
        """Record what storing update `step` loses, in states.jsonl alone."""
        if self.states is not None:
            self.states.write({"step": step, **values})

    def log_numerics(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Record what FP8 lost in the layers of update `step`, in numerics.jsonl alone."""
        if self.numerics is not None:
            for record in records:
                self.numerics.write({"step": step, **record})

    def close(self) -> None:
        """Finish every sink."""
        for sink in (*self.sinks, *filter(None, (self.states, self.numerics))):
            sink.close()
        self.sinks, self.states, self.numerics = [], None, None

    def _write(self, record: Record) -> None:
        for sink in self.sinks:
            sink.write(record)
