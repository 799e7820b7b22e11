"""What a config.json says is computed, carried or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from coatlm.config import make_config
from coatlm.hf.config import make_hf_config, read_model, run_config
from tests.hf.models import CASES, SMALL

BASE = {name: value for name, value in SMALL.items() if not name.endswith("token_id")}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "olmo2"}, "model_type='olmo2' does not fit: it normalizes the outputs"),
    ({"model_type": "gemma2"}, "model_type='gemma2': one of llama, mistral, qwen2, qwen3"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' of llama: only 'silu'"),
    ({"mlp_bias": True}, "mlp_bias=True"),
    ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ({"rope_interleaved": True}, "rope_interleaved=True of llama: only False"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"rope_scaling": YARN}, "rope_scaling.rope_type='yarn': one of default, llama3"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type='linear'"),
    ({"rope_parameters": {**YARN, "rope_theta": 1.0}}, "rope_parameters.rope_type='yarn'"),
    ({"rope_parameters": {"rope_type": "default", "beta": 1}}, "rope_parameters.beta"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
        "rope_scaling.high_freq_factor is missing",
    ),
    ({"model_type": "mistral", "sliding_window": 64}, "sliding_window=64 is below"),
    ({"model_type": "mistral"}, "sliding_window=4096 is below max_position_embeddings=8192"),
    (
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 1,
        },
        "sliding_window=64 is below",
    ),
    (
        {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types has 'sliding_attention'",
    ),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map="),
    ({"logit_scale": 2.0, "embedding_multiplier": 3}, "embedding_multiplier=3 is not known"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
    ({"model_type": "qwen2", "attention_bias": True}, "attention_bias=True of qwen2"),
    ({"hidden_size": None}, "hidden_size is missing"),
]


@pytest.mark.parametrize(("fields", "complaint"), REFUSED, ids=[c for _, c in REFUSED])
def test_what_coatlm_does_not_compute_is_refused_by_name(
    fields: dict[str, Any], complaint: str
) -> None:
    raw = {"model_type": "llama", **BASE, "max_position_embeddings": 8192}
    assert read_model(raw)["layers"] == 3
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        read_model({**raw, **fields})
    assert complaint in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "mistral", "sliding_window": 128},  # as long as the longest sequence
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16,
         "max_window_layers": 3},
        {"model_type": "llama", "sliding_window": None, "pretraining_tp": 2},
    ],
)  # fmt: skip
def test_windows_that_never_act_are_read(fields: dict[str, Any]) -> None:
    assert read_model({**BASE, **fields})["layers"] == 3


@pytest.mark.parametrize("name", list(CASES))
def test_transformers_reads_the_same_values_from_a_config_that_went_through_coatlm(
    name: str,
) -> None:
    original = AutoConfig.for_model(**{**SMALL, **CASES[name]})
    raw = {**original.to_dict(), "architectures": None}
    raw = {key: value for key, value in raw.items() if key in original.to_diff_dict()}
    config = run_config(read_model(raw), tokenizer="byte", seq_len=128, precision="fp32")
    written = make_hf_config(config, SMALL["vocab_size"], dtype="float32", like=raw)
    again = AutoConfig.for_model(**written).to_diff_dict()
    ignored = {"architectures", "transformers_version", "dtype", "pretraining_tp"}
    expected = {k: v for k, v in original.to_diff_dict().items() if k not in ignored}
    assert {key: again.get(key) for key in expected} == expected
    sections = [make_config({"model": read_model(each)}).model for each in (written, raw)]
    assert sections[0] == sections[1]


def test_fields_that_are_not_there_have_the_values_of_transformers() -> None:
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        sizes = {"hidden_size": 1024, "num_attention_heads": 32, "num_hidden_layers": 2,
                 "intermediate_size": 64, "vocab_size": 99}  # fmt: skip
        loaded = AutoConfig.for_model(family, **sizes)
        shown = {"sliding_window": None} if family == "mistral" else {}
        model = read_model({"model_type": family, **sizes, **shown})
        section = make_config({"model": model}).model
        assert section.queries_groups == loaded.num_key_value_heads
        assert section.size_per_head == (getattr(loaded, "head_dim", None) or 32)
        assert section.norm_eps == loaded.rms_norm_eps
        assert section.rope_theta == loaded.rope_parameters["rope_theta"]
        assert section.tie_embeddings == loaded.tie_word_embeddings


@pytest.mark.parametrize(
    ("model", "wanted", "family"),
    [
        ({}, None, "llama"),
        ({"heads": 3, "hidden": 64, "head_dim": 32}, None, "mistral"),  # llama must divide
        ({}, "mistral", "mistral"),
        ({"qkv_bias": True}, None, "qwen2"),
        ({"qkv_bias": True}, "llama", "llama"),
        ({"qk_norm": True, "qkv_bias": True}, None, "qwen3"),
        ({"qk_norm": True}, "llama", "qwen3"),
    ],
)
def test_family_has_the_features_of_the_model(
    model: dict[str, Any], wanted: str | None, family: str
) -> None:
    config = make_config({"model": model})
    like = make_hf_config(make_config({}), 256, dtype="bfloat16") if wanted else {}
    like |= {"model_type": wanted, "architectures": None}
    written = make_hf_config(config, 256, dtype="bfloat16", like=like if wanted else None)
    assert written["model_type"] == family
    section = make_config({"model": read_model(written)}).model
    assert section == config.model.model_copy(update={"vocab": 256})


def test_relative_of_another_shape_is_refused() -> None:
    like = make_hf_config(make_config({"model": {"ffn": 512}}), 256, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"model\.ffn is 704, and 512 in the config\.json"):
        make_hf_config(make_config({}), 256, dtype="bfloat16", like=like)
