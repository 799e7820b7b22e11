"""Windows predict every token once, and the perplexity is what transformers computes."""

from __future__ import annotations

import gc
import gzip
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coatlm.data.tokenizer import make_tokenizer
from coatlm.evaluation.perplexity import (
    Document,
    ScoredWindow,
    check_windows,
    read_documents,
    score,
    window_count,
    windows,
)
from coatlm.model.loss import IGNORE

BYTE = make_tokenizer("byte")


@pytest.mark.parametrize("stride", [1, 3, 7, 8])
@pytest.mark.parametrize("length", [2, 7, 8, 9, 10, 16, 17, 30])
def test_each_token_but_the_first_is_predicted_once_with_context(length: int, stride: int) -> None:
    window, ids = 8, list(range(100, 100 + length))
    predicted = []
    for piece in windows(ids, window=window, stride=stride):
        assert len(piece.tokens) == len(piece.labels) <= window
        for at, label in enumerate(piece.labels):
            if label != IGNORE:
                assert label == piece.tokens[at] + 1  # the next of a counting document
                assert at + 1 >= min(label - 100, window - stride + 1)
                predicted.append(label)
    assert predicted == ids[1:]


@pytest.mark.parametrize("stride", [1, 3, 7, 8])
def test_the_count_of_windows_is_known_before_they_are_made(stride: int) -> None:
    for length in range(1, 40):
        pieces = list(windows(range(length), window=8, stride=stride))
        assert window_count(length, window=8, stride=stride) == len(pieces)


def test_only_the_windows_of_a_batch_are_in_memory() -> None:
    alive = []

    def model(tokens: Tensor, labels: Tensor) -> Tensor:
        alive.append(sum(isinstance(thing, ScoredWindow) for thing in gc.get_objects()))
        return tokens.float()

    documents = [Document(tuple(range(50)), 50)] * 4
    score(model, documents, window=8, stride=2, batch=3, device=torch.device("cpu"))
    assert len(alive) == -(-4 * 22 // 3) and max(alive) <= 3


def test_score_is_the_mean_over_predicted_tokens_whatever_the_batch() -> None:
    def model(tokens: Tensor, labels: Tensor) -> Tensor:
        return (tokens + labels / 7).float()

    documents = [Document(tuple(range(n)), 10 * n) for n in (3, 21, 40)]
    expected = [(t + (t + 1) / 7) for d in documents for t in d.ids[:-1]]
    for batch in (1, 4, 100):
        found = score(model, documents, window=8, stride=5, batch=batch, device=torch.device("cpu"))
        assert found.tokens == 2 + 20 + 39 and found.nbytes == 640
        assert found.loss == pytest.approx(sum(expected) / len(expected), rel=1e-6)
        assert found.perplexity == pytest.approx(math.exp(found.loss))
        bits = found.loss * found.tokens / math.log(2)
        assert found.bits_per_byte == pytest.approx(bits / 640)


def test_documents_are_files_of_text_and_lines_of_json(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("näive\ntext")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps({"body": t}) + "\n" for t in ("one", "", "x", "two")))
    files = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl.gz")]
    documents = read_documents(files, BYTE, field="body")
    assert [bytes(d.ids).decode() for d in documents] == ["näive\ntext", "one", "two"]
    assert [d.nbytes for d in documents] == [10, 2, 2]  # the first token is not scored
    prefixed = read_documents(files[1:], BYTE, field="body", prefix=256)
    assert [d.ids for d in prefixed] == [(256, *b) for b in (b"one", b"x", b"two")]
    assert [d.nbytes for d in prefixed] == [3, 1, 3]
    (tmp_path / "c.txt").write_text("x")
    with pytest.raises(ValueError, match=r"c.txt: no document has a token"):
        read_documents([str(tmp_path / "c.txt")], BYTE)


@pytest.mark.parametrize("prefix", [None, 256])
@pytest.mark.parametrize("text", ["ab", "üb", "a", "aüc"])
def test_bits_per_byte_of_a_uniform_model_do_not_depend_on_the_prefix(
    text: str, prefix: int | None, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("more")
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]

    def model(tokens: Tensor, labels: Tensor) -> Tensor:
        return torch.full(tokens.shape, 8 * math.log(2))

    documents = read_documents(files, BYTE, prefix=prefix)
    found = score(model, documents, window=8, stride=8, batch=1, device=torch.device("cpu"))
    assert found.bits_per_byte == pytest.approx(8)


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ((1, 1, 1), "window=1"),
        ((8, 0, 1), "stride=0"),
        ((8, 9, 1), "stride=9"),
        ((8, 8, 0), "batch"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: tuple[int, int, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_windows(*sizes)
