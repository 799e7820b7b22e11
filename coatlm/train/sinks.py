"""The sinks for the records of a run: JSON lines, TensorBoard, Weights & Biases, the console."""

from __future__ import annotations

import json
import math
import shutil
import uuid
from pathlib import Path
from typing import Protocol, TextIO

from tqdm import tqdm

from coatlm.config import Config
from coatlm.train.run_directory import (
    TASK,
    Record,
    lines,
    logger,
    repair_metrics,
    speed,
    step_line,
    time_left,
    write_atomically,
)


class Sink(Protocol):
    """A destination for the records of a run."""

    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """A .jsonl file; each line is flushed to the file when `write` returns."""

    def __init__(self, path: Path, resume_step: int) -> None:
        dropped = repair_metrics(path, resume_step)
        if dropped:
            logger.warning("%s: dropped %d lines after step %d", path.name, dropped, resume_step)
        self.file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        bad = [k for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)]
        valid = {**record, **dict.fromkeys(bad), **({"nonfinite": bad} if bad else {})}
        self.file.write(json.dumps(valid, allow_nan=False) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Event files under tb/: train/KEY, val/KEY and task/NAME/METRIC over steps."""

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise missing_package("log.tensorboard=true", "tensorboard") from None
        # purge_step hides events after the checkpoint, which metrics.jsonl drops as well
        self.writer = SummaryWriter(str(run_dir / "tb"), purge_step=resume_step + 1)

    def write(self, record: Record) -> None:
        for key, value in _scalars(record).items():
            self.writer.add_scalar(key, value, record["step"])

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """Weights & Biases; a restart resumes the wandb run whose id is in wandb_id.txt."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        try:
            import wandb
        except ImportError:
            option = f"log.wandb_project={config.log.wandb_project}"
            raise missing_package(option, "wandb") from None
        path = run_dir / "wandb_id.txt"
        if not path.exists():
            write_atomically(path, uuid.uuid4().hex[:8] + "\n")
        self.run = wandb.init(
            project=config.log.wandb_project,
            name=config.run.name,
            id=path.read_text().strip(),
            resume="allow",
            dir=str(run_dir),
            config=config.model_dump(mode="json"),
        )
        # a resumed run repeats steps, which wandb's own step counter does not allow
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        self.run.log({**_scalars(record), "step": record["step"]})

    def close(self) -> None:
        self.run.finish()


class Console:
    """One line per record; on a terminal a progress bar replaces the lines of steps.

    Lines of steps end with the time to the end of the run, but for the first, which compiles.
    """

    def __init__(self, config: Config, resume_step: int, stream: TextIO) -> None:
        self.steps, self.warm = config.train.steps, False
        width, height = shutil.get_terminal_size()  # never 0 x 0, as a container may report
        self.bar = tqdm(
            total=self.steps,
            initial=resume_step,
            desc=config.run.name,
            unit="step",
            file=stream,
            ncols=width,
            nrows=height,
            disable=not stream.isatty(),
        )

    def write(self, record: Record) -> None:
        evaluated = "loss_mean" not in record
        line = step_line(record, self.steps)
        if not evaluated and self.warm and record["step"] < self.steps:
            line += f" | {time_left(record, self.steps)}"
        (logger if evaluated else lines).info(line)
        if not evaluated:
            self.warm = True
            loss = f"loss {record['loss_mean']:.4f}"
            self.bar.set_postfix_str(", ".join([loss, *speed(record)]))

    def close(self) -> None:
        self.bar.close()


def missing_package(option: str, package: str) -> ValueError:
    """The error for an option whose package is not installed."""
    return ValueError(f"{option} needs the package {package}: pip install 'coatlm[tracking]'")


def _scalars(record: Record) -> Record:
    """The numeric values of a record, named train/KEY, val/KEY or task/NAME/METRIC."""
    kind = "val/" if "val_loss" in record else "train/"
    return {
        (k if k.startswith(TASK) else kind + k.removeprefix("val_")): v
        for k, v in record.items()
        if isinstance(v, int | float) and k != "step"
    }
