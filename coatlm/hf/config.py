"""Convert between a Hugging Face config.json and coatlm's `Model`, without dropping anything.

Every field of a config.json has one of three roles: it is a field of coatlm's model (`MODEL_FIELDS`
and the rotary fields), it must have a value that coatlm supports (`_check_fixed`), or it does not
affect the logits (`HARMLESS`). Any other field is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from coatlm.config import Config, Model, make_config
from coatlm.hf.families import (
    FAMILIES,
    MULTIPLIERS,
    SCALAR,
    SOFTCAPS,
    Json,
    families_in_order,
    read_own,
    write_own,
)
from coatlm.hf.rotary import LISTS, NESTED, ROTARY, longest_context, read_rotary, write_rotary
from coatlm.hf.windows import FULL, SLIDING, read_window, write_window

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MODEL_FIELDS = {  # config.json -> model.*
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "initializer_range": "init_std",
}
REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
# no effect on the logits; written back by a conversion to Hugging Face
CARRIED = (*TOKEN_IDS, "max_position_embeddings")
HARMLESS = frozenset(CARRIED) | {
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "dtype",
    "is_llama_config",
    "max_sequence_length",
    "model_type",
    "pretraining_tp",  # splits GEMMs of early checkpoints, without changing the result
    "torch_dtype",
    "transformers_version",
    "unsloth_fixed",
    "use_cache",
}
WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
FIXED = (
    "hidden_act",
    "attention_dropout",
    "mlp_bias",
    "attention_bias",
    "use_mrope",
    "rope_interleaved",
)
COUNTS = (  # integers; `Model` checks the types of the other fields
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "sliding_window",
    "sliding_window_pattern",
    "max_window_layers",
    "original_max_position_embeddings",
    SCALAR,
)
REALS = (*MULTIPLIERS, *SOFTCAPS, "rope_theta", "rope_local_base_freq", "partial_rotary_factor")
NOT_COMPARED = {"spec", "vocab"}  # they do not decide the family of an export
SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn")


def read_model(raw: Mapping[str, Any]) -> Json:
    """The `model` section for a config.json. Raises ValueError with the name of a wrong field.

    Missing fields have transformers' defaults.
    """
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"config.json: model_type={family!r}: one of {', '.join(FAMILIES)}")
    _check_types(raw)
    known = {*MODEL_FIELDS, *HARMLESS, *ROTARY, *WINDOW, *FIXED, *FAMILIES[family].own}
    if unknown := sorted(raw.keys() - known):
        raise ValueError(
            f"config.json: {unknown[0]}={raw[unknown[0]]!r} is not known to this converter, "
            f"so it cannot tell what would be lost{_more(unknown)}"
        )
    if missing := [name for name in REQUIRED if raw.get(name) is None]:
        raise ValueError(f"config.json: {missing[0]} is missing")
    usual = {"rms_norm_eps": 1e-6, **FAMILIES[family].defaults}
    filled = {**usual, **raw}
    for name in ("max_position_embeddings", "original_max_position_embeddings"):
        if name in usual and filled[name] is None:
            filled[name] = usual[name]
    _check_fixed(family, filled)
    section = {
        ours: filled[name] for name, ours in MODEL_FIELDS.items() if filled.get(name) is not None
    }
    window = read_window(family, filled)
    rotary = read_rotary(filled, windowed=window is not None)
    if window is not None:
        section["window"] = window | rotary.pop("window", {})
    section |= rotary | {"qkv_bias": bool(filled.get("attention_bias"))}
    return section | read_own(family, filled)


def make_hf_config(
    config: Config, vocab: int, *, dtype: str, like: Mapping[str, Any] | None = None
) -> Json:
    """A config.json for the model of a run, for transformers 4.51 or later.

    `vocab` is the number of embedding rows, `dtype` the type of the stored weights. `like` is the
    config.json of the model that the run started from; it gives the fields in `CARRIED`, and the
    family if that fits. Raises ValueError if it describes a model of another shape, and if no
    family has the layers of the model.
    """
    model = config.model
    if like:
        _check_shape(model, Model.model_validate(read_model(like)))
    like = like or {}
    carried = {name: like[name] for name in CARRIED if like.get(name) is not None}
    known = carried.get("max_position_embeddings", 0)
    yarn = model.rope_scaling is not None and model.rope_scaling.type == "yarn"
    if not known or not yarn:  # some versions of transformers derive YaRN's factor from it
        carried["max_position_embeddings"] = max(known, config.data.seq_len)
    lost: dict[str, list[str]] = {}
    for family in families_in_order(model, like.get("model_type")):
        written = _write(family, model, vocab, dtype) | carried
        if (longest := longest_context(model)) is not None:
            written["max_position_embeddings"] = longest
        lost[family] = _lost(family, model, written)
        if not lost[family]:
            return written
    closest = min(lost, key=lambda family: len(lost[family]))
    name = lost[closest][0]
    raise ValueError(
        f"model.{name}={getattr(model, name)}: no family of Hugging Face has such a layer; "
        f"{closest} lacks {', '.join(f'model.{key}' for key in lost[closest])} of this model"
    )


def _write(family: str, model: Model, vocab: int, dtype: str) -> Json:
    """The config.json of a model as one of `family`, which may not be able to describe it."""
    result: Json = {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        **{name: getattr(model, ours) for name, ours in MODEL_FIELDS.items()},
        "vocab_size": vocab,
        **write_rotary(family, model),
        **write_window(family, model),
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": dtype,
        **write_own(family, model),
    }
    even = model.size_per_head * model.heads == model.hidden
    if even and not FAMILIES[family].head_dim:
        del result["head_dim"]  # not a field of this family, though transformers reads it
    return result


def _lost(family: str, model: Model, written: Json) -> list[str]:
    """The keys of `model` that differ when a written config.json is read again.

    head_dim counts as lost where transformers refuses it or does not read it.
    """
    even = model.hidden % model.heads == 0
    square = even and model.size_per_head * model.heads == model.hidden
    needs_even = FAMILIES[family].square or family in ("llama", "gemma2", "gemma3_text")
    if (FAMILIES[family].square and not square) or (needs_even and not even):
        return ["head_dim"]
    mine = model.model_dump(exclude=NOT_COMPARED)
    try:
        again = Model.model_validate(read_model(written)).model_dump(exclude=NOT_COMPARED)
    except ValueError:  # it has fields for the model, but not their values
        usual = Model().model_dump(exclude={*NOT_COMPARED, *SHAPE})
        return [name for name, value in usual.items() if mine[name] != value]
    mine["attention_multiplier"] = _unless_usual(model)
    return [name for name, value in mine.items() if again[name] != value]


def _unless_usual(model: Model) -> float | None:
    """The multiplier of attention scores; None for 1 / sqrt(head_dim)."""
    given = model.attention_multiplier
    return None if given == model.size_per_head**-0.5 else given


def output_bias(raw: Mapping[str, Any]) -> bool:
    """Whether the attention's output projection has a bias in this config.json."""
    return FAMILIES[raw["model_type"]].biased and bool(raw.get("attention_bias"))


def run_config(model: Mapping[str, Any], *, tokenizer: str, seq_len: int, precision: str) -> Config:
    """A complete configuration for a converted model, with defaults for all other sections."""
    return make_config(
        {
            "model": dict(model),
            "data": {"text": "python-stdlib", "tokenizer": tokenizer, "seq_len": seq_len},
            "precision": {"recipe": precision},
        }
    )


def _check_shape(model: Model, other: Model) -> None:
    """Raise ValueError if two models have different shapes."""
    for name in SHAPE:
        if getattr(model, name) != getattr(other, name):
            raise ValueError(
                f"model.{name} is {getattr(model, name)}, and {getattr(other, name)} in the "
                "config.json of --like or of the checkpoint: this model was not trained from it"
            )


def _check_types(raw: Mapping[str, Any]) -> None:
    """Raise ValueError if a field that this module computes with has a wrong type."""
    wanted: list[
        tuple[str, Any, bool, str]
    ] = []  # name, value, whether it is right, what it must be
    for name in COUNTS:
        value = raw.get(name)
        right = value is None or (type(value) is int and 0 <= value < 2**63)
        wanted.append((name, value, right, "a whole number below 2^63"))
    for name in ("rope_scaling", "rope_parameters"):
        inner = raw["model_type"] in NESTED and name == "rope_parameters"
        wanted += _rotary_types(name, raw.get(name), (FULL, SLIDING) if inner else ())
    layers = raw.get("layer_types")
    names = layers is None or (isinstance(layers, list) and all(type(n) is str for n in layers))
    wanted.append(("layer_types", layers, names, "a list of names"))
    for name in REALS:
        right = raw.get(name) is None or _is_number(raw[name])
        wanted.append((name, raw.get(name), right, "a number"))
    for name, value, right, what in wanted:
        if not right:
            raise ValueError(f"config.json: {name}={value!r}: must be {what}")


def _rotary_types(
    name: str, section: Any, sections: tuple[str, ...]
) -> list[tuple[str, Any, bool, str]]:
    """Rows (name, value, valid, what it must be) for a set of rotary parameters.

    The values at the keys `sections` are such sets too.
    """
    wanted = [(name, section, isinstance(section, dict | None), "an object")]
    for key, value in section.items() if isinstance(section, dict) else ():
        right = value is None or _is_number(value)
        what = "a number, or the name of a type"
        if key in sections:
            wanted += _rotary_types(f"{name}.{key}", value, ())
            continue
        if key in ("rope_type", "type"):
            right = isinstance(value, str)
        elif key == "truncate":  # transformers takes null for false
            right, what = isinstance(value, bool), "true or false"
        elif key in LISTS:
            right = isinstance(value, list) and all(map(_is_number, value))
            what = "a list of numbers"
        wanted.append((f"{name}.{key}", value, right, what))
    return wanted


def _is_number(value: Any) -> bool:
    """Whether a JSON value is a number in the range of float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def _check_fixed(family: str, raw: Mapping[str, Any]) -> None:
    """Raise ValueError if a field has a value that coatlm does not support."""
    gated = FAMILIES[family].fixed.get("hidden_activation", "silu")
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_act": (None, gated),
        "attention_dropout": (None, 0),
        "mlp_bias": (None, False),
        "use_mrope": (None, False),
        "use_sliding_window": (None, False, True),
        "rope_interleaved": (None, False),
        "attention_bias": (None, False, True) if FAMILIES[family].biased else (None, False),
        "architectures": (None, [FAMILIES[family].architecture]),
        **{name: (None, value) for name, value in FAMILIES[family].fixed.items()},
    }
    for name, values in allowed.items():
        value = raw.get(name)
        if name == "auto_map" and isinstance(value, dict):  # the tokenizer does not matter here
            value = {key: code for key, code in value.items() if key != "AutoTokenizer"} or None
        if value not in values:
            choices = " or ".join(repr(v) for v in values if v is not None) or "null"
            raise ValueError(f"config.json: {name}={value!r} of {family}: only {choices}")


def check_token_ids(file: str, raw: Mapping[str, Any], rows: int) -> None:
    """Raise ValueError if a config.json or generation_config.json has an invalid token id.

    `rows` is the number of embedding rows, which limits only the end-of-text id: early models use
    -1 for a missing padding token.
    """
    for name in TOKEN_IDS:
        value = raw.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        lowest, highest = (0, rows - 1) if name == "eos_token_id" else (-1, 2**31 - 1)
        for token in ids:
            if type(token) is not int or not lowest <= token <= highest:
                raise ValueError(
                    f"{file}: {name}={value!r}: a token id from 0 to {rows - 1}, or a list of them"
                )


def _more(names: list[str]) -> str:
    return f" (also {', '.join(names[1:])})" if len(names) > 1 else ""
