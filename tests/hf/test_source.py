"""Slices of a Hugging Face directory: the same bits as whole tensors, and no others are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from coatlm.config import ConfigError, make_config
from coatlm.hf.run_config import completed
from coatlm.hf.source import HfSource
from coatlm.megatron import ShardedTensor
from tests.hf.models import SMALL, make_model, save_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source")
    save_model("qwen2 head_dim", root / "hf")
    save_model("phi3", root / "phi3")
    return root / "hf"


def target(key: str, shape: tuple[int, ...], corner: tuple[int, ...], size: Any) -> ShardedTensor:
    data = torch.full(tuple(size), 7.0)
    return ShardedTensor(key, data, data.dtype, tuple(size), shape, corner, None)


@pytest.mark.parametrize("name", ["hf", "phi3"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_rectangle_has_the_bits_of_the_joined_tensor_and_reads_only_its_bytes(
    directory: Path, name: str, data: st.DataObject
) -> None:
    source = HfSource.open(directory.parent / name)
    entry = source.plan[data.draw(st.sampled_from(sorted(source.plan)))]
    whole = entry.join([source.weights.read(name) for name in entry.stored])
    corner = [data.draw(st.integers(0, n - 1)) for n in entry.shape]
    size = [data.draw(st.integers(1, n - c)) for n, c in zip(entry.shape, corner, strict=True)]
    wanted = target(entry.key, entry.shape, tuple(corner), size)
    assert source.fill([wanted]) == wanted.data.nbytes
    cut = tuple(slice(c, c + n) for c, n in zip(corner, size, strict=True))
    assert torch.equal(wanted.data, whole[cut])


def test_rows_that_pad_the_vocabulary_are_zero(directory: Path) -> None:
    source, key = HfSource.open(directory), "embedding.word_embeddings.weight"
    assert source.rows == 263
    wanted = target(key, (384, 64), (192, 0), (192, 64))
    assert source.fill([wanted]) == 71 * 64 * 4
    stored = source.weights.read("model.embed_tokens.weight")
    assert torch.equal(wanted.data[:71], stored[192:])
    assert not wanted.data[71:].any()


def test_values_beyond_the_range_of_the_type_are_refused_by_name(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "hf")
    source = HfSource.open(tmp_path / "hf")
    tensors = {name: source.weights.read(name) for name in source.weights.files}
    tensors["model.norm.weight"][5] = 3.4e38  # above the largest BF16 number after rounding
    save_file(tensors, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    data = torch.zeros(64, dtype=torch.bfloat16)
    wanted = ShardedTensor(
        "decoder.final_layernorm.weight", data, data.dtype, (64,), (64,), (0,), None
    )
    with pytest.raises(ValueError, match=r"final_layernorm\.weight has values beyond bfloat16"):
        source.fill([wanted])


DIFFERENT = {
    "hidden": 128,
    "layers": 4,
    "kv_heads": 4,
    "head_dim": 32,
    "ffn": 192,
    "norm_eps": 1e-5,
    "rope_theta": 5e5,
    "qkv_bias": False,
    "qk_norm": True,
    "tie_embeddings": True,
    "rope_scaling": {},
}


@pytest.mark.parametrize("field", list(DIFFERENT))
def test_a_model_that_differs_is_refused_by_the_name_of_the_field(
    directory: Path, field: str
) -> None:
    source = HfSource.open(directory)
    source.check(source.model, 263)
    changed = source.model.model_dump() | {field: DIFFERENT[field]}
    model = make_config({"model": changed}).model
    with pytest.raises(ValueError, match=rf"model\.{field}(\.factor)?=.*config\.json says"):
        source.check(model, 263)


def test_an_embedding_with_fewer_rows_is_refused_and_one_with_more_is_not(directory: Path) -> None:
    source = HfSource.open(directory)
    source.check(source.model, 384)
    with pytest.raises(ValueError, match=r"model\.vocab=262: .* has 263 rows"):
        source.check(source.model, 262)


def test_keys_that_are_not_given_come_from_the_directory(directory: Path) -> None:
    given_keys = {"checkpoint": {"resume": f"hf:{directory}"}, "model": {"vocab": 384}}
    config = make_config(completed(given_keys))
    assert config.model == HfSource.open(directory).model.model_copy(update={"vocab": 384})
    assert config.data.tokenizer == "byte"  # the directory has no tokenizer
    assert completed({"model": {"layers": 2}}) == {"model": {"layers": 2}}
    named = make_config(completed({**given_keys, "model": {"layers": 7}}))
    assert (named.model.layers, named.model.vocab) == (7, SMALL["vocab_size"])


def test_a_resolved_configuration_needs_no_directory(directory: Path) -> None:
    config = make_config(completed({"checkpoint": {"resume": f"hf:{directory}"}}))
    resolved = config.model_dump(mode="json")
    resolved["checkpoint"]["resume"] = "hf:/nowhere"
    assert make_config(completed(resolved)).model == config.model
    with pytest.raises(ConfigError, match=r"hf:/nowhere: .*config\.json: No such file"):
        completed({"checkpoint": {"resume": "hf:/nowhere"}})
