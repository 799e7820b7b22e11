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
    ARCHITECTURES,
    BIASED,
    DEFAULTS,
    MULTIPLIERS,
    OWN,
    WITHOUT_HEAD_DIM,
    choose_family,
    own_fields,
    read_multipliers,
)
from coatlm.hf.rotary import read_rotary, write_scaling

Json = dict[str, Any]

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
CARRIED = (  # no effect on the logits; written back by a conversion to Hugging Face
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "max_position_embeddings",
)
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
ROTARY = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
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
    "max_window_layers",
)
SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn")


def read_model(raw: Mapping[str, Any]) -> Json:
    """The `model` section for a config.json. Raises ValueError with the name of a wrong field.

    Missing fields have transformers' defaults.
    """
    family = raw.get("model_type")
    if not isinstance(family, str):
        raise ValueError(f"config.json: model_type={family!r}: one of {', '.join(ARCHITECTURES)}")
    if family not in ARCHITECTURES:
        raise ValueError(f"config.json: model_type={family!r}: one of {', '.join(ARCHITECTURES)}")
    _check_types(raw)
    known = {*MODEL_FIELDS, *HARMLESS, *ROTARY, *WINDOW, *FIXED, *OWN.get(family, ())}
    if unknown := sorted(raw.keys() - known):
        raise ValueError(
            f"config.json: {unknown[0]}={raw[unknown[0]]!r} is not known to this converter, "
            f"so it cannot tell what would be lost{_more(unknown)}"
        )
    if missing := [name for name in REQUIRED if raw.get(name) is None]:
        raise ValueError(f"config.json: {missing[0]} is missing")
    usual = {"rms_norm_eps": 1e-6, **DEFAULTS[family]}
    filled = {**usual, **raw}
    if filled["max_position_embeddings"] is None:
        filled["max_position_embeddings"] = usual["max_position_embeddings"]
    _check_fixed(family, filled)
    _check_window(family, filled)
    section = {
        ours: filled[name] for name, ours in MODEL_FIELDS.items() if filled.get(name) is not None
    }
    section |= read_rotary(filled)
    section["qkv_bias"] = family == "qwen2" or bool(filled.get("attention_bias"))
    section["qk_norm"] = family in ("qwen3", "olmo2")
    if family == "olmo2":
        section |= {"qk_norm_width": "all", "norm_after": True}
    if family == "granite":
        section |= read_multipliers(filled)
    return section


def make_hf_config(
    config: Config, vocab: int, *, dtype: str, like: Mapping[str, Any] | None = None
) -> Json:
    """A config.json for the model of a run, for transformers 4.51 or later.

    `vocab` is the number of embedding rows, `dtype` the type of the stored weights. `like` is the
    config.json of the model that the run started from; it gives the fields in `CARRIED`, and the
    family if that fits. Raises ValueError if it describes a model of another shape.
    """
    model = config.model
    if like:
        _check_shape(model, Model.model_validate(read_model(like)))
    like = like or {}
    family = choose_family(model, like.get("model_type"))
    carried = {name: like[name] for name in CARRIED if like.get(name) is not None}
    result: Json = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_act": "silu",
        **{name: getattr(model, ours) for name, ours in MODEL_FIELDS.items()},
        "vocab_size": vocab,
        "rope_theta": model.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.data.seq_len,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": dtype,
        **carried,
    }
    if model.rope_scaling is not None:
        result["rope_scaling"] = write_scaling(model.rope_scaling)
    result |= own_fields(family, model)
    even = model.size_per_head * model.heads == model.hidden
    if even and family in WITHOUT_HEAD_DIM:
        del result["head_dim"]  # not a field of this family, though transformers reads it
    return result


def output_bias(raw: Mapping[str, Any]) -> bool:
    """Whether the attention's output projection has a bias in this config.json."""
    return raw["model_type"] in BIASED and bool(raw.get("attention_bias"))


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
        right = value is None or (type(value) is int and value >= 0)
        wanted.append((name, value, right, "a whole number"))
    for name in ("rope_scaling", "rope_parameters"):
        section = raw.get(name)
        wanted.append((name, section, isinstance(section, dict | None), "an object"))
        for key, value in section.items() if isinstance(section, dict) else ():
            right = value is None or _is_number(value)
            what = "a number, or the name of a type"
            if key in ("rope_type", "type"):
                right = isinstance(value, str)
            elif key == "truncate":  # transformers takes null for false
                right, what = isinstance(value, bool), "true or false"
            wanted.append((f"{name}.{key}", value, right, what))
    theta, layers = raw.get("rope_theta"), raw.get("layer_types")
    wanted.append(("rope_theta", theta, theta is None or _is_number(theta), "a number"))
    names = layers is None or (isinstance(layers, list) and all(type(n) is str for n in layers))
    wanted.append(("layer_types", layers, names, "a list of names"))
    for name in MULTIPLIERS:
        right = raw.get(name) is None or _is_number(raw[name])
        wanted.append((name, raw.get(name), right, "a number"))
    for name, value, right, what in wanted:
        if not right:
            raise ValueError(f"config.json: {name}={value!r}: must be {what}")


def _is_number(value: Any) -> bool:
    """Whether a JSON value is a number in the range of float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def _check_fixed(family: str, raw: Mapping[str, Any]) -> None:
    """Raise ValueError if a field has a value that coatlm does not support."""
    allowed: list[tuple[str, tuple[Any, ...]]] = [
        ("hidden_act", (None, "silu")),
        ("attention_dropout", (None, 0)),
        ("mlp_bias", (None, False)),
        ("partial_rotary_factor", (None, 1)),
        ("use_mrope", (None, False)),
        ("rope_interleaved", (None, False)),
        ("resid_pdrop", (None, 0)),
        ("embd_pdrop", (None, 0)),
        (
            "attention_bias",
            (None, False, True) if family in BIASED else (None, False),
        ),
        ("architectures", (None, [ARCHITECTURES[family]])),
    ]
    for name, values in allowed:
        value = raw.get(name)
        if value not in values:
            choices = " or ".join(repr(v) for v in values if v is not None)
            raise ValueError(f"config.json: {name}={value!r} of {family}: only {choices}")


def _check_window(family: str, raw: Mapping[str, Any]) -> None:
    """Raise ValueError if a layer would use sliding-window attention."""
    longest, window = raw["max_position_embeddings"], raw.get("sliding_window")
    if family in ("qwen2", "qwen3") and not raw.get("use_sliding_window"):
        window = None  # transformers ignores it then
    layers = raw["num_hidden_layers"]
    first = raw.get("max_window_layers", 28) if family in ("qwen2", "qwen3") else 0
    if window is not None and window < longest and first < layers and family != "llama":
        raise ValueError(
            f"config.json: sliding_window={window} is below max_position_embeddings={longest}: "
            "coatlm has no sliding-window attention"
        )
    others = set(raw.get("layer_types") or ()) - {"full_attention"}
    if others:
        raise ValueError(f"config.json: layer_types has {sorted(others)[0]!r}: only full_attention")


def check_token_ids(file: str, raw: Mapping[str, Any], rows: int) -> None:
    """Raise ValueError if a config.json or generation_config.json has an invalid token id.

    `rows` is the number of embedding rows, which limits only the end-of-text id: early models use
    -1 for a missing padding token.
    """
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
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
