"""The model families of Hugging Face that coatlm's layer computes.

    family      q, k, v bias       q, k norm per head  sliding window
    llama       attention_bias     no                  no
    mistral     no                 no                  refused if it has an effect
    qwen2       yes                no                  refused if it has an effect
    qwen3       attention_bias     yes                 refused if it has an effect
    phi3        no                 no                  refused if it has an effect
    granite     attention_bias     no                  no
    olmo2       no                 over all heads      no

`attention_bias` also adds a bias to the output projection, which coatlm does not have; it must be
zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coatlm.config import Model

Json = dict[str, Any]

MULTIPLIERS = (  # of granite, and model.* of coatlm
    *("embedding_multiplier", "residual_multiplier"),
    *("attention_multiplier", "logits_scaling"),
)
DEFAULTS: Mapping[str, Json] = {  # transformers' defaults for missing fields
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "olmo2": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    "granite": {"max_position_embeddings": 2048, **dict.fromkeys(MULTIPLIERS, 1.0)},
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
}
BIASED = ("llama", "qwen3", "granite")  # attention_bias=true is supported
OWN = {  # fields of one family
    # the last is for longrope, which is refused
    "phi3": ("resid_pdrop", "embd_pdrop", "original_max_position_embeddings"),
    "granite": MULTIPLIERS,
}
WITHOUT_HEAD_DIM = ("qwen2", "phi3", "olmo2", "granite")


def read_multipliers(raw: Mapping[str, Any]) -> Json:
    """Granite's multipliers as keys of model; the usual one of attention scores is left out."""
    found = {name: float(raw[name]) for name in MULTIPLIERS if raw[name] is not None}
    width = raw.get("head_dim") or raw["hidden_size"] // max(raw["num_attention_heads"], 1)
    if width and found.get("attention_multiplier") == width**-0.5:
        del found["attention_multiplier"]
    return found


def own_fields(family: str, model: Model) -> Json:
    """The fields of config.json that a family has and others do not."""
    result: Json = {}
    if family in BIASED:
        result["attention_bias"] = model.qkv_bias
    if family in ("llama", "granite"):
        result["mlp_bias"] = False
    if family == "granite":
        result |= {name: getattr(model, name) for name in MULTIPLIERS}
        result["attention_multiplier"] = _score_scale(model)
    if family == "mistral":
        result["sliding_window"] = None
    if family in ("qwen2", "qwen3"):
        result["use_sliding_window"] = False
    return result


def choose_family(model: Model, wanted: str | None) -> str:
    """A family that has this model's features, preferably `wanted`.

    Raises ValueError if there is none.
    """
    biased, normed = model.qkv_bias, model.qk_norm
    even = model.hidden % model.heads == 0  # transformers requires this for llama only
    head_dims = even and model.size_per_head == model.hidden // model.heads
    all_heads = normed and model.qk_norm_width == "all"
    after, plain = model.norm_after, not model.norm_after and not _multiplied(model)
    fits = {
        "llama": plain and not biased and not normed and even,
        "mistral": plain and not biased and not normed,
        "qwen2": plain and biased and not normed,
        "qwen3": plain and normed and model.qk_norm_width == "head",
        "phi3": plain and not (biased or normed) and head_dims and model.rope_scaling is None,
        "olmo2": after and head_dims and not biased and not _multiplied(model) and all_heads,
        "granite": not after and head_dims and not normed,
    }
    if wanted == "llama" and plain and biased and not normed and even:
        return "llama"
    if wanted is not None and fits.get(wanted):
        return wanted
    found = next((name for name, fit in fits.items() if fit), None)
    if found is None:
        raise ValueError(
            f"model.norm_after={after}, qk_norm={normed}, qk_norm_width={model.qk_norm_width}, "
            f"qkv_bias={biased}: no family of Hugging Face has such a layer"
        )
    return found


def _multiplied(model: Model) -> bool:
    """Whether the model has multipliers that only Granite has."""
    if model.attention_multiplier not in (None, model.size_per_head**-0.5):
        return True
    others = (model.embedding_multiplier, model.residual_multiplier, model.logits_scaling)
    return others != (1.0, 1.0, 1.0)


def _score_scale(model: Model) -> float:
    """What scores of attention are multiplied by."""
    given = model.attention_multiplier
    return model.size_per_head**-0.5 if given is None else given
