"""Rotary positions in a config.json: rope_theta, rope_scaling of four types, the rotated share.

transformers 5 has one field `rope_parameters`, earlier versions `rope_theta`, `rope_scaling` and
more. Gemma 3 and OLMo-3 have two sets: `rope_parameters` has one for full_attention, which is also
that of the earlier fields, and one for sliding_attention, which is never scaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from coatlm.config import Model, RopeScaling
from coatlm.hf.families import Json
from coatlm.hf.windows import FULL, SLIDING

THETA = 10000.0  # transformers' default of rope_theta
THETAS = {"gemma3_text": 1e6, "olmo3": 5e5}  # of other families
NESTED = tuple(THETAS)  # families with two sets
ROTARY = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
ORIGINAL = "original_max_position_embeddings"
SCALINGS = {  # rope_type -> required keys
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "linear": ("factor",),
    "yarn": ("factor", ORIGINAL),
    "longrope": ("factor", ORIGINAL, "short_factor", "long_factor"),
}
OPTIONAL = {
    "llama3": (),
    "linear": (),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
    "longrope": ("attention_factor",),
}
LISTS = ("short_factor", "long_factor")


def known_scalings(family: str) -> tuple[str, ...]:
    """The types of rope_scaling of a family: longrope is that of phi3 alone."""
    return tuple(kind for kind in SCALINGS if (kind == "longrope") == (family == "phi3"))


def write_rotary(family: str, model: Model) -> Json:
    """The rotary fields of a config.json, in the form of transformers 4.

    Families with two sets also have the form of transformers 5.
    """
    scaling = None
    if model.rope_scaling is not None and model.rope_scaling.type in known_scalings(family):
        scaling = _write_scaling(model.rope_scaling)
    result: Json = {"rope_theta": model.rope_theta, "rope_scaling": scaling}
    if family == "phi3":
        result["partial_rotary_factor"] = model.partial_rotary_factor
        if scaling is not None and model.rope_scaling is not None:
            result[ORIGINAL] = model.rope_scaling.original_max_position_embeddings
    if family in NESTED:
        own = None if model.window is None else model.window.rope_theta
        local = model.rope_theta if own is None else own
        result["rope_parameters"] = {
            FULL: {"rope_type": "default", **(scaling or {}), "rope_theta": model.rope_theta},
            SLIDING: {"rope_type": "default", "rope_theta": local},
        }
        if family == "gemma3_text":
            result["rope_local_base_freq"] = local
    return result


def longest_context(model: Model) -> int | None:
    """The max_position_embeddings from which transformers derives the factor of LongRoPE."""
    scaling = model.rope_scaling
    if scaling is None or scaling.type != "longrope":
        return None
    return round(scaling.factor * (scaling.original_max_position_embeddings or 0))


def _write_scaling(scaling: RopeScaling) -> Json:
    """The field rope_scaling. Optional keys that have their usual value are left out."""
    given = scaling.parameters()
    kind = given.pop("type")
    if kind == "longrope":  # transformers 4 accepts exactly these keys of phi3
        return {"type": kind, **{name: list(given[name]) for name in LISTS}}
    usual = RopeScaling(type=scaling.type).parameters()
    optional = OPTIONAL[kind]
    kept = {k: v for k, v in given.items() if k not in optional or v != usual[k]}
    return {"rope_type": kind, **kept}


def read_rotary(raw: Mapping[str, Any], *, windowed: bool) -> Json:
    """The rotary keys of `model`, and of `model.window` under "window" if `windowed`.

    `raw` has transformers' defaults for missing fields.
    """
    if raw["model_type"] in NESTED:
        return _read_two(raw, windowed=windowed)
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    return _read_one(name, dict(raw.get(name) or {}), raw)


def _read_two(raw: Mapping[str, Any], *, windowed: bool) -> Json:
    family, name = raw["model_type"], "rope_parameters"
    nested = {key: value or {} for key, value in (raw.get(name) or {}).items()}
    if unknown := sorted(nested.keys() - {FULL, SLIDING}):
        raise ValueError(f"config.json: {name}.{unknown[0]} of {family}: only {FULL}, {SLIDING}")
    given = {**nested.get(FULL, {}), **(raw.get("rope_scaling") or {})}
    section = _read_one(name, given, raw)
    local = {"rope_theta": _local_theta(raw, section["rope_theta"]), **nested.get(SLIDING, {})}
    sliding = _read_one(f"{name}.{SLIDING}", local, raw)
    if "rope_scaling" in sliding:
        kind = sliding["rope_scaling"]["type"]
        raise ValueError(f"config.json: {name}.{SLIDING}.rope_type={kind!r}: only 'default'")
    if windowed and sliding != section:
        section["window"] = {"rope_theta": sliding["rope_theta"]}
    theta, ambiguous = section["rope_theta"], "rope_theta" not in nested.get(SLIDING, {})
    if windowed and ambiguous and family == "olmo3" and theta != THETAS[family]:
        raise ValueError(
            f"config.json: rope_theta={theta} of {family}: layers with a window have it in "
            f"transformers 4, and {THETAS[family]} in 5; write {name}.{SLIDING}.rope_theta"
        )
    return section


def _local_theta(raw: Mapping[str, Any], theta: float) -> float:
    """The base of the frequencies in layers with a window, unless rope_parameters has it."""
    if raw["model_type"] == "olmo3":
        return theta
    given = raw.get("rope_local_base_freq")
    return THETA if given is None else given


def _read_one(name: str, given: Json, raw: Mapping[str, Any]) -> Json:
    """The keys of `model` for one set of parameters, which `name` holds."""
    family = raw["model_type"]
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    theta = given.pop("rope_theta", None)
    theta = raw.get("rope_theta") if theta is None else theta
    usual = THETAS.get(family, THETA)
    section: Json = {"rope_theta": usual if theta is None else float(theta)}
    section |= _share(name, given.pop("partial_rotary_factor", None), raw)
    if family == "phi3":
        kind = "longrope" if kind == "su" else kind  # its first name
    scalings = known_scalings(family)
    if kind != "default" and kind not in scalings:
        known = ", ".join(("default", *scalings))
        raise ValueError(f"config.json: {name}.rope_type={kind!r} of {family}: one of {known}")
    if kind != "default":
        section["rope_scaling"] = {"type": kind, **_scaling(name, kind, given, raw)}
    if given:
        raise ValueError(f"config.json: {name}.{min(given)} of {kind!r} is not known")
    return section


def _share(name: str, inner: Any, raw: Mapping[str, Any]) -> Json:
    """`partial_rotary_factor` of `model`, if it is not 1."""
    outer = raw.get("partial_rotary_factor")
    share = outer if inner is None else inner
    if share is None or share == 1:
        return {}
    where = "partial_rotary_factor" if inner is None else f"{name}.partial_rotary_factor"
    if raw["model_type"] != "phi3":
        raise ValueError(f"config.json: {where}={share!r} of {raw['model_type']}: only 1")
    return {"partial_rotary_factor": float(share)}


def _scaling(name: str, kind: str, given: Json, raw: Mapping[str, Any]) -> Json:
    """The keys of model.rope_scaling, which are removed from `given`."""
    longest = raw["max_position_embeddings"]
    if kind == "longrope":
        if given.setdefault(ORIGINAL, raw[ORIGINAL]) != raw[ORIGINAL]:
            raise ValueError(f"config.json: {name}.{ORIGINAL} differs from {ORIGINAL}")
    elif kind != "linear" and given.get(ORIGINAL) is None:
        given[ORIGINAL] = longest
    if kind == "yarn":
        given["factor"] = _yarn_factor(name, given, longest, given[ORIGINAL])
    if kind == "longrope" and given.get("factor") is None:
        given["factor"] = longest / max(given[ORIGINAL], 1)
    required = SCALINGS[kind]
    found = {key: given.pop(key) for key in (*required, *OPTIONAL[kind]) if key in given}
    if missing := [key for key in required if found.get(key) is None]:
        raise ValueError(f"config.json: {name}.{missing[0]} is missing")
    reals = [key for key in found if key not in (ORIGINAL, "truncate", *LISTS)]
    lists = {key: tuple(map(float, found[key])) for key in LISTS if key in found}
    return found | lists | {key: float(found[key]) for key in reals if found[key] is not None}


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
