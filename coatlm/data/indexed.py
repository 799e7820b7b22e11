"""Indexed datasets on disk: PREFIX.bin holds tokens, PREFIX.idx where documents lie, PREFIX.json
what made them.

    .idx = magic (9 B) | version u64 | dtype code u8 | sequences u64 | bounds u64
         | length i32 per sequence | byte offset i64 per sequence | i64 per document bound

The first two are the format of `megatron.core.datasets.indexed_dataset`, written with its builder.
They are mapped here rather than by its reader, which unmaps the tokens when it is collected even
while arrays still look into them, and which trusts files that do not fit. Datasets of other tools
come without PREFIX.json, so without proof of the tokenizer that made them: their ids are compared
with the vocabulary instead.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coatlm.data.tokenizer import Tokenizer

FORMAT = "coatlm-tokens"
VERSION = 1
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
SCANNED_TOKENS = 1 << 26  # ids compared with the vocabulary; beyond, evenly spaced blocks
SCANNED_BLOCK = 1 << 16


@dataclass(frozen=True)
class Manifest:
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
    format: str = FORMAT
    version: int = VERSION


@dataclass(frozen=True)
class Indexed:
    """An open dataset: document d is tokens[bounds[d]:bounds[d + 1]]."""

    name: str  # for messages
    tokens: NDArray[Any]  # of the whole .bin, mapped and not read
    bounds_D1: NDArray[np.int64]  # token offsets, one more than documents


def token_dtype(vocab_size: int) -> type[np.number[Any]]:
    """What ids are stored in: that of megatron's `DType.optimal_dtype`."""
    return np.uint16 if vocab_size < 65500 else np.int32


def suffixed(prefix: Path, suffix: str) -> Path:
    """PREFIX + suffix; a dot in the prefix stays."""
    return prefix.with_name(prefix.name + suffix)


def read_manifest(prefix: Path) -> Manifest | None:
    """PREFIX.json, or None where there is none. Raises ValueError if it is not ours or broken."""
    path = suffixed(prefix, ".json")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{path}: does not describe a dataset of coatlm; move it elsewhere")
    if record.get("version") != VERSION:
        raise ValueError(
            f"{path}: version={record.get('version')}: this coatlm reads version {VERSION}"
        )
    fields = {field.name for field in dataclasses.fields(Manifest)}
    if set(record) != fields:
        raise ValueError(f"{path}: unknown or missing keys: {sorted(set(record) ^ fields)}")
    return Manifest(**record)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a file whole or not at all, and on disk when this returns."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(json.dumps(record, indent=2, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def open_indexed(prefix: Path, tokenizer: Tokenizer, *, name: str = "") -> Indexed:
    """Open PREFIX for reading. Raises ValueError naming the file and what is wrong with it."""
    manifest = read_manifest(prefix)
    dtype, bounds_D1 = _read_index(prefix)
    if bounds_D1[-1] == 0:
        raise ValueError(f"{suffixed(prefix, '.bin')}: holds no tokens")
    if manifest is not None:
        _check_manifest(prefix, manifest, tokenizer, dtype, bounds_D1)
    tokens = np.asarray(np.memmap(suffixed(prefix, ".bin"), dtype, mode="r"))
    if manifest is None:
        _check_vocabulary(prefix, tokens, tokenizer)
    return Indexed(name or str(prefix), tokens, bounds_D1)


def _read_index(prefix: Path) -> tuple[type[np.number[Any]], NDArray[np.int64]]:
    """dtype and document bounds, in tokens, of an .idx file that fits its .bin file."""
    idx, bin_ = suffixed(prefix, ".idx"), suffixed(prefix, ".bin")
    for path in (idx, bin_):
        if not path.is_file():
            raise ValueError(f"{path}: no such file; a dataset is PREFIX.bin and PREFIX.idx")
        if path.stat().st_size == 0:
            raise ValueError(f"{path}: the file is empty")
        if not os.access(path, os.R_OK):
            raise ValueError(f"{path}: the file is not readable")
    size = idx.stat().st_size
    with open(idx, "rb") as file:
        header = file.read(HEADER_BYTES)
    if not header.startswith(MAGIC):
        raise ValueError(f"{idx}: not the index of a Megatron dataset (wrong first bytes)")
    if size < HEADER_BYTES:
        raise ValueError(f"{idx}: cut off inside its header, at {size} bytes")
    version, code = int.from_bytes(header[9:17], "little"), header[17]
    if version != 1 or code not in DTYPES:
        raise ValueError(f"{idx}: version {version}, dtype code {code}: not readable as token ids")
    sequences, bounds = (int.from_bytes(header[i : i + 8], "little") for i in (18, 26))
    expected = HEADER_BYTES + 12 * sequences + 8 * bounds
    if size != expected or bounds == 0:
        raise ValueError(
            f"{idx}: {size} bytes, but its header ({sequences} sequences, {bounds} document "
            f"bounds) means {expected}: cut off, or not a text dataset"
        )
    content = np.memmap(idx, mode="r", offset=HEADER_BYTES)
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
        raise ValueError(f"{idx}: its lengths, offsets and document bounds contradict each other")
    if bin_.stat().st_size != ends_S1[-1] * itemsize:
        raise ValueError(
            f"{bin_}: {bin_.stat().st_size} bytes, but {idx.name} means "
            f"{ends_S1[-1]} tokens of {itemsize} bytes: cut off, or from another dataset"
        )
    return DTYPES[code], ends_S1[sequence_D1]


def _check_manifest(
    prefix: Path,
    manifest: Manifest,
    tokenizer: Tokenizer,
    dtype: type[np.number[Any]],
    bounds_D1: NDArray[np.int64],
) -> None:
    """Raise ValueError unless PREFIX.json fits the run's tokenizer and the two other files."""
    path = suffixed(prefix, ".json")
    if (manifest.fingerprint, manifest.vocab_size, manifest.eod) != (
        tokenizer.fingerprint,
        tokenizer.vocab_size,
        tokenizer.eod,
    ):
        raise ValueError(
            f"{path}: made with tokenizer {manifest.tokenizer} (fingerprint "
            f"{manifest.fingerprint[:12]}, {manifest.vocab_size} ids), but data.tokenizer="
            f"{tokenizer.spec} (fingerprint {tokenizer.fingerprint[:12]}, "
            f"{tokenizer.vocab_size} ids)"
        )
    found = (np.dtype(dtype).name, len(bounds_D1) - 1, int(bounds_D1[-1]))
    if (manifest.dtype, manifest.documents, manifest.tokens) != found:
        raise ValueError(
            f"{path}: describes {manifest.documents} documents of {manifest.tokens} tokens as "
            f"{manifest.dtype}, but the .idx file {found[1]} of {found[2]} as {found[0]}"
        )


def _check_vocabulary(prefix: Path, tokens: NDArray[Any], tokenizer: Tokenizer) -> None:
    """Raise ValueError if an id is outside the vocabulary; samples what is over SCANNED_TOKENS."""
    last = max(len(tokens) - SCANNED_BLOCK, 0)
    blocks = min(-(-len(tokens) // SCANNED_BLOCK), SCANNED_TOKENS // SCANNED_BLOCK)
    for number in range(blocks):  # from end to end; together all tokens, if they are few enough
        start = number * last // max(blocks - 1, 1)
        block = tokens[start : start + SCANNED_BLOCK]
        for token in (int(block.max()), int(block.min())):
            if not 0 <= token < tokenizer.vocab_size:
                raise ValueError(
                    f"{suffixed(prefix, '.bin')}: holds token id {token}, outside the "
                    f"{tokenizer.vocab_size} ids of data.tokenizer={tokenizer.spec}"
                )
