"""Attempts: earlier files of a run directory, moved away by a start that does not continue them.

    RUN/metrics.jsonl  config.yaml  env.json  checkpoints/ ...        the current run
    RUN/attempts/2026-11-22T174122Z/ the same names                   an earlier attempt

A start with newly initialized weights (`checkpoint.resume=none`, or no checkpoint to continue from)
or from an earlier checkpoint of the run deletes nothing: files that it would overwrite move into an
attempt. The attempt is named after the time of the last start (`started` in env.json) of the run
whose files it holds. It is itself a run directory, so every tool that reads runs reads attempts.

RUN/checkpoints may be a symbolic link, to another disk. The link stays, checkpoints move into a
directory beside its target, and the attempt's `checkpoints` is a link to that:

    /disk/NAME/  /disk/NAME-2026-11-22T174122Z/

A rollback during a run (`train.rollbacks`) moves nothing: see `make_newest`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from coatlm.train.checkpoint import CHECKPOINTS
from coatlm.train.manifest import (
    LATEST,
    MANIFEST,
    REPLACED,
    TEMPORARY,
    last_serial,
    newest_first,
    write_file,
)
from coatlm.train.run_directory import (
    ATTEMPTS,
    METRICS,
    NUMERICS,
    STATES,
    read_environment,
    read_records,
    write_atomically,
)

BESIDE_STEPS = (LATEST, TEMPORARY, REPLACED)  # beginnings of names in checkpoints/
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
    if checkpoints.is_symlink():
        aside = _make_place(run_dir, attempt)
        # the newest last: if the process is killed in between, it is still there to resume from
        steps = newest_first(checkpoints)[::-1]
        # other files, such as lost+found of a disk, stay
        beside = (p for p in checkpoints.iterdir() if p.name.startswith(BESIDE_STEPS))
        for path in (*steps, *beside):
            path.rename(aside / path.name)
    elif checkpoints.exists():
        checkpoints.rename(attempt / CHECKPOINTS)
    for name in (*RECORDS, *DESCRIPTION, *TRACKED):
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
    aside = _make_place(run_dir, attempt)
    newer = list(_newer_than(checkpoint))
    for path in newer:
        path.rename(aside / path.name)
    for directory, newest in ((aside, newer), (checkpoint.parent, [checkpoint])):
        if newest:
            write_file(directory / LATEST, f"{newest[0].name}\n".encode())
    return attempt


def make_newest(checkpoint: Path) -> None:
    """Give a checkpoint the highest number of its directory, so that the next start resumes from
    it. Those that were newer stay, as older ones, until they are pruned. Raises OSError.

    Numbers only grow, so whatever the run uploads later is newer than what it has uploaded.
    """
    if newest_first(checkpoint.parent)[0].name == checkpoint.name:
        return
    content = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    content["serial"] = 1 + last_serial(checkpoint.parent)
    write_atomically(checkpoint / MANIFEST, json.dumps(content, indent=1))
    write_atomically(checkpoint.parent / LATEST, f"{checkpoint.name}\n")


def _make_place(run_dir: Path, attempt: Path) -> Path:
    """Create `checkpoints` of an attempt, on the disk of the run's. Returns its path."""
    place, target = attempt / CHECKPOINTS, (run_dir / CHECKPOINTS).resolve()
    if not (run_dir / CHECKPOINTS).is_symlink():
        place.mkdir()
    elif os.path.ismount(target) or not os.access(target.parent, os.W_OK):
        place.symlink_to(_new_directory(target / ATTEMPTS, attempt.name))
    else:
        place.symlink_to(_new_directory(target.parent, f"{target.name}-{attempt.name}"))
    return place


def _newer_than(checkpoint: Path) -> Iterator[Path]:
    """The checkpoints of the same directory that were written after this one, newest first."""
    for path in newest_first(checkpoint.parent):
        if path.name == checkpoint.name:
            return
        yield path


def _new_attempt(run_dir: Path) -> Path:
    """Create an empty directory named after the time of the run's last start."""
    return _new_directory(run_dir / ATTEMPTS, f"{_started(run_dir):%Y-%m-%dT%H%M%SZ}")


def _new_directory(parent: Path, stem: str) -> Path:
    """Create the first of STEM, STEM-2, STEM-3, ... that does not exist yet."""
    for number in range(1, 10_000):
        directory = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        return directory
    raise FileExistsError(f"{parent}: too many directories {stem}")


def _started(run_dir: Path) -> datetime:
    """The time of the run's last start from env.json, or now where env.json has none."""
    try:
        return datetime.fromisoformat(str(read_environment(run_dir)["started"])).astimezone(UTC)
    except (ValueError, KeyError):
        return datetime.now(UTC)
