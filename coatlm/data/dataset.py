"""Tokens -> samples -> batches; sample i is a pure function of (seed, i).

    stream(e) = documents of a part in the order of shuffled(documents; seed, source, e), joined
    window(e, w) = stream(e)[w * S : w * S + S + 1],  w = 0 .. (tokens - 1) // S - 1
    sample j of a source = window(e, shuffled(windows; seed, source, e)[j mod windows]),
                           e = j // windows
    sample i of a blend  = sample (number of earlier samples from s) of s = source(i)

S = seq_len. Each epoch cuts the windows anew; the tokens after its last window are dropped. Nothing
depends on the number of ranks or of training steps, so a run may be resumed, lengthened or spread
differently and still reads the same samples in the same order. Step n of training reads samples
n * G .. (n + 1) * G - 1 for a global batch of G.

A source is split by tokens into train, validation and test: contiguous parts whose boundaries move
to the nearest document boundary, unless that would take more than half of its tokens from a part
(few or huge documents), where they stay and cut a document.

Shapes: D documents, W windows, b samples of a microbatch, s = seq_len.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coatlm.config import Data
from coatlm.data.indexed import Indexed, open_indexed
from coatlm.data.preprocess import prepare_text
from coatlm.data.tokenizer import Tokenizer
from coatlm.platform import enable_cpu

PARTS = ("train", "validation", "test")
PERIOD = 1 << 20  # samples after which a blend repeats its order of sources; 1/PERIOD of weight
EVAL_SEED = 0  # validation samples are the same in every run


def shuffled(count: int, *key: object) -> NDArray[np.int64]:
    """The numbers 0..count-1 sorted by hash: a permutation that is a pure function of (count, key).

    hash(i) = mix(h + i * golden), h = sha256(key), mix = SplitMix64's finaliser (Steele et al.,
    2014). The map is one-to-one on 64-bit words, so hashes never tie. Unlike a generator's
    shuffle, this does not change with the version of a library.
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    x = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64(int.from_bytes(digest[:8], "little"))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ (x >> np.uint64(31)))


def split_bounds(
    bounds_D1: NDArray[np.int64], ratios: Sequence[float]
) -> list[NDArray[np.int64]]:
    """Document bounds (token offsets) of each contiguous part; rule in the module docstring."""
    total = int(bounds_D1[-1])
    share = np.asarray(ratios, dtype=np.float64) / sum(ratios)
    exact = np.rint(total * np.cumsum(share)).astype(np.int64)[:-1]
    above = np.clip(np.searchsorted(bounds_D1, exact), 1, len(bounds_D1) - 1)
    low, high = bounds_D1[above - 1], bounds_D1[above]
    moved = np.where(exact - low < high - exact, low, high)
    sizes = np.diff(moved, prepend=0, append=total)
    cuts = moved if (2 * sizes >= share * total).all() else exact
    edges = [0, *(int(cut) for cut in cuts), total]
    parts = []
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        inside = bounds_D1[(bounds_D1 > begin) & (bounds_D1 < end)]
        parts.append(np.concatenate(([begin], inside, [end])).astype(np.int64))
    return parts


class _Epoch(NamedTuple):
    """One order of a part's tokens: token p of the stream is tokens[p + shift_D[d(p)]]."""

    ends_D: NDArray[np.int64]  # stream offset at which the d-th document ends
    shift_D: NDArray[np.int64]
    windows_W: NDArray[np.int64]


class Stream:
    """One part of one source as an endless, randomly accessible sequence of windows."""

    def __init__(
        self, source: Indexed, bounds_D1: NDArray[np.int64], *, seq_len: int, key: tuple[int, ...]
    ) -> None:
        self.windows = (int(bounds_D1[-1] - bounds_D1[0]) - 1) // seq_len
        self._tokens = source.tokens
        self._bounds_D1 = bounds_D1
        self._seq_len = seq_len
        self._key = key
        self._epochs: dict[int, _Epoch] = {}

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        """The s + 1 tokens of a sample, sample >= 0."""
        number, place = divmod(sample, self.windows)
        epoch = self._epochs.get(number) or self._open_epoch(number)
        begin = int(epoch.windows_W[place]) * self._seq_len
        end = begin + self._seq_len + 1
        first, last = np.searchsorted(epoch.ends_D, (begin, end - 1), side="right")
        ends = epoch.ends_D[first : last + 1].clip(max=end)
        shifts = np.repeat(epoch.shift_D[first : last + 1], np.diff(ends, prepend=begin))
        return self._tokens[np.arange(begin, end) + shifts].astype(np.int64)

    def _open_epoch(self, number: int) -> _Epoch:
        order_D = shuffled(len(self._bounds_D1) - 1, "documents", *self._key, number)
        ends_D = np.cumsum(np.diff(self._bounds_D1)[order_D])
        shift_D = self._bounds_D1[1:][order_D] - ends_D
        windows_W = shuffled(self.windows, "windows", *self._key, number)
        kept = {n: e for n, e in self._epochs.items() if n == number - 1}  # a step may straddle two
        self._epochs = {**kept, number: _Epoch(ends_D, shift_D, windows_W)}
        return self._epochs[number]


class Dataset:
    """Streams blended by weight: sample i, for any i >= 0, is s + 1 token ids.

    Each sample comes from the source that is furthest behind its share (megatron's
    `build_blending_indices`). Weights are rounded to 1/PERIOD, so the order repeats every PERIOD
    samples and a table of one period places any i. After n samples no source is ahead of its share
    of n by a whole sample; of two sources, none is behind by a whole one either.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        weights: Sequence[float],
        *,
        seq_len: int,
        eod: int,
        eod_mask_loss: bool = False,
        reset_attention_mask: bool = False,
    ) -> None:
        self.seq_len = seq_len
        self.eod = eod
        self.eod_mask_loss = eod_mask_loss
        self.reset_attention_mask = reset_attention_mask
        self._streams = list(streams)
        if len(self._streams) > 1:
            self._quota = _quotas(weights)
            self._source_P, self._rank_P = _blend_period(self._quota)

    def locate(self, sample: int) -> tuple[int, int]:
        """(source, number of the sample within that source)."""
        if len(self._streams) == 1:
            return 0, sample
        period, place = divmod(sample, PERIOD)
        source = int(self._source_P[place])
        return source, period * int(self._quota[source]) + int(self._rank_P[place])

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        source, number = self.locate(sample)
        return self._streams[source][number]


def _quotas(weights: Sequence[float]) -> NDArray[np.int64]:
    """Weights as whole samples of PERIOD, by largest remainder."""
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * PERIOD
    quota = np.floor(exact).astype(np.int64)
    quota[np.argsort(quota - exact, kind="stable")[: PERIOD - quota.sum()]] += 1
    if quota.min() == 0:
        raise ValueError(
            f"data.paths: weight={weights[int(quota.argmin())]} is less than 1/{PERIOD} of the sum"
        )
    return quota


def _blend_period(quota: NDArray[np.int64]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Source of each of PERIOD samples, and how many of that source came before it.

    Exact in megatron's doubles: weights are multiples of 2^-20 and counts are below 2^20.
    """
    enable_cpu()
    from megatron.core.datasets.helpers import build_blending_indices

    source_P = np.zeros(PERIOD, dtype=np.int16)
    rank_P = np.zeros(PERIOD, dtype=np.int64)
    build_blending_indices(source_P, rank_P, quota / PERIOD, len(quota), PERIOD, False)
    return source_P, rank_P


@dataclass(frozen=True)
class Datasets:
    """The parts of data.split; a part of ratio 0 is None."""

    train: Dataset
    validation: Dataset | None
    test: Dataset | None


def open_datasets(data: Data, tokenizer: Tokenizer, *, seed: int) -> Datasets:
    """Open (for `data.text`: first make) the sources of a run and order their samples.

    Raises ValueError, one line that names the file, for what cannot be trained on.
    """
    if data.text:
        label = f"data.text={','.join(data.text)}"
        sources = [open_indexed(prepare_text(data), tokenizer, name=label)]
    else:
        sources = [open_indexed(Path(source.path), tokenizer) for source in data.paths]
    weights = [source.weight for source in data.paths] or [1.0]
    splits = [split_bounds(source.bounds_D1, data.split) for source in sources]

    def part(index: int) -> Dataset | None:
        if data.split[index] == 0:
            return None
        streams = []
        for number, (source, bounds) in enumerate(zip(sources, splits, strict=True)):
            key = (seed if index == 0 else EVAL_SEED, index, number)
            streams.append(Stream(source, bounds[index], seq_len=data.seq_len, key=key))
            if streams[-1].windows == 0:
                raise ValueError(
                    f"{source.name}: the {PARTS[index]} part (data.split) has "
                    f"{bounds[index][-1] - bounds[index][0]} of {source.bounds_D1[-1]} tokens, but "
                    f"one sample takes data.seq_len + 1 = {data.seq_len + 1}"
                )
        return Dataset(
            streams,
            weights,
            seq_len=data.seq_len,
            eod=tokenizer.eod,
            eod_mask_loss=data.eod_mask_loss,
            reset_attention_mask=data.reset_attention_mask,
        )

    train = part(0)
    assert train is not None  # config: the first ratio is > 0
    return Datasets(train, part(1), part(2))


class Batch(TypedDict):
    """A microbatch of one rank. Context parallelism shortens s of all but `document_ids`."""

    tokens: Tensor  # [b, s] int64
    labels: Tensor  # [b, s] int64, the tokens one position later
    loss_mask: Tensor  # [b, s] float32, 0 where the prediction does not count
    document_ids: Tensor | None  # [b, s] int32, with data.reset_attention_mask


def microbatches(
    dataset: Dataset,
    step: int,
    *,
    global_batch: int,
    micro_batch: int,
    dp_rank: int,
    dp_size: int,
    device: torch.device | str = "cpu",
) -> Iterator[Batch]:
    """This rank's microbatches of `step` (0-based), in order.

    Row j of microbatch k is sample step * G + k * (micro_batch * dp_size) + dp_rank * micro_batch
    + j, with G = global_batch.
    """
    at_once = micro_batch * dp_size
    if global_batch % at_once:
        raise ValueError(
            f"global_batch={global_batch} is not a multiple of micro_batch*dp_size={at_once}"
        )
    for k in range(global_batch // at_once):
        first = step * global_batch + k * at_once + dp_rank * micro_batch
        yield _to(_read_batch(dataset, range(first, first + micro_batch)), torch.device(device))


def _read_batch(dataset: Dataset, samples: Sequence[int]) -> Batch:
    """The batch of these samples, in host memory."""
    ids = torch.from_numpy(np.stack([dataset[i] for i in samples]))
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    ends = tokens == dataset.eod
    mask = (~ends).float() if dataset.eod_mask_loss else torch.ones(tokens.shape)
    documents = None
    if dataset.reset_attention_mask:
        documents = (ends.cumsum(1) - ends.long()).to(torch.int32)
    return Batch(tokens=tokens, labels=labels, loss_mask=mask, document_ids=documents)


def _map(batch: Batch, function: Any) -> Batch:
    """Apply `function` to every tensor."""
    documents = batch["document_ids"]
    return Batch(
        tokens=function(batch["tokens"]),
        labels=function(batch["labels"]),
        loss_mask=function(batch["loss_mask"]),
        document_ids=None if documents is None else function(documents),
    )


def _to(batch: Batch, device: torch.device) -> Batch:
    return _map(batch, lambda t: t.to(device, non_blocking=True))


class BatchIterator:
    """The microbatches of steps first_step, first_step + 1, ..., a list a step.

    A thread reads the next step while this one is computed on. Close it, or use it in `with`.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        first_step: int = 0,
        global_batch: int,
        micro_batch: int,
        dp_rank: int,
        dp_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._dataset = dataset
        self._shape = dict(
            global_batch=global_batch, micro_batch=micro_batch, dp_rank=dp_rank, dp_size=dp_size
        )
        self._device = torch.device(device)
        self._step = first_step
        cuda = self._device.type == "cuda"
        # a thread starts on GPU 0, where pinning memory would open a context for every rank
        init = dict(initializer=torch.cuda.set_device, initargs=(self._device,)) if cuda else {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches", **init)
        self._next: Future[list[Batch]] = self._thread.submit(self._read, self._step)

    def _read(self, step: int) -> list[Batch]:
        batches = list(microbatches(self._dataset, step, **self._shape))
        if self._device.type == "cuda":
            batches = [_map(batch, Tensor.pin_memory) for batch in batches]
        return batches

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> list[Batch]:
        batches = self._next.result()
        self._step += 1
        self._next = self._thread.submit(self._read, self._step)
        return [_to(batch, self._device) for batch in batches]

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def zigzag_positions(seq_len: int, cp_rank: int, cp_size: int) -> Tensor:
    """Positions [seq_len / cp_size] of a context-parallel rank: chunks r and 2n-1-r of 2n.

    A causal query attends to what is before it; an early and a late chunk balance the work.
    """
    if seq_len % (2 * cp_size):
        raise ValueError(f"seq_len={seq_len} is not a multiple of 2*cp_size={2 * cp_size}")
    chunks = torch.arange(seq_len).view(2 * cp_size, -1)
    return torch.cat((chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]))


def cp_slice(batch: Batch, cp_rank: int, cp_size: int) -> Batch:
    """The rank's positions of tokens, labels and loss_mask; document_ids stay whole, for keys."""
    if cp_size == 1:
        return batch
    tokens = batch["tokens"]
    at = zigzag_positions(tokens.shape[1], cp_rank, cp_size).to(tokens.device, non_blocking=True)
    return Batch(
        tokens=tokens.index_select(1, at),
        labels=batch["labels"].index_select(1, at),
        loss_mask=batch["loss_mask"].index_select(1, at),
        document_ids=batch["document_ids"],
    )


def attention_mask(document_ids: Tensor, query_positions: Tensor) -> Tensor:
    """bool [b, 1, len(query_positions), s], True where a query may not attend (megatron's sense).

    A query attends to keys at its own and earlier positions of its own document.
    """
    positions = torch.arange(document_ids.shape[1], device=document_ids.device)
    queries = query_positions.to(document_ids.device)
    later = positions[None, :] > queries[:, None]
    foreign = document_ids[:, queries][:, :, None] != document_ids[:, None, :]
    return (later | foreign)[:, None]
