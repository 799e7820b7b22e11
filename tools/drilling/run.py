"""The run that jobs train: a tiny model, and the comparison of its log with an undisturbed run."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS, EVERY, KEEP = 30, 5, 3  # train.steps, checkpoint.every, checkpoint.keep
COMPARED = ("loss", "grad_norm", "lr", "val_loss")
TEXT = "".join(f"{i} times {i} is {i * i}.\n" for i in range(4000))
LIFE = re.compile(r"INFO model  ")  # first line of the plan, which each start logs once
STEP = re.compile(r"INFO step (\d+)/\d+ \| loss ")

RecordKey = tuple[int, bool]  # step, and whether it is an evaluation
History = dict[RecordKey, tuple[Any, ...]]


@dataclass
class DrilledRun:
    """A run directory, and the records that faults destroyed."""

    directory: Path
    config: Path
    many: bool  # trained by several ranks
    lost: set[RecordKey] = field(default_factory=set)  # records that a fault has destroyed

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.directory / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.directory / "train.log"

    def whole_checkpoints(self) -> list[Path]:
        """The complete checkpoints, which `latest` may name, sorted by step."""
        return sorted(path.parent for path in self.checkpoints.glob("step_*/manifest.json"))

    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(self.checkpoints.glob(".tmp-step_*"))

    def size_of_log(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def records(self) -> list[tuple[RecordKey, tuple[Any, ...]]]:
        """The records of metrics.jsonl in order, without incomplete lines."""
        return list(_records(self.metrics)) if self.metrics.exists() else []

    def last_step(self) -> int:
        return max((step for (step, _), _ in self.records()), default=0)

    def problem(self, undisturbed: History) -> str | None:
        """The first difference of the log from that of the undisturbed run; None if there is none.

        The log may end before that of the undisturbed run.
        """
        found: History = {}
        for key, values in self.records():
            name = f"{'evaluation' if key[1] else 'step'} {key[0]}"
            if key in found:
                return f"{name} is logged twice"
            if key not in undisturbed:
                return f"{name} is not in the undisturbed run"
            if values != undisturbed[key]:
                return f"{name} is {values}, undisturbed {undisturbed[key]}"
            found[key] = values
        last = max((step for step, evaluated in found if not evaluated), default=0)
        steps = {(step, False) for step in range(1, last + 1)}
        if missing := sorted(steps - found.keys() - self.lost):
            return f"step {missing[0][0]} of {last} is not logged"
        return None


def _records(path: Path) -> Iterator[tuple[RecordKey, tuple[Any, ...]]]:
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            record = json.loads(line)
            key = (int(record["step"]), "val_loss" in record)
        except (ValueError, TypeError, KeyError):
            continue
        yield key, tuple(record.get(name) for name in COMPARED)


def write_config(path: Path, *, ranks: int) -> None:
    """Write the configuration that all runs share except run.dir."""
    sections: Mapping[str, Any] = {
        "model": {"layers": 2, "hidden": 32, "heads": 2, "ffn": 64, "vocab": 272},
        "data": {
            "text": [str(path.with_name("text.txt"))],
            "cache_dir": str(path.with_name("cache")),
            "seq_len": 16,
            "workers": 1,
        },
        "parallel": {"start_timeout": 25.0},
        "precision": {"recipe": "bf16"},
        "optim": {"recipe": "coat-lean", "warmup_steps": 5},
        "train": {
            "steps": STEPS,
            "micro_batch": 2,
            "global_batch": 4 * max(ranks, 1),
            "eval_every": 10,
            "eval_batches": 1,
        },
        "checkpoint": {"every": EVERY, "keep": KEEP},
        "log": {"every": 1, "hang_timeout": 60.0},
    }
    path.write_text(json.dumps(sections, indent=1))
    path.with_name("text.txt").write_text(TEXT)


@dataclass(frozen=True)
class RunProgress:
    """The progress of a job since an offset in train.log."""

    lives: int  # number of starts
    steps: Sequence[int]  # logged by the latest start

    @classmethod
    def of(cls, run: DrilledRun, since: int) -> RunProgress:
        if not run.log.exists():
            return cls(0, ())
        with run.log.open("rb") as file:
            file.seek(since)
            text = file.read().decode(errors="replace")
        first, *lives = LIFE.split(text)
        return cls(len(lives), [int(step) for step in STEP.findall(lives[-1] if lives else first)])


def until(condition: Any, seconds: float, *, pause: float = 0.005) -> bool:
    """Wait up to `seconds` until `condition()` is true; returns whether it is."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True
