"""Perplexity of documents longer than a window: exp of the mean loss per token.

A document of tokens t_0 .. t_(n-1) is read in windows of W tokens with stride S. A window scores
the tokens that earlier windows have not scored, so every token but the first is scored once, with
at least W - S + 1 tokens of context where the document has so many. S = W is the fastest, S = 1
gives each token the most context. Bits per byte, sum of losses / (ln 2 * bytes of scored text),
compare models with different tokenizers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coatlm.console import progress
from coatlm.data.documents import expand_inputs, file_kind, plan_segments, read_segment
from coatlm.data.tokenizer import Tokenizer
from coatlm.model.loss import IGNORE

LONGEST_WINDOW, MOST_WINDOWS = 1 << 40, 1 << 16  # tokens; windows at a time
WHOLE = 1 << 62  # bytes per segment, so that a text file is one document


@dataclass(frozen=True)
class Document:
    """The token ids of a document, and the size of the text of all but the first in UTF-8 bytes."""

    ids: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class ScoredWindow:
    """Inputs and labels, both of length at most W; labels of tokens scored before are IGNORE."""

    tokens: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """The result over all documents."""

    loss: float  # nats per token
    tokens: int  # scored tokens
    nbytes: int  # of their text

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        return self.loss * self.tokens / (math.log(2) * self.nbytes) if self.nbytes else math.inf


def read_documents(
    inputs: Sequence[str], tokenizer: Tokenizer, *, field: str = "text", prefix: int | None = None
) -> list[Document]:
    """Read and tokenize documents as for training; `prefix` is a token id put before each.

    Raises ValueError if no document has a token to predict.
    """
    documents = []
    for text in _texts(inputs, field):
        ids = tokenizer.encode(text)
        start = [] if prefix is None else [prefix]
        if len(start) + len(ids) > 1:
            unscored = _nbytes(ids[0], tokenizer) if prefix is None else 0
            documents.append(Document((*start, *ids), max(len(text.encode()) - unscored, 0)))
    if not documents:
        raise ValueError(f"{', '.join(inputs)}: no document has a token to predict")
    return documents


def _nbytes(token: int, tokenizer: Tokenizer) -> int:
    """The bytes of a token's text; of a character that it only begins, one."""
    whole, replaced, _ = tokenizer.decode([token]).partition("\ufffd")
    return len(whole.encode()) + len(replaced)


def check_windows(window: int, stride: int, batch: int) -> None:
    """Raise ValueError for invalid sizes."""
    if not 2 <= window <= LONGEST_WINDOW:
        raise ValueError(f"window={window}: must be in 2..{LONGEST_WINDOW}, in tokens")
    if not 1 <= stride <= window:
        raise ValueError(f"stride={stride}: between 1 and window={window}")
    if not 1 <= batch <= MOST_WINDOWS:
        raise ValueError(f"batch={batch}: must be in 1..{MOST_WINDOWS}, in windows")


def windows(ids: Sequence[int], *, window: int, stride: int) -> Iterator[ScoredWindow]:
    """The windows of one document, in order."""
    done = 1  # tokens scored so far, and the first one, which is never scored
    for start in range(0, len(ids), stride):
        stop = min(start + window, len(ids) - 1)
        labels = ids[start + 1 : stop + 1]
        fresh = range(start + 1, stop + 1)
        counted = (n if at >= done else IGNORE for at, n in zip(fresh, labels, strict=True))
        yield ScoredWindow(tuple(ids[start:stop]), tuple(counted))
        done = stop + 1
        if done >= len(ids):
            return


def window_count(tokens: int, *, window: int, stride: int) -> int:
    """The number of windows of a document of at least one token."""
    return 1 + max(-((window + 1 - tokens) // stride), 0)


@torch.no_grad()
def score(
    model: Callable[[Tensor, Tensor], Tensor],
    documents: Iterable[Document],
    *,
    window: int,
    stride: int,
    batch: int,
    device: torch.device,
    what: str = "evaluating",
) -> Score:
    """Score documents with `model(tokens, labels)`, which returns losses [B, W].

    Short windows are padded on the right. `what` is the label of the progress bar.
    """
    documents = list(documents)
    sizes = {"window": window, "stride": stride}
    total = sum(window_count(len(d.ids), **sizes) for d in documents)
    pieces = (p for d in documents for p in windows(d.ids, **sizes))
    losses, counts = [], 0
    with progress(what, total, unit="windows") as advance:
        while some := list(itertools.islice(pieces, batch)):
            tokens = _filled([p.tokens for p in some], window, 0, device)
            labels = _filled([p.labels for p in some], window, IGNORE, device)
            loss = model(tokens, labels).masked_fill(labels == IGNORE, 0.0)
            losses.append(loss.double().sum())
            counts += sum(label != IGNORE for p in some for label in p.labels)
            advance(len(some))
    mean = float(torch.stack(losses).sum()) / counts
    return Score(mean, counts, sum(d.nbytes for d in documents))


def _filled(rows: Sequence[Sequence[int]], width: int, fill: int, device: torch.device) -> Tensor:
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], device=device)


def _texts(inputs: Sequence[str], field: str) -> Iterator[str]:
    """Yield the text of each document."""
    for segment in plan_segments(expand_inputs(inputs), WHOLE):
        blocks = read_segment(segment, field, field)
        if file_kind(segment.path)[0] == "text":
            yield "".join(text for block in blocks for text in block.items)
        else:
            yield from (text for block in blocks for text in block.items)
