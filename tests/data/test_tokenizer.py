from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from coatlm.data.tokenizer import ByteTokenizer, make_tokenizer
from tests.data.conftest import CORPUS, PATTERN

TEXTS = ["", " ", "\n\n", "naïve — 東京 🦊\x00\t", "a\r\nb", *CORPUS[:4]]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_decodes_what_it_encoded(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eod]) == text


@pytest.mark.parametrize("text", TEXTS)
def test_every_kind_decodes_what_it_encoded(spec: str, text: str) -> None:
    tokenizer = make_tokenizer(spec)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_a_vocabulary_with_the_html_tag_of_strike_through_ends_documents_with_eos(
    tmp_path: Path,
) -> None:
    vocabulary = {"<unk>": 0, "</s>": 1, "<eos>": 2}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.save(str(tmp_path / "tokenizer.json"))
    assert make_tokenizer(f"hf:{tmp_path}/tokenizer.json").eod == 2
    assert make_tokenizer(f"hf:{tmp_path}/tokenizer.json?eod=</s>").eod == 1


def test_every_kind_has_its_eod_inside_the_vocabulary(spec: str) -> None:
    tokenizer = make_tokenizer(spec)
    assert 0 <= tokenizer.eod < tokenizer.vocab_size


def test_vocabularies_have_the_sizes_they_were_made_with(
    hf_file: Path, sentencepiece_file: Path, tiktoken_file: Path
) -> None:
    assert make_tokenizer("byte").vocab_size == 257
    assert make_tokenizer(f"hf:{hf_file}").vocab_size == 320
    assert make_tokenizer(f"sentencepiece:{sentencepiece_file}").vocab_size == 340
    tiktoken = make_tokenizer(f"tiktoken:{tiktoken_file}?pattern={PATTERN}")
    assert (tiktoken.vocab_size, tiktoken.eod) == (256 + 3 + 1, 259)


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<end>"])
def test_text_that_spells_eod_does_not_encode_to_it(spec: str, name: str) -> None:
    tokenizer = make_tokenizer(spec)
    ids = tokenizer.encode(f"before{name}after")
    assert tokenizer.eod not in ids
    assert tokenizer.decode(ids) == f"before{name}after"


@pytest.mark.parametrize("text", ["before</s>after", "</s>", "</s></s> </s>"])
def test_eod_that_is_an_ordinary_piece_is_spelled_in_text(text: str, tmp_path: Path) -> None:
    pieces = [(c, -9.0) for c in "</s>beforat "] + [("</s>", -1.0)]
    model = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), *pieces], unk_id=0))
    model.decoder = tokenizers.decoders.Fuse()
    assert model.encode(text).ids.count(len(pieces)) == text.count("</s>")
    model.save(str(tmp_path / "unigram.json"))
    tokenizer = make_tokenizer(f"hf:{tmp_path}/unigram.json")
    assert tokenizer.eod == len(pieces)
    ids = tokenizer.encode(text)
    assert tokenizer.eod not in ids
    assert tokenizer.decode(ids) == text


def test_eod_that_text_cannot_spell_is_an_error(tmp_path: Path) -> None:
    pieces = [(c, -9.0) for c in "<s>a"] + [("</s>", -1.0)]
    model = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), *pieces], unk_id=0))
    model.save(str(tmp_path / "unigram.json"))
    tokenizer = make_tokenizer(f"hf:{tmp_path}/unigram.json")
    with pytest.raises(ValueError, match=r"unigram\.json: a document has .*'</s>'.*\?eod=TOKEN"):
        tokenizer.encode("a</s>a")
    assert tokenizer.decode(tokenizer.encode("a")) == "a"


def test_merges_are_applied(hf_file: Path, tiktoken_file: Path) -> None:
    assert len(make_tokenizer(f"hf:{hf_file}").encode("The quick")) < len("The quick")
    tiktoken = make_tokenizer(f"tiktoken:{tiktoken_file}?pattern={PATTERN}")
    assert tiktoken.encode("low") == [257]


def test_hf_neither_truncates_nor_pads(hf_file: Path) -> None:
    tokenizer = make_tokenizer(f"hf:{hf_file}")  # its file asks for at most 4 and at least 64
    assert len(tokenizer.encode("a")) == 1
    assert len(tokenizer.encode("".join(CORPUS))) > 64


def test_fingerprint_follows_the_content_and_not_the_path(
    spec: str, tmp_path: Path, hf_file: Path, tiktoken_file: Path
) -> None:
    fingerprint = make_tokenizer(spec).fingerprint
    assert len(fingerprint) == 64
    assert make_tokenizer(spec).fingerprint == fingerprint
    for suffix, path in ((".json", hf_file), (".tiktoken", tiktoken_file)):
        if str(path) in spec:
            copy = shutil.copy(path, tmp_path / f"copy{suffix}")
            assert make_tokenizer(spec.replace(str(path), str(copy))).fingerprint == fingerprint


def test_fingerprints_of_different_tokenizers_differ(
    hf_file: Path, sentencepiece_file: Path, tiktoken_file: Path
) -> None:
    specs = [
        "byte",
        f"hf:{hf_file}",
        f"hf:{hf_file}?eod=!",
        f"sentencepiece:{sentencepiece_file}",
        f"tiktoken:{tiktoken_file}?pattern={PATTERN}",
        f"tiktoken:{tiktoken_file}?pattern=.",
    ]
    assert len({make_tokenizer(spec).fingerprint for spec in specs}) == len(specs)


def test_the_fingerprint_of_byte_is_the_same_in_every_version() -> None:
    assert make_tokenizer("byte").fingerprint.startswith("1c31626f568a075d")


def test_eod_can_be_named(sentencepiece_file_without_eos: Path, hf_file: Path) -> None:
    named = make_tokenizer(f"sentencepiece:{sentencepiece_file_without_eos}?eod=<end>")
    assert named.eod not in named.encode("<end>")
    assert (
        make_tokenizer(f"hf:{hf_file}?eod=!").eod == make_tokenizer(f"hf:{hf_file}").encode("!")[0]
    )


def test_a_vocabulary_without_eod_is_an_error_that_says_how_to_name_one(
    sentencepiece_file_without_eos: Path,
) -> None:
    with pytest.raises(ValueError, match=r"\?eod=TOKEN"):
        make_tokenizer(f"sentencepiece:{sentencepiece_file_without_eos}")


def test_an_eod_that_is_not_in_the_vocabulary_is_an_error(hf_file: Path) -> None:
    with pytest.raises(ValueError, match="no token '<nope>'"):
        make_tokenizer(f"hf:{hf_file}?eod=<nope>")


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "bytes",
        "byte:x",
        "hf",
        "hf:",
        "words:x",
        "hf:x?color=red",
        "hf:x?pattern=.",
        "tiktoken:x?eod=y",
    ],
)
def test_a_spec_that_does_not_exist_is_an_error_that_quotes_it(spec: str) -> None:
    with pytest.raises(ValueError, match=r"data\.tokenizer=") as error:
        make_tokenizer(spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["hf", "sentencepiece", "tiktoken"])
@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), (b"", "empty"), (b"\xff{[ nonsense", "not")]
)
def test_a_bad_tokenizer_file_is_a_one_line_error_that_names_it(
    kind: str, content: bytes | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as error:
        make_tokenizer(f"{kind}:{path}")
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


WORDS = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"}
BAD_HF = {  # content of a tokenizer.json
    "a panic": {
        "version": "1.0",
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        "model": WORDS,
    },
    "ids beyond 32 bits": {"version": "1.0", "model": WORDS | {"vocab": {"a": 0, "</s>": 2**31}}},
    "no model": {"version": "1.0"},
    "a long name": {"version": "1.0", "model": {"type": "x" * 100_000}},
    "a number": 7,
}


@pytest.mark.parametrize("case", BAD_HF)
def test_an_invalid_tokenizer_json_is_one_line_and_nothing_else(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(BAD_HF[case]))
    with pytest.raises(ValueError, match=r"tokenizer\.json") as error:
        make_tokenizer(f"hf:{path}")
    assert "\n" not in str(error.value) and len(str(error.value)) <= 400
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("opening", ["[", '{"model":', '{"normalizer":{"type":"Sequence","x":['])
def test_a_nested_tokenizer_json_is_an_error(opening: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(opening * 100_000)
    with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
        make_tokenizer(f"hf:{path}")


@pytest.mark.parametrize(
    "model", [{"unk_token": "none"}, {"type": "WordPiece", "unk_token": "none"}]
)
def test_text_that_a_tokenizer_cannot_encode_is_an_error(
    model: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    rest = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    path.write_text(json.dumps({"version": "1.0", "model": WORDS | rest | model}))
    with pytest.raises(ValueError, match=r"tokenizer\.json: cannot encode .*\[UNK\]"):
        make_tokenizer(f"hf:{path}").encode("b")


@pytest.mark.parametrize("rank", [-5, 2**31, 2**32])
def test_a_rank_that_is_no_id_is_an_error(rank: int, tiktoken_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.tiktoken"
    path.write_bytes(tiktoken_file.read_bytes().replace(b" 258\n", f" {rank}\n".encode()))
    with pytest.raises(ValueError, match="line 259 is not `base64 rank`"):
        make_tokenizer(f"tiktoken:{path}?pattern={PATTERN}")


@pytest.mark.parametrize("kind", ["hf", "sentencepiece", "tiktoken"])
def test_a_pipe_is_not_a_tokenizer(kind: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: is not a regular file"):
        make_tokenizer(f"{kind}:{tmp_path / 'pipe'}")


def test_a_rank_file_needs_a_pattern(tiktoken_file: Path) -> None:
    with pytest.raises(ValueError, match=r"\?pattern=REGEX"):
        make_tokenizer(f"tiktoken:{tiktoken_file}")
    with pytest.raises(ValueError, match=r"data\.tokenizer="):
        make_tokenizer(f"tiktoken:{tiktoken_file}?pattern=(")


def test_a_rank_file_covers_every_byte_once(tiktoken_file: Path, tmp_path: Path) -> None:
    lines = tiktoken_file.read_bytes().splitlines(keepends=True)
    for name, content in (("gap", lines[1:]), ("tie", [*lines, b"bG93dGg= 258\n"])):
        path = tmp_path / name
        path.write_bytes(b"".join(content))
        with pytest.raises(ValueError, match="unique and cover"):
            make_tokenizer(f"tiktoken:{path}?pattern={PATTERN}")


def test_a_named_encoding_that_is_neither_cached_nor_reachable_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import tiktoken.load

    def offline(_: str) -> bytes:
        raise ConnectionError("no network")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.load, "read_file", offline)
    with pytest.raises(ValueError, match=r"TIKTOKEN_CACHE_DIR.*no network"):
        make_tokenizer("tiktoken:cl100k_base")


def test_a_missing_package_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        make_tokenizer("hf:tokenizer.json")


@pytest.mark.parametrize("text", [*TEXTS, "<|end|>", "é" * 5000])
def test_ids_are_those_of_the_library_whose_way_with_offsets_is_slower(
    hf_file: Path, text: str
) -> None:
    model = tokenizers.Tokenizer.from_file(str(hf_file))
    model.no_truncation()
    model.no_padding()
    model.encode_special_tokens = True
    expected = model.encode(text, add_special_tokens=False).ids
    assert make_tokenizer(f"hf:{hf_file}").encode(text) == expected
