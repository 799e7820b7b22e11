"""Documents -> tokens on disk: PREFIX.bin, PREFIX.idx (Megatron's indexed dataset), PREFIX.json and
PREFIX.crc32 (what they must be).

    inputs -> segments -> shards -> PREFIX

Shards are made by any number of processes and joined in the order of the input. Hence the result
does not depend on the number of processes, nor on interruptions: finished shards stay. Checksums
are taken of what was tokenised, and compared when shards are joined and when datasets are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coatlm.data.checksums import BlockSums
from coatlm.data.documents import Segment, expand_inputs, plan_segments
from coatlm.data.manifest import (
    SUFFIXES,
    DatasetManifest,
    read_dataset_manifest,
    suffixed,
    token_dtype,
    write_record,
)
from coatlm.data.shards import Options, TokenShard, fingerprint, plan_shards, tokenise
from coatlm.data.streams import DEFAULT_LIMITS, Limits
from coatlm.data.tokenizer import Tokenizer, make_tokenizer

COPIED_BYTES = 1 << 24  # of a shard, at once


def preprocess(
    inputs: Sequence[str],
    prefix: Path,
    options: Options,
    *,
    limits: Limits = DEFAULT_LIMITS,
    workers: int = 0,
    overwrite: bool = False,
) -> DatasetManifest:
    """Tokenise files, globs or `python-stdlib` into PREFIX.bin, .idx, .json and .crc32.

    An interrupted call leaves PREFIX.shards behind, from which the same call goes on. If PREFIX is
    already what is asked for, nothing is done. `workers`: processes, 0 for one a core.
    Raises ValueError, one line that names the file, and OSError where writing fails.
    """
    tokenizer = make_tokenizer(options.tokenizer)
    segments = plan_segments(expand_inputs(inputs), options.shard_bytes)
    key = fingerprint(segments, options, tokenizer)
    done = _existing(prefix, key, segments, overwrite)
    directory = suffixed(prefix, ".shards")
    if done is not None:
        shutil.rmtree(directory, ignore_errors=True)  # of a run that ended just before removing it
        return done
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        shards = plan_shards(segments, options, tokenizer, directory)
        tokenise(shards, options, limits, workers)
        crc32 = _join(shards, _joined(prefix), token_dtype(tokenizer.vocab_size))
        manifest = _describe(shards, options, tokenizer, key, crc32)
        if manifest.documents:
            _publish(prefix, manifest)
        shutil.rmtree(directory)
    if not manifest.documents:
        raise ValueError(f"{_shortened(inputs)}: the input holds no text")
    return manifest


def _shortened(inputs: Sequence[str]) -> str:
    return ", ".join(inputs[:2]) + (f" and {len(inputs) - 2} more" if len(inputs) > 2 else "")


def _existing(
    prefix: Path, key: str, segments: Sequence[Segment], overwrite: bool
) -> DatasetManifest | None:
    """The manifest if PREFIX is what is asked for. Raises ValueError where it must not be."""
    targets = [suffixed(prefix, suffix) for suffix in SUFFIXES]
    inputs = {segment.path for segment in segments}
    for target in targets:
        if str(target.absolute()) in inputs:
            raise ValueError(f"{target}: would overwrite an input; choose another output prefix")
    manifest = read_dataset_manifest(prefix)
    if manifest is not None and manifest.inputs == key:
        expected = [suffixed(prefix, suffix) for suffix in manifest.suffixes]
        if all(target.exists() for target in expected) and not (
            overwrite and manifest.version == 1
        ):
            return manifest
    joined = _joined(prefix)
    publishing = suffixed(joined, ".idx").exists() and not suffixed(joined, ".bin").exists()
    for target in (suffixed(prefix, ".bin"), suffixed(prefix, ".idx")):
        if target.exists() and not overwrite and not publishing:
            raise ValueError(
                f"{target}: exists, made from other inputs or options; see --overwrite"
            )
    return None


def _joined(prefix: Path) -> Path:
    """Where the joined files lie until they get their names, .bin first and .idx last."""
    return suffixed(prefix, ".shards") / "joined"


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other runs out of `directory`; the lock ends with the process."""
    with open(directory / "lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{directory}: another run is writing here") from None
        yield


def _join(shards: Sequence[TokenShard], base: Path, dtype: type[np.number[Any]]) -> tuple[int, int]:
    """Write the documents of all shards, in order, to BASE.bin, .idx and .crc32, onto the disk.

    Returns the CRC-32 of .idx and of .crc32. Raises ValueError where a shard was damaged.
    """
    with warnings.catch_warnings():  # about GPU packages, which this does not need
        warnings.simplefilter("ignore")
        from coatlm.megatron import IndexedDatasetBuilder  # imports torch, unneeded by workers

    binary, index, checksums = (suffixed(base, suffix) for suffix in (".bin", ".idx", ".crc32"))
    builder = IndexedDatasetBuilder(str(binary), dtype=dtype)
    sums = BlockSums()
    for shard in shards:
        tokens, lengths = shard.read(dtype)
        content = tokens.view(np.uint8).data
        for start in range(0, len(content), COPIED_BYTES):
            sums.update(content[start : start + COPIED_BYTES])
        start = 0
        for length in lengths.tolist():
            builder.add_document(tokens[start : start + length], [length])
            start += length
    builder.finalize(str(index))
    sums.array().tofile(checksums)
    for path in (binary, index, checksums):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return zlib.crc32(np.memmap(index, mode="r").data), zlib.crc32(sums.array().data)


def _publish(prefix: Path, manifest: DatasetManifest) -> None:
    """Give the joined files their names; PREFIX.idx, without which there is no dataset, last."""
    base = _joined(prefix)
    suffixed(prefix, ".idx").unlink(missing_ok=True)
    os.replace(suffixed(base, ".bin"), suffixed(prefix, ".bin"))
    os.replace(suffixed(base, ".crc32"), suffixed(prefix, ".crc32"))
    write_record(suffixed(prefix, ".json"), dataclasses.asdict(manifest))
    os.replace(suffixed(base, ".idx"), suffixed(prefix, ".idx"))


def _describe(
    shards: Sequence[TokenShard],
    options: Options,
    tokenizer: Tokenizer,
    key: str,
    crc32: tuple[int, int],
) -> DatasetManifest:
    """The manifest of finished shards; `crc32` of the files .idx and .crc32."""
    records = [shard.record() for shard in shards]

    def total(name: str) -> int:
        return sum(record[name] for record in records if record is not None)

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
    )
