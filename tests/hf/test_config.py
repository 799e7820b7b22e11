"""What a config.json says is computed, carried or refused by its name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from transformers import AutoConfig

from coatlm.config import make_config
from coatlm.hf.config import make_hf_config, read_model, run_config
from tests.hf.models import CASES, SMALL

BASE = {name: value for name, value in SMALL.items() if not name.endswith("token_id")}
LONG = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "olmo3"}, "model_type='olmo3': one of llama, mistral"),
    ({"model_type": "olmo2", "attention_bias": True}, "attention_bias=True of olmo2"),
    ({"residual_multiplier": 0.5}, "residual_multiplier=0.5 is not known"),
    (
        {"model_type": "gemma2"},
        "model_type='gemma2': one of llama, mistral, qwen2, qwen3, phi3, olmo2, granite",
    ),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' of llama: only 'silu'"),
    ({"mlp_bias": True}, "mlp_bias=True"),
    ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ({"rope_interleaved": True}, "rope_interleaved=True of llama: only False"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"rope_scaling": LONG}, "rope_scaling.rope_type='longrope': one of default, llama3"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type='dynamic'"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    ({"rope_parameters": {**LONG, "rope_theta": 1.0}}, "rope_parameters.rope_type='longrope'"),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "low_freq_factor": 1.0}},
        "rope_parameters.low_freq_factor of 'yarn' is not known",
    ),
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
    ({"model_type": "phi3", "resid_pdrop": 0.1}, "resid_pdrop=0.1 of phi3: only 0"),
    ({"model_type": "phi3", "sliding_window": 2047}, "sliding_window=2047 is below"),
    ({"model_type": "phi3", "rope_scaling": {**LONG, "rope_type": "yarn"}}, "'yarn' of phi3"),
    ({"original_max_position_embeddings": 32}, "original_max_position_embeddings=32 is not known"),
    ({"rope_scaling": {**YARN, "truncate": None}}, "rope_scaling.truncate=None: must be true or"),
    (
        {"rope_scaling": {**YARN, "factor": math.e, "mscale": 1.0, "mscale_all_dim": -10.0}},
        "rope_scaling.mscale=1.0, mscale_all_dim=-10.0: with factor=2.718",
    ),
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


def test_deepseeks_pair_of_scales_becomes_the_attention_factor() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    raw = {"model_type": "llama", **BASE, "rope_scaling": yarn | {"mscale": 1.5}}
    assert "attention_factor" not in read_model(raw)["rope_scaling"]  # one alone does nothing
    raw["rope_scaling"] |= {"mscale_all_dim": 0.5}
    expected = (0.1 * 1.5 * math.log(8) + 1) / (0.1 * 0.5 * math.log(8) + 1)
    assert read_model(raw)["rope_scaling"]["attention_factor"] == pytest.approx(expected)


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
    for family in ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "granite"):
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
        ({"residual_multiplier": 0.5, "qkv_bias": True}, "llama", "granite"),
        ({"attention_multiplier": 0.5}, None, "granite"),
        ({"qk_norm": True, "qk_norm_width": "all", "norm_after": True}, "llama", "olmo2"),
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


def test_a_layer_that_no_family_has_is_refused() -> None:
    config = make_config({"model": {"norm_after": True}})
    with pytest.raises(ValueError, match=r"model\.norm_after=True.*no family of Hugging Face"):
        make_hf_config(config, 256, dtype="bfloat16")


def test_relative_of_another_shape_is_refused() -> None:
    like = make_hf_config(make_config({"model": {"ffn": 512}}), 256, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"model\.ffn is 704, and 512 in the config\.json"):
        make_hf_config(make_config({}), 256, dtype="bfloat16", like=like)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "phi3", "olmo2", "granite"])
def test_null_means_the_default_of_transformers(family: str) -> None:
    raw = {"model_type": family, **BASE, "sliding_window": 4096}
    raw = raw if family in ("mistral", "qwen2", "phi3") else {**raw, "sliding_window": None}
    raw.pop("max_position_embeddings", None)
    nulls = {"rope_theta": None, "max_position_embeddings": None, "rope_parameters": None}
    window = {"sliding_window": None} if family == "mistral" else {}
    assert read_model({**raw, **nulls, **window}) == read_model({**raw, **window})
    inside = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    assert read_model({**raw, **inside, **window})["rope_theta"] == 10000.0


def test_yarn_without_an_original_length_takes_the_longest_one() -> None:
    raw = {"model_type": "llama", **BASE, "max_position_embeddings": 64}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": None}
    found = read_model({**raw, "rope_scaling": yarn})["rope_scaling"]
    assert found["original_max_position_embeddings"] == 64


def test_yarn_needs_a_theta_above_one() -> None:
    model = {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}
    with pytest.raises(ValueError, match=r"rope_theta=1\.0: yarn needs one above 1"):
        make_config({"model": model})
