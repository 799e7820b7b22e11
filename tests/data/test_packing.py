"""Best-fit packing: no document is cut that fits, no token is lost, and padding does not count."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coatlm.config import Data
from coatlm.data.batches import microbatches
from coatlm.data.dataset import open_datasets
from coatlm.data.order import Stream
from coatlm.data.packing import PackedStream, best_fit, packing_cost, pieces
from coatlm.data.tokenizer import ByteTokenizer
from tests.data.test_dataset import write_foreign

SEQ_LEN = 8
PADDING = -1
sizes = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)


def bounds_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


def stream_of(lengths: list[int], key: tuple[int, ...] = (1,)) -> PackedStream:
    """A stream over tokens that are their own offsets."""
    return PackedStream(np.arange, bounds_of(lengths), seq_len=SEQ_LEN, key=key, padding=PADDING)


@given(sizes)
def test_pieces_predict_every_token_of_a_document_once(lengths: list[int]) -> None:
    bounds = bounds_of(lengths)
    begins, counts = pieces(bounds, SEQ_LEN)
    assert ((counts >= 1) & (counts <= SEQ_LEN + 1)).all()
    predicted = Counter(
        token for b, n in zip(begins, counts, strict=True) for token in range(b + 1, b + n)
    )
    assert all(n > 1 for b, n in zip(begins, counts, strict=True) if b not in bounds)
    first = {int(b) for b, n in zip(bounds, lengths, strict=False) if n}
    assert predicted == Counter(set(range(bounds[-1])) - first)
    whole = [n for n in lengths if 0 < n <= SEQ_LEN + 1]
    starts = dict(zip(begins.tolist(), counts.tolist(), strict=True))
    assert [starts[b] for b, n in zip(bounds.tolist(), lengths, strict=False) if n in whole] == [
        n for n in lengths if n in whole
    ]


def best_fit_ref(lengths: list[int], capacity: int) -> list[int]:
    """The bin of each length, by looking at every bin; of bins with equal room, the last filled."""
    rooms: list[int] = []
    filled: list[int] = []  # number of the piece that was put last into each bin
    bins: list[int] = []
    for number, length in enumerate(lengths):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(capacity)
            filled.append(number)
            fitting = [len(rooms) - 1]
        chosen = min(fitting, key=lambda i: (rooms[i], -filled[i]))
        rooms[chosen] -= length
        filled[chosen] = number
        bins.append(chosen)
    return bins


@settings(max_examples=300)
@given(st.lists(st.integers(1, 20), max_size=60), st.sampled_from([20, 31, 64]))
def test_best_fit_is_its_definition(lengths: list[int], capacity: int) -> None:
    lengths = sorted(lengths, reverse=True)
    found = best_fit(np.asarray(lengths, np.int64), capacity).tolist()
    assert found == best_fit_ref(lengths, capacity)


def test_best_fit_takes_the_bin_with_the_least_room() -> None:
    # 7, 6 and 5 open bins with room 3, 4 and 5; 4 fills the second, 3 the first, 2 and 2 the third
    lengths = np.array([7, 6, 5, 4, 3, 2, 2])
    assert best_fit(lengths, 10).tolist() == [0, 1, 2, 1, 0, 2, 2]


@settings(max_examples=50)
@given(sizes, st.integers(0, 3))
def test_an_epoch_has_every_piece_once_and_whole_documents_where_they_fit(
    lengths: list[int], epoch: int
) -> None:
    stream = stream_of(lengths)
    samples = range(epoch * stream.windows, (epoch + 1) * stream.windows)
    found = sorted(itertools.chain.from_iterable(stream.ranges(i) for i in samples))
    begins, counts = pieces(bounds_of(lengths), SEQ_LEN)
    assert found == sorted(zip(begins.tolist(), (begins + counts).tolist(), strict=True))
    for i in samples:
        ids = stream[i]
        assert len(ids) == SEQ_LEN + 1
        expected = [t for a, b in stream.ranges(i) for t in range(a, b)]
        assert ids.tolist() == expected + [PADDING] * (SEQ_LEN + 1 - len(expected))


def test_the_share_of_padding_is_that_of_the_samples() -> None:
    stream = stream_of([9, 5, 4, 3])
    ids = np.concatenate([stream[i] for i in range(stream.windows)])
    assert stream.windows == 3
    assert stream.padded == pytest.approx((ids == PADDING).mean()) == pytest.approx(6 / 27)


@given(sizes)
def test_the_cost_of_packing_is_that_of_the_samples(lengths: list[int]) -> None:
    bounds = bounds_of(lengths)
    documents = {(a, b) for a, b in itertools.pairwise(bounds.tolist()) if a < b}
    packed, plain = stream_of(lengths), Stream(np.arange, bounds, seq_len=SEQ_LEN, key=())
    cost = packing_cost(bounds, SEQ_LEN)
    assert list(cost) == ["best-fit", "concat"]
    for stream, found in zip((packed, plain), cost.values(), strict=True):
        whole = {part for i in range(stream.windows) for part in stream.ranges(i)} & documents
        assert (found.samples, found.cut) == (stream.windows, len(documents - whole))
    assert cost["best-fit"].padded == packed.padded and cost["concat"].padded == 0


def test_the_cost_of_packing_by_hand() -> None:
    # in samples of 9 tokens: 9 | 5 + 4 | 9 of 12 | 4 more of 12, a token of them a second time
    assert packing_cost(bounds_of([9, 5, 4, 12]), 8)["best-fit"] == (4, 1 - 31 / 36, 1)
    # samples end behind tokens 9, 17 and 25: each of these documents crosses the end of one
    assert packing_cost(bounds_of([7, 7, 7, 7]), 8)["concat"] == (3, 0, 3)
    assert packing_cost(bounds_of([5]), 8) == {"best-fit": (1, 1 - 5 / 9, 0), "concat": (0, 0, 1)}


def test_epochs_and_seeds_differ_and_a_sample_depends_on_nothing_read_before() -> None:
    lengths = [2, 3, 4, 2, 3, 4, 5, 5] * 4
    stream = stream_of(lengths)
    orders = [
        [stream.ranges(e * stream.windows + i) for i in range(stream.windows)] for e in (0, 1)
    ]
    assert orders[0] != orders[1]
    assert sorted(map(sorted, orders[0])) != sorted(map(sorted, orders[1]))  # other neighbors too
    assert stream_of(lengths).ranges(stream.windows + 3) == orders[1][3]
    assert stream_of(lengths, key=(2,)).ranges(0) != orders[0][0]


def options(prefix: Path, **more: object) -> Data:
    return Data.model_validate(
        {"paths": [prefix], "seq_len": SEQ_LEN, "packing": "best-fit", **more}
    )


def test_padding_and_repeated_tokens_do_not_count(tmp_path: Path) -> None:
    documents = [[10 + d] * n for d, n in enumerate([21, 3, 4, 9, 2])]
    prefix = write_foreign(tmp_path / "x", documents)
    train = open_datasets(options(prefix, split=[1, 0, 0]), ByteTokenizer(), seed=3).train
    stream = train.streams[0]
    assert isinstance(stream, PackedStream)
    inside = 0
    for epoch in range(8):
        counted = leading = 0
        for i in range(epoch * stream.windows, (epoch + 1) * stream.windows):
            mask, starts = train.counted(i), [a for a, _ in stream.ranges(i)]
            assert mask is not None and (mask[train[i] == ByteTokenizer.eod] == 0).all()
            counted += int(mask[1:].sum())
            leading += stream.repeats(starts[0])
            inside += sum(map(stream.repeats, starts[1:]))
        # each token once, but the first of a sample that begins with a document
        assert counted == 21 + 3 + 4 + 9 + 2 - (stream.windows - leading)
    assert inside > 0  # a later piece of the first document came behind another document


def test_documents_of_a_sample_are_told_apart_without_end_of_document(tmp_path: Path) -> None:
    documents = [[10 + d] * n for d, n in enumerate([5, 3, 4, 9, 2])]
    prefix = write_foreign(tmp_path / "x", documents)
    data = options(prefix, split=[1, 0, 0], reset_attention_mask=True)
    train = open_datasets(data, ByteTokenizer(), seed=3).train
    (batch,) = microbatches(train, 0, global_batch=4, micro_batch=4, dp_rank=0, dp_size=1)
    bounds = batch["document_bounds"]
    assert bounds is not None
    for tokens, row in zip(batch["tokens"].tolist(), bounds.tolist(), strict=True):
        changes = [i + 1 for i, (a, b) in enumerate(itertools.pairwise(tokens)) if a != b]
        length = len(tokens)
        assert row == [0, *changes] + [length] * (len(row) - len(changes) - 1)
    assert bounds.shape[1] > 3


def test_the_log_says_how_much_is_padding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefix = write_foreign(tmp_path / "x", [[1] * 9, [2] * 5, [3] * 4, [4] * 12])
    with caplog.at_level(logging.INFO, "coatlm"):
        open_datasets(options(prefix, split=[1, 0, 0]), ByteTokenizer(), seed=3)
    (line,) = [r.getMessage() for r in caplog.records]
    # 9 | 9 of 12 | 5 + 4 | 4 more of 12
    assert line.endswith(
        "x: train: 4 documents in 4 samples, 13.89 % padding, 1 documents longer than a sample"
    )


def test_the_order_of_packed_samples_is_the_same_in_every_version(tmp_path: Path) -> None:
    """If this changes, runs that were begun before it cannot be resumed."""
    prefix = write_foreign(tmp_path / "a", [[d % 256] * (d % 11 + 1) for d in range(250)])
    datasets = open_datasets(options(prefix), ByteTokenizer(), seed=1234)
    digest = hashlib.sha256()
    for part in (datasets.train, datasets.validation, datasets.test):
        assert part is not None
        for i in range(300):
            digest.update(part[i].astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "c9cc86b0090a9832"
