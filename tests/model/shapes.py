"""Sizes of models that several tests use."""

from __future__ import annotations

from typing import Any

from coatlm.config import Config, make_config

LLAMA2_7B = {
    **{"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "head_dim": 128, "ffn": 11008},
    **{"vocab": 32000},
}
LLAMA3_8B = {**LLAMA2_7B, "kv_heads": 8, "ffn": 14336, "vocab": 128256}
QWEN25_05B = {
    **{"layers": 24, "hidden": 896, "heads": 14, "kv_heads": 2, "ffn": 4864, "vocab": 151936},
    **{"tie_embeddings": True, "qkv_bias": True},
}
QWEN3_06B = {
    **{"layers": 28, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 3072},
    **{"vocab": 151936, "tie_embeddings": True, "qk_norm": True},
}
TINY = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 48}
DATA = {"text": "x", "seq_len": 64}
OLMO2 = {"qk_norm": True, "qk_norm_width": "all", "norm_after": True}
GEMMA = {
    **{"sandwich_norm": True, "zero_centered_norm": True, "activation": "gelu_tanh"},
    **{"scale_embeddings": True, "attention_softcap": 50.0, "logits_softcap": 30.0},
    **{"window": {"size": 8, "period": 2}},
}
VARIANTS: list[dict[str, Any]] = [
    *(
        {"tie_embeddings": bool(tied), "qkv_bias": bool(bias), "qk_norm": bool(norm)}
        for tied, bias, norm in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1))
    ),
    OLMO2,
    GEMMA,
]


def config(model: dict[str, Any] | None = None, seq_len: int = 64, **sections: Any) -> Config:
    model = {**TINY, "vocab": 256, **(model or {})}
    return make_config({"model": model, "data": {"text": "x", "seq_len": seq_len}, **sections})
