"""Documents that are too long, or too hard for a tokenizer, to be encoded at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coatlm.data.indexed import open_indexed
from coatlm.data.preprocess import preprocess
from coatlm.data.token_shard import Options
from coatlm.data.tokenizer import make_tokenizer
from tests.bpe import train_bpe
from tests.data.conftest import CORPUS


def ids_of(path: Path, spec: str) -> list[int]:
    """The ids of the only document of a file of JSON lines, without its end."""
    preprocess([str(path)], path.parent / "out", Options(tokenizer=spec), overwrite=True)
    (dataset,) = [open_indexed(path.parent / "out", make_tokenizer(spec))]
    return dataset.read(0, int(dataset.bounds_D1[-1]) - 1).tolist()


@pytest.mark.parametrize("limit", [50, 1000, 7777])
def test_a_long_document_has_the_tokens_of_its_whole_text(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the white space before a word in its token, as GPT-2, Llama 3 and Qwen have it."""
    tokenizer = tmp_path / "tokenizer.json"
    train_bpe(CORPUS, vocab_size=320).save(str(tokenizer))
    text = "".join(CORPUS) + " " * 90 + "and\n\n  ".join(CORPUS)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    monkeypatch.setattr("coatlm.data.token_shard.MAX_CHARACTERS", limit)
    spec = f"hf:{tokenizer}"
    assert ids_of(tmp_path / "a.jsonl", spec) == make_tokenizer(spec).encode(text)


def test_a_long_document_without_white_space_is_cut_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(chr(0x4E00 + i % 2000) for i in range(10_000))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    monkeypatch.setattr("coatlm.data.token_shard.MAX_CHARACTERS", 999)
    assert bytes(ids_of(tmp_path / "a.jsonl", "byte")).decode() == text


def test_a_run_of_spaces_at_which_tiktoken_fails_is_encoded_in_halves(
    tmp_path: Path, tiktoken_file: Path
) -> None:
    spec = rf"tiktoken:{tiktoken_file}?pattern=\w+|\s+(?!\S)|\s+"
    text = "low" + " " * 1_200_000 + "th"
    with pytest.raises(ValueError, match="StackOverflow"):
        make_tokenizer(spec).encode(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert make_tokenizer(spec).decode(ids_of(tmp_path / "a.jsonl", spec)) == text


def test_a_document_that_cannot_be_encoded_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(self: object, text: str) -> list[int]:
        if "bad" in text:
            raise ValueError("cannot encode a document")
        return [1] * len(text)

    monkeypatch.setattr("coatlm.data.tokenizer.ByteTokenizer.encode", encode)
    for name, text in (("a", "good"), ("b", "bad")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    with pytest.raises(ValueError, match=r"b\.jsonl: cannot encode a document"):
        preprocess([str(tmp_path / "*.jsonl")], tmp_path / "out", Options(), workers=1)
