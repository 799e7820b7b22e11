"""A tokenizer with more ids than its model: their rows on the way in and on the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from coatlm.commands.convert import main
from coatlm.convert.from_hf import from_huggingface
from coatlm.convert.to_hf import to_huggingface
from coatlm.hf.source import HfSource
from coatlm.megatron import ShardedTensor
from coatlm.train.shards import StoredTensors
from tests.bpe import train_bpe
from tests.hf.models import make_model

NEW = ["<|im_start|>", "<|im_end|>"]
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf: a model with its tokenizer. new: the same with two tokens more. run: of both, converted
    with a vocabulary of a multiple of 64."""
    root = tmp_path_factory.mktemp("new tokens")
    tokenizer = train_bpe(["Three squared is nine.\n"] * 20, vocab_size=300)
    ids = tokenizer.get_vocab_size()
    make_model("llama", vocab_size=ids, eos_token_id=0).save_pretrained(root / "hf")
    for name, tokens in (("hf", []), ("new", NEW)):
        tokenizer.add_special_tokens(tokens)
        whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
        whole.save_pretrained(root / name)
    notes = from_huggingface(
        root / "hf",
        root / "run",
        tokenizer=f"hf:{root / 'new/tokenizer.json'}",
        vocab_multiple=64,
    ).notes
    assert notes == (
        "2 rows were added to the vocabulary for new tokens, each the mean of the others",
        f"{-(ids + 2) % 64} rows of zeros were added to the vocabulary",
    )
    return root


def stored_ids(root: Path) -> int:
    return int(json.loads((root / "hf/config.json").read_text())["vocab_size"])


@pytest.mark.parametrize("key", [EMBEDDING, OUTPUT])
def test_a_new_token_begins_with_the_mean_row_and_padding_with_zeros(root: Path, key: str) -> None:
    weight, ids = StoredTensors(root / "run").read(key), stored_ids(root)
    mean = weight[:ids].double().mean(0)
    assert mean.std() > 0.005
    torch.testing.assert_close(weight[ids : ids + 2], mean.float().expand(2, -1))
    assert len(weight) > ids + 2 and not weight[ids + 2 :].any()


@pytest.mark.parametrize("key", [EMBEDDING, OUTPUT])
def test_a_run_that_starts_from_the_directory_has_the_same_rows(root: Path, key: str) -> None:
    source, whole = HfSource.open(root / "hf"), StoredTensors(root / "run").read(key)
    middle = stored_ids(root) + 1  # between the two new rows
    for first, stop in ((0, middle), (middle, len(whole))):
        data = torch.full((stop - first, 32), 7.0)
        cut = ShardedTensor(
            key, data, data.dtype, tuple(data.shape), (len(whole), 64), (first, 32), None
        )
        nbytes = source.fill([cut], stored_ids(root) + 2)
        assert torch.equal(data, whole[first:stop, 32:])
        assert nbytes == (min(middle - 1, stop) - min(middle - 1, first) + middle - 1) * 32 * 4


def test_a_generation_config_without_an_end_gets_all_of_them(root: Path, tmp_path: Path) -> None:
    (tmp_path / "like").mkdir()
    (tmp_path / "like/config.json").write_bytes((root / "hf/config.json").read_bytes())
    (tmp_path / "like/generation_config.json").write_text('{"top_p": 0.8}')
    out = tmp_path / "out"
    to_huggingface(root / "run", out, like=tmp_path / "like", stop_tokens=["<|im_end|>"])
    ids = [json.loads((out / f"{n}.json").read_text()) for n in ("config", "generation_config")]
    assert ids[0]["eos_token_id"] == ids[1]["eos_token_id"] == [0, stored_ids(root) + 1]


def test_a_padding_token_of_no_row_adds_none(root: Path, tmp_path: Path) -> None:
    (tmp_path / "like").mkdir()
    config = json.loads((root / "hf/config.json").read_text())
    config["pad_token_id"] = stored_ids(root) + 5
    (tmp_path / "like/config.json").write_text(json.dumps(config))
    to_huggingface(root / "run", tmp_path / "out", like=tmp_path / "like")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["vocab_size"] == stored_ids(root) + 2


@pytest.mark.parametrize("like", [True, False])
def test_an_export_has_the_rows_of_new_tokens(root: Path, tmp_path: Path, like: bool) -> None:
    notes = to_huggingface(root / "run", tmp_path / "out", like=root / "hf" if like else None).notes
    rows = stored_ids(root) + 2
    assert any(f"vocab_size is {rows}, and {rows - 2} in " in note for note in notes)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(tokenizer) == model.config.vocab_size == rows
    ids = tokenizer("<|im_start|>Three", return_tensors="pt").input_ids
    assert ids[0, 0] == rows - 2
    assert model(ids).logits.shape[-1] == rows


def test_generation_ends_at_a_stop_token(root: Path, tmp_path: Path) -> None:
    words = ["--from", "coatlm", "--to", "hf", str(root / "run"), str(tmp_path / "out")]
    assert main([*words, "--stop-token", "<|im_end|>", "--stop-token=<|im_end|>"]) == 0
    end = stored_ids(root) + 1
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == [0, end]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        model.lm_head.weight[end] = 100 * model.lm_head.weight.abs().amax(0)
        model.lm_head.weight[end] *= model.model(torch.tensor([[5]]))[0][0, 0].sign()
    written = model.generate(torch.tensor([[5]]), max_new_tokens=9, do_sample=False)
    assert written.tolist() == [[5, end]]


def test_a_copied_generation_config_gets_the_stop_token(root: Path, tmp_path: Path) -> None:
    (tmp_path / "like").mkdir()
    for path in (root / "new").iterdir():
        (tmp_path / "like" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "like/config.json").write_bytes((root / "hf/config.json").read_bytes())
    generation = {"eos_token_id": 0, "top_p": 0.8}
    (tmp_path / "like/generation_config.json").write_text(json.dumps(generation))
    to_huggingface(
        root / "run", tmp_path / "out", like=tmp_path / "like", stop_tokens=["<|im_end|>"]
    )
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert written == generation | {"eos_token_id": [0, stored_ids(root) + 1]}


def test_a_stop_token_that_is_none_is_refused(root: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["--from", "coatlm", "--to", "hf", str(root / "run"), str(tmp_path / "out")]
    assert main([*words, "--stop-token", "<|eot|>"]) == 2
    error = capsys.readouterr().err
    assert "stop_tokens=<|eot|>: the exported tokenizer has no such token" in error
    assert not (tmp_path / "out").exists()
