"""PREFIX.json: what made a prepared dataset, and the CRC-32 of PREFIX.idx and of PREFIX.crc32."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coatlm.data.checksums import SUM_BYTES, DatasetError
from coatlm.data.streams import quoted, some

FORMAT = "coatlm-tokens"
VERSION = 2  # 1: without checksums
SUFFIXES = (".bin", ".crc32", ".json", ".idx")  # .idx, without which there is no dataset, last


@dataclass(frozen=True)
class DatasetManifest:
    """PREFIX.json."""

    tokenizer: str  # spec
    fingerprint: str  # of the tokenizer
    vocab_size: int
    eod: int
    append_eod: bool  # every document ends with it
    dtype: str  # of PREFIX.bin
    documents: int
    tokens: int
    replaced_utf8: int  # U+FFFD put in place of bytes that are not UTF-8
    empty_documents: int  # without text, skipped
    inputs: str  # sha256 of the files (path, size, mtime) and options
    index_crc32: int  # of PREFIX.idx
    sums_crc32: int  # of PREFIX.crc32
    format: str = FORMAT
    version: int = VERSION

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Of the files that make up the dataset."""
        return SUFFIXES if self.version >= 2 else tuple(s for s in SUFFIXES if s != ".crc32")


_SINCE_2 = {"index_crc32", "sums_crc32"}


def token_dtype(vocab_size: int) -> type[np.number[Any]]:
    """What ids are stored in: that of megatron's `DType.optimal_dtype`."""
    return np.uint16 if vocab_size < 65500 else np.int32


def suffixed(prefix: Path, suffix: str) -> Path:
    """PREFIX + suffix; a dot in the prefix stays."""
    return prefix.with_name(prefix.name + suffix)


def read_dataset_manifest(prefix: Path) -> DatasetManifest | None:
    """PREFIX.json, or None where there is none. Raises DatasetError if it is broken or not ours."""
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
    if record.get("version") not in (1, VERSION):
        raise DatasetError(
            f"{path}: version={quoted(record.get('version'))}: this coatlm reads versions 1 and "
            f"{VERSION}"
        )
    known = {field.name: field.type for field in dataclasses.fields(DatasetManifest)}
    if record["version"] == 1:
        record = dict.fromkeys(_SINCE_2, 0) | record
    if wrong := set(record) ^ set(known):
        raise DatasetError(f"{path}: unknown or missing keys: {some(sorted(wrong))}")
    if wrong := {name for name, kind in known.items() if type(record[name]).__name__ != kind}:
        raise DatasetError(f"{path}: of another type than was written: {some(sorted(wrong))}")
    return DatasetManifest(**record)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a file whole or not at all, and on disk when this returns."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(json.dumps(record, indent=2, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_sums(prefix: Path, manifest: DatasetManifest, nbytes: int) -> NDArray[np.uint32]:
    """PREFIX.crc32, compared with its own checksum; `nbytes` of PREFIX.bin."""
    path = suffixed(prefix, ".crc32")
    try:
        sums = np.fromfile(path, "<u4") if path.is_file() else None
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror or error}") from None
    if sums is None:
        raise DatasetError(f"{path}: no such file; it holds the checksums of {prefix.name}.bin")
    if len(sums) != -(-nbytes // SUM_BYTES) or zlib.crc32(sums.data) != manifest.sums_crc32:
        raise DatasetError(f"{path}: damaged: its checksum differs from that in {prefix.name}.json")
    return sums
