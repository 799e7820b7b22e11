"""Sliding windows in a config.json: sliding_window and which layers have it.

    mistral, phi3         every layer
    qwen2, qwen3          the layers from max_window_layers on, if use_sliding_window
    gemma2                all but every second layer
    gemma3_text           all but every sixth layer, or every sliding_window_pattern-th
    olmo3                 all but every fourth layer

Where a family has layer_types, those replace this rule. Other families ignore sliding_window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coatlm.config import Model, Window
from coatlm.config.model import MOST_LAYERS
from coatlm.hf.families import Json

FULL, SLIDING = "full_attention", "sliding_attention"
SWITCHED = ("qwen2", "qwen3")  # use_sliding_window=false is the default
MASKED = ("gemma2", "gemma3_text", "olmo3")  # transformers needs a size if no layer has it, too
TYPED = (*SWITCHED, *MASKED)  # transformers reads layer_types
WINDOWED = ("mistral", "phi3", *TYPED)
PERIODS = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4}
LARGEST = 2**30  # tokens
MOST_FULL = 28  # max_window_layers of Qwen2's and Qwen3's configurations if it is missing


def read_window(family: str, raw: Mapping[str, Any]) -> Json | None:
    """`model.window` without its rope_theta; None if no layer has a window.

    Raises ValueError with the field's name for layers that coatlm's `Window` cannot describe.
    """
    size, sliding = raw.get("sliding_window"), _sliding_layers(family, raw)
    if family not in WINDOWED or (family in SWITCHED and not raw.get("use_sliding_window")):
        size = None
    if size is None and SLIDING in (raw.get("layer_types") or ()):
        raise ValueError(f"config.json: layer_types has {SLIDING!r}, but no sliding_window is set")
    if size is None or not any(sliding):
        return None
    if not 1 <= size <= LARGEST:
        raise ValueError(f"config.json: sliding_window={size}: from 1 to {LARGEST}")
    section: Json = {"size": size}
    if first := sliding.index(True):
        section["full_layers"] = first
    elif not all(sliding):
        section["period"] = sliding.index(False) + 1
    window = Window.model_validate(section)
    if [window.covers(layer) for layer in range(len(sliding))] != sliding:
        raise ValueError(
            "config.json: layer_types: coatlm has windows in all layers but the first n, or in all "
            "but every n-th"
        )
    return section


def write_window(family: str, model: Model) -> Json:
    """The fields of a config.json that describe the window."""
    result: Json = {}
    size = None if model.window is None else model.window.size
    if family in WINDOWED:
        result["sliding_window"] = LARGEST if size is None and family in MASKED else size
    if family in SWITCHED:
        result["use_sliding_window"] = size is not None
    if family in SWITCHED and model.window is not None:
        result["max_window_layers"] = model.window.full_layers
    if family in TYPED:
        windows = map(model.window_of, range(model.layers))
        result["layer_types"] = [FULL if window is None else SLIDING for window in windows]
    return result


def _sliding_layers(family: str, raw: Mapping[str, Any]) -> list[bool]:
    """Whether each layer has the window, if there is one."""
    count, types = raw["num_hidden_layers"], raw.get("layer_types")
    if types is not None:
        known = (FULL, SLIDING) if family in TYPED else (FULL,)
        if others := sorted(set(types) - set(known)):
            choices = " and ".join(known)
            raise ValueError(
                f"config.json: layer_types has {others[0]!r} of {family}: only {choices}"
            )
        if family in TYPED and len(types) != count:
            raise ValueError(
                f"config.json: layer_types has {len(types)} names for num_hidden_layers={count}"
            )
    if types is not None and family in TYPED:
        return [kind == SLIDING for kind in types]
    layers = range(min(count, MOST_LAYERS))  # more are refused later
    if family in SWITCHED:
        first = raw.get("max_window_layers")
        return [layer >= (MOST_FULL if first is None else first) for layer in layers]
    period = raw.get("sliding_window_pattern") or PERIODS.get(family)
    return [period is None or (layer + 1) % period != 0 for layer in layers]
