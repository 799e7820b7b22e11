"""The files of a run directory, and logging to the console and train.log.

config.yaml     the resolved configuration
env.json        versions, device, host, commit and command line
train.log       the lines of the console with timestamps
metrics.jsonl   written by `metrics.py`; read, repaired and plotted here
states.jsonl    the same, with log.states_every
numerics.jsonl  the same, with log.numerics_every
loss.png        the loss curves of metrics.jsonl
attempts/       files of earlier starts that the run does not continue: `attempts.py`
lock.json       the process that holds the directory while a run is active: `lock.py`
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from coatlm.config import Config, ConfigError
from coatlm.console import duration
from coatlm.files import durable_file, read_json, whole_file

METRICS = "metrics.jsonl"
STATES = "states.jsonl"
NUMERICS = "numerics.jsonl"
ATTEMPTS = "attempts"
TASK = "task/"  # begins the keys of metrics of eval.tasks
SHOWN = 8  # of these metrics in a line on the console
FILES = ("config.yaml", "env.json", "train.log", METRICS, STATES, NUMERICS)
PACKAGES = ("coatlm", "torch", "megatron-core", "triton", "transformer-engine", "numpy")
Record = dict[str, Any]

logger = logging.getLogger("coatlm")
whole_run = logging.getLogger("coatlm.run")  # equal on all ranks: rank 0 prints it
lines = logging.getLogger("coatlm.lines")  # lines that a progress bar replaces on a terminal


def prepare_directory(path: Path, *, files: bool = True) -> None:
    """Create the run directory. Raises ConfigError if it is not writable.

    With `files`, for the rank that writes them, existing files of the run must be writable as well.
    Several ranks may call this concurrently.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".writable-{platform.node()}-{os.getpid()}"
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        reason = "it is a file" if path.is_file() else error.strerror
        raise ConfigError(f"run.dir={path}: cannot be written to: {reason}") from error
    for file in map(path.joinpath, FILES if files else ()):
        try:
            if os.path.lexists(file):
                file.open("ab").close()
        except OSError as error:
            raise ConfigError(
                f"run.dir={path}: {file.name} cannot be written to: {error.strerror}"
            ) from error
    if os.path.lexists(path / "checkpoints") and not (path / "checkpoints").is_dir():
        raise ConfigError(f"run.dir={path}: checkpoints is not a directory")


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by `text` atomically: after a crash it has the old or the new content."""
    with durable_file(path) as file:
        file.write(text.encode())


def write_config(run_dir: Path, config: Config) -> None:
    """Write config.yaml, from which the same run can be started."""
    write_atomically(run_dir / "config.yaml", config.to_yaml())


def write_environment(run_dir: Path, *, device_name: str | None, job: str | None = None) -> None:
    """Write env.json: command, software and hardware. `job` is the launcher's name of the job."""
    import torch  # takes seconds, which commands that only read a run need not wait

    environment = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "command": sys.argv,
        "job": job,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "gpu": device_name,
    }
    write_atomically(run_dir / "env.json", json.dumps(environment, indent=2) + "\n")


def read_environment(run_dir: Path) -> Record:
    """Read env.json; {} if it cannot be read."""
    try:
        return read_json(run_dir / "env.json")
    except ValueError:
        return {}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the code, with `-dirty` if files differ; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def read_metrics(run_dir: Path) -> list[Record]:
    """The records of metrics.jsonl; see `read_records`."""
    return read_records(run_dir / METRICS)


def read_records(path: Path) -> list[Record]:
    """The records of a .jsonl file, without damaged lines and lines without a step."""
    return [record for record, _ in _whole_lines(path)]


def earlier_attempts(run_dir: Path) -> list[Path]:
    """The run directories under attempts/, oldest first."""
    parent = run_dir / ATTEMPTS
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []


def repair_metrics(path: Path, last_step: int) -> int:
    """Remove damaged lines and those of steps after `last_step`; returns how many were removed.

    A crash can leave an incomplete line, and a run resumed at step k repeats the steps after k.
    """
    if not path.exists():
        return 0
    kept = [line for record, line in _whole_lines(path) if record["step"] <= last_step]
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = "".join(line + "\n" for line in kept)
    if whole != text:
        write_atomically(path, whole)
    return len(text.splitlines()) - len(kept)


def _whole_lines(path: Path) -> Iterator[tuple[Record, str]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # a too long number raises plain ValueError
            continue
        if isinstance(record, dict) and _is_step(record.get("step")):
            yield record, line


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def is_value(value: Any) -> bool:
    """Whether a value can be plotted: a finite number, or null, which stands for NaN or Inf."""
    if value is None:
        return True
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def loss_plot(run_dir: Path) -> Path | None:
    """Draw loss.png with losses and learning rate from metrics.jsonl; None if there is no loss.

    Training losses of earlier attempts are drawn in gray. Metrics of eval.tasks have an axis of
    their own.
    """
    from matplotlib.figure import Figure  # takes half a second, needed only at the end of a run

    records = read_metrics(run_dir)
    train = [{"loss_mean": r["loss"], **r} for r in records if is_value(r.get("loss", ""))]
    val = [r for r in records if is_value(r.get("val_loss", ""))]
    if not train and not val:
        return None
    tasks = list(dict.fromkeys(key for r in records for key in task_scores(r)))
    ratios = [4, 3, 1] if tasks else [4, 1]
    # without pyplot: no display, no globals
    figure = Figure(figsize=(8, sum(ratios)), layout="constrained")
    upper, *middle, lower = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios)
    for attempt in earlier_attempts(run_dir):
        upper.plot(*_curve(read_metrics(attempt), "loss"), linewidth=0.8, color="0.8")
    upper.plot(*_curve(train, "loss_mean"), linewidth=1.2, label="train")
    upper.plot(
        *_curve(val, "val_loss"), marker="o", markersize=4, linewidth=1.0, label="validation"
    )
    upper.set_ylabel("loss (nats per token)")
    upper.legend(frameon=False)
    lower.plot(*_curve(train, "lr"), color="0.4", linewidth=1.0)
    lower.set_ylabel("lr")
    lower.set_xlabel("step")
    for axis in middle:
        for key in tasks:
            curve = _curve(records, TASK + key)
            axis.plot(*curve, marker="o", markersize=4, linewidth=1.0, label=key)
        axis.set_ylabel("tasks")
        axis.legend(frameon=False, fontsize="small")
    for axis in (upper, *middle, lower):
        axis.grid(alpha=0.3)
    path = run_dir / "loss.png"
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)
    return path


def _curve(records: list[Record], key: str) -> tuple[list[int], list[float]]:
    """The x and y values of `key`; null becomes NaN, which leaves a gap in the curve."""
    drawn = [r for r in records if is_value(r.get(key, ""))]
    return [r["step"] for r in drawn], [math.nan if r[key] is None else r[key] for r in drawn]


class _Console(logging.StreamHandler[TextIO]):
    """A console handler that does not write into a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class _LogFile(logging.FileHandler):
    """A log file that raises on write errors, so that a full disk ends the run with that error."""

    def handleError(self, record: logging.LogRecord) -> None:
        raise


def start_logging(run_dir: Path, rank: int, *, stream: TextIO | None = None) -> None:
    """Log to the console and train.log on rank 0; other ranks print warnings to stderr.

    Only rank 0 prints messages of the logger `coatlm.run`, which are equal on all ranks.
    `stream` is rank 0's console, by default stdout. A second call replaces the earlier handlers.
    """
    stop_logging()
    console = _Console((stream or sys.stdout) if rank == 0 else sys.stderr)
    handlers: list[logging.Handler] = [console]
    if rank == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        if console.stream.isatty():
            console.addFilter(lambda record: record.name != lines.name)
        file = _LogFile(run_dir / "train.log", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        handlers.append(file)
    else:
        console.setFormatter(logging.Formatter(f"[rank {rank}] %(levelname)s %(message)s"))
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    whole_run.disabled = rank > 0
    logger.propagate = False  # other libraries configure the root logger
    for handler in handlers:
        logger.addHandler(handler)


def stop_logging() -> None:
    """Remove the handlers of `start_logging`."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)
    whole_run.disabled = False
    logger.propagate = True


def step_line(record: Mapping[str, Any], steps: int) -> str:
    """The console line of a record, without unknown values."""
    parts = [f"step {record['step']}/{steps}"]
    if "val_loss" in record:
        return f"{parts[0]} | val_loss {record['val_loss']:.4f} | val_ppl {record['val_ppl']:.2f}"
    if scores := task_scores(record):
        shown = [f"{name} {value:.4f}" for name, value in scores.items()]
        more = [f"{len(shown) - SHOWN} more in {METRICS}"] if len(shown) > SHOWN else []
        return " | ".join([*parts, *shown[:SHOWN], *more])
    parts += [
        f"loss {record['loss_mean']:.4f}",
        f"grad_norm {record['grad_norm']:.2f}",
        f"lr {record['lr']:.1e}",
        *speed(record),
    ]
    if record["peak_mem_gib"] is not None:
        parts.append(f"mem {record['peak_mem_gib']:.1f} GiB")
    return " | ".join(parts)


def task_scores(record: Mapping[str, Any]) -> Record:
    """The metrics of eval.tasks in a record, by `NAME/METRIC`."""
    return {k.removeprefix(TASK): v for k, v in record.items() if k.startswith(TASK)}


def time_left(record: Mapping[str, Any], steps: int) -> str:
    """How long the remaining steps take at the speed of the last ones, such as `2 h 5 min left`.

    Evaluations and checkpoints come on top.
    """
    return f"{duration((steps - record['step']) * record['step_ms'] / 1000)} left"


def speed(record: Mapping[str, Any]) -> Iterator[str]:
    """The throughput in a console line: tokens and FLOPs per second, and mfu if it is known."""
    rate, tflops = record["tokens_per_s_per_gpu"], record["tflops_per_gpu"]
    yield (f"{rate / 1000:.1f}k" if rate >= 1000 else f"{rate:.0f}") + " tok/s/gpu"
    yield (f"{tflops:.0f}" if tflops >= 100 else f"{tflops:.3g}") + " TFLOP/s/gpu"
    if record["mfu"] is not None:
        yield f"mfu {100 * record['mfu']:.1f}%"
