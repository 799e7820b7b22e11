"""Rotary positions in a config.json: rope_theta, and rope_scaling of three types.

transformers 5 has one field `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from coatlm.config import RopeScaling

Json = dict[str, Any]

THETA = 10000.0  # transformers' default of rope_theta for every family here
SCALINGS = {  # rope_type -> required keys
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
}
OPTIONAL = {
    "llama3": (),
    "linear": (),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
}


def write_scaling(scaling: RopeScaling) -> Json:
    """The field rope_scaling. Optional keys that have their usual value are left out."""
    given, usual = scaling.parameters(), RopeScaling(type=scaling.type).parameters()
    kind = given.pop("type")
    optional = OPTIONAL[kind]
    kept = {k: v for k, v in given.items() if k not in optional or v != usual[k]}
    return {"rope_type": kind, **kept}


def read_rotary(raw: Mapping[str, Any]) -> Json:
    """rope_theta and rope_scaling, from transformers 5's single field or the two earlier ones."""
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = dict(raw.get(name) or {})
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    theta = given.pop("rope_theta", None)
    theta = raw.get("rope_theta") if theta is None else theta
    if given.pop("partial_rotary_factor", 1) != 1:
        raise ValueError(f"config.json: {name}.partial_rotary_factor: only 1 is supported")
    section: Json = {"rope_theta": THETA if theta is None else float(theta)}
    if kind != "default" and raw["model_type"] == "phi3":  # transformers reads yarn as longrope
        raise ValueError(f"config.json: {name}.rope_type={kind!r} of phi3: only 'default'")
    if kind != "default" and kind not in SCALINGS:
        known = ", ".join(("default", *SCALINGS))
        raise ValueError(f"config.json: {name}.rope_type={kind!r}: one of {known}")
    if kind != "default":
        section["rope_scaling"] = {"type": kind, **_scaling(name, kind, given, raw)}
    if given:
        raise ValueError(f"config.json: {name}.{min(given)} of {kind!r} is not known")
    return section


def _scaling(name: str, kind: str, given: Json, raw: Mapping[str, Any]) -> Json:
    """The keys of model.rope_scaling, which are removed from `given`."""
    original = "original_max_position_embeddings"
    if kind != "linear" and given.get(original) is None:
        given[original] = raw["max_position_embeddings"]
    if kind == "yarn":
        given["factor"] = _yarn_factor(name, given, raw["max_position_embeddings"], given[original])
    required = SCALINGS[kind]
    found = {key: given.pop(key) for key in (*required, *OPTIONAL[kind]) if key in given}
    if missing := [key for key in required if found.get(key) is None]:
        raise ValueError(f"config.json: {name}.{missing[0]} is missing")
    reals = [key for key in found if key not in (original, "truncate")]
    return found | {key: float(found[key]) for key in reals if found[key] is not None}


def _yarn_factor(name: str, given: Json, longest: int, original: int) -> Any:
    """The factor of YaRN; sets attention_factor from DeepSeek's pair mscale, mscale_all_dim."""
    factor = given.get("factor")
    factor = longest / max(original, 1) if factor is None else factor
    pair = given.pop("mscale", None), given.pop("mscale_all_dim", None)
    if given.get("attention_factor") is None and all(pair):
        numerator, denominator = (
            1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0 for scale in pair
        )
        if not (numerator > 0 and denominator > 0):
            raise ValueError(
                f"config.json: {name}.mscale={pair[0]!r}, mscale_all_dim={pair[1]!r}: with factor="
                f"{factor!r} they must give a positive attention factor"
            )
        given["attention_factor"] = numerator / denominator
    return factor
