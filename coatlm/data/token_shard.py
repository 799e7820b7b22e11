"""The files of one shard: NAME.bin, NAME.lengths.npy, NAME.mask of conversations, NAME.json.

The record NAME.json is written last, so a shard with a record is complete and can be reused by the
next run. It has the CRC-32 of the tokens and of the mask, which are verified when the shards are
joined. A document is written in parts as it is read, so memory does not grow with its length; it
may have up to 2^31 - 1 tokens, the largest length in PREFIX.idx. A conversation is encoded whole:
its JSON line is limited by `Limits.max_record`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coatlm.data.chat import ChatEncoder, ChatFormat
from coatlm.data.documents import Segment, file_kind, read_records, read_segment
from coatlm.data.manifest import suffixed, token_dtype, write_record
from coatlm.data.streams import BLOCK_BYTES, Limits
from coatlm.data.tokenizer import Tokenizer
from coatlm.files import durable_file

SHARD_BYTES = 64 << 20  # bytes of input per shard
MAX_CHARACTERS = 2 * BLOCK_BYTES  # encoded at once; a longer text is encoded in parts
SEARCHED = 4096  # characters before that end in which a part may end instead
WORD = re.compile(r"\S(?=\s\S)")  # the end of a word
MAX_LENGTH = 2**31 - 1  # tokens of a document

COUNTS = {"bytes", "crc32", "documents", "empty_documents", "replaced_utf8", "tokens"}

ReportProgress = Callable[[int, int], None]  # (documents, input bytes) since the last report


class Tokens(NamedTuple):
    """The content of a shard; the mask is empty unless it was asked for."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int32]  # of documents
    mask: NDArray[np.uint8]  # 1 per learned token


@dataclass(frozen=True)
class Options:
    """The options that determine the tokens, besides the input files."""

    tokenizer: str = "byte"  # spec
    field: str = "text"  # of JSON lines
    column: str = "text"  # of parquet files
    append_eod: bool = True  # whether to end every document with end-of-document
    shard_bytes: int = SHARD_BYTES  # a larger plain text file becomes several documents
    chat: ChatFormat | None = None  # how JSON lines of conversations become text, with a loss mask


@dataclass(frozen=True)
class TokenShard:
    """Segments that one process tokenizes into files of DIRECTORY: see the module docstring."""

    base: Path  # DIRECTORY/NAME
    segments: tuple[Segment, ...]
    nbytes: int  # bytes of input

    def record(self) -> dict[str, Any] | None:
        """The record of a finished shard: crc32, bytes, documents and other counts; else None."""
        try:
            record = json.loads(suffixed(self.base, ".json").read_text(encoding="utf-8"))
            whole = record["bytes"] == suffixed(self.base, ".bin").stat().st_size
            whole = whole and record.keys() >= COUNTS
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
            return None
        return record if whole else None

    def read(self, dtype: type[np.number[Any]], *, masked: bool = False) -> Tokens:
        """The memory-mapped tokens with lengths and masks. Raises ValueError if damaged.

        The record of a damaged shard is removed, so that the next run writes the shard again.
        """
        record = self.record()
        path = suffixed(self.base, ".bin")
        if record is not None and record["tokens"] == 0:
            return Tokens(np.zeros(0, dtype), np.zeros(0, np.int32), np.zeros(0, np.uint8))
        # TokenError: of a .npy header, from Python 3.12 on
        with contextlib.suppress(OSError, ValueError, EOFError, LookupError, TokenError):
            lengths = np.load(suffixed(self.base, ".lengths.npy"))
            tokens = np.memmap(path, dtype, mode="r")
            total = int(lengths.sum(dtype=np.int64))
            found = [zlib.crc32(tokens.data), len(tokens), total, len(lengths)]
            names = ["crc32", "tokens", "tokens", "documents"]
            mask = np.zeros(0, np.uint8)
            if masked:
                mask = np.memmap(suffixed(self.base, ".mask"), np.uint8, mode="r")
                found += [zlib.crc32(mask.data), len(mask)]
                names += ["mask_crc32", "tokens"]
            if record is not None and found == [record[name] for name in names]:
                return Tokens(tokens, lengths, mask)
        suffixed(self.base, ".json").unlink(missing_ok=True)
        raise ValueError(f"{path}: damaged: it differs from its record; run again to repair it")


class _Documents:
    """Writes the token ids of documents to a file, in parts of documents."""

    def __init__(
        self,
        file: IO[bytes],
        dtype: type[np.number[Any]],
        end: Sequence[int],
        masks: IO[bytes] | None,
    ) -> None:
        self.lengths: list[int] = []  # tokens of each document
        self.crc32 = self.mask_crc32 = self.learned = self.empty = 0
        self._file, self._dtype, self._end, self._masks = file, dtype, end, masks
        self._length = 0  # of the current document

    def write(self, ids: Sequence[int]) -> None:
        """Append ids to the current document."""
        raw = np.asarray(ids, dtype=self._dtype).tobytes()
        self.crc32 = zlib.crc32(raw, self.crc32)
        self._file.write(raw)
        self._length += len(ids)

    def write_mask(self, mask: Sequence[int]) -> None:
        """Append the mask of all ids of the current document."""
        assert self._masks is not None and len(mask) == self._length
        raw = bytes(mask)
        self.mask_crc32 = zlib.crc32(raw, self.mask_crc32)
        self._masks.write(raw)
        self.learned += sum(mask)

    def end_document(self) -> None:
        """End and count the current document. Raises ValueError if it is too long."""
        if not self._length:
            self.empty += 1
            return
        self.write(self._end)
        if self._length > MAX_LENGTH:
            raise ValueError(f"a document of {self._length:,} tokens: at most {MAX_LENGTH:,}")
        self.lengths.append(self._length)
        self._length = 0


def write_shard(
    shard: TokenShard,
    options: Options,
    limits: Limits,
    tokenizer: Tokenizer,
    report: ReportProgress,
) -> None:
    """Tokenize one shard. Each file is renamed once complete; the record comes last."""
    dtype = token_dtype(tokenizer.vocab_size)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(durable_file(suffixed(shard.base, ".bin")))
        if options.chat is not None:
            masks = stack.enter_context(durable_file(suffixed(shard.base, ".mask")))
            documents = _Documents(file, dtype, [], masks)
            encoder = ChatEncoder(options.chat, tokenizer, append_eod=options.append_eod)
            replaced, empty = _write_conversations(shard, limits, encoder, documents, report)
        else:
            end = [tokenizer.eod] if options.append_eod else []
            documents = _Documents(file, dtype, end, None)
            replaced, empty = _write_texts(shard, options, limits, tokenizer, documents, report)
    with durable_file(suffixed(shard.base, ".lengths.npy")) as file:
        np.save(file, np.asarray(documents.lengths, dtype=np.int32))
    tokens = sum(documents.lengths)
    masked = {"mask_crc32": documents.mask_crc32, "learned_tokens": documents.learned}
    write_record(
        suffixed(shard.base, ".json"),
        {
            "bytes": tokens * dtype().itemsize,
            "crc32": documents.crc32,
            "documents": len(documents.lengths),
            "empty_documents": empty + documents.empty,
            "replaced_utf8": replaced,
            "tokens": tokens,
            "files": [[s.path, s.size, s.mtime_ns, s.start, s.stop] for s in shard.segments],
            "options": dataclasses.asdict(options),
            **({} if options.chat is None else masked),
        },
    )


def _write_texts(
    shard: TokenShard,
    options: Options,
    limits: Limits,
    tokenizer: Tokenizer,
    documents: _Documents,
    report: ReportProgress,
) -> tuple[int, int]:
    """Write the documents of text. Returns the numbers of U+FFFD and of empty documents."""
    replaced = empty = 0
    for segment in shard.segments:
        joined = file_kind(segment.path)[0] == "text"
        blocks = read_segment(
            segment,
            options.field,
            options.column,
            limits=limits,
            document_bytes=options.shard_bytes,
        )
        for block in blocks:
            replaced += block.replaced
            empty += block.empty
            try:
                for text in block.items:
                    for part in _parts(text):
                        documents.write(_encode(tokenizer, part))
                    if not joined:
                        documents.end_document()
                if block.ends:
                    documents.end_document()
            except ValueError as error:
                raise ValueError(f"{segment.path}: {error}") from error
            report(block.ends if joined else len(block.items), block.nbytes)
    return replaced, empty


def _parts(text: str) -> Iterator[str]:
    """`text` in parts of at most MAX_CHARACTERS.

    A part begins with the white space before a word, if that is a single character and one is near:
    tokenizers that put it in front of the word find the tokens of the whole text.
    """
    start = 0
    while len(text) - start > MAX_CHARACTERS:
        stop = start + MAX_CHARACTERS
        for found in WORD.finditer(text, max(start + 1, stop - SEARCHED), stop + 2):
            stop = found.start() + 1  # behind the end of a word
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text, whose halves are encoded alone if the tokenizer fails at it.

    tiktoken fails at a million spaces in a row. Raises ValueError if it fails at a short text too.
    """
    try:
        return tokenizer.encode(text)
    except ValueError:
        if len(text) <= SEARCHED:
            raise
    half = len(text) // 2
    return _encode(tokenizer, text[:half]) + _encode(tokenizer, text[half:])


def _write_conversations(
    shard: TokenShard,
    limits: Limits,
    encoder: ChatEncoder,
    documents: _Documents,
    report: ReportProgress,
) -> tuple[int, int]:
    """Write one document per JSON line, with its mask. Returns the same as `_write_texts`."""
    replaced = 0
    for segment in shard.segments:
        for block in read_records(segment, encoder.encode, limits=limits):
            replaced += block.replaced
            for example in block.items:
                documents.write(example.ids)
                documents.write_mask(example.mask)
                documents.end_document()
            report(len(block.items), block.nbytes)
    return replaced, 0
