"""Tokenize documents to disk: PREFIX.bin and PREFIX.idx (Megatron's indexed dataset), PREFIX.json
(manifest) and PREFIX.crc32 (checksums); of conversations also PREFIX.mask, a loss mask per token,
and PREFIX.mask.crc32.

    inputs -> segments -> shards -> PREFIX

Any number of processes write the shards, which are joined in the order of the input. So the result
depends neither on the number of processes nor on interruptions, after which finished shards are
reused. Checksums are computed at tokenization, and verified when shards are joined and when
datasets are read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coatlm.data.checksums import BlockSums, DatasetError
from coatlm.data.documents import Segment, expand_inputs, plan_segments, require_json_lines
from coatlm.data.indexed import DTYPES, MAGIC, Indexed, open_indexed
from coatlm.data.manifest import (
    MASK,
    MASK_SUFFIXES,
    MASKED,
    SUFFIXES,
    VERSION,
    DatasetManifest,
    read_dataset_manifest,
    suffixed,
    token_dtype,
    write_record,
)
from coatlm.data.shards import fingerprint, plan_shards, tokenize
from coatlm.data.streams import DEFAULT_LIMITS, Limits, some
from coatlm.data.token_shard import Options, TokenShard
from coatlm.data.tokenizer import Tokenizer, make_tokenizer
from coatlm.files import open_locked

COPIED_BYTES = 1 << 24  # bytes of a shard that are copied at once
INDEXED = 1 << 16  # documents of .idx whose offsets are computed at once
VERIFIED_BYTES = 1 << 30  # of a file; verified at 4 GB/s from the page cache
ATTEMPTS = 100  # to lock PREFIX.shards before a call that ends removes it
BUSY = "{}: another run is writing here"
LOCK = "lock"  # in PREFIX.shards, the first file of a call
PUBLISHING = "publishing"  # in PREFIX.shards, from before the first rename: the key of the inputs


def preprocess(
    inputs: Sequence[str],
    prefix: Path,
    options: Options,
    *,
    limits: Limits = DEFAULT_LIMITS,
    workers: int = 0,
    overwrite: bool = False,
) -> DatasetManifest:
    """Tokenize files, globs or `python-stdlib` into PREFIX.bin, .idx, .json and .crc32.

    With `options.chat` the inputs are JSON lines of conversations, and PREFIX.mask is written too.

    An interrupted call leaves PREFIX.shards, from which the same call continues. Without
    `overwrite`, does nothing if PREFIX already has this content. `workers` is the number of
    processes, 0 for one per core. Raises a one-line ValueError with the file's name, and OSError if
    writing fails.
    """
    tokenizer = make_tokenizer(options.tokenizer)
    segments = plan_segments(expand_inputs(inputs), options.shard_bytes)
    masked = options.chat is not None
    if masked:
        require_json_lines(segments)
    key = fingerprint(segments, options, tokenizer)
    directory = suffixed(prefix, ".shards")
    _check_targets(prefix, segments, directory)
    for _ in range(ATTEMPTS):
        if overwrite:
            _replaced(prefix)
        elif (done := _unchanged(prefix, key, tokenizer, masked=masked)) is not None:
            _remove_left(directory)
            return done
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory) as held:
            # a call that has just ended may have made the same dataset, and removed the directory
            if held and (overwrite or _unchanged(prefix, key, tokenizer, masked=masked) is None):
                shards = plan_shards(segments, options, tokenizer, directory)
                tokenize(shards, options, limits, workers)
                dtype = token_dtype(tokenizer.vocab_size)
                crc32 = _join(shards, _joined(prefix), dtype, masked=masked)
                manifest = _describe(shards, options, tokenizer, key, crc32)
                if manifest.documents:
                    (directory / PUBLISHING).write_text(key)
                    _publish(prefix, manifest)
                _discard(directory)
                break
    else:
        raise ValueError(BUSY.format(directory))
    if not manifest.documents:
        raise ValueError(f"{some(inputs)}: the input holds no text")
    return manifest


def _check_targets(prefix: Path, segments: Sequence[Segment], directory: Path) -> None:
    """Raise ValueError if a file of PREFIX is an input or a directory, or if PREFIX.shards, which
    the end of the call removes, has files that no call has written."""
    inputs, other = {segment.path for segment in segments}, "choose another output prefix"
    for target in (suffixed(prefix, suffix) for suffix in SUFFIXES + MASK_SUFFIXES):
        if str(target.absolute()) in inputs:
            raise ValueError(f"{target}: would overwrite an input; {other}")
        if target.is_dir():
            raise ValueError(f"{target}: is a directory; {other}")
    if any(directory.absolute() in Path(name).parents for name in inputs):
        raise ValueError(f"{directory}: would be removed, and holds an input; {other}")
    if directory.exists() and not (directory / LOCK).exists():
        if not directory.is_dir():
            raise ValueError(f"{directory}: is no directory; {other}")
        if any(directory.iterdir()):
            foreign = "would be removed, and holds files that prepare did not write"
            raise ValueError(f"{directory}: {foreign}; {other}")


def _replaced(prefix: Path) -> DatasetManifest | None:
    """The content of PREFIX.json, None if it does not exist or is damaged.

    Raises DatasetError if it is not of coatlm.
    """
    try:
        return read_dataset_manifest(prefix)
    except DatasetError:
        if all(suffixed(prefix, suffix).is_file() for suffix in (".json", ".crc32")):
            return None  # only coatlm writes .crc32
        raise


def verify_small(dataset: Indexed) -> None:
    """Verify tokens and mask, if they have checksums and at most VERIFIED_BYTES.

    Raises DatasetError if they are damaged.
    """
    for file in (dataset.file, dataset.mask):
        if file is not None and file.sums is not None and file.nbytes <= VERIFIED_BYTES:
            for _ in file.verify():
                pass


def _unchanged(
    prefix: Path, key: str, tokenizer: Tokenizer, *, masked: bool
) -> DatasetManifest | None:
    """The content of PREFIX.json if PREFIX already has this content, None if it can be written.

    All checksums are verified, but of .bin or .mask of more than VERIFIED_BYTES only the size.
    Raises ValueError if PREFIX is damaged or has other content, unless a call was ended while it
    replaced the files.
    """
    damaged, manifest = None, read_dataset_manifest(prefix)
    if manifest is not None and manifest.inputs == key:
        try:
            verify_small(open_indexed(prefix, tokenizer))
        except DatasetError as error:
            damaged = f"{error}; --overwrite prepares it again"
        else:
            return manifest
    marker = suffixed(prefix, ".shards") / PUBLISHING
    if marker.exists() and marker.read_text() == key:
        return None
    written = [".bin", ".idx", *([MASK] if masked else [])]
    if manifest is None:  # without it checksums are of no call that has ended
        written += [".crc32", *(MASK_SUFFIXES if masked else [])]
    for target in (suffixed(prefix, suffix) for suffix in written):
        if target.exists():
            other = f"{target}: exists, made from other inputs or options; see --overwrite"
            raise ValueError(damaged or other)
    return None


def _joined(prefix: Path) -> Path:
    """The prefix of the joined files until they are renamed, .bin first and .idx last."""
    return suffixed(prefix, ".shards") / "joined"


def _remove_left(directory: Path) -> None:
    """Remove what a call that ended after `_publish` has left; a call that runs keeps its files."""
    if directory.exists():
        with contextlib.suppress(ValueError, OSError), _locked(directory) as held:
            if held:
                _discard(directory)


def _discard(directory: Path) -> None:
    """Remove PREFIX.shards, which this process has locked.

    Its lock is the last file, in a directory that has another name by then: a call that begins
    meanwhile never finds a directory without the lock.
    """
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
    gone = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}")
    directory.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Lock `directory` against other processes; the kernel releases the lock with the process.

    Yields whether the directory is still there: a call that ends removes it.
    """
    path = directory / LOCK
    try:
        lock = open_locked(path, wait=False)
    except FileNotFoundError:
        yield False
        return
    except BlockingIOError:
        raise ValueError(BUSY.format(directory)) from None
    with lock:
        try:
            held = os.path.samestat(os.fstat(lock.fileno()), path.stat())
        except FileNotFoundError:
            held = False
        yield held


def _join(
    shards: Sequence[TokenShard], base: Path, dtype: type[np.number[Any]], *, masked: bool
) -> tuple[int, int, int]:
    """Write the documents of all shards, in order, to BASE.bin, .idx and .crc32, with fsync.

    `masked` writes their masks to .mask and .mask.crc32. Returns the CRC-32 of .idx, of .crc32 and
    of .mask.crc32, which is 0 without a mask. Raises ValueError if a shard is damaged.
    """
    binary, index, checksums = (suffixed(base, suffix) for suffix in (".bin", ".idx", ".crc32"))
    masks, mask_checksums = (suffixed(base, suffix) for suffix in MASK_SUFFIXES)
    sums, mask_sums = BlockSums(), BlockSums()
    lengths: list[NDArray[np.int32]] = []
    with contextlib.ExitStack() as stack:
        tokens_file = stack.enter_context(open(binary, "wb"))
        masks_file = stack.enter_context(open(masks, "wb")) if masked else None
        for shard in shards:
            content = shard.read(dtype, masked=masked)
            lengths.append(content.lengths)
            raw = content.tokens.view(np.uint8).data
            for start in range(0, len(raw), COPIED_BYTES):
                piece = raw[start : start + COPIED_BYTES]
                tokens_file.write(piece)
                sums.update(piece)
            if masks_file is not None:
                masks_file.write(content.mask.data)
                mask_sums.update(content.mask.data)
    write_index(index, dtype, lengths)
    sums.array().tofile(checksums)
    if masked:
        mask_sums.array().tofile(mask_checksums)
    for path in (binary, index, checksums, *((masks, mask_checksums) if masked else ())):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    index_crc32 = zlib.crc32(np.memmap(index, mode="r").data)
    mask_crc32 = zlib.crc32(mask_sums.array().data) if masked else 0
    return index_crc32, zlib.crc32(sums.array().data), mask_crc32


def write_index(
    path: Path, dtype: type[np.number[Any]], lengths: Sequence[NDArray[np.int32]]
) -> None:
    """Write PREFIX.idx of documents with these lengths in tokens, an array per shard.

        MAGIC, version 1: u64, dtype code: u8, D: u64, D + 1: u64
        length: i32 per document | its offset in .bin, bytes: i64 | 0 .. D: i64

    Each of Megatron's sequences is a document here. At most INDEXED documents are in memory with
    more than their length.
    """
    code = next(code for code, known in DTYPES.items() if known is dtype)
    size, count = np.dtype(dtype).itemsize, sum(map(len, lengths))
    with open(path, "wb") as file:
        file.write(MAGIC + struct.pack("<QBQQ", 1, code, count, count + 1))
        for shard in lengths:
            file.write(shard.astype("<i4", copy=False).data)
        offset = 0
        for shard in lengths:
            for start in range(0, len(shard), INDEXED):
                sizes = shard[start : start + INDEXED].astype("<i8") * size
                ends = offset + np.cumsum(sizes)
                file.write((ends - sizes).data)
                offset = int(ends[-1])
        for start in range(0, count + 1, INDEXED):
            file.write(np.arange(start, min(start + INDEXED, count + 1), dtype="<i8").data)


def _publish(prefix: Path, manifest: DatasetManifest) -> None:
    """Rename the joined files to PREFIX; PREFIX.idx, which completes the dataset, comes last."""
    base = _joined(prefix)
    replaced = _replaced(prefix)
    suffixed(prefix, ".idx").unlink(missing_ok=True)
    os.replace(suffixed(base, ".bin"), suffixed(prefix, ".bin"))
    os.replace(suffixed(base, ".crc32"), suffixed(prefix, ".crc32"))
    for suffix in MASK_SUFFIXES:
        if manifest.masked:
            os.replace(suffixed(base, suffix), suffixed(prefix, suffix))
        elif replaced is not None and replaced.masked:
            suffixed(prefix, suffix).unlink(missing_ok=True)
    write_record(suffixed(prefix, ".json"), manifest.record())
    os.replace(suffixed(base, ".idx"), suffixed(prefix, ".idx"))


def _describe(
    shards: Sequence[TokenShard],
    options: Options,
    tokenizer: Tokenizer,
    key: str,
    crc32: tuple[int, int, int],
) -> DatasetManifest:
    """The manifest of finished shards; `crc32` is what `_join` returned."""
    records = [shard.record() for shard in shards]

    def total(name: str) -> int:
        return sum(record[name] for record in records if record is not None)

    masked = options.chat is not None

    return DatasetManifest(
        tokenizer=options.tokenizer,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        append_eod=options.append_eod,
        dtype=np.dtype(token_dtype(tokenizer.vocab_size)).name,
        documents=total("documents"),
        tokens=total("tokens"),
        replaced_utf8=total("replaced_utf8"),
        empty_documents=total("empty_documents"),
        inputs=key,
        index_crc32=crc32[0],
        sums_crc32=crc32[1],
        version=MASKED if masked else VERSION,
        mask_sums_crc32=crc32[2],
        learned_tokens=total("learned_tokens") if masked else 0,
    )
