"""Tiny tokenizers, trained or written here, one file of each kind; and a prepared dataset."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest

from coatlm.data.preprocess import preprocess
from coatlm.data.token_shard import Options
from tests.bpe import train_bpe

CORPUS = [
    "The quick brown fox jumps over the lazy dog.\n",
    "def area(radius):\n    return 3.14159 * radius ** 2\n",
    "Zwei Füchse, drei Hähne, 42 Bäume.\n",
    "low rank, low precision, low loss: slow is smooth and smooth is fast\n",
] * 20
PATTERN = r"\p{L}+|\p{N}+|\s+|[^\s\p{L}\p{N}]+"


@pytest.fixture(scope="session")
def hf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer.json that would truncate and pad if it were let."""
    model = train_bpe(CORPUS, vocab_size=320)
    model.enable_truncation(max_length=4)
    model.enable_padding(length=64)
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    model.save(str(path))
    return path


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BPE model with byte fallback, no normalization, and </s>."""
    return _train_sentencepiece(tmp_path_factory.mktemp("sp") / "with.model", eos_id=2)


@pytest.fixture(scope="session")
def sentencepiece_file_without_eos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sp") / "without.model"
    return _train_sentencepiece(path, eos_id=-1, control_symbols=["<end>"])


def _train_sentencepiece(path: Path, **options: object) -> Path:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="session")
def tiktoken_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 bytes and three merges."""
    tokens = [bytes([b]) for b in range(256)] + [b"lo", b"low", b"th"]
    lines = [base64.b64encode(t) + f" {rank}\n".encode() for rank, t in enumerate(tokens)]
    path = tmp_path_factory.mktemp("tiktoken") / "tiny.tiktoken"
    path.write_bytes(b"".join(lines))
    return path


@pytest.fixture(params=["byte", "hf", "sentencepiece", "tiktoken"])
def spec(
    request: pytest.FixtureRequest, hf_file: Path, sentencepiece_file: Path, tiktoken_file: Path
) -> str:
    """A spec of each kind."""
    return {
        "byte": "byte",
        "hf": f"hf:{hf_file}",
        "sentencepiece": f"sentencepiece:{sentencepiece_file}",
        "tiktoken": f"tiktoken:{tiktoken_file}?pattern={PATTERN}",
    }[request.param]


def write_text(path: Path, count: int = 60, seed: int = 0) -> Path:
    """A prepared dataset of `count` documents of 1 .. 90 bytes."""
    rng = np.random.default_rng(seed)
    lines = [
        json.dumps({"text": "".join(map(chr, rng.integers(97, 123, n)))})
        for n in rng.integers(1, 90, count)
    ]
    source = path.with_suffix(".jsonl")
    source.write_text("\n".join(lines))
    preprocess([str(source)], path, Options(), workers=1)
    return path


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "letters")
