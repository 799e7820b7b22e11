"""PREFIX.json: how a dataset was prepared, and the CRC-32 of PREFIX.idx and PREFIX.crc32.

A dataset of conversations has two files more: PREFIX.mask, a byte per token that is 1 if the token
is learned and else 0, and PREFIX.mask.crc32, its checksums.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coatlm.data.checksums import SUM_BYTES, DatasetError
from coatlm.data.streams import quoted, some
from coatlm.files import durable_file

FORMAT = "coatlm-tokens"
VERSION = 2  # version 1 has no checksums
MASKED = 3  # the version of datasets with a loss mask
MASK = ".mask"
MASK_SUFFIXES = (MASK, MASK + ".crc32")
SUFFIXES = (".bin", ".crc32", ".json", ".idx")  # in the order of writing: .idx completes a dataset


@dataclass(frozen=True)
class DatasetManifest:
    """The content of PREFIX.json."""

    tokenizer: str  # spec
    fingerprint: str  # of the tokenizer
    vocab_size: int
    eod: int
    append_eod: bool  # whether every document ends with `eod`
    dtype: str  # of PREFIX.bin
    documents: int
    tokens: int
    replaced_utf8: int  # number of U+FFFD that replace bytes that are not UTF-8
    empty_documents: int  # skipped documents without text
    inputs: str  # SHA-256 of the input files (path, size, mtime) and options
    index_crc32: int  # of PREFIX.idx
    sums_crc32: int  # of PREFIX.crc32
    format: str = FORMAT
    version: int = VERSION
    mask_sums_crc32: int = 0  # of PREFIX.mask.crc32
    learned_tokens: int = 0  # tokens whose mask is 1

    @property
    def masked(self) -> bool:
        """Whether the dataset has a loss mask."""
        return self.version == MASKED

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of the dataset's files."""
        files = SUFFIXES if self.version >= 2 else tuple(s for s in SUFFIXES if s != ".crc32")
        return files + (MASK_SUFFIXES if self.masked else ())

    def record(self) -> dict[str, Any]:
        """The content of PREFIX.json; without a mask, the keys of version 2."""
        absent = set() if self.masked else _SINCE_3
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in absent}


_SINCE_2 = {"index_crc32", "sums_crc32"}
_SINCE_3 = {"mask_sums_crc32", "learned_tokens"}


def token_dtype(vocab_size: int) -> type[np.number[Any]]:
    """The dtype in which ids are stored, which equals megatron's `DType.optimal_dtype`."""
    return np.uint16 if vocab_size < 65500 else np.int32


def suffixed(prefix: Path, suffix: str) -> Path:
    """Append a suffix to PREFIX, which may itself contain dots."""
    return prefix.with_name(prefix.name + suffix)


def read_dataset_manifest(prefix: Path) -> DatasetManifest | None:
    """Read PREFIX.json; None if it does not exist. Raises DatasetError if it is not a manifest."""
    path = suffixed(prefix, ".json")
    if path.exists() and not path.is_file():
        raise DatasetError(f"{path}: is not a regular file")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: not readable as JSON: {quoted(error)}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise DatasetError(f"{path}: does not describe a dataset of coatlm; move it elsewhere")
    if record.get("version") not in (1, VERSION, MASKED):
        raise DatasetError(
            f"{path}: version={quoted(record.get('version'))}: this coatlm reads versions 1 to "
            f"{MASKED}"
        )
    known = {field.name: field.type for field in dataclasses.fields(DatasetManifest)}
    if record["version"] == 1:
        record = dict.fromkeys(_SINCE_2, 0) | record
    if record["version"] != MASKED:
        record = dict.fromkeys(_SINCE_3, 0) | record
    if wrong := set(record) ^ set(known):
        raise DatasetError(f"{path}: unknown or missing keys: {some(sorted(wrong))}")
    if wrong := {name for name, kind in known.items() if type(record[name]).__name__ != kind}:
        raise DatasetError(f"{path}: of another type than was written: {some(sorted(wrong))}")
    return DatasetManifest(**record)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a JSON file atomically and fsync it."""
    with durable_file(path) as file:
        file.write((json.dumps(record, indent=2, sort_keys=True) + "\n").encode())


def read_sums(prefix: Path, suffix: str, crc32: int, nbytes: int) -> NDArray[np.uint32]:
    """Read PREFIX and `suffix`, the checksums of a file of `nbytes`, and verify it with `crc32`."""
    path = suffixed(prefix, suffix)
    summed = path.name.removesuffix(".crc32") if suffix != ".crc32" else f"{prefix.name}.bin"
    try:
        sums = np.fromfile(path, "<u4") if path.is_file() else None
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror or error}") from None
    if sums is None:
        raise DatasetError(f"{path}: no such file; it holds the checksums of {summed}")
    if len(sums) != -(-nbytes // SUM_BYTES) or zlib.crc32(sums.data) != crc32:
        raise DatasetError(f"{path}: damaged: its checksum differs from that in {prefix.name}.json")
    return sums
