"""Prepared tokens -> samples.

A sample of a `Dataset` has S + 1 token ids, in the order of `coatlm.data.order`; `batches` makes
inputs, labels and masks of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coatlm.config import Data
from coatlm.data.block_cache import RemoteFile
from coatlm.data.cache import open_text_dataset
from coatlm.data.identity import SourceIdentity, identify
from coatlm.data.indexed import Indexed
from coatlm.data.manifest import MASK
from coatlm.data.order import Blend, Stream, split_bounds
from coatlm.data.packing import PackedStream
from coatlm.data.remote_dataset import open_source
from coatlm.data.tokenizer import Tokenizer

SPLITS = ("train", "validation", "test")
EVAL_SEED = 0  # validation samples are the same in every run

logger = logging.getLogger("coatlm")
ReadMask = Callable[[int, int], NDArray[np.uint8]]


@dataclass(frozen=True)
class Dataset:
    """A blend of streams; sample i, for any i >= 0, has seq_len + 1 token ids."""

    streams: Sequence[Stream | PackedStream]
    blend: Blend
    seq_len: int
    eod: int
    eod_mask_loss: bool = False
    reset_attention_mask: bool = False
    masks: Sequence[ReadMask] = ()  # of each stream's source, with data.loss_mask=completion
    sources: Sequence[Indexed] = ()  # of each stream

    @property
    def remote(self) -> bool:
        """Whether a source is at a URL."""
        return any(isinstance(source.file, RemoteFile) for source in self.sources)

    def missing(self, sample: int) -> Iterator[tuple[RemoteFile, int]]:
        """The blocks of remote sources that reading a sample would download."""
        source, number = self.blend.locate(sample)
        for begin, end in self.streams[source].ranges(number):
            yield from self.sources[source].missing(begin, end, masks=bool(self.masks))

    @property
    def packed(self) -> bool:
        """Whether samples are packed, by data.packing=best-fit."""
        return any(isinstance(stream, PackedStream) for stream in self.streams)

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        source, number = self.blend.locate(sample)
        return self.streams[source][number]

    def counted(self, sample: int) -> NDArray[np.uint8] | None:
        """For each of a sample's seq_len + 1 tokens, 1 if it counts as a label, else 0.

        None if all tokens count.
        """
        if not self.masks and not self.packed:
            return None
        source, number = self.blend.locate(sample)
        stream = self.streams[source]
        counted = np.zeros(self.seq_len + 1, np.uint8)
        at = 0
        for begin, end in stream.ranges(number):
            stop = at + end - begin
            counted[at:stop] = self.masks[source](begin, end) if self.masks else 1
            if isinstance(stream, PackedStream) and stream.repeats(begin):
                counted[at] = 0
            at = stop
        return counted

    def eod_inside(self, sample: int) -> bool:
        """Whether the end-of-document id may stand within a document of this sample.

        So it is in conversations, whose template may write it behind every turn, and in packed
        samples. Other datasets may hold several documents as one, with that id between them.
        """
        source, _ = self.blend.locate(sample)
        return self.packed or self.sources[source].mask is not None

    def documents(self, sample: int) -> NDArray[np.int32]:
        """The number of the document of each token, by the index; padding has its own."""
        source, number = self.blend.locate(sample)
        sizes = [end - begin for begin, end in self.streams[source].ranges(number)]
        sizes.append(self.seq_len + 1 - sum(sizes))
        return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)


@dataclass(frozen=True)
class Datasets:
    """The splits of the data by data.split; one with ratio 0 is None."""

    train: Dataset
    validation: Dataset | None
    test: Dataset | None
    sources: Sequence[Indexed]  # before the split
    weights: Sequence[float]  # of the sources in the blend

    def identity(self) -> list[SourceIdentity]:
        """The identity of the tokens: see `coatlm.data.identity`."""
        return identify(self.sources, self.weights)


def open_datasets(data: Data, tokenizer: Tokenizer, *, seed: int) -> Datasets:
    """Open the sources of a run, tokenizing `data.text` first if needed, and order their samples.

    Raises ValueError with the file's name for data that cannot be trained on, and CacheFullError if
    the disk of data.cache_dir is full.
    """
    if data.text:
        sources = [open_text_dataset(data, tokenizer)]
    else:
        sources = [open_source(source.path, data, tokenizer) for source in data.paths]
    weights = [source.weight for source in data.paths] or [1.0]
    blend = Blend(weights)
    splits = [split_bounds(source.bounds_D1, data.split) for source in sources]
    masks = _masks(sources) if data.loss_mask == "completion" else []

    def split(index: int) -> Dataset | None:
        if data.split[index] == 0:
            return None
        streams: list[Stream | PackedStream] = []
        for number, (source, bounds) in enumerate(zip(sources, splits, strict=True)):
            key = (seed if index == 0 else EVAL_SEED, index, number)
            streams.append(_stream(source, bounds[index], data, key, tokenizer.eod))
            if streams[-1].windows == 0:
                raise ValueError(
                    f"{source.name}: the {SPLITS[index]} split (data.split) has "
                    f"{bounds[index][-1] - bounds[index][0]} of {source.bounds_D1[-1]} tokens, but "
                    f"one sample takes data.seq_len + 1 = {data.seq_len + 1}"
                )
        return Dataset(
            streams,
            blend,
            seq_len=data.seq_len,
            eod=tokenizer.eod,
            eod_mask_loss=data.eod_mask_loss,
            reset_attention_mask=data.reset_attention_mask,
            masks=masks,
            sources=sources,
        )

    train = split(0)
    assert train is not None  # config: the first ratio is > 0
    return Datasets(train, split(1), split(2), sources, weights)


def _masks(sources: Sequence[Indexed]) -> list[ReadMask]:
    """How to read the loss mask of each source. Raises ValueError for a source without one."""
    for source in sources:
        if source.mask is None and Path(source.name + MASK).exists():
            record = Path(f"{source.name}.json")
            why = "no such file; it describes the loss mask in"
            if record.exists():
                why = "was prepared without --chat, and does not describe"
            raise ValueError(
                f"{record}: {why} {source.name}{MASK}; data.loss_mask=completion needs a mask"
            )
        if source.mask is None:
            raise ValueError(
                f"{source.name}{MASK}: no such file; data.loss_mask=completion needs the loss mask "
                "that coatlm prepare --chat writes"
            )
    return [source.read_mask for source in sources]


def _stream(
    source: Indexed, bounds_D1: NDArray[np.int64], data: Data, key: tuple[int, ...], eod: int
) -> Stream | PackedStream:
    """The samples of one split of one source, as data.packing says."""
    if data.packing == "concat":
        return Stream(source.read, bounds_D1, seq_len=data.seq_len, key=key)
    stream = PackedStream(source.read, bounds_D1, seq_len=data.seq_len, key=key, padding=eod)
    logger.info(
        "%s: %s: %s documents in %s samples, %.2f %% padding, %s documents longer than a sample",
        source.name,
        SPLITS[key[1]],
        f"{int((np.diff(bounds_D1) > 0).sum()):,}",
        f"{stream.windows:,}",
        100 * stream.padded,
        f"{int((np.diff(bounds_D1) > data.seq_len + 1).sum()):,}",
    )
    return stream
