"""Files -> documents: plain text, JSON lines and parquet, in pieces that can be read in parallel.

    file     = segment*      byte range of a plain file | row group of parquet | compressed file
    document = a JSON line's field | a parquet row's column | the text of one segment

A line belongs to the segment in which it begins, so that segments are read independently and
together give every line once. Text that is not UTF-8 is decoded with U+FFFD in place of what is
wrong, and counted. Empty documents (no text, or null) are skipped, and counted.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

STDLIB = "python-stdlib"  # stands for the sources of the running Python's standard library
STDLIB_BYTES = 16_000_000  # of which whole files are taken in sorted order, up to this size
BLOCK_BYTES = 1 << 20  # what is read, and of plain text encoded, at once; ends with a line
ROWS = 1024  # of parquet, decoded at once

_BOM = b"\xef\xbb\xbf"
_REPLACEMENT = "\ufffd".encode()
_SURROGATE = re.compile("[\ud800-\udfff]")  # lone halves, which JSON can spell: "\\ud800"
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

Kind = Literal["text", "jsonl", "parquet"]


@dataclass(frozen=True)
class Segment:
    """Bytes [start, stop) of a plain file; row group `start` of parquet; a compressed file."""

    path: str  # absolute
    size: int  # of the file, bytes; with mtime_ns, what tells that it has changed
    mtime_ns: int
    start: int
    stop: int
    nbytes: int  # its part of the file on disk


@dataclass(frozen=True)
class Block:
    """What is read at once: documents, or (of plain text) a part of the segment's one document."""

    texts: list[str]
    replaced: int  # U+FFFD put in place of bytes that are not UTF-8
    empty: int  # documents without text
    nbytes: int  # read from disk since the block before


def expand_inputs(inputs: Iterable[str]) -> list[Path]:
    """Absolute paths of files, globs (`**` for any depth) and `python-stdlib`, each file once.

    Order: that of `inputs`, sorted within a glob. Raises ValueError for what names no file.
    """
    paths: dict[Path, None] = {}
    for item in inputs:
        if item == STDLIB:
            found = stdlib_sources()
        elif Path(item).exists():  # also names that look like globs
            found = [Path(item)]
        else:
            found = [Path(p) for p in sorted(glob.glob(item, recursive=True)) if Path(p).is_file()]
        if not found:
            raise ValueError(f"{item}: no such file, and no file matches it as a glob")
        for path in found:
            if path.is_dir():
                raise ValueError(
                    f"{path}: is a directory; name its files, for example {path}/*.txt"
                )
            paths[path.absolute()] = None
    return list(paths)


def stdlib_sources() -> list[Path]:
    """The .py files of the standard library without its tests, sorted, capped at STDLIB_BYTES."""
    root = sysconfig.get_paths()["stdlib"]
    paths: list[Path] = []
    for directory, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _NOT_STDLIB]
        paths += [Path(directory, name) for name in files if name.endswith(".py")]
    chosen, total = [], 0
    for path in sorted(paths):
        total += path.stat().st_size
        if total > STDLIB_BYTES:
            break
        chosen.append(path)
    return chosen


def file_kind(path: str) -> tuple[Kind, str]:
    """What a file holds, by its name, and its compression: "", ".gz" or ".zst"."""
    name = Path(path)
    compression = name.suffix if name.suffix in (".gz", ".zst") else ""
    suffix = name.with_suffix("").suffix if compression else name.suffix
    if suffix in (".jsonl", ".ndjson", ".json"):
        return "jsonl", compression
    if suffix == ".parquet":
        if compression:
            raise ValueError(
                f"{path}: parquet is compressed inside; a {compression} of it is not read"
            )
        return "parquet", ""
    return "text", compression


def plan_segments(paths: Sequence[Path], segment_bytes: int) -> list[Segment]:
    """The segments of all files, in order. Plain files are cut every `segment_bytes`."""
    segments: list[Segment] = []
    for path in paths:
        kind, compression = file_kind(str(path))
        try:
            stat = path.stat()
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
        size = stat.st_size
        identity = (str(path), size, stat.st_mtime_ns)
        if kind == "parquet":
            groups = _open_parquet(str(path)).metadata.num_row_groups
            share = size // max(groups, 1)
            segments += [Segment(*identity, g, g + 1, share) for g in range(groups)]
        elif compression:
            if not size:
                raise ValueError(f"{path}: the file is empty")
            segments.append(Segment(*identity, 0, size, size))
        else:
            for start in range(0, max(size, 1), segment_bytes):
                stop = min(start + segment_bytes, size)
                segments.append(Segment(*identity, start, stop, stop - start))
    return segments


def read_segment(segment: Segment, field: str, column: str) -> Iterator[Block]:
    """The blocks of a segment. Raises ValueError naming the file for whatever is wrong with it."""
    path = segment.path
    kind, compression = file_kind(path)
    try:
        stat = Path(path).stat()
        if (stat.st_size, stat.st_mtime_ns) != (segment.size, segment.mtime_ns):
            raise ValueError(f"{path}: was changed while it was being read")
        if kind == "parquet":
            yield from _parquet_blocks(segment, column)
        elif kind == "jsonl":
            yield from _jsonl_blocks(segment, field)
        else:
            yield from _text_blocks(segment)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: broken {compression or 'file'}: {error}") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None


def decode(raw: bytes) -> tuple[str, int]:
    """Text of UTF-8 bytes, and how many U+FFFD stand for what is not UTF-8."""
    try:
        return raw.decode("utf-8"), 0
    except UnicodeDecodeError:
        text = raw.decode("utf-8", errors="replace")
        return text, text.count("\ufffd") - raw.count(_REPLACEMENT)


def _text_blocks(segment: Segment) -> Iterator[Block]:
    for lines, _, nbytes in _line_blocks(segment):
        text, replaced = decode(b"".join(lines))
        step = 2 * BLOCK_BYTES  # binds only where a single line is longer than a block
        yield Block([text[i : i + step] for i in range(0, len(text), step)], replaced, 0, nbytes)


def _jsonl_blocks(segment: Segment, field: str) -> Iterator[Block]:
    for lines, offset, nbytes in _line_blocks(segment):
        texts, replaced, empty = [], 0, 0
        for line in lines:
            if line and not line.isspace():
                text, wrong = _json_text(line, field, f"{segment.path}: at byte {offset}")
                replaced += wrong
                if text:
                    texts.append(text)
                else:
                    empty += 1
            offset += len(line)
        yield Block(texts, replaced, empty, nbytes)


def _json_text(line: bytes, field: str, where: str) -> tuple[str | None, int]:
    """The text under `field` of a JSON object, and the number of U+FFFD put into it."""
    source, wrong = decode(line)
    try:
        record = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not a JSON line: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a {type(record).__name__}, not a JSON object")
    if field not in record:
        raise ValueError(f"{where}: no field {field!r}; there are {', '.join(record) or 'none'}")
    text = record[field]
    if text is None:
        return None, wrong
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {field!r} is a {type(text).__name__}, not a string")
    text, halves = _SURROGATE.subn("\ufffd", text)
    return text, wrong + halves


def _line_blocks(segment: Segment) -> Iterator[tuple[list[bytes], int, int]]:
    """(lines that begin in the segment, byte offset of the first, bytes read from disk)."""
    _, compression = file_kind(segment.path)
    with open(segment.path, "rb") as raw:
        file: IO[bytes] = raw
        if compression == ".gz":
            file = io.BufferedReader(gzip.GzipFile(fileobj=raw), BLOCK_BYTES)
        elif compression == ".zst":
            file = io.BufferedReader(_ZstdReader(raw), BLOCK_BYTES)
        elif segment.start:
            raw.seek(segment.start - 1)
            raw.readline()  # the rest of a line of the segment before, or only its line end
        offset = file.tell() if not compression else 0
        at_disk = offset
        while compression or offset < segment.stop:
            limit = offset + BLOCK_BYTES
            lines = _read_lines(file, offset, limit if compression else min(limit, segment.stop))
            if not lines:
                return
            begin, offset = offset, offset + sum(map(len, lines))
            if begin == 0 and lines[0].startswith(_BOM):
                lines[0] = lines[0][len(_BOM) :]
            moved, at_disk = raw.tell() - at_disk, raw.tell()
            yield lines, begin, moved


def _read_lines(file: IO[bytes], offset: int, stop: int) -> list[bytes]:
    """The lines that begin at `offset` and up to `stop`, exclusive."""
    lines = []
    while offset < stop and (line := file.readline()):
        lines.append(line)
        offset += len(line)
    return lines


class _ZstdReader(io.RawIOBase):
    """Frames of zstandard, decompressed; unlike the library's reader it notices a cut-off end."""

    def __init__(self, raw: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError:
            raise ValueError(".zst needs zstandard: pip install zstandard") from None
        self._raw = raw
        self._make = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._error = zstandard.ZstdError
        self._frame: Any = None  # of the frame being read
        self._compressed = b""  # read, not yet decompressed
        self._ready = memoryview(b"")  # decompressed, not yet asked for

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._compressed = self._compressed or self._raw.read(1 << 17)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the file ends inside a frame")
                return 0
            self._frame = self._frame or self._make()
            try:
                self._ready = memoryview(self._frame.decompress(self._compressed))
            except self._error as error:
                raise OSError(f"broken .zst: {error}") from None
            self._compressed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _open_parquet(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: parquet needs pyarrow: pip install pyarrow") from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a parquet file: {' '.join(str(error).split())}") from None


def _parquet_blocks(segment: Segment, column: str) -> Iterator[Block]:
    import pyarrow

    file = _open_parquet(segment.path)
    names = file.schema_arrow.names
    if column not in names:
        raise ValueError(f"{segment.path}: no column {column!r}; there are {', '.join(names)}")
    kind = file.schema_arrow.field(column).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        raise ValueError(f"{segment.path}: column {column!r} is {kind}, not string")
    rows = file.metadata.row_group(segment.start).num_rows
    try:
        for batch in file.iter_batches(ROWS, row_groups=[segment.start], columns=[column]):
            # as bytes, because pyarrow hands out strings only if they are valid UTF-8
            values = batch.column(0).cast(kind).cast(pyarrow.large_binary()).to_pylist()
            decoded = [decode(value) for value in values if value]
            yield Block(
                [text for text, _ in decoded],
                sum(wrong for _, wrong in decoded),
                len(values) - len(decoded),
                segment.nbytes * len(values) // rows,
            )
    except pyarrow.ArrowException as error:
        raise ValueError(
            f"{segment.path}: broken parquet: {' '.join(str(error).split())}"
        ) from None
    finally:
        file.close()
