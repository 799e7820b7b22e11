"""Find the checkpoint that a run resumes from, and read the state saved with it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from coatlm.config import Config, ConfigError, make_config
from coatlm.config.recipes import ATTENTION
from coatlm.config.urls import is_url
from coatlm.files import check_regular
from coatlm.remote import RemoteError
from coatlm.train.agreement import Group, together
from coatlm.train.manifest import (
    LATEST,
    MANIFEST,
    STATE,
    STEP,
    CheckpointError,
    mark_damaged,
    newest_first,
    recover,
    step_name,
    verify,
)
from coatlm.train.remote_checkpoint import remote_candidates
from coatlm.train.reports import error_line

REMOVED = ("tp_comm",)  # keys of `parallel` in older checkpoints, ignored: they changed no result
CHECKPOINTS = "checkpoints"  # the directory of the checkpoints in a run directory


def find_checkpoint(
    resume: str,
    directory: Path,
    log: logging.Logger,
    group: Group | None = None,
    *,
    wanted: Callable[[dict[str, Any]], bool] | None = None,
) -> Path | None:
    """The checkpoint to resume from; `resume` is `none`, `auto` or a path.

    `auto`: the newest intact checkpoint of `directory`, None if there are no checkpoints. A path:
    that checkpoint, or the newest intact one of that run or checkpoints directory. Newer damaged
    ones are skipped with a warning on `log`, and `auto` marks them for `manifest.prune`. Every file
    is read once to compare its checksum, by this process, or by the ranks of a gloo `group`, all of
    which must call this and which divide the files among them. `auto` skips checkpoints for whose
    state `wanted` returns False.

    Raises CheckpointError with the reason if the requested checkpoint is damaged, or if all
    checkpoints are.
    """
    if resume == "none":
        return None
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    candidates = together(
        lambda: _candidates(resume, directory, wanted) if rank == 0 else [], group
    )[0]
    broken: dict[Path, str] = {}
    for path in candidates:
        shares = together(partial(verify, path, rank=rank, world=world), group)
        problems = [problem for share in shares for problem in share]
        if not problems:
            for damaged, problem in broken.items() if rank == 0 else ():
                log.warning("damaged checkpoint skipped: %s", problem)
                if resume == "auto":
                    mark_damaged(damaged, problem)
            if resume == "auto" and rank == 0:
                mark_damaged(path, None)
            return path
        broken[path] = problems[0]
    if broken:
        raise CheckpointError(f"no intact checkpoint: {'; '.join(broken.values())}")
    return None


def named_checkpoint(path: Path, log: logging.Logger) -> Path:
    """A checkpoint, or the newest intact one of a run, that a command line names.

    Raises ValueError if there is no such directory, and CheckpointError as `find_checkpoint`.
    """
    if not path.is_dir():
        raise ValueError(f"{path}: no such directory")
    named = os.path.join(".", path)  # a path even if it is named auto or none
    found = find_checkpoint(named, path, log)
    assert found is not None  # a path was given
    return found


def check_resume(resume: str, directory: Path) -> None:
    """Raise ConfigError if `resume` is a path or a URL without a checkpoint.

    It is not needed, and not checked, if the run already has checkpoints in `directory`.
    """
    if resume in ("auto", "none") or newest_first(directory):
        return
    try:
        if is_url(resume):
            remote_candidates(resume)
        else:
            _candidates(resume, directory, None)
    except (CheckpointError, OSError, RemoteError) as error:
        raise ConfigError(f"checkpoint.resume={resume}: {error_line(error)}") from error


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read state.json of a checkpoint. Raises CheckpointError."""
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
    """The configuration in a checkpoint's `state`, without log.profile.

    Raises CheckpointError with the file's name.
    """
    path = checkpoint / STATE
    if not isinstance(state.get("config"), dict):
        raise CheckpointError(f"{path} is damaged (it has no configuration)")
    config, parallel = state["config"], state["config"].get("parallel")
    if isinstance(config.get("data"), dict):  # the key's default was false before it was saved
        config = config | {"data": {"reset_attention_mask": False} | config["data"]}
    if isinstance(parallel, dict):
        config = config | {"parallel": {k: v for k, v in parallel.items() if k not in REMOVED}}
    if isinstance(log := config.get("log"), dict):  # older versions accepted it beyond train.steps
        config = config | {"log": {k: v for k, v in log.items() if k != "profile"}}
    if isinstance(precision := config.get("precision"), dict):
        if precision.get("recipe") == "fp8-linear":  # older versions accepted and ignored it
            precision = precision | {"group_size": None}
        config = config | {"precision": split_names(precision)}
    try:
        return make_config(config)
    except ConfigError as error:
        problem = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path} has a configuration that cannot be used: {problem}"
        ) from None


def split_names(precision: Mapping[str, Any]) -> dict[str, Any]:
    """`precision` of a checkpoint, with saved.q, saved.k, saved.v and saved.o in place of
    saved.attention, the one name that older versions had for all four."""
    names = precision.get("bf16_operands")
    if not isinstance(names, list) or "saved.attention" not in names:
        return dict(precision)
    others = [name for name in names if name != "saved.attention"]
    return {**precision, "bf16_operands": [*others, *(f"saved.{name}" for name in ATTENTION)]}


def _candidates(
    resume: str, directory: Path, wanted: Callable[[dict[str, Any]], bool] | None
) -> list[Path]:
    """The checkpoints to try, the preferred one first; only one if `resume` names it."""
    if resume == "auto":
        recover(directory)
        found = newest_first(directory)
        return found if wanted is None else [path for path in found if state_is(path, wanted)]
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
    """The checkpoint that a file `latest` names; any other path is returned unchanged."""
    if path.name == LATEST and path.is_file():
        with contextlib.suppress(OSError, UnicodeDecodeError):
            name = path.read_text(encoding="utf-8").strip()
            return path.with_name(name) if STEP.fullmatch(name) else path
    return path


def state_is(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> bool:
    """Whether a checkpoint's state can be read and `wanted` is true for it."""
    with contextlib.suppress(CheckpointError):
        return wanted(read_state(path))
    return False
