"""Presets: the number formats of a whole run under one name.

    preset: fp8               in a file; keys that the file gives win over it
    preset=bf16               as an override, or coatlm train --preset bf16: it replaces the
                              file's preset and whichever keys of KEYS the file gives

The precedence is defaults < preset < file < preset on the command line < keys on the command line.
A preset is resolved when a configuration is loaded: `Config`, config.yaml of a run and checkpoints
have the keys that it stands for.

PRESETS is the only list. What its values are based on is measured in docs/results/: the loss of
`fp8` and `fp8-lean` in convergence.md, of FP8 sums in reduction.md, speed and memory in layer.md,
one-gpu.md, optimizer.md and reduction.md. Gradients are accumulated in fp32 (`parallel.main_grads`)
in all of them: with BF16 sums of four microbatches the loss was 0.019 +- 0.008 % higher
(convergence.md). The output layer is in BF16 in all of them: with FP8 gradients rounded to nearest
a run of 2 billion tokens ended 6.4 % higher. With what replaced that, stochastic rounding and sums
about the mean, the training loss of a branch of 0.39 billion tokens ended 0.08 % higher. Since then
the rounding errors are a third and have no bias, which no long run has had (convergence.md).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from coatlm.config.errors import ConfigError, shown

Sections = dict[str, dict[str, Any]]


def _formats(recipe: str, scaling: str, output: str, states: str, grad_comm: str) -> Sections:
    return {
        "precision": {"recipe": recipe, "scaling": scaling, "output_layer": output},
        "optim": {"recipe": states},
        "parallel": {"grad_comm": grad_comm},
        "train": {"cuda_graphs": "auto"},
    }


PRESETS: dict[str, Sections] = {
    "fp8": _formats("coat", "delayed", "bf16", "coat-lean", "fp8-a2a"),
    "fp8-lean": _formats("coat-lean", "delayed", "bf16", "coat-lean", "fp8-a2a"),
    "fp8-states": _formats("bf16", "current", "bf16", "coat-lean", "fp8-a2a"),
    "bf16": _formats("bf16", "current", "bf16", "adamw-fp32", "fp32"),
}
KEYS = [(section, key) for section, values in PRESETS["fp8"].items() for key in values]


def with_preset(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a configuration in which the keys of a preset stand in place of `preset`.

    Keys that `data` gives win. A section whose given `recipe` is not the preset's takes none of its
    keys: `precision.scaling` of FP8 layers is not for precision.recipe=bf16. Raises ConfigError for
    an unknown preset; null means none.
    """
    result = dict(data)
    name = result.pop("preset", None)
    if name is None:
        return result
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"preset={shown(name)}: must be null or one of {', '.join(PRESETS)}")
    for section, values in PRESETS[name].items():
        given = result.get(section, {})
        if not isinstance(given, Mapping):  # an error that validation reports
            continue
        recipe = values.get("recipe")
        if given.get("recipe", recipe) == recipe:
            result[section] = {**values, **given}
    return result


def without_formats(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a configuration without `preset` and the keys that presets set."""
    return without({key: value for key, value in data.items() if key != "preset"}, KEYS)


def without(data: Mapping[str, Any], keys: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """A copy of a configuration without these keys, given as (section, key)."""
    result = dict(data)
    for section, key in keys:
        given = result.get(section)
        if isinstance(given, Mapping):
            result[section] = {name: value for name, value in given.items() if name != key}
    return result


def presets_table(width: int) -> str:
    """What each preset stands for, in lines of at most `width` columns."""
    text = (
        "preset: The number formats of the whole run, as a key of the file or an override. Keys "
        "that are given win over it."
    )
    rows = []
    for name, sections in PRESETS.items():
        keys = " ".join(f"{s}.{k}={v}" for s, values in sections.items() for k, v in values.items())
        indent = " " * 20
        rows += textwrap.wrap(
            f"{'preset=' + name:<20}{keys}", width, subsequent_indent=indent, break_on_hyphens=False
        )
    return "\n".join([*textwrap.wrap(text, width), "", *rows])
