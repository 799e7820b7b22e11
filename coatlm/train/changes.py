"""Compare a checkpoint's configuration and data with those of the run that resumes from it.

A run may resume with another learning rate, layout or batch size. Other data, another split,
packing, seed or tokenizer make it a different run: validation text could leak into training, or
samples repeat. Such a change is an error unless `checkpoint.allow_changes` names it. So is another
optimizer recipe, whose states a resumed run converts (`optim.convert`). Another model is an error
in every case, except that a run which loads only the weights may compute another function of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coatlm.config import Config, ConfigError, RopeScaling, dotted
from coatlm.data.identity import SourceIdentity, describe_change, same_identity
from coatlm.train.checkpoint import CheckpointError
from coatlm.train.find_checkpoint import split_names

# keys whose change is not reported: names, paths, tasks, logging and checkpointing
SILENT = ("run.name", "run.dir", "data.cache_dir", "data.workers", "eval.", "checkpoint.", "log.")
CONTENT = ("data.text", "data.paths")  # compared by their tokens, not by file names
# a change of these is refused, as of the data and the tokenizer
FIXED = ("data.split", "data.packing", "run.seed", "optim.recipe")
# keys of model that change names or shapes of tensors; most others change the function of these
TENSORS = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tie_embeddings"),
    *("qkv_bias", "qk_norm", "qk_norm_width", "norm_after", "sandwich_norm"),
)
UNORDERED = ("precision.bf16_operands",)  # lists that are sets
OldAndNew = tuple[Any, Any]


def changed_keys(saved: Mapping[str, Any], config: Config) -> dict[str, OldAndNew]:
    """Dotted key -> (old, new) where a checkpoint's configuration differs, except SILENT keys.

    A key missing from a checkpoint of an older version counts as having its default, and
    saved.attention, a name of older versions, as the four names that replaced it.
    """
    defaults = dict(dotted(Config().model_dump(mode="json")))
    old = defaults | dict(dotted(_with_names(_with_scaling(saved))))
    new = dict(dotted(config.model_dump(mode="json")))
    # keys of an optional section, such as model.window, that only the checkpoint has
    dropped = sorted(key for key in old.keys() - new.keys() if key.rpartition(".")[0] in new)
    new |= dict.fromkeys(dropped)
    return {
        key: (old.get(key), value)
        for key, value in new.items()
        if not key.startswith(SILENT) and not _same(key, old.get(key), value)
    }


def _same(key: str, old: Any, new: Any) -> bool:
    if key in UNORDERED and isinstance(old, list) and isinstance(new, list):
        return sorted(map(str, old)) == sorted(map(str, new))
    return bool(old == new)


def _with_names(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace names of older versions in the section precision."""
    precision = saved.get("precision")
    if not isinstance(precision, Mapping):
        return saved
    return {**saved, "precision": split_names(precision)}


def _with_scaling(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add keys of model.rope_scaling that a checkpoint of an older version lacks."""
    model = saved.get("model")
    scaling = model.get("rope_scaling") if isinstance(model, Mapping) else None
    if not isinstance(scaling, Mapping):
        return saved
    try:
        full = RopeScaling.model_validate(scaling).model_dump(mode="json")
    except ValueError:  # it differs from every valid configuration, which is then reported
        return saved
    return {**saved, "model": {**(model or {}), "rope_scaling": full}}


def check_changes(
    path: Path,
    state: Mapping[str, Any],
    config: Config,
    *,
    tokenizer: str,
    data: Sequence[SourceIdentity],
) -> list[str]:
    """Describe each difference from the checkpoint at `path` in a line `key: old -> new`.

    `tokenizer` is the tokenizer's fingerprint. Raises ConfigError (exit code 2) for a change of
    data, split, packing, seed, tokenizer or optimizer recipe that checkpoint.allow_changes does not
    name, and for another model as `check_same_model`.
    """
    keys = check_same_model(path, changed_keys(state["config"], config))
    refused = {key: keys.pop(key) for key in FIXED if key in keys}
    if state["tokenizer"] and state["tokenizer"] != tokenizer:  # empty: converted without one
        old = state["config"]["data"]["tokenizer"]
        refused["data.tokenizer"] = (
            f"{old} (fingerprint {str(state['tokenizer'])[:8]})",
            f"{config.data.tokenizer} (fingerprint {tokenizer[:8]})",
        )
        keys.pop("data.tokenizer", None)
    before = state.get("data")  # None in checkpoints of older versions
    if before is not None and not same_identity(before, data):
        name = "data.text" if config.data.text else "data.paths"
        refused[name] = describe_change(before, data)
        for key in CONTENT:
            keys.pop(key, None)
    allowed = config.checkpoint.allow_changes
    denied = {key: change for key, change in refused.items() if key not in allowed}
    if denied:
        problems, names = describe_changes(denied), ",".join(denied)
        problems.append(
            f"{path} belongs to another run: use another run.dir, or allow this with "
            f"checkpoint.allow_changes=[{names}]"
        )
        raise ConfigError("\n".join(problems))
    return describe_changes(refused | keys)


def check_same_model(
    path: Path, keys: Mapping[str, OldAndNew], *, weights_only: bool = False
) -> dict[str, OldAndNew]:
    """Check that the model can continue with the stored weights.

    Returns `keys` without those that have no effect then: model.init_std, and model.vocab where
    one side is null; the rows of the embedding are compared when the tensors are loaded. Raises
    CheckpointError (exit code 4) with the field's name if the stored tensors do not fit, and
    ConfigError (exit code 2) if they do, but the model computes another function of them. Loading
    `weights_only` allows the latter.
    """
    kept = {
        key: change
        for key, change in keys.items()
        if key != "model.init_std" and not (key == "model.vocab" and None in change)
    }
    said = {
        key: f"{path}: {key} is {old!r} in the checkpoint and {new!r} in this configuration"
        for key, (old, new) in kept.items()
    }
    for key, change in kept.items():  # first what no option allows
        section, _, name = key.partition(".")
        other_dtype = key == "precision.recipe" and "fp32" in change  # else BF16 weights
        if (section == "model" and name in TENSORS) or other_dtype:
            raise CheckpointError(f"{said[key]}; its tensors do not fit")
    for key in kept:
        if key.startswith("model.") and key != "model.spec" and not weights_only:
            raise ConfigError(
                f"{said[key]}, which changes the function that the weights were trained for: only "
                "a new run with checkpoint.weights_only=true may change it"
            )
    return kept


def describe_changes(keys: Mapping[str, OldAndNew]) -> list[str]:
    """A line `key: old -> new` for each change."""
    return [f"{key}: {_arrow(change)}" for key, change in keys.items()]


def _arrow(change: OldAndNew) -> str:
    return " -> ".join(_short(value) for value in change)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-16:]}"
