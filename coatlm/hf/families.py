"""The model families of Hugging Face that coatlm's layers compute.

A family fixes some keys of `model`, for example qk_norm of qwen3, has fields of its own in
config.json, and defaults for missing fields. `attention_bias` also adds a bias to the output
projection, which coatlm does not have; it must be zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coatlm.config import Model

Json = dict[str, Any]

GELU = "gelu_pytorch_tanh"  # the activation that coatlm calls gelu_tanh
MULTIPLIERS = (  # of granite, and model.* of coatlm
    *("embedding_multiplier", "residual_multiplier"),
    *("attention_multiplier", "logits_scaling"),
)
SOFTCAPS = {  # of gemma2, gemma3_text -> model.*
    "attn_logit_softcapping": "attention_softcap",
    "final_logit_softcapping": "logits_softcap",
}
SCALAR = "query_pre_attn_scalar"  # attention_multiplier^-2, an integer


@dataclass(frozen=True)
class Family:
    """A value of model_type."""

    architecture: str
    defaults: Json  # transformers' defaults for missing fields
    model: Json = field(default_factory=dict)  # the keys of model that it fixes
    own: tuple[str, ...] = ()  # fields of config.json that not all families have
    fixed: Json = field(default_factory=dict)  # their supported value, where there is one
    biased: bool = False  # attention_bias=true is supported
    head_dim: bool = True  # config.json may have head_dim
    square: bool = False  # a head has hidden / heads elements


OLMO = {"norm_after": True, "qk_norm": True, "qk_norm_width": "all"}
GEMMA = {
    "sandwich_norm": True,
    "zero_centered_norm": True,
    "activation": "gelu_tanh",
    "scale_embeddings": True,
}
GEMMA_DEFAULTS = {
    **{"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
    **{"sliding_window": 4096, SCALAR: 256, "hidden_activation": GELU},
}
GEMMA_OWN = (
    *("hidden_activation", SCALAR, *SOFTCAPS, "use_bidirectional_attention"),
    *("cache_implementation", "sliding_window_size"),  # without effect on the logits
)
PHI3_CODE = {  # the code that Phi-3's directories hold, which transformers has a class for
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}
FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", {"max_position_embeddings": 2048}, biased=True),
    "mistral": Family(
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
        {"qkv_bias": True},
        head_dim=False,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {
            **{"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
            **{"sliding_window": 4096},
        },
        {"qk_norm": True},
        biased=True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {
            **{"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
            **{"rms_norm_eps": 1e-5},
        },
        own=(
            *("resid_pdrop", "embd_pdrop", "lm_head_bias", "full_attn_mod", "interpolate_factor"),
            *("original_max_position_embeddings", "auto_map"),
        ),
        fixed={
            "auto_map": PHI3_CODE,
            **{"resid_pdrop": 0, "embd_pdrop": 0, "lm_head_bias": False},
            **{"full_attn_mod": 1, "interpolate_factor": 1},
        },
        head_dim=False,
        square=True,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        OLMO,
        head_dim=False,
        square=True,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096},
        OLMO,
        head_dim=False,
        square=True,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        {"max_position_embeddings": 2048, **dict.fromkeys(MULTIPLIERS, 1.0)},
        own=MULTIPLIERS,
        biased=True,
        head_dim=False,
        square=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            **GEMMA_DEFAULTS,
            **{"max_position_embeddings": 8192},
            **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        },
        GEMMA,
        own=GEMMA_OWN,
        fixed={"hidden_activation": GELU, "use_bidirectional_attention": False},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {**GEMMA_DEFAULTS, "max_position_embeddings": 131072},
        {**GEMMA, "qk_norm": True},
        own=(
            *(*GEMMA_OWN, "rope_local_base_freq"),
            *("sliding_window_pattern", "_sliding_window_pattern"),
        ),
        fixed={
            **{"hidden_activation": GELU, "use_bidirectional_attention": False},
            # the class of transformers does not apply it
            **{"attn_logit_softcapping": None},
        },
    ),
}


def read_own(family: str, raw: Mapping[str, Any]) -> Json:
    """The keys of `model` that a family fixes, or reads from fields of its own.

    The usual multiplier of attention scores, 1 / sqrt(head_dim), is left out.
    """
    result = dict(FAMILIES[family].model)
    if family == "granite":
        result |= {name: float(raw[name]) for name in MULTIPLIERS if raw[name] is not None}
    if SCALAR in FAMILIES[family].own:
        for theirs, ours in SOFTCAPS.items():
            if raw.get(theirs) is not None:
                result[ours] = float(raw[theirs])
        if not isinstance(raw[SCALAR], int) or raw[SCALAR] < 1:
            raise ValueError(f"config.json: {SCALAR}={raw[SCALAR]!r}: must be at least 1")
        result["attention_multiplier"] = raw[SCALAR] ** -0.5
    width = raw.get("head_dim") or raw["hidden_size"] // max(raw["num_attention_heads"], 1)
    if width and result.get("attention_multiplier") == width**-0.5:
        del result["attention_multiplier"]
    return result


def write_own(family: str, model: Model) -> Json:
    """The fields of config.json that a family has and others do not."""
    kind = FAMILIES[family]
    result: Json = {}
    scale = model.attention_multiplier or model.size_per_head**-0.5
    if kind.biased:
        result["attention_bias"] = model.qkv_bias
    if family in ("llama", "granite"):
        result["mlp_bias"] = False
    if family == "granite":
        result |= {name: getattr(model, name) for name in MULTIPLIERS}
        result["attention_multiplier"] = scale
    if SCALAR in kind.own:
        result |= {theirs: getattr(model, ours) for theirs, ours in SOFTCAPS.items()}
        result |= {"hidden_activation": GELU, SCALAR: max(round(scale**-2), 1)}
    else:
        result["hidden_act"] = "silu"
    return result


def families_in_order(model: Model, wanted: str | None) -> list[str]:
    """The families to try for an export: `wanted`, then those in which biases are not an option."""
    order = sorted(FAMILIES, key=lambda name: model.qkv_bias and FAMILIES[name].biased)
    return order if wanted is None else [wanted, *order]
