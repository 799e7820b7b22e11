"""The metrics of a run: their definitions, and the records for files, trackers and the console.

    metrics.jsonl   one JSON object per logged step, in the order of steps:
                    step loss loss_mean grad_norm lr tokens step_ms tokens_per_s_per_gpu
                    tflops_per_gpu mfu peak_mem_gib skipped comm_bytes_{grad,weights,tp,cp}[_FORMAT]
                    (cp with parallel.cp > 1);
                    after an evaluation step val_loss val_ppl;
                    with eval.tasks, after their evaluation, step task/NAME/METRIC ...
                    (train.harness);
                    with several ranks slowest: {rank phase ms median_ms} (train.stragglers);
                    with precision.guard guard_bf16_layers guard_findings, with operand also
                    guard_bf16_tensors, and a line per finding: step layer tensor measure value
                    limit action (train.guard)
    states.jsonl    with log.states_every, the rounding errors of stored weights and moments: step
                    and the values of optim.edq.to_metrics
    numerics.jsonl  with log.numerics_every, quantization errors, kurtosis and lse: step and the
                    values of model.numerics.report, one line per layer and tensor
    tb/             with log.tensorboard, the records of metrics.jsonl as TensorBoard events; a
                    finding is the value of guard_layerN_TENSOR_MEASURE; log.wandb_project sends the
                    same to Weights & Biases

Steps count from 1: `step` is the number of updates done. null means unknown (mfu and memory on a
CPU). NaN and Inf are written as null too, because JSON has neither; a line with such values has a
list `nonfinite` of their names.

    loss                 = loss of the last step
    loss_mean            = mean of the finite losses of all steps since the previous line
    tokens_per_s_per_gpu = tokens per step / seconds per step / processes
    tflops_per_gpu       = tokens_per_s_per_gpu * FLOPs per token / 1e12    (model.accounting)
    mfu                  = tflops_per_gpu / peak dense BF16 TFLOP/s of the GPU
    comm_bytes           = bytes that rank 0 sends per step (parallel.collectives, model.traffic)

This module reads nothing from a device: it is given floats, on log steps only.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from coatlm.config import Config
from coatlm.model import accounting
from coatlm.train.guard import Finding
from coatlm.train.run_directory import (
    METRICS,
    NUMERICS,
    STATES,
    Record,
    read_metrics,
    repair_metrics,
)
from coatlm.train.sinks import Console, JsonLines, Sink, TensorBoard, Wandb


class Throughput:
    """Measures the seconds per training step, without evaluations and checkpoints.

    The first `warmup` steps (compilation, caches, first allocations) are excluded from the mean.
    `synchronize` waits for the device. It is called after the warm-up and before each pause, so
    that work queued until then counts as training.
    """

    def __init__(
        self,
        *,
        warmup: int = 1,
        synchronize: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.warmup, self.synchronize, self.clock = warmup, synchronize, clock
        self.mean = 0.0  # seconds per step after warm-up; 0 before the first lap
        self._steps = self._total_steps = 0
        self._total = 0.0
        self._lap = 0.0  # seconds per step of the last lap
        self._start = clock()

    def step(self) -> None:
        """Count a step that was launched."""
        self._steps += 1
        if self.warmup:
            self.warmup -= 1
            if not self.warmup:
                self.synchronize()
                self.lap()
                self._total, self._total_steps, self.mean = 0.0, 0, 0.0

    def lap(self) -> float:
        """Seconds per step since the last call; the previous value if there was no step since."""
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
        """Exclude the time inside the context from the throughput."""
        self.synchronize()
        stopped = self.clock()
        try:
            yield
        finally:
            self._start += self.clock() - stopped


class MetricsLogger:
    """Turns the values of the loop into records and writes them to every sink, on rank 0 only.

    `flops_per_token` is accounting.flops_per_token, `device_name` the GPU's name (None on a CPU),
    `resume_step` the number of updates done before this start, `synchronize` torch.cuda.synchronize
    on a GPU. Call `start_logging` first. Raises ValueError if a tracker is not installed.
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
        self.run_dir = run_dir
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
            repair_metrics(run_dir / STATES, resume_step)  # a later start may append to it
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
        self.throughput = Throughput(synchronize=synchronize)  # trackers take seconds to start

    def advance(self) -> None:
        """Advance the progress bar and the clock by one step, without waiting for the device."""
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
        guard: Mapping[str, int] | None = None,
    ) -> None:
        """Write the record of update `step`. Call it after `advance`, with values already fetched.

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
                **(guard or {}),
                **({} if slowest is None else {"slowest": slowest}),
            }
        )

    def log_eval(self, step: int, val_loss: float) -> None:
        """Write the record of an evaluation; perplexity is exp(loss), Inf where that overflows."""
        val_ppl = math.exp(val_loss) if val_loss < 700 else val_loss * math.inf
        self._write({"step": step, "val_loss": val_loss, "val_ppl": val_ppl})

    def log_tasks(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of eval.tasks; the keys begin with run_directory.TASK."""
        self._write({"step": step, **values})

    def rollbacks_after(self, step: int) -> list[Record]:
        """The records of rollbacks in steps after `step`; none where rank > 0."""
        if not self.sinks:
            return []
        records = read_metrics(self.run_dir)
        return [r for r in records if "rolled_back_from" in r and r["step"] > step]

    def log_rollback(
        self,
        step: int,
        *,
        failed_step: int,
        left_out: tuple[int, int],
        after: Sequence[Record] = (),
    ) -> None:
        """Record that the run went back to `step` and leaves out batches [first, stop).

        Only metrics.jsonl gets the record, as it is not a point of a curve. A resume at `step` or
        earlier drops the line, because the run then rolls back again. `after` are the records of
        earlier rollbacks that this one dropped, although their batches stay left out.
        """
        new = {"rolled_back_from": failed_step, "left_out": list(left_out)}
        for sink in self.sinks:
            if isinstance(sink, JsonLines):
                for record in (*after, new):
                    sink.write({**record, "step": step + 1})

    def log_guard(self, step: int, findings: Iterable[Finding]) -> None:
        """Write the findings of precision.guard in update `step`, to all sinks but the console."""
        for finding in findings:
            name = f"guard_layer{finding.layer}_{finding.tensor}_{finding.measure}"
            for sink in self.sinks:
                if isinstance(sink, JsonLines):
                    sink.write({"step": step, **finding.record()})
                elif not isinstance(sink, Console):
                    sink.write({"step": step, name: finding.value})

    def log_states(self, step: int, values: Record) -> None:
        """Write the rounding errors of the states stored by update `step` to states.jsonl."""
        if self.states is not None:
            self.states.write({"step": step, **values})

    def log_numerics(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write the quantization errors in the layers of update `step` to numerics.jsonl."""
        if self.numerics is not None:
            for record in records:
                self.numerics.write({"step": step, **record})

    def close(self) -> None:
        """Close every sink."""
        for sink in (*self.sinks, *filter(None, (self.states, self.numerics))):
            sink.close()
        self.sinks, self.states, self.numerics = [], None, None

    def _write(self, record: Record) -> None:
        for sink in self.sinks:
            sink.write(record)
