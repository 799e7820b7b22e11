"""Read indexed datasets: PREFIX.bin has the tokens, PREFIX.idx the document offsets, PREFIX.json
the manifest, PREFIX.crc32 the checksums of PREFIX.bin. A dataset of conversations also has
PREFIX.mask, a byte per token that is 1 if the token is learned, and its checksums.

    .idx = magic (9 B) | version u64 | dtype code u8 | sequences u64 | bounds u64
         | length i32 per sequence | byte offset i64 per sequence | i64 per document bound

The first two files have the format of `megatron.core.datasets.indexed_dataset`, whose builder would
write the same bytes but keeps some 100 per document in memory. Its reader is not used, because it
unmaps the tokens when it is garbage-collected even while arrays refer to them, and does not check
that the files are consistent.

No damaged byte is trained on. .idx and .crc32, 2 % of the data, are compared with the checksums in
PREFIX.json when a dataset is opened, and blocks of tokens with those in .crc32 on every read: see
`coatlm.data.checksums`.

A dataset at a URL is the same, but has to have checksums: see `coatlm.data.remote_dataset`.

Datasets of other tools have no PREFIX.json, so their tokenizer is unknown and they have no
checksums. Datasets of coatlm's format version 1 have no checksums either. Every id that is read is
compared with the vocabulary; a dataset without PREFIX.json is also sampled when it is opened.
"""

from __future__ import annotations

import io
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coatlm.data.block_cache import RemoteFile
from coatlm.data.checksums import CheckedBytes, CheckedFile, DatasetError
from coatlm.data.manifest import (
    MASK,
    MASK_SUFFIXES,
    SUFFIXES,
    DatasetManifest,
    read_dataset_manifest,
    read_sums,
    suffixed,
)
from coatlm.data.tokenizer import Tokenizer

HEADER_BYTES = 34
MAGIC = b"MMIDIDX\x00\x00"
DTYPES: dict[int, type[np.number[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
SCANNED_TOKENS = 1 << 26  # ids that are checked when a dataset without PREFIX.json is opened
SCANNED_BLOCK = 1 << 16

logger = logging.getLogger("coatlm")


@dataclass(frozen=True)
class Indexed:
    """An open dataset; document d is tokens[bounds[d]:bounds[d + 1]]."""

    name: str  # for messages
    tokens: NDArray[Any]  # the whole .bin, memory-mapped and not verified; empty if at a URL
    bounds_D1: NDArray[np.int64]  # token offsets of the D documents, and the end
    file: CheckedBytes  # .bin
    tokenizer: Tokenizer
    on_damage: Callable[[], object]  # called before a read raises DatasetError
    mask: CheckedBytes | None = None  # .mask of conversations

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """Read tokens [begin, end). Raises DatasetError for damaged bytes and unknown ids."""
        size = self.tokens.itemsize
        try:
            ids = np.frombuffer(self.file.read(begin * size, end * size), self.tokens.dtype)
            self._check_ids(ids, begin)
        except DatasetError:
            self.on_damage()
            raise
        return ids

    def read_mask(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Read the loss mask of tokens [begin, end). Raises DatasetError for damaged bytes."""
        assert self.mask is not None
        mask = np.frombuffer(self.mask.read(begin, end), np.uint8)
        if (mask > 1).any():
            raise DatasetError(f"{self.mask.path}: holds bytes other than 0 and 1")
        return mask

    def missing(self, begin: int, end: int, *, masks: bool) -> Iterator[tuple[RemoteFile, int]]:
        """The blocks of a remote dataset that reading tokens [begin, end) would download.

        With `masks`, also those of their loss mask.
        """
        if isinstance(self.file, RemoteFile):
            size = self.tokens.itemsize
            yield from ((self.file, n) for n in self.file.missing(begin * size, end * size))
        if masks and isinstance(self.mask, RemoteFile):
            yield from ((self.mask, n) for n in self.mask.missing(begin, end))

    def _check_ids(self, ids: NDArray[Any], begin: int) -> None:
        """Raise DatasetError for an id outside the vocabulary."""
        vocab = self.tokenizer.vocab_size
        if len(ids) and (ids.max() >= vocab or ids.min() < 0):
            at = int(np.argmax((ids >= vocab) | (ids < 0)))
            document = int(np.searchsorted(self.bounds_D1, begin + at, side="right")) - 1
            raise DatasetError(
                f"{self.file.path}: holds token id {ids[at]}, outside the {vocab} ids of "
                f"data.tokenizer={self.tokenizer.spec}, as token "
                f"{begin + at - self.bounds_D1[document]} of document {document}"
            )


def open_indexed(
    prefix: Path,
    tokenizer: Tokenizer,
    *,
    name: str = "",
    on_damage: Callable[[], object] = lambda: None,
) -> Indexed:
    """Open PREFIX for reading. Raises DatasetError with the file's name and the problem."""
    manifest = read_dataset_manifest(prefix)
    dtype, bounds_D1 = read_index(prefix, manifest)
    if manifest is not None:
        check_manifest(prefix, manifest, tokenizer, dtype, bounds_D1)
        if manifest.version == 1:
            logger.info("%s: has no checksums, so damage cannot be detected", prefix)
    file = _open_bin(prefix, manifest, int(bounds_D1[-1]) * np.dtype(dtype).itemsize)
    tokens = np.asarray(np.memmap(file.path, dtype, mode="r"))
    mask = _open_mask(prefix, manifest)
    data = Indexed(name or str(prefix), tokens, bounds_D1, file, tokenizer, on_damage, mask)
    if manifest is None:
        _scan(data)
    return data


def open_checked(prefix: Path) -> list[CheckedFile]:
    """Open PREFIX.bin, and PREFIX.mask if there is one, for verification without a tokenizer.

    Raises DatasetError if other files of the dataset are damaged or it has no checksums.
    """
    manifest = read_dataset_manifest(prefix)
    if manifest is None:
        found = [suffix for suffix in (*SUFFIXES, MASK) if suffixed(prefix, suffix).exists()]
        if not found:
            raise DatasetError(f"{prefix}: no prepared dataset is here; it would be {prefix}.bin")
        if {".crc32", MASK}.intersection(found):
            raise DatasetError(f"{prefix}.json: no such file; it describes {prefix.name}.bin")
    if manifest is None or manifest.version == 1:
        raise DatasetError(f"{prefix}: has no checksums; preprocess it again with --overwrite")
    dtype, bounds_D1 = read_index(prefix, manifest)
    file = _open_bin(prefix, manifest, int(bounds_D1[-1]) * np.dtype(dtype).itemsize)
    mask = _open_mask(prefix, manifest)
    return [file] if mask is None else [file, mask]


def _open_bin(prefix: Path, manifest: DatasetManifest | None, nbytes: int) -> CheckedFile:
    path = suffixed(prefix, ".bin")
    has_sums = manifest is not None and manifest.version >= 2
    sums = None
    if manifest is not None and has_sums:
        sums = read_sums(prefix, ".crc32", manifest.sums_crc32, nbytes)
    return CheckedFile(path, nbytes, sums, io.FileIO(path))


def _open_mask(prefix: Path, manifest: DatasetManifest | None) -> CheckedFile | None:
    """Open PREFIX.mask; None if the dataset has no loss mask. Raises DatasetError."""
    if manifest is None or not manifest.masked:
        return None
    path = suffixed(prefix, MASK)
    if not path.is_file():
        raise DatasetError(f"{path}: no such file; it holds the loss mask of {prefix.name}.bin")
    if path.stat().st_size != manifest.tokens:
        raise DatasetError(
            f"{path}: {path.stat().st_size} bytes, must be {manifest.tokens}, one per token"
        )
    sums = read_sums(prefix, MASK_SUFFIXES[1], manifest.mask_sums_crc32, manifest.tokens)
    try:
        return CheckedFile(path, manifest.tokens, sums, io.FileIO(path))
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}") from None


def read_index(
    prefix: Path, manifest: DatasetManifest | None, bin_bytes: int | None = None
) -> tuple[type[np.number[Any]], NDArray[np.int64]]:
    """Read dtype and document bounds (in tokens) from .idx. Raises DatasetError if inconsistent.

    `bin_bytes` is the size of .bin if it is not here.
    """
    idx, bin_ = suffixed(prefix, ".idx"), suffixed(prefix, ".bin")
    for path in (idx, bin_) if bin_bytes is None else (idx,):
        if not path.is_file():
            raise DatasetError(f"{path}: no such file; a dataset is PREFIX.bin and PREFIX.idx")
        if path.stat().st_size == 0:
            raise DatasetError(f"{path}: the file is empty")
        if not os.access(path, os.R_OK):
            raise DatasetError(f"{path}: the file is not readable")
    size = idx.stat().st_size
    with open(idx, "rb") as file:
        header = file.read(HEADER_BYTES)
    if not header.startswith(MAGIC):
        raise DatasetError(f"{idx}: not the index of a Megatron dataset (wrong first bytes)")
    if size < HEADER_BYTES:
        raise DatasetError(f"{idx}: cut off inside its header, at {size} bytes")
    version, code = int.from_bytes(header[9:17], "little"), header[17]
    if version != 1 or code not in DTYPES:
        raise DatasetError(
            f"{idx}: version {version}, dtype code {code}: not readable as token ids"
        )
    sequences, bounds = (int.from_bytes(header[i : i + 8], "little") for i in (18, 26))
    expected = HEADER_BYTES + 12 * sequences + 8 * bounds
    if size != expected or bounds == 0:
        raise DatasetError(
            f"{idx}: {size} bytes, but its header ({sequences} sequences, {bounds} document "
            f"bounds) implies {expected}: cut off, or not a text dataset"
        )
    whole = np.memmap(idx, mode="r")
    if (
        manifest is not None
        and manifest.version >= 2
        and zlib.crc32(whole.data) != manifest.index_crc32
    ):
        raise DatasetError(f"{idx}: damaged: its checksum differs from that in {prefix.name}.json")
    content = whole[HEADER_BYTES:]
    lengths = content[: 4 * sequences].view(np.int32)
    offsets = content[4 * sequences : 12 * sequences].view(np.int64)
    ends_S1 = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    sequence_D1 = content[12 * sequences :].view(np.int64)
    itemsize = np.dtype(DTYPES[code]).itemsize
    if (
        (lengths < 0).any()
        or (offsets != ends_S1[:-1] * itemsize).any()
        or (sequence_D1[0], sequence_D1[-1]) != (0, sequences)
        or (np.diff(sequence_D1) < 0).any()
    ):
        raise DatasetError(f"{idx}: its lengths, offsets and document bounds contradict each other")
    found = bin_.stat().st_size if bin_bytes is None else bin_bytes
    if found != ends_S1[-1] * itemsize:
        raise DatasetError(
            f"{bin_}: {found} bytes, but {idx.name} implies "
            f"{ends_S1[-1]} tokens of {itemsize} bytes: cut off, or from another dataset"
        )
    if not found:
        raise DatasetError(f"{bin_}: holds no tokens")
    return DTYPES[code], ends_S1[sequence_D1]


def check_manifest(
    prefix: Path,
    manifest: DatasetManifest,
    tokenizer: Tokenizer,
    dtype: type[np.number[Any]],
    bounds_D1: NDArray[np.int64],
) -> None:
    """Raise DatasetError unless PREFIX.json agrees with the run's tokenizer and the other files."""
    path = suffixed(prefix, ".json")
    if (manifest.fingerprint, manifest.vocab_size, manifest.eod) != (
        tokenizer.fingerprint,
        tokenizer.vocab_size,
        tokenizer.eod,
    ):
        raise DatasetError(
            f"{path}: tokenized with {manifest.tokenizer} (fingerprint "
            f"{manifest.fingerprint[:12]}, {manifest.vocab_size} ids), but data.tokenizer="
            f"{tokenizer.spec} (fingerprint {tokenizer.fingerprint[:12]}, "
            f"{tokenizer.vocab_size} ids)"
        )
    found = (np.dtype(dtype).name, len(bounds_D1) - 1, int(bounds_D1[-1]))
    if (manifest.dtype, manifest.documents, manifest.tokens) != found:
        raise DatasetError(
            f"{path}: describes {manifest.documents} documents of {manifest.tokens} tokens as "
            f"{manifest.dtype}, but the .idx file {found[1]} of {found[2]} as {found[0]}"
        )


def _scan(data: Indexed) -> None:
    """Raise DatasetError for unknown ids, in at most SCANNED_TOKENS evenly spaced ids."""
    total = len(data.tokens)
    last = max(total - SCANNED_BLOCK, 0)
    blocks = min(-(-total // SCANNED_BLOCK), SCANNED_TOKENS // SCANNED_BLOCK)
    for number in range(blocks):  # covers all tokens if there are at most SCANNED_TOKENS
        start = number * last // max(blocks - 1, 1)
        data.read(start, min(start + SCANNED_BLOCK, total))
