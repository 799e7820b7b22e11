"""Samples -> the microbatches of each rank.

Each training step reads the next G samples of a `Dataset`, where G is the global batch size, for
any number of ranks. A sample of S + 1 tokens becomes S inputs and S labels, which are the inputs
shifted by one position. A label counts in the loss if it is neither padding nor excluded by
data.loss_mask or data.eod_mask_loss.

Shapes: b samples per microbatch, s = S = seq_len.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from coatlm.data.dataset import Dataset
from coatlm.data.read_ahead import ReadAhead, rank_samples


class Microbatch(TypedDict):
    """A microbatch of one rank. Context parallelism shards s; `document_bounds` stay whole."""

    tokens: Tensor  # [b, s] int64
    labels: Tensor  # [b, s] int64, the tokens one position later
    loss_mask: Tensor  # [b, s] float32, 0 for predictions excluded from the loss
    document_bounds: Tensor | None  # [b, n + 1] int32, with data.reset_attention_mask


def microbatches(
    dataset: Dataset,
    first_sample: int,
    *,
    global_batch: int,
    micro_batch: int,
    dp_rank: int,
    dp_size: int,
    device: torch.device | str = "cpu",
) -> Iterator[Microbatch]:
    """Yield this rank's microbatches of the global batch that begins at `first_sample`."""
    for samples in rank_samples(
        first_sample,
        global_batch=global_batch,
        micro_batch=micro_batch,
        dp_rank=dp_rank,
        dp_size=dp_size,
    ):
        yield _to(_read_batch(dataset, samples), torch.device(device))


def _read_batch(dataset: Dataset, samples: Sequence[int]) -> Microbatch:
    """Read these samples into a microbatch in host memory."""
    ids = torch.from_numpy(np.stack([dataset[i] for i in samples]))
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    mask = torch.ones(tokens.shape)
    for row, sample in enumerate(samples):
        counted = dataset.counted(sample)
        if counted is not None:
            mask[row] *= torch.from_numpy(counted[1:])
    bounds = None
    if dataset.reset_attention_mask or dataset.eod_mask_loss:
        documents = _documents(dataset, samples, ids)
        if dataset.reset_attention_mask:
            bounds = document_bounds(documents[:, :-1])
        if dataset.eod_mask_loss:
            mask *= documents[:, 1:] == documents[:, :-1]
    return Microbatch(tokens=tokens, labels=labels, loss_mask=mask, document_bounds=bounds)


def _documents(dataset: Dataset, samples: Sequence[int], ids: Tensor) -> Tensor:
    """A number for each token of these samples [b, s + 1] that changes where a document begins."""
    ends = ids == dataset.eod
    documents = ends.cumsum(1) - ends.long()
    for row, sample in enumerate(samples):
        indexed = torch.from_numpy(dataset.documents(sample))
        documents[row] = indexed if dataset.eod_inside(sample) else documents[row] + indexed
    return documents


def document_bounds(documents: Tensor) -> Tensor:
    """The first positions of the documents of each sample, then its length s: int32 [b, n + 1].

    `documents` [b, s], in host memory, numbers the document of each token. n is the smallest power
    of two that is enough for every sample, so that few different shapes occur.
    """
    samples, length = documents.shape
    first = torch.ones(documents.shape, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    most = int(first.sum(1).max())
    bounds = torch.full((samples, (1 << (most - 1).bit_length()) + 1), length, dtype=torch.int32)
    row, position = first.nonzero(as_tuple=True)
    bounds[row, first.cumsum(1)[row, position] - 1] = position.int()
    return bounds


def _map(batch: Microbatch, function: Callable[[Tensor], Tensor]) -> Microbatch:
    """Apply `function` to every tensor of a microbatch."""
    bounds = batch["document_bounds"]
    return Microbatch(
        tokens=function(batch["tokens"]),
        labels=function(batch["labels"]),
        loss_mask=function(batch["loss_mask"]),
        document_bounds=None if bounds is None else function(bounds),
    )


def _to(batch: Microbatch, device: torch.device) -> Microbatch:
    return _map(batch, lambda t: t.to(device, non_blocking=True))


class BatchIterator:
    """Iterates over global batches from `first_sample` on, each as this rank's list of
    microbatches.

    A thread prefetches the next global batch, and others the blocks of remote datasets further
    ahead. Close the iterator, or use it in `with`.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        first_sample: int = 0,
        global_batch: int,
        micro_batch: int,
        dp_rank: int,
        dp_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._read = functools.partial(
            microbatches,
            dataset,
            global_batch=global_batch,
            micro_batch=micro_batch,
            dp_rank=dp_rank,
            dp_size=dp_size,
        )
        self._ahead: ReadAhead | None = None
        if dataset.remote:
            self._ahead = ReadAhead(
                dataset.missing,
                global_batch=global_batch,
                micro_batch=micro_batch,
                dp_rank=dp_rank,
                dp_size=dp_size,
            )
        self._first, self._global_batch = first_sample, global_batch
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next = self._thread.submit(self._prepare, self._first)

    def _prepare(self, first_sample: int) -> list[Microbatch]:
        """Read a global batch into host memory, pinned for a GPU. Runs in the thread."""
        if self._ahead is not None:
            self._ahead.wait_for(first_sample)
        batches = list(self._read(first_sample))
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread would use GPU 0
            batches = [_map(batch, Tensor.pin_memory) for batch in batches]
        return batches

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> list[Microbatch]:
        batches = self._next.result()
        self._first += self._global_batch
        self._next = self._thread.submit(self._prepare, self._first)
        return [_to(batch, self._device) for batch in batches]

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop prefetching."""
        if self._ahead:
            self._ahead.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
