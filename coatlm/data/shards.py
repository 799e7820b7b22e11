"""Shards: the units of work that tokenizing processes take one after the other.

    segments, in order -> shards of about `shard_bytes` -> NAME.bin, NAME.lengths.npy, NAME.json

NAME is the hash of everything that the tokens depend on: files with size and mtime, tokenizer,
options. The record NAME.json is written last, so a shard with a record is complete and can be
reused by the next run. It has the CRC-32 of the tokens, which is verified when the shards are
joined. A document is written in parts as it is read, so memory does not grow with its length; it
may have up to 2^31 - 1 tokens, the largest length in PREFIX.idx.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from coatlm.data.documents import Segment, file_kind, read_segment
from coatlm.data.manifest import suffixed, token_dtype, write_record
from coatlm.data.streams import BLOCK_BYTES, Limits
from coatlm.data.tokenizer import Tokenizer, make_tokenizer
from coatlm.process import uninterrupted

SHARD_BYTES = 64 << 20  # bytes of input per shard
POLL_SECONDS = 0.2  # between checks of the worker processes
MAX_CHARACTERS = 2 * BLOCK_BYTES  # encoded at once; a longer text is encoded in parts
MAX_LENGTH = 2**31 - 1  # tokens of a document

COUNTS = {"bytes", "crc32", "documents", "empty_documents", "replaced_utf8", "tokens"}

Report = Callable[[int, int], None]  # (documents, input bytes) since the last report


class LostWorkerError(ValueError):
    """A tokenizing process died; the same call continues from the finished shards."""


@dataclass(frozen=True)
class Options:
    """The options that determine the tokens, besides the input files."""

    tokenizer: str = "byte"  # spec
    field: str = "text"  # of JSON lines
    column: str = "text"  # of parquet files
    append_eod: bool = True  # whether to end every document with end-of-document
    shard_bytes: int = SHARD_BYTES  # a larger plain text file becomes several documents


@dataclass(frozen=True)
class TokenShard:
    """Segments that one process tokenizes into DIRECTORY/NAME.bin, .lengths.npy and .json."""

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

    def read(self, dtype: type[np.number[Any]]) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """The memory-mapped tokens and the document lengths. Raises ValueError if damaged.

        The record of a damaged shard is removed, so that the next run writes the shard again.
        """
        record = self.record()
        path = suffixed(self.base, ".bin")
        if record is not None and record["tokens"] == 0:
            return np.zeros(0, dtype), np.zeros(0, np.int32)
        with contextlib.suppress(OSError, ValueError, EOFError):
            lengths = np.load(suffixed(self.base, ".lengths.npy"))
            tokens = np.memmap(path, dtype, mode="r")
            total = int(lengths.sum(dtype=np.int64))
            found = [zlib.crc32(tokens.data), len(tokens), total, len(lengths)]
            names = ("crc32", "tokens", "tokens", "documents")
            if record is not None and found == [record[name] for name in names]:
                return tokens, lengths
        suffixed(self.base, ".json").unlink(missing_ok=True)
        raise ValueError(f"{path}: damaged: it differs from its record; run again to repair it")


def fingerprint(segments: Sequence[Segment], options: Options, tokenizer: Tokenizer) -> str:
    """The SHA-256 of everything that the tokens depend on."""
    described = dataclasses.asdict(options) | {"tokenizer": tokenizer.fingerprint}
    parts = [json.dumps(described, sort_keys=True)]
    parts += [json.dumps(dataclasses.astuple(segment)) for segment in segments]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def plan_shards(
    segments: Sequence[Segment], options: Options, tokenizer: Tokenizer, directory: Path
) -> list[TokenShard]:
    """Group consecutive segments into shards of about options.shard_bytes."""
    shards: list[TokenShard] = []
    group: list[Segment] = []
    size = 0
    for at, segment in enumerate(segments):
        group.append(segment)
        size += segment.nbytes
        if size >= options.shard_bytes or at == len(segments) - 1:
            name = fingerprint(group, options, tokenizer)[:32]
            shards.append(TokenShard(directory / name, tuple(group), size))
            group, size = [], 0
    return shards


def tokenize(shards: Sequence[TokenShard], options: Options, limits: Limits, workers: int) -> None:
    """Write the missing shards, with a progress bar."""
    missing = [shard for shard in shards if shard.record() is None]
    workers = min(workers or len(os.sched_getaffinity(0)), len(missing))
    total = sum(shard.nbytes for shard in shards)
    bar = tqdm(
        desc="tokenize",
        total=total,
        initial=total - sum(shard.nbytes for shard in missing),
        unit="B",
        unit_scale=True,
        mininterval=0.5 if sys.stderr.isatty() else 30.0,
    )
    documents, begin = 0, time.monotonic()

    def report(new_documents: int, nbytes: int) -> None:
        nonlocal documents
        documents += new_documents
        rate = documents / max(time.monotonic() - begin, 1e-9)
        bar.set_postfix_str(f"{documents:,} docs, {rate:,.0f} docs/s", refresh=False)
        bar.update(nbytes)

    with bar:
        if workers <= 1:
            tokenizer = make_tokenizer(options.tokenizer)
            for shard in missing:
                _write_shard(shard, options, limits, tokenizer, report)
        else:
            _run_workers(missing, options, limits, workers, report)


def _run_workers(
    shards: Sequence[TokenShard], options: Options, limits: Limits, workers: int, report: Report
) -> None:
    """Distribute shards over worker processes. Raises the first worker's ValueError or OSError."""
    context = multiprocessing.get_context("spawn")  # fork would copy CUDA contexts and threads
    counters: Any = context.Array("q", 3)  # next shard, documents, bytes
    complaints = context.SimpleQueue()
    processes = [
        context.Process(
            target=_work, args=(shards, options, limits, counters, complaints), daemon=True
        )
        for _ in range(workers)
    ]
    seen = [0, 0]
    try:
        # A worker whose parent is interrupted while starting it would print a traceback. Ctrl-C
        # reaches all processes of a terminal; workers inherit the mask, so only the parent acts.
        with uninterrupted():
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                for process in processes:
                    process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        while True:
            alive = any(process.is_alive() for process in processes)  # before the counters are read
            _, *now = counters.get_obj()  # without the lock, which a killed process may hold
            report(now[0] - seen[0], now[1] - seen[1])
            seen = now
            if not complaints.empty():
                raise complaints.get()
            if died := [p.exitcode for p in processes if p.exitcode]:
                raise LostWorkerError(
                    f"a tokenizing process ended with exit code {died[0]} (-9: out of memory?); "
                    "run again with fewer workers, which reuses finished shards"
                )
            if not alive:
                return
            time.sleep(POLL_SECONDS)
    finally:
        for process in processes:
            if process.pid is not None:
                process.terminate()  # safe at any time: only a complete shard gets a record
                process.join()


def _work(
    shards: Sequence[TokenShard], options: Options, limits: Limits, counters: Any, complaints: Any
) -> None:
    """Tokenize the next shard until there is none. Runs in a worker process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def report(documents: int, nbytes: int) -> None:
        with counters.get_lock():
            counters[1] += documents
            counters[2] += nbytes

    try:
        tokenizer = make_tokenizer(options.tokenizer)
        while True:
            with counters.get_lock():
                at = counters[0]
                counters[0] += 1
            if at >= len(shards):
                return
            _write_shard(shards[at], options, limits, tokenizer, report)
    except OSError as error:
        complaints.put(OSError(error.errno, error.strerror or str(error)))
    except ValueError as error:
        complaints.put(ValueError(str(error)))  # a type that can be pickled


def _end_with_parent() -> None:
    """End this process once its parent has ended for any reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


class _Documents:
    """Writes the token ids of documents to a file, in parts of documents."""

    def __init__(self, file: IO[bytes], dtype: type[np.number[Any]], end: Sequence[int]) -> None:
        self.lengths: list[int] = []  # tokens of each document
        self.crc32 = self.empty = 0
        self._file, self._dtype, self._end = file, dtype, end
        self._length = 0  # of the current document

    def write(self, ids: Sequence[int]) -> None:
        """Append ids to the current document."""
        raw = np.asarray(ids, dtype=self._dtype).tobytes()
        self.crc32 = zlib.crc32(raw, self.crc32)
        self._file.write(raw)
        self._length += len(ids)

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


def _write_shard(
    shard: TokenShard, options: Options, limits: Limits, tokenizer: Tokenizer, report: Report
) -> None:
    """Tokenize one shard. Each file is renamed once complete; the record comes last."""
    dtype = token_dtype(tokenizer.vocab_size)
    replaced = empty = 0
    with _atomic(suffixed(shard.base, ".bin")) as file:
        documents = _Documents(file, dtype, [tokenizer.eod] if options.append_eod else [])
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
                for text in block.texts:
                    for start in range(0, len(text), MAX_CHARACTERS):
                        documents.write(tokenizer.encode(text[start : start + MAX_CHARACTERS]))
                    if not joined:
                        documents.end_document()
                if block.ends:
                    documents.end_document()
                report(block.ends if joined else len(block.texts), block.nbytes)
    with _atomic(suffixed(shard.base, ".lengths.npy")) as file:
        np.save(file, np.asarray(documents.lengths, dtype=np.int32))
    tokens = sum(documents.lengths)
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
        },
    )


@contextlib.contextmanager
def _atomic(path: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file that is renamed to `path` after fsync."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
