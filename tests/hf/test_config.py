"""What a config.json says is computed, carried or refused by its name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coatlm.config import make_config
from coatlm.hf.config import make_hf_config, read_model, run_config
from coatlm.hf.families import FAMILIES, GEMMA, OLMO, PHI3_CODE
from tests.hf.models import CASES, SMALL

BASE = {name: value for name, value in SMALL.items() if not name.endswith("token_id")}
ORIGINAL = "original_max_position_embeddings"
LONG = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gemma3"}, "model_type='gemma3': one of llama, mistral"),
    ({"model_type": "olmo2", "attention_bias": True}, "attention_bias=True of olmo2"),
    ({"residual_multiplier": 0.5}, "residual_multiplier=0.5 is not known"),
    ({"model_type": "gemma2", "hidden_act": "silu"}, "hidden_act='silu' of gemma2: only 'gelu_"),
    ({"model_type": "gemma2", "use_bidirectional_attention": True}, "attention=True of gemma2"),
    (
        {"model_type": "gemma2", "query_pre_attn_scalar": 10**400},
        "000: must be a whole number below 2^63",
    ),
    ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0: must be at"),
    (
        {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
        "attn_logit_softcapping=50.0 of gemma3_text: only null",
    ),
    (
        {
            "model_type": "gemma3_text",
            "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
        },
        "rope_parameters.sliding_attention.rope_type='linear': only 'default'",
    ),
    (
        {"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}},
        "rope_parameters.rope_type",
    ),
    ({"model_type": "olmo3", "rope_theta": 1e4}, "rope_theta=10000.0 of olmo3: layers with a"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' of llama: only 'silu'"),
    ({"mlp_bias": True}, "mlp_bias=True"),
    ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ({"rope_interleaved": True}, "rope_interleaved=True of llama: only False"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"rope_scaling": LONG}, "rope_scaling.rope_type='longrope' of llama: one of default, llama3"),
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
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window=0: from 1 to"),
    (
        {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types has 2 names for num_hidden_layers=3",
    ),
    (
        {"model_type": "qwen3", "layer_types": ["full_attention", "x", "full_attention"]},
        "layer_types has 'x' of qwen3: only full_attention and sliding_attention",
    ),
    (
        {"model_type": "mistral", "layer_types": ["sliding_attention"] * 3},
        "layer_types has 'sliding_attention' of mistral: only full_attention",
    ),
    (
        {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3},
        "layer_types has 'sliding_attention', but no sliding_window is set",
    ),
    (
        {
            **{"model_type": "gemma2", "num_hidden_layers": 5},
            "layer_types": ["full_attention", "sliding_attention", *["full_attention"] * 3],
        },
        "layer_types: coatlm has windows in all layers but the first n, or in all but",
    ),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map="),
    (
        {"model_type": "phi3", "auto_map": {"AutoConfig": "x.Y"}},
        "auto_map={'AutoConfig': 'x.Y'} of",
    ),
    ({"logit_scale": 2.0, "embedding_multiplier": 3}, "embedding_multiplier=3 is not known"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
    ({"model_type": "qwen2", "attention_bias": True}, "attention_bias=True of qwen2"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"model_type": "phi3", "resid_pdrop": 0.1}, "resid_pdrop=0.1 of phi3: only 0"),
    ({"model_type": "phi3", "rope_scaling": {**LONG, "rope_type": "yarn"}}, "'yarn' of phi3"),
    ({"model_type": "phi3", "rope_scaling": {**LONG, ORIGINAL: 4096}}, "short_factor is missing"),
    ({"model_type": "phi3", "rope_scaling": LONG}, f"rope_scaling.{ORIGINAL} differs from"),
    (
        {"model_type": "phi3", "rope_scaling": {**LONG, "short_factor": [1.0, "2"]}},
        "rope_scaling.short_factor=[1.0, '2']: must be a list of numbers",
    ),
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
    ("fields", "window"),
    [
        ({"model_type": "mistral"}, {"size": 4096}),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "llama", "sliding_window": 16}, None),  # ignored by transformers
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16}, None),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16}, None),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 2},
            {"size": 4096, "full_layers": 2},
        ),
        ({"model_type": "gemma2"}, {"size": 4096, "period": 2}),
        ({"model_type": "gemma3_text"}, {"size": 4096, "rope_theta": 1e4}),  # of three layers
        (
            {"model_type": "gemma3_text", "sliding_window_pattern": 2, "rope_local_base_freq": 7},
            {"size": 4096, "period": 2, "rope_theta": 7.0},
        ),
        ({"model_type": "olmo3", "num_hidden_layers": 4}, {"size": 4096, "period": 4}),
        (
            {"model_type": "olmo3", "num_hidden_layers": 4, "rope_scaling": YARN},
            {"size": 4096, "period": 4, "rope_theta": 5e5},
        ),
    ],
)
def test_windows_and_their_frequencies_are_those_of_the_family(
    fields: dict[str, Any], window: dict[str, Any] | None
) -> None:
    assert read_model({**BASE, **fields}).get("window") == window


def test_fields_of_phi4_mini_that_transformers_does_not_read_are_accepted() -> None:
    code = {**PHI3_CODE, "AutoTokenizer": "x/y"}
    fields = {"auto_map": code, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}
    raw = {"model_type": "phi3", **BASE}
    assert read_model({**raw, **fields}) == read_model(raw)
    for nothing in ({}, {"AutoTokenizer": "x/y"}):
        assert read_model({**raw, "auto_map": nothing}) == read_model(raw)


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
    if again["model_type"] == "phi3":  # transformers 4 needs the earlier name of rope_type
        again["rope_parameters"].pop("type", None)
    ignored = {"architectures", "transformers_version", "dtype", "pretraining_tp"}
    expected = {k: v for k, v in original.to_diff_dict().items() if k not in ignored}
    assert {key: again.get(key) for key in expected} == expected
    sections = [make_config({"model": read_model(each)}).model for each in (written, raw)]
    assert sections[0] == sections[1]


def test_fields_that_are_not_there_have_the_values_of_transformers() -> None:
    for family in FAMILIES:
        sizes = {"hidden_size": 1024, "num_attention_heads": 32, "num_hidden_layers": 2,
                 "intermediate_size": 64, "vocab_size": 99}  # fmt: skip
        loaded = AutoConfig.for_model(family, **sizes)
        model = read_model({"model_type": family, **sizes})
        section = make_config({"model": model}).model
        assert section.key_value_heads == loaded.num_key_value_heads
        assert section.size_per_head == (getattr(loaded, "head_dim", None) or 32)
        assert section.norm_eps == loaded.rms_norm_eps
        full = loaded.rope_parameters.get("full_attention", loaded.rope_parameters)
        assert section.rope_theta == full["rope_theta"]
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
        ({**OLMO, "window": {"size": 64, "period": 2}}, None, "olmo3"),
        ({"window": {"size": 64}}, None, "mistral"),
        ({"window": {"size": 64, "full_layers": 2}, "qkv_bias": True}, None, "qwen2"),
        ({"partial_rotary_factor": 0.5}, None, "phi3"),
        (GEMMA, None, "gemma2"),
        ({**GEMMA, "qk_norm": True, "attention_multiplier": 7**-0.5}, None, "gemma3_text"),
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


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"norm_after": True}, "model.norm_after=True: no family of Hugging Face"),
        ({"logits_softcap": 3.0}, "model.logits_softcap=3.0: no family"),
        ({**GEMMA, "attention_multiplier": 0.3}, "gemma2 lacks model.attention_multiplier"),
        ({"window": {"size": 64, "period": 2}}, "model.window=size=64 period=2"),
        (
            {**GEMMA, "qk_norm": True, "attention_softcap": 50.0},
            "model.qk_norm=True: no family of Hugging Face has such a layer; gemma2 lacks",
        ),
    ],
)
def test_a_layer_that_no_family_has_is_refused(model: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match="no family of Hugging Face") as caught:
        make_hf_config(make_config({"model": model}), 256, dtype="bfloat16")
    assert told in str(caught.value)


@pytest.mark.parametrize("norms", [{}, {"qk_norm": True}, {**OLMO, "sandwich_norm": False}])
def test_transformers_runs_a_model_without_windows(norms: dict[str, Any]) -> None:
    model = norms if norms.get("norm_after") else {**GEMMA, **norms}
    written = make_hf_config(make_config({"model": model}), 256, dtype="float32")
    assert read_model(written).get("window") is None
    assert written.get("sliding_window", 2**30) == 2**30  # where layer_types are not read
    config = AutoConfig.for_model(**written)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    assert theirs(torch.zeros(1, 8, dtype=torch.int64, device="meta")).logits.shape == (1, 8, 256)


@pytest.mark.parametrize(("seq_len", "longest"), [(64, 128), (512, 512)])
def test_the_context_of_an_export_is_the_longer_one(seq_len: int, longest: int) -> None:
    before, after = (
        make_config({"data": {"text": "python-stdlib", "seq_len": n}}) for n in (128, seq_len)
    )
    like = make_hf_config(before, 256, dtype="float32")
    written = make_hf_config(after, 256, dtype="float32", like=like)
    assert written["max_position_embeddings"] == longest


def test_the_context_of_yarn_stays() -> None:
    model = {"model": {"rope_scaling": YARN | {"type": YARN["rope_type"]}}}
    del model["model"]["rope_scaling"]["rope_type"]
    before, after = (
        make_config(model | {"data": {"text": "python-stdlib", "seq_len": n}}) for n in (128, 512)
    )
    like = make_hf_config(before, 256, dtype="float32")
    written = make_hf_config(after, 256, dtype="float32", like=like)
    assert written["max_position_embeddings"] == 128


def test_relative_of_another_shape_is_refused() -> None:
    like = make_hf_config(make_config({"model": {"ffn": 512}}), 256, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"model\.ffn is 704, and 512 in the config\.json"):
        make_hf_config(make_config({}), 256, dtype="bfloat16", like=like)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "phi3", "olmo2", "granite"])
def test_null_means_the_default_of_transformers(family: str) -> None:
    raw = {"model_type": family, **BASE, "sliding_window": 4096}
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
