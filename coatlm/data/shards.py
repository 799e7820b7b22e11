"""Shards: the units of tokenising. Processes take them in turn; each leaves three files.

    segments, in order -> shards of about `shard_bytes` -> NAME.bin, NAME.lengths.npy, NAME.json

NAME is the hash of all that the tokens depend on: files with size and time of change, tokenizer,
options. The record NAME.json is written last, so a shard that has one is whole, is what is asked
for, and is taken over by the next run.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from coatlm.data.documents import Segment, file_kind, read_segment
from coatlm.data.indexed import suffixed, token_dtype, write_json
from coatlm.data.tokenizer import Tokenizer, make_tokenizer

SHARD_BYTES = 64 << 20  # of input
POLL_SECONDS = 0.2  # between looks at the worker processes

Report = Callable[[int, int], None]  # (documents, input bytes) since the last report


@dataclass(frozen=True)
class Options:
    """What decides on the tokens, beside the files."""

    tokenizer: str = "byte"  # spec
    field: str = "text"  # of a JSON line
    column: str = "text"  # of parquet
    append_eod: bool = True  # to every document
    shard_bytes: int = SHARD_BYTES  # a plain text file beyond it becomes several documents


@dataclass(frozen=True)
class Shard:
    """Segments that one process turns into DIRECTORY/NAME.bin, .lengths.npy and .json."""

    base: Path  # DIRECTORY/NAME
    segments: tuple[Segment, ...]
    nbytes: int  # of input

    def record(self) -> dict[str, Any] | None:
        """Counts of a finished shard: documents, tokens, bytes, replaced_utf8, empty_documents."""
        try:
            record = json.loads(suffixed(self.base, ".json").read_text(encoding="utf-8"))
            whole = record["bytes"] == suffixed(self.base, ".bin").stat().st_size
        except (OSError, ValueError):
            return None
        return record if whole else None


def fingerprint(segments: Sequence[Segment], options: Options, tokenizer: Tokenizer) -> str:
    """sha256 of all that the tokens depend on."""
    described = dataclasses.asdict(options) | {"tokenizer": tokenizer.fingerprint}
    parts = [json.dumps(described, sort_keys=True)]
    parts += [json.dumps(dataclasses.astuple(segment)) for segment in segments]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def plan_shards(
    segments: Sequence[Segment], options: Options, tokenizer: Tokenizer, directory: Path
) -> list[Shard]:
    """Consecutive segments, together of about options.shard_bytes."""
    shards: list[Shard] = []
    group: list[Segment] = []
    size = 0
    for at, segment in enumerate(segments):
        group.append(segment)
        size += segment.nbytes
        if size >= options.shard_bytes or at == len(segments) - 1:
            name = fingerprint(group, options, tokenizer)[:32]
            shards.append(Shard(directory / name, tuple(group), size))
            group, size = [], 0
    return shards


def tokenise(shards: Sequence[Shard], options: Options, workers: int) -> None:
    """Write the shards that are missing, and show how far it is."""
    missing = [shard for shard in shards if shard.record() is None]
    workers = min(workers or len(os.sched_getaffinity(0)), len(missing))
    total = sum(shard.nbytes for shard in shards)
    bar = tqdm(
        desc="tokenise",
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
                _write_shard(shard, options, tokenizer, report)
        else:
            _run_workers(missing, options, workers, report)


def _run_workers(shards: Sequence[Shard], options: Options, workers: int, report: Report) -> None:
    """Spread shards over processes. Raises ValueError with the first worker's complaint."""
    context = multiprocessing.get_context("spawn")  # fork would copy a CUDA context and threads
    counters: Any = context.Array("q", 3)  # next shard, documents, bytes
    complaints = context.SimpleQueue()
    processes = [
        context.Process(target=_work, args=(shards, options, counters, complaints), daemon=True)
        for _ in range(workers)
    ]
    seen = [0, 0]
    try:
        # Ctrl-C reaches all processes of a terminal; these inherit the mask and leave it to us
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for process in processes:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        while True:
            alive = any(process.is_alive() for process in processes)  # before the last look
            _, *now = counters.get_obj()  # without the lock, which a killed process may hold
            report(now[0] - seen[0], now[1] - seen[1])
            seen = now
            if not complaints.empty():
                raise ValueError(complaints.get())
            if died := [p.exitcode for p in processes if p.exitcode]:
                raise ValueError(
                    f"a tokenising process ended with exit code {died[0]} (-9: out of memory?); "
                    "finished shards are kept, run again with fewer workers"
                )
            if not alive:
                return
            time.sleep(POLL_SECONDS)
    finally:
        for process in processes:
            if process.pid is not None:
                process.terminate()  # at any time: only a whole shard gets a record
                process.join()


def _work(shards: Sequence[Shard], options: Options, counters: Any, complaints: Any) -> None:
    """A worker process: take the next shard until there is none."""
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
            _write_shard(shards[at], options, tokenizer, report)
    except (ValueError, OSError) as error:
        complaints.put(str(error))


def _end_with_parent() -> None:
    """End this process when its parent is gone, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _write_shard(shard: Shard, options: Options, tokenizer: Tokenizer, report: Report) -> None:
    """Tokenise one shard. Files appear under their names when they are whole, the record last."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.asarray([tokenizer.eod] if options.append_eod else [], dtype=dtype)
    lengths: list[int] = []
    counts = {"replaced_utf8": 0, "empty_documents": 0}
    with _atomic(suffixed(shard.base, ".bin")) as file:
        for segment in shard.segments:
            for ids in _encode_segment(segment, options, tokenizer, counts, report):
                if len(ids):
                    document = np.concatenate((ids, end))
                    file.write(document.tobytes())
                    lengths.append(len(document))
                else:
                    counts["empty_documents"] += 1
    with _atomic(suffixed(shard.base, ".lengths.npy")) as file:
        np.save(file, np.asarray(lengths, dtype=np.int32))
    tokens = sum(lengths)
    counts |= {"documents": len(lengths), "tokens": tokens, "bytes": tokens * dtype().itemsize}
    files = [[s.path, s.size, s.mtime_ns, s.start, s.stop] for s in shard.segments]
    made_from = {"files": files, "options": dataclasses.asdict(options)}
    write_json(suffixed(shard.base, ".json"), counts | made_from)


def _encode_segment(
    segment: Segment,
    options: Options,
    tokenizer: Tokenizer,
    counts: dict[str, int],
    report: Report,
) -> Iterator[NDArray[Any]]:
    """The ids of each document of a segment, without end-of-document."""
    dtype = token_dtype(tokenizer.vocab_size)
    joined = file_kind(segment.path)[0] == "text"  # one document from all blocks
    parts = [np.zeros(0, dtype=dtype)]
    for block in read_segment(segment, options.field, options.column):
        counts["replaced_utf8"] += block.replaced
        counts["empty_documents"] += block.empty
        for text in block.texts:
            ids = np.asarray(tokenizer.encode(text), dtype=dtype)
            if joined:
                parts.append(ids)
            else:
                yield ids
        report(0 if joined else len(block.texts), block.nbytes)
    if joined:
        yield np.concatenate(parts)
        report(1, 0)


@contextlib.contextmanager
def _atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name once it is whole and on disk."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
