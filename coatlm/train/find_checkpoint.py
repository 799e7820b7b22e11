"""Which checkpoint a run continues from, and the state that was saved with it."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from coatlm.config import Config, ConfigError, make_config
from coatlm.files import check_regular
from coatlm.train.agreement import Group, together
from coatlm.train.manifest import (
    LATEST,
    MANIFEST,
    STATE,
    STEP,
    CheckpointError,
    newest_first,
    recover,
    step_name,
    verify,
)
from coatlm.train.reports import error_line

CHECKPOINTS = "checkpoints"  # the directory of the checkpoints in a run directory


def find_checkpoint(
    resume: str,
    directory: Path,
    log: logging.Logger,
    group: Group | None = None,
    *,
    wanted: Callable[[dict[str, Any]], bool] | None = None,
) -> Path | None:
    """The checkpoint to continue from. `resume` is `none`, `auto` or a path.

    `auto`: the newest whole checkpoint of `directory`, None if it has none of any kind. A path:
    that checkpoint, or the newest whole one of that run or checkpoints directory. Newer ones that
    are not whole are passed over with a warning on `log`. Every file is read once and its checksum
    compared: by this process, or shared among the ranks of a gloo group that all call this.
    `auto` leaves out those whose `state` is not `wanted`.

    Raises CheckpointError if a checkpoint that was asked for is not whole, naming the reason, or if
    there are checkpoints and none is whole.
    """
    if resume == "none":
        return None
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    candidates = together(
        lambda: _candidates(resume, directory, wanted) if rank == 0 else [], group
    )[0]
    broken: list[str] = []
    for path in candidates:
        shares = together(partial(verify, path, rank=rank, world=world), group)
        problems = [problem for share in shares for problem in share]
        if not problems:
            for problem in broken if rank == 0 else ():
                log.warning("checkpoint passed over: %s", problem)
            return path
        broken.append(problems[0])
    if broken:
        raise CheckpointError(f"no whole checkpoint: {'; '.join(broken)}")
    return None


def check_resume(resume: str, directory: Path) -> None:
    """Raise ConfigError where `resume` is a path that has no checkpoint of any kind to offer.

    A run that has checkpoints in `directory` need not have that path any more.
    """
    if resume in ("auto", "none") or newest_first(directory):
        return
    try:
        _candidates(resume, directory, None)
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"checkpoint.resume={resume}: {error_line(error)}") from error


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The `state` that was saved with a checkpoint. Raises CheckpointError."""
    path = checkpoint / STATE
    try:
        check_regular(path)
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is damaged (nested too deeply)") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged (a {type(state).__name__}, not an object)")
    return state


def saved_config(checkpoint: Path, state: dict[str, Any]) -> Config:
    """The configuration in a checkpoint's `state`. Raises CheckpointError, naming its file."""
    path = checkpoint / STATE
    if not isinstance(state.get("config"), dict):
        raise CheckpointError(f"{path} is damaged (it has no configuration)")
    try:
        return make_config(state["config"])
    except ConfigError as error:
        problem = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path} has a configuration that cannot be used: {problem}"
        ) from None


def _candidates(
    resume: str, directory: Path, wanted: Callable[[dict[str, Any]], bool] | None
) -> list[Path]:
    """Where to look, best first. A checkpoint that was named is the only one."""
    if resume == "auto":
        recover(directory)
        found = newest_first(directory)
        return found if wanted is None else [path for path in found if _state_is(path, wanted)]
    path = _followed(Path(resume))
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    if STEP.fullmatch(path.name) or (path / MANIFEST).exists() or (path / ".metadata").exists():
        return [path]
    found = newest_first(path / CHECKPOINTS) or newest_first(path)
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint (no {step_name(0)[:-8]}* directory)")
    return found


def _followed(path: Path) -> Path:
    """The checkpoint that a file `latest` names; any other path as it is."""
    if path.name == LATEST and path.is_file():
        with contextlib.suppress(OSError, UnicodeDecodeError):
            name = path.read_text(encoding="utf-8").strip()
            return path.with_name(name) if STEP.fullmatch(name) else path
    return path


def _state_is(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> bool:
    """Whether a checkpoint's state is readable and wanted."""
    with contextlib.suppress(CheckpointError):
        return wanted(read_state(path))
    return False
