"""Files -> documents: plain text, JSON lines and parquet, in segments that are read in parallel.

    file     = segment*      byte range of a plain file | row group of parquet | compressed file
    document = a JSON line's field | a parquet row's column | the text of one segment
             | what `read_records` makes of a JSON line

A line belongs to the segment in which it begins, so segments are read independently and together
give every line once. Compressed plain text is cut into the same documents as the uncompressed file.
A line of plain text that is longer than a segment is cut too: text without line ends gives one
document per segment. Bytes that are not UTF-8 are decoded as U+FFFD and counted. Empty documents
(no text, or null) are skipped and counted.

Memory is bounded: see `coatlm.data.streams` and `coatlm.data.parquet`. Only regular files are read,
because a pipe may never end and cannot be read twice, and objects at URLs (`coatlm.remote`), whose
version stands for the time of the last change.
"""

from __future__ import annotations

import glob
import gzip
import itertools
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from coatlm.config.urls import is_url
from coatlm.data.input_files import START_BYTES, require_content, require_regular, suffixes
from coatlm.data.parquet import read_column, row_groups
from coatlm.data.streams import (
    BLOCK_BYTES,
    DEFAULT_LIMITS,
    Limits,
    TextStream,
    open_text_stream,
    some,
)
from coatlm.remote import Location

STDLIB = "python-stdlib"  # input name of the source of the running Python's standard library
STDLIB_BYTES = 16_000_000  # of these sources, whole files in sorted order up to this size
WHOLE = 1 << 62  # segment_bytes or document_bytes for files that are not to be cut

_BOM = b"\xef\xbb\xbf"
_REPLACEMENT = "\ufffd".encode()
_SURROGATE = re.compile("[\ud800-\udfff]")  # lone halves, which JSON can spell: "\\ud800"
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

FileKind = Literal["text", "jsonl", "parquet"]
T = TypeVar("T")
# A JSON object and its place in the input -> a document (None if it is empty), and the number of
# U+FFFD put into it.
Extract = Callable[[dict[str, Any], str], tuple[T | None, int]]


@dataclass(frozen=True)
class Segment:
    """Bytes [start, stop) of a plain file, row group `start` of parquet, or a compressed file."""

    path: str  # absolute, or a URL
    size: int  # of the file, bytes; with mtime_ns, detects a changed file
    mtime_ns: int  # at a URL: `coatlm.remote.Info.version`
    start: int
    stop: int
    nbytes: int  # the segment's share of the file on disk


@dataclass(frozen=True)
class Block(Generic[T]):
    """What is read at once: documents, or (of plain text) a part of the segment's only document."""

    items: list[T]
    replaced: int  # number of U+FFFD that replace bytes that are not UTF-8
    empty: int  # documents without text
    nbytes: int  # read from disk since the previous block
    ends: bool = False  # for plain text: the document ends with this block


def expand_inputs(inputs: Iterable[str]) -> list[Path | str]:
    """The absolute paths of files, globs (`**` for any depth) and `python-stdlib`, each file once.

    What matches a URL, which may be a glob too, is a list of URLs. They are in the order of
    `inputs`, sorted within a glob. Raises ValueError if an input matches no file.
    """
    paths: dict[Path | str, Path | str] = {}  # of the same file, or URL
    for item in inputs:
        found: Sequence[Path | str]
        if is_url(item):
            found = Location.of(item).matches() if glob.has_magic(item) else [item]
        elif item == STDLIB:
            found = stdlib_sources()
        elif Path(item).exists():  # includes file names that look like globs
            found = [Path(item)]
        else:
            found = [Path(p) for p in sorted(glob.glob(item, recursive=True)) if Path(p).is_file()]
        if not found:
            raise ValueError(f"{item}: no such file, and no file matches it as a glob")
        for path in found:
            if isinstance(path, Path):
                require_regular(path)
                paths.setdefault(path.resolve(), path.absolute())
            else:
                paths.setdefault(path, path)
    return list(paths.values())


def stdlib_sources() -> list[Path]:
    """The .py files of the standard library without its tests, sorted, up to STDLIB_BYTES."""
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


def file_kind(path: str) -> tuple[FileKind, str]:
    """The content type and the compression ("", ".gz" or ".zst") of a file, from its name.

    Raises ValueError for the name of a file that is not read.
    """
    suffix, compression = suffixes(path)
    if suffix in (".jsonl", ".ndjson", ".json"):
        return "jsonl", compression
    if suffix == ".parquet":
        if compression:
            raise ValueError(
                f"{path}: parquet is compressed internally; {compression} on top is not supported"
            )
        return "parquet", ""
    return "text", compression


def plan_segments(paths: Sequence[Path | str], segment_bytes: int) -> list[Segment]:
    """Divide all files into segments, in order. Plain files are cut every `segment_bytes`.

    Raises ValueError for a file that cannot be read, or holds another format than its name says.
    """
    segments: list[Segment] = []
    for path in paths:
        kind, compression = file_kind(str(path))
        try:
            size, version = _size_and_version(str(path))
            if not is_url(str(path)):  # an object is checked when it is read
                with open(path, "rb") as file:
                    named = ".parquet" if kind == "parquet" else compression
                    require_content(str(path), file.read(START_BYTES), named)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
        identity = (str(path), size, version)
        if kind == "parquet":
            groups = row_groups(str(path), size)
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


def _size_and_version(path: str) -> tuple[int, int]:
    """The size of a file, and what changes when the file does: its mtime, in ns, if it is local."""
    if is_url(path):
        return Location.of(path).info()
    found = Path(path).stat()
    return found.st_size, found.st_mtime_ns


def read_segment(
    segment: Segment,
    field: str,
    column: str,
    *,
    limits: Limits = DEFAULT_LIMITS,
    document_bytes: int = WHOLE,
) -> Iterator[Block[str]]:
    """Yield the blocks of a segment. Raises ValueError with the file's name for any problem.

    `document_bytes` is the `segment_bytes` with which `plan_segments` cut plain text.
    """
    kind, compression = file_kind(segment.path)
    if kind == "jsonl":
        yield from read_records(segment, partial(_field_text, field), limits=limits)
        return
    with _errors_of(segment, compression):
        if kind == "parquet":
            yield from _parquet_blocks(segment, column, limits)
            return
        with open_text_stream(segment.path, compression, segment.size, limits) as stream:
            yield from _text_blocks(segment, stream, document_bytes)


def read_records(
    segment: Segment, extract: Extract[T], *, limits: Limits = DEFAULT_LIMITS
) -> Iterator[Block[T]]:
    """Yield the documents that `extract` makes of the JSON lines of a segment, in blocks.

    Raises ValueError with the file's name for any problem, and for a file of another kind.
    """
    require_json_lines([segment])
    compression = file_kind(segment.path)[1]
    with (
        _errors_of(segment, compression),
        open_text_stream(segment.path, compression, segment.size, limits) as stream,
    ):
        yield from _jsonl_blocks(segment, stream, extract)


def require_json_lines(segments: Iterable[Segment]) -> None:
    """Raise ValueError for a file that does not hold JSON lines."""
    for segment in segments:
        if file_kind(segment.path)[0] != "jsonl":
            raise ValueError(f"{segment.path}: holds no JSON lines: *.jsonl, *.ndjson or *.json")


@contextmanager
def _errors_of(segment: Segment, compression: str) -> Iterator[None]:
    """Turn errors of reading into a ValueError with the file's name, also if the file changed."""
    path = segment.path
    try:
        if _size_and_version(path) != (segment.size, segment.mtime_ns):
            raise ValueError(f"{path}: was changed while it was being read")
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: broken {compression or 'file'}: {error}") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None


def decode_utf8(raw: bytes) -> tuple[str, int]:
    """Decode UTF-8; returns the text and the number of U+FFFD that replace invalid bytes."""
    try:
        return raw.decode("utf-8"), 0
    except UnicodeDecodeError:
        text = raw.decode("utf-8", errors="replace")
        return text, text.count("\ufffd") - raw.count(_REPLACEMENT)


def _text_blocks(segment: Segment, stream: TextStream, document_bytes: int) -> Iterator[Block[str]]:
    """Yield the parts of the segment's document; a compressed file has several documents."""
    compressed = file_kind(segment.path)[1]
    stops = itertools.count(document_bytes, document_bytes) if compressed else [segment.stop]
    if not compressed:
        stream.seek_line(segment.start, document_bytes)
    for stop in stops:
        begin = stream.offset
        while raw := stream.read_piece(stop, document_bytes):
            if stream.offset == len(raw):
                require_content(segment.path, raw)
                raw = raw.removeprefix(_BOM)
            text, replaced = decode_utf8(raw)
            yield Block([text], replaced, 0, stream.bytes_from_disk())
        if stream.offset > begin or not compressed:
            yield Block([], 0, 0, stream.bytes_from_disk(), ends=True)
        if stream.at_end():
            return


def _jsonl_blocks(segment: Segment, stream: TextStream, extract: Extract[T]) -> Iterator[Block[T]]:
    """Yield the documents of lines that begin in the segment, about BLOCK_BYTES at a time."""
    compressed = file_kind(segment.path)[1]
    if not compressed:
        stream.skip_to_line(segment.start)
    stop = WHOLE if compressed else segment.stop
    items: list[T] = []
    replaced = empty = 0
    after = BLOCK_BYTES + stream.offset
    while (begin := stream.offset) < stop and (line := stream.read_line()):
        if begin == 0:
            require_content(segment.path, line)
            line = line.removeprefix(_BOM)
        if line and not line.isspace():
            where = f"{segment.path}: at byte {begin}"
            record, wrong = _json_record(line, where)
            item, more = extract(record, where)
            replaced += wrong + more
            if item:
                items.append(item)
            else:
                empty += 1
        if stream.offset >= after:
            yield Block(items, replaced, empty, stream.bytes_from_disk())
            items, replaced, empty, after = [], 0, 0, BLOCK_BYTES + stream.offset
    yield Block(items, replaced, empty, stream.bytes_from_disk())


def _json_record(line: bytes, where: str) -> tuple[dict[str, Any], int]:
    """The JSON object of a line, and the number of U+FFFD in place of invalid bytes."""
    source, wrong = decode_utf8(line)
    try:
        record = json.loads(source)
    except RecursionError:
        raise ValueError(f"{where}: not a JSON line: its values are nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{where}: not a JSON line: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a {type(record).__name__}, not a JSON object")
    return record, wrong


def _field_text(field: str, record: dict[str, Any], where: str) -> tuple[str | None, int]:
    """The text in `field` of a JSON object, None for null."""
    if field not in record:
        raise ValueError(f"{where}: no field {field!r}; there are {some(record)}")
    if record[field] is None:
        return None, 0
    return string_in(record, field, where)


def string_in(record: dict[str, Any], field: str, where: str) -> tuple[str, int]:
    """The string in `field`, and the number of U+FFFD put in place of lone surrogates."""
    text = record.get(field)
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {field!r} is a {type(text).__name__}, not a string")
    return _SURROGATE.subn("\ufffd", text)


def _parquet_blocks(segment: Segment, column: str, limits: Limits) -> Iterator[Block[str]]:
    """Yield one document per row; rows without text are counted."""
    batches = read_column(segment.path, segment.start, column, segment.size, limits)
    for values, share in batches:
        decoded = [decode_utf8(value) for value in values if value]
        yield Block(
            [text for text, _ in decoded],
            sum(wrong for _, wrong in decoded),
            len(values) - len(decoded),
            int(segment.nbytes * share),
        )
