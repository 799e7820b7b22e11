"""Tokenizers go along: the files of a directory, and what a run names in data.tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from coatlm.config import ConfigError, load_config
from coatlm.convert.from_hf import from_huggingface
from coatlm.convert.to_hf import to_huggingface
from coatlm.data.tokenizer import make_tokenizer
from coatlm.hf.files import write_json
from coatlm.hf.tokenizer import export_tokenizer, spec_in, tokenizer_of
from coatlm.train.changes import check_changes
from coatlm.train.checkpoint import read_state
from coatlm.train.resume import _check_tokenizer
from tests.hf.models import make_model

TEXT = ["the cat sat on the mat, and the dog saw the cat", "a rat ran at the cat; naïve café"] * 50


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer.json whose end-of-document token no list of names knows."""
    directory = tmp_path_factory.mktemp("source")
    make_model("llama").save_pretrained(directory)
    model = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<start>", "<stop>"]
    model.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=120, special_tokens=special))
    model.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<stop>"}
    write_json(directory / "tokenizer_config.json", config)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def test_files_of_a_directory_go_there_and_back_unchanged(source: Path, tmp_path: Path) -> None:
    from_huggingface(source, tmp_path / "coatlm")
    to_huggingface(tmp_path / "coatlm", tmp_path / "back")
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
             "generation_config.json")  # fmt: skip
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()


def test_converted_checkpoint_names_its_own_copy_and_the_end_of_document(
    source: Path, tmp_path: Path
) -> None:
    from_huggingface(source, tmp_path / "coatlm")
    state = read_state(tmp_path / "coatlm")
    spec = state["config"]["data"]["tokenizer"]
    assert spec == f"hf:{tmp_path}/coatlm/tokenizer.json?eod=<stop>"
    tokenizer = make_tokenizer(spec)
    assert (tokenizer.eod, tokenizer.fingerprint) == (2, state["tokenizer"])


def test_tokenizer_given_in_place_of_the_directorys_is_the_one_that_goes_along(
    source: Path, tmp_path: Path
) -> None:
    from_huggingface(source, tmp_path / "coatlm", tokenizer="byte")
    to_huggingface(tmp_path / "coatlm", tmp_path / "back")
    names = {path.name for path in (tmp_path / "back").iterdir()}
    assert "chat_template.jinja" not in names and "generation_config.json" in names
    ids = AutoTokenizer.from_pretrained(tmp_path / "back").encode("é")
    assert ids == list("é".encode())
    report = to_huggingface(tmp_path / "coatlm", tmp_path / "like", like=source)
    assert f"{source} has another tokenizer than the run: byte was exported" in report.notes
    for name in ("back", "like"):
        assert not (tmp_path / name / "chat_template.jinja").exists()
        for file in ("config.json", "generation_config.json"):
            ids = json.loads((tmp_path / name / file).read_text())
            assert ids["eos_token_id"] == ids["bos_token_id"] == make_tokenizer("byte").eod


@pytest.mark.parametrize("end", ["<stop>", "<start>"])
def test_a_run_may_end_documents_otherwise_than_the_directory(
    end: str, source: Path, tmp_path: Path
) -> None:
    spec = f"hf:{source}/tokenizer.json?eod={end}"
    from_huggingface(source, tmp_path / "coatlm", tokenizer=spec)
    report = to_huggingface(tmp_path / "coatlm", tmp_path / "back", like=source)
    assert report.notes == ()
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()


def test_without_a_hugging_face_form_of_the_runs_tokenizer_the_directorys_goes_along(
    source: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    other.write_bytes((source / "tokenizer.json").read_bytes())
    from_huggingface(source, tmp_path / "coatlm", tokenizer=f"hf:{other}?eod=<stop>")
    state = json.loads((tmp_path / "coatlm" / "state.json").read_text())
    assert not to_huggingface(tmp_path / "coatlm", tmp_path / "same", like=source).notes
    other.write_text(other.read_text().replace('"<start>"', '"<begin>"'))
    assert (
        state["tokenizer"] == make_tokenizer(f"hf:{source}/tokenizer.json?eod=<stop>").fingerprint
    )
    directory = tmp_path / "another"
    directory.mkdir()
    for path in source.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    (directory / "tokenizer.json").write_bytes(other.read_bytes())
    other.unlink()
    report = to_huggingface(tmp_path / "coatlm", tmp_path / "back", like=directory)
    assert f"the tokenizer of {directory} was copied: the run's" in report.notes[0]
    copied = tmp_path / "back" / "tokenizer.json"
    assert copied.read_bytes() == (directory / "tokenizer.json").read_bytes()


def test_export_of_a_run_carries_the_file_that_it_trained_with(
    source: Path, tmp_path: Path
) -> None:
    spec = f"hf:{source}/tokenizer.json?eod=<stop>"
    fingerprint = make_tokenizer(spec).fingerprint
    assert export_tokenizer(spec, fingerprint, tmp_path) == (2, "")
    ids = AutoTokenizer.from_pretrained(tmp_path).encode(TEXT[0], add_special_tokens=False)
    assert ids == make_tokenizer(spec).encode(TEXT[0])
    with pytest.raises(ValueError, match="not the file that this checkpoint trained with"):
        export_tokenizer(spec, "0" * 64, tmp_path)
    eod, note = export_tokenizer("hf:gone/tokenizer.json", fingerprint, tmp_path)
    assert eod is None and "no tokenizer was written" in note and "gone" in note


def train_sentencepiece(directory: Path, **options: Any) -> str:
    (directory / "text.txt").write_text("\n".join(TEXT))
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "text.txt"),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    return f"sentencepiece:{directory}/tokenizer.model"


def test_sentencepiece_model_like_llamas_is_read_by_transformers_with_the_same_ids(
    tmp_path: Path,
) -> None:
    like_llama = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    spec = train_sentencepiece(tmp_path, **like_llama)
    assert spec_in(tmp_path, 2) == spec
    tokenizer = make_tokenizer(spec)
    (tmp_path / "out").mkdir()
    assert export_tokenizer(spec, tokenizer.fingerprint, tmp_path / "out") == (tokenizer.eod, "")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in (TEXT[0], "two  spaces ", "\u4e2d\n\nx"):
        assert loaded.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    assert loaded.eos_token_id == tokenizer.eod


def test_sentencepiece_model_that_normalises_is_copied_with_a_note(tmp_path: Path) -> None:
    spec = train_sentencepiece(tmp_path)
    tokenizer = make_tokenizer(spec)
    (tmp_path / "out").mkdir()
    eod, note = export_tokenizer(spec, tokenizer.fingerprint, tmp_path / "out")
    assert eod == tokenizer.eod and "transformers has no tokenizer for it" in note
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer.model"]


def test_first_of_several_end_tokens_counts(source: Path, tmp_path: Path) -> None:
    raw = json.loads((source / "config.json").read_text())
    assert spec_in(source, 1) == f"hf:{source}/tokenizer.json?eod=<start>"
    assert raw["eos_token_id"] == 2
    for eos in ([1, 2], None):
        write_json(source / "config.json", {**raw, "eos_token_id": eos})
        write_json(source / "generation_config.json", {"eos_token_id": [1, 2]})
        from_huggingface(source, tmp_path / str(eos))
        spec = read_state(tmp_path / str(eos))["config"]["data"]["tokenizer"]
        assert spec.endswith("?eod=<start>")


def test_a_checkpoint_without_a_tokenizer_makes_the_run_name_one(
    source: Path, tmp_path: Path
) -> None:
    report = from_huggingface(source, tmp_path / "coatlm", tokenizer="none")
    assert report.notes == ("no tokenizer: a run from this checkpoint has to name data.tokenizer",)
    assert not (tmp_path / "coatlm/tokenizer.json").exists()
    text = [f"data.text={tmp_path}/coatlm/config.json"]
    with pytest.raises(ConfigError, match=r"data\.tokenizer=null"):
        load_config(tmp_path / "coatlm/config.yaml", text)
    config = load_config(tmp_path / "coatlm/config.yaml", [*text, "data.tokenizer=byte"])
    state = read_state(tmp_path / "coatlm")
    assert state["tokenizer"] == ""
    fingerprint = make_tokenizer("byte").fingerprint
    _check_tokenizer(tmp_path, state, config, fingerprint)
    (line,) = check_changes(tmp_path, state, config, tokenizer=fingerprint, data=[])
    assert line.startswith("data.text: ")  # the tokenizer is not a change
    report = to_huggingface(tmp_path / "coatlm", tmp_path / "back")
    assert report.notes == ("no tokenizer was written: the checkpoint has none",)
    assert not (tmp_path / "back/tokenizer.json").exists()


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("eos", [-1, 2**40])
def test_an_end_of_text_id_outside_the_vocabulary_is_refused_with_its_file(
    source: Path, tmp_path: Path, file: str, eos: int
) -> None:
    raw = json.loads((source / "config.json").read_text()) | {"eos_token_id": None}
    (tmp_path / "tokenizer.json").write_text((source / "tokenizer.json").read_text())
    if file == "config.json":
        raw["eos_token_id"] = eos
    else:
        write_json(tmp_path / file, {"eos_token_id": eos})
    with pytest.raises(ValueError, match=rf"{file}: eos_token_id={eos}: a token id from 0 to"):
        tokenizer_of(tmp_path, raw)
