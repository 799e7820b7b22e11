"""Small random models of each family, made by transformers, and the logits of both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from coatlm.evaluation.model import open_model
from coatlm.train.checkpoint import read_state

WINDOW = 96  # tokens: longer than what LLAMA3 calls the original context
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.5, 3.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 9.0],
}
SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": 263,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,  # large enough to be seen
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 4},
    "llama gqa rope3 tied": {
        "model_type": "llama",
        "rope_parameters": LLAMA3,
        "tie_word_embeddings": True,
    },
    "llama yarn": {"model_type": "llama", "rope_parameters": YARN},
    "qwen2 yarn": {
        "model_type": "qwen2",
        "rope_parameters": {
            **{**YARN, "attention_factor": 1.3, "truncate": False},
            **{"beta_fast": 4.0, "beta_slow": 0.5},
        },
    },
    "mistral linear": {
        "model_type": "mistral",
        "sliding_window": None,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    },
    "llama bias": {"model_type": "llama", "attention_bias": True},
    "mistral": {"model_type": "mistral", "head_dim": 24, "sliding_window": None},
    "qwen2 head_dim": {"model_type": "qwen2", "head_dim": 24},
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2.5": {
        "model_type": "qwen2",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "olmo2": {"model_type": "olmo2", "pad_token_id": 0},
    "granite": {
        **{"model_type": "granite", "embedding_multiplier": 12.0, "logits_scaling": 1.5},
        **{"residual_multiplier": 0.22, "attention_multiplier": 0.015, "pad_token_id": 0},
        **{"tie_word_embeddings": True},
    },
    "granite bias yarn": {
        **{"model_type": "granite", "attention_bias": True, "rope_parameters": YARN},
        **{"logits_scaling": 0.5, "attention_multiplier": 0.2, "pad_token_id": 0},
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "mistral window": {"model_type": "mistral", "sliding_window": 20},
    "qwen2 window": {
        **{"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 20},
        **{"max_window_layers": 1},
    },
    "phi4": {
        **{"model_type": "phi3", "pad_token_id": 0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0},
    },
    "phi3.5 short window": {
        **{"model_type": "phi3", "pad_token_id": 0, "original_max_position_embeddings": 100},
        **{"sliding_window": 20, "num_key_value_heads": 4},
        "rope_parameters": {
            **LONGROPE,
            "short_factor": [*LONGROPE["short_factor"], 4.0, 5.0],
            "long_factor": [*LONGROPE["long_factor"], 10.0, 11.0],
        },
    },
    "phi4-mini long": {
        **{"model_type": "phi3", "pad_token_id": 0, "original_max_position_embeddings": 32},
        **{"tie_word_embeddings": True},
        "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
    },
    "olmo3": {
        **{"model_type": "olmo3", "pad_token_id": 0, "num_hidden_layers": 4, "sliding_window": 20},
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "gemma2": {
        **{"model_type": "gemma2", "head_dim": 24, "query_pre_attn_scalar": 20},
        **{"sliding_window": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    },
    "gemma3": {
        **{"model_type": "gemma3_text", "head_dim": 24, "query_pre_attn_scalar": 30},
        **{"sliding_window": 20, "final_logit_softcapping": 4.0},
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
}


def make_model(name: str, **changes: Any) -> Any:
    """A model in fp32 whose every tensor is random; the biases coatlm lacks are zero."""
    config = AutoConfig.for_model(**{**SMALL, **CASES[name], **changes})
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            center = 1.0 if "norm" in key and not name.startswith("gemma") else 0.0
            tensor.normal_(center, 0.15)
            if key.endswith("o_proj.bias"):
                tensor.zero_()
    return model


def save_model(name: str, directory: Path) -> Any:
    """Save a model by save_pretrained in several files, and return it."""
    model = make_model(name)
    model.save_pretrained(directory, max_shard_size="100KB")
    return model


def tokens(vocab: int = SMALL["vocab_size"]) -> Tensor:
    return torch.randint(0, vocab, (2, WINDOW), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def theirs(directory: Path | Any, ids: Tensor) -> Tensor:
    """Logits of transformers, fp32."""
    model = directory
    if isinstance(directory, Path):
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    return model(ids).logits


def ours(checkpoint: Path, ids: Tensor, vocab: int | None = None) -> Tensor:
    """Logits of coatlm, fp32; of the first `vocab` tokens."""
    saved = read_state(checkpoint)["config"]
    with open_model(checkpoint, saved, window=ids.shape[1], precision="fp32") as model:
        return model(ids)[..., :vocab]
