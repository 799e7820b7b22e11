"""Compare a checkpoint's configuration and data with those of the run that continues it.

A run may continue with another learning rate, layout or batch. With other data, another split,
seed or tokenizer it is another run: validation text could leak into training, or samples repeat.
Such a change is refused unless `checkpoint.allow_changes` names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coatlm.config import Config, ConfigError, dotted
from coatlm.data.identity import SourceIdentity, describe_identity
from coatlm.train.checkpoint import CheckpointError

# what may change without a word: names, places, and what is logged or saved
SILENT = ("run.name", "run.dir", "data.cache_dir", "data.workers", "checkpoint.", "log.")
CONTENT = ("data.text", "data.paths")  # compared by the tokens, not by the names of files
FIXED = ("data.split", "run.seed")  # of the configuration; with data and tokenizer, another run
Change = tuple[Any, Any]  # old, new


def changed_keys(saved: Mapping[str, Any], config: Config) -> dict[str, Change]:
    """Dotted key -> (old, new) of a checkpoint's configuration and this one, but SILENT keys.

    A key that the checkpoint does not have, because an older version wrote it, had its default.
    """
    defaults = dict(dotted(Config().model_dump(mode="json")))
    old = defaults | dict(dotted(saved))
    new = dict(dotted(config.model_dump(mode="json")))
    return {
        key: (old.get(key), value)
        for key, value in new.items()
        if not key.startswith(SILENT) and old.get(key) != value
    }


def check_changes(
    path: Path,
    state: Mapping[str, Any],
    config: Config,
    *,
    tokenizer: str,
    data: Sequence[SourceIdentity],
) -> list[str]:
    """Lines `key: old -> new` for what differs from the checkpoint at `path`.

    `tokenizer` is the fingerprint of the tokenizer. Raises CheckpointError (exit code 4) for
    another model or optimizer recipe, which the stored tensors do not fit, and ConfigError (exit
    code 2) for any other change that checkpoint.allow_changes does not name.
    """
    keys = changed_keys(state["config"], config)
    check_same_model(path, keys, weights_only=False)
    refused = {key: keys.pop(key) for key in FIXED if key in keys}
    if state["tokenizer"] != tokenizer:
        old = state["config"]["data"]["tokenizer"]
        refused["data.tokenizer"] = (
            f"{old} (fingerprint {str(state['tokenizer'])[:8]})",
            f"{config.data.tokenizer} (fingerprint {tokenizer[:8]})",
        )
        keys.pop("data.tokenizer", None)
    before = state.get("data")  # None: a checkpoint of a version that did not record it
    if before is not None and before != list(data):
        name = "data.text" if config.data.text else "data.paths"
        refused[name] = (describe_identity(before), describe_identity(data))
        for key in CONTENT:
            keys.pop(key, None)
    allowed = config.checkpoint.allow_changes
    problems = [f"{key}: {_arrow(change)}" for key, change in refused.items() if key not in allowed]
    if problems:
        names = ",".join(key for key in refused if key not in allowed)
        problems.append(
            f"{path} belongs to another run: use another run.dir, or allow this with "
            f"checkpoint.allow_changes=[{names}]"
        )
        raise ConfigError("\n".join(problems))
    return [f"{key}: {_arrow(change)}" for key, change in {**refused, **keys}.items()]


def check_same_model(path: Path, keys: Mapping[str, Change], *, weights_only: bool) -> None:
    """Raise CheckpointError, naming the field, where the stored tensors do not fit the model."""
    for key, (old, new) in keys.items():
        section, _, name = key.partition(".")
        fixed = (section == "model" and name != "spec") or key == "optim.recipe"
        if fixed and not (weights_only and section == "optim"):
            raise CheckpointError(
                f"{path}: {key} is {old!r} in the checkpoint and {new!r} in this configuration; "
                "its tensors do not fit"
            )


def _arrow(change: Change) -> str:
    return " -> ".join(_short(value) for value in change)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-16:]}"
