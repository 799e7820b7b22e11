"""The microbatches of each rank: which samples they are made of, and what is in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from coatlm.data.batches import BatchIterator, Microbatch, document_bounds, microbatches
from coatlm.data.dataset import Dataset, open_datasets
from coatlm.data.order import Blend
from coatlm.data.packing import PackedStream
from tests.data.test_dataset import BYTE, SEQ_LEN, options, write_foreign


def step_rows(dataset: Dataset, step: int, dp_size: int, micro: int = 2) -> list[list[int]]:
    """The token rows of a step of 8 samples, from all ranks, in the order of samples."""
    ranks = [
        list(
            microbatches(
                dataset, 8 * step, global_batch=8, micro_batch=micro, dp_rank=r, dp_size=dp_size
            )
        )
        for r in range(dp_size)
    ]
    return [row for k in range(len(ranks[0])) for r in ranks for row in r[k]["tokens"].tolist()]


@pytest.fixture
def train(prefix: Path) -> Dataset:
    return open_datasets(options(prefix), BYTE, seed=7).train


def test_a_step_reads_the_same_samples_for_any_number_of_ranks(train: Dataset) -> None:
    for step in (0, 3, 40):
        expected = [train[step * 8 + i][:-1].tolist() for i in range(8)]
        for dp_size, micro in ((1, 1), (1, 8), (2, 2), (4, 1), (4, 2), (8, 1)):
            assert step_rows(train, step, dp_size, micro) == expected


def test_a_resumed_run_reads_what_a_straight_run_reads(prefix: Path, train: Dataset) -> None:
    straight = [step_rows(train, step, 1) for step in range(60)]
    for start in (1, 17, 59):
        resumed = open_datasets(options(prefix), BYTE, seed=7).train
        assert step_rows(resumed, start, 2) == straight[start]


def test_training_depends_on_the_seed_and_validation_does_not(prefix: Path) -> None:
    one, two = (open_datasets(options(prefix), BYTE, seed=seed) for seed in (1, 2))
    assert step_rows(one.train, 0, 1) != step_rows(two.train, 0, 1)
    assert one.validation is not None and two.validation is not None
    assert step_rows(one.validation, 0, 1) == step_rows(two.validation, 0, 1)


def test_a_batch_that_does_not_divide_is_an_error(train: Dataset) -> None:
    with pytest.raises(ValueError, match="global_batch=6 is not a multiple of micro_batch"):
        list(microbatches(train, 0, global_batch=6, micro_batch=2, dp_rank=0, dp_size=2))


SHAPE = dict(global_batch=8, micro_batch=2, dp_rank=1, dp_size=2)


def equal(a: Microbatch, b: Microbatch) -> bool:
    keys = ("tokens", "labels", "loss_mask")
    return all(torch.equal(a[key], b[key]) for key in keys)  # type: ignore[literal-required]


def test_reading_ahead_changes_nothing(train: Dataset) -> None:
    with BatchIterator(train, first_sample=40, **SHAPE) as iterator:
        for step, batches in zip(range(5, 30), iterator, strict=False):
            expected = list(microbatches(train, 8 * step, **SHAPE))
            assert len(batches) == len(expected) == 2
            assert all(equal(a, b) for a, b in zip(batches, expected, strict=True))


def test_an_error_while_reading_ahead_reaches_the_caller(train: Dataset) -> None:
    with (
        BatchIterator(train, **SHAPE | {"global_batch": 6}) as iterator,
        pytest.raises(ValueError, match="global_batch=6"),
    ):
        next(iterator)


def batch_of(rows: list[list[int]], **flags: bool) -> Microbatch:
    """A batch whose samples are `rows`, eod = 0."""

    class Rows(Dataset):
        def __getitem__(self, sample: int) -> NDArray[np.int64]:
            return np.asarray(rows[sample])

        def documents(self, sample: int) -> NDArray[np.int32]:
            return np.zeros(len(rows[sample]), np.int32)

        def eod_inside(self, sample: int) -> bool:
            return False

    dataset = Rows([], Blend([1.0]), seq_len=len(rows[0]) - 1, eod=0, **flags)
    shape = dict(global_batch=len(rows), micro_batch=len(rows), dp_rank=0, dp_size=1)
    (batch,) = microbatches(dataset, 0, **shape)
    return batch


def test_labels_are_the_tokens_one_position_later() -> None:
    batch = batch_of([[5, 6, 0, 7, 8]])
    assert batch["tokens"].tolist() == [[5, 6, 0, 7]]
    assert batch["labels"].tolist() == [[6, 0, 7, 8]]
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 1]]
    assert batch["document_bounds"] is None
    assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
    assert batch["loss_mask"].dtype == torch.float32


def test_eod_mask_loss_leaves_out_what_follows_an_eod() -> None:
    batch = batch_of([[5, 0, 0, 7, 8], [0, 1, 2, 3, 0]], eod_mask_loss=True)
    assert batch["loss_mask"].tolist() == [[1, 0, 0, 1], [0, 1, 1, 1]]


@pytest.mark.parametrize("eod", [0, 99])
def test_eod_mask_loss_follows_the_documents_of_packed_samples(eod: int) -> None:
    """Token 0 is the end of a turn, or an ordinary token of documents prepared without eod."""
    flat, bounds = np.array([5, 6, 0, 7, 8, 9, 1]), np.array([0, 5, 7])
    stream = PackedStream(lambda a, b: flat[a:b], bounds, seq_len=6, key=(0,), padding=eod)
    flags = {"eod_mask_loss": True, "reset_attention_mask": True}
    dataset = Dataset([stream], Blend([1.0]), 6, eod, **flags)
    (batch,) = microbatches(dataset, 0, global_batch=1, micro_batch=1, dp_rank=0, dp_size=1)
    documents = batch["document_bounds"]
    assert documents is not None
    assert batch["tokens"].tolist() == [[9, 1, 5, 6, 0, 7]]
    assert documents.tolist() == [[0, 2, 6]]
    assert batch["loss_mask"].tolist() == [[1, 0, 1, 1, 1, 1]]


def test_a_document_begins_behind_an_eod() -> None:
    batch = batch_of([[5, 0, 0, 7, 8], [0, 1, 2, 0, 4]], reset_attention_mask=True)
    assert batch["document_bounds"] is not None
    assert batch["document_bounds"].tolist() == [[0, 2, 3, 4, 4], [0, 1, 4, 4, 4]]
    assert batch["document_bounds"].dtype == torch.int32


def starts(dataset: Dataset, samples: int) -> list[list[int]]:
    """Where the documents of each of the first samples begin."""
    shape = dict(global_batch=samples, micro_batch=1, dp_rank=0, dp_size=1)
    found = []
    for batch in microbatches(dataset, 0, **shape):
        bounds = batch["document_bounds"]
        assert bounds is not None
        found.append([b for b in bounds[0].tolist() if b < dataset.seq_len])
    return found


def test_documents_of_the_index_and_eods_separate_tokens_and_turns_do_not(tmp_path: Path) -> None:
    """Foreign documents without an eod at their end, and with one in their middle."""
    prefix = write_foreign(tmp_path / "x", [[9, 9, BYTE.eod, 9, 9]] * 40)
    train = open_datasets(options(prefix, split=(1, 0, 0)), BYTE, seed=7).train
    sizes = [[b - a for a, b in train.streams[0].ranges(i)] for i in range(8)]
    indexed = [[0, *np.cumsum(lengths[:-1]).tolist()] for lengths in sizes]
    behind = [np.flatnonzero(train[i][:-1] == BYTE.eod) + 1 for i in range(8)]
    assert starts(train, 8) == [
        sorted({b for b in {*begins, *more.tolist()} if b < SEQ_LEN})
        for begins, more in zip(indexed, behind, strict=True)
    ]
    (source,) = train.sources
    conversations = replace(train, sources=[replace(source, mask=source.file)])
    assert starts(conversations, 8) == [[b for b in begins if b < SEQ_LEN] for begins in indexed]


@pytest.mark.parametrize(("most", "width"), [(1, 2), (2, 3), (3, 5), (4, 5), (5, 9), (8, 9)])
def test_bounds_are_as_wide_as_the_next_power_of_two(most: int, width: int) -> None:
    documents = torch.stack([torch.zeros(8), torch.arange(8).clamp(max=most - 1)])
    bounds = document_bounds(documents)
    assert bounds.tolist() == [
        [0] + [8] * (width - 1),
        [*range(most), *[8] * (width - most)],
    ]
