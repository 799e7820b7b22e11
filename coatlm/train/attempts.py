"""Attempts: earlier files of a run directory, moved away by a start that does not continue them.

    RUN/metrics.jsonl  config.yaml  env.json  checkpoints/ ...        the current run
    RUN/attempts/2026-11-22T174122Z/ the same names                   an earlier attempt

A start with newly initialized weights (`checkpoint.resume=none`, or no checkpoint to continue from)
or from an earlier checkpoint of the run deletes nothing: files that it would overwrite move into an
attempt. The attempt is named after the time of the last start (`started` in env.json) of the run
whose files it holds. It is itself a run directory, so every tool that reads runs reads attempts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from coatlm.train.checkpoint import CHECKPOINTS
from coatlm.train.manifest import LATEST, newest_first, write_file
from coatlm.train.run_directory import (
    ATTEMPTS,
    METRICS,
    NUMERICS,
    STATES,
    read_environment,
    read_records,
)

RECORDS = (METRICS, STATES, NUMERICS)
DESCRIPTION = ("config.yaml", "env.json")
TRACKED = ("loss.png", "tb", "wandb_id.txt")  # without these, trackers start a new run


def set_aside(run_dir: Path) -> Path | None:
    """Move the history of a run into a new attempt. Returns its path, None without a history.

    Checkpoints move first: if the process is killed in between, the next start finds records
    without checkpoints and moves those as well. Raises OSError.
    """
    checkpoints = run_dir / CHECKPOINTS
    if not newest_first(checkpoints) and not any(read_records(run_dir / n) for n in RECORDS):
        return None
    attempt = _new_attempt(run_dir)
    for name in (CHECKPOINTS, *RECORDS, *DESCRIPTION, *TRACKED):
        if (run_dir / name).exists():
            (run_dir / name).rename(attempt / name)
    return attempt


def go_back(run_dir: Path, checkpoint: Path) -> Path:
    """Move what the run wrote after `checkpoint` into a new attempt. Returns its path.

    `checkpoint` is one of the run's own. The attempt gets the newer checkpoints and a copy of the
    records; the run keeps its records up to the checkpoint's step. Raises OSError.
    """
    attempt = _new_attempt(run_dir)
    for name in (*RECORDS, *DESCRIPTION):
        if (run_dir / name).exists():
            shutil.copy2(run_dir / name, attempt / name)
    (attempt / CHECKPOINTS).mkdir()
    newer = list(_newer_than(checkpoint))
    for path in newer:
        path.rename(attempt / CHECKPOINTS / path.name)
    for directory, newest in ((attempt / CHECKPOINTS, newer), (checkpoint.parent, [checkpoint])):
        if newest:
            write_file(directory / LATEST, f"{newest[0].name}\n".encode())
    return attempt


def _newer_than(checkpoint: Path) -> Iterator[Path]:
    """The checkpoints of the same directory that were written after this one, newest first."""
    for path in newest_first(checkpoint.parent):
        if path.name == checkpoint.name:
            return
        yield path


def _new_attempt(run_dir: Path) -> Path:
    """Create an empty directory named after the time of the run's last start."""
    started = _started(run_dir)
    stem = f"{started:%Y-%m-%dT%H%M%SZ}"
    for number in range(1, 10_000):
        attempt = run_dir / ATTEMPTS / (stem if number == 1 else f"{stem}-{number}")
        try:
            attempt.mkdir(parents=True)
        except FileExistsError:
            continue
        return attempt
    raise FileExistsError(f"{run_dir / ATTEMPTS}: too many attempts of {stem}")


def _started(run_dir: Path) -> datetime:
    """The time of the run's last start from env.json, or now where env.json has none."""
    try:
        return datetime.fromisoformat(str(read_environment(run_dir)["started"])).astimezone(UTC)
    except (ValueError, KeyError):
        return datetime.now(UTC)
