"""Shards: the units of work that tokenizing processes take one after the other.

    segments, in order -> shards of consecutive segments -> files of `coatlm.data.token_shard`

A shard has about `shard_bytes` of input. If the input is smaller than 256 such shards, its segments
are divided into up to 256 shards of at least 1 MiB, so that more processes have work; a segment is
not divided. The size does not depend on the number of processes, so that a call with another number
reuses the shards of an earlier one. The name of a shard is the hash of everything that its tokens
depend on: files with size and mtime, tokenizer, options.
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
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from coatlm.data.documents import Segment
from coatlm.data.streams import Limits
from coatlm.data.token_shard import Options, ReportProgress, TokenShard, write_shard
from coatlm.data.tokenizer import Tokenizer, make_tokenizer
from coatlm.process import uninterrupted

POLL_SECONDS = 0.2  # between checks of the worker processes
MOST_SHARDS = 256  # of an input below 256 * shard_bytes, about
LEAST_BYTES = 1 << 20  # of a shard, at least, but for the last


class LostWorkerError(ValueError):
    """A tokenizing process died; the same call continues from the finished shards."""


def fingerprint(segments: Sequence[Segment], options: Options, tokenizer: Tokenizer) -> str:
    """The SHA-256 of everything that the tokens depend on."""
    described = dataclasses.asdict(options) | {"tokenizer": tokenizer.fingerprint}
    if options.chat is None:  # as before there were conversations: prepared data stays valid
        del described["chat"]
    parts = [json.dumps(described, sort_keys=True)]
    parts += [json.dumps(dataclasses.astuple(segment)) for segment in segments]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def plan_shards(
    segments: Sequence[Segment], options: Options, tokenizer: Tokenizer, directory: Path
) -> list[TokenShard]:
    """Group consecutive segments into shards."""
    total = sum(segment.nbytes for segment in segments)
    enough = min(options.shard_bytes, max(total // MOST_SHARDS, LEAST_BYTES))
    shards: list[TokenShard] = []
    group: list[Segment] = []
    size = 0
    for at, segment in enumerate(segments):
        group.append(segment)
        size += segment.nbytes
        if size >= enough or at == len(segments) - 1:
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
                write_shard(shard, options, limits, tokenizer, report)
        else:
            _run_workers(missing, options, limits, workers, report)


def _run_workers(
    shards: Sequence[TokenShard],
    options: Options,
    limits: Limits,
    workers: int,
    report: ReportProgress,
) -> None:
    """Distribute shards over worker processes. Raises the first worker's ValueError or OSError."""
    context = multiprocessing.get_context("spawn")  # fork would copy CUDA contexts and threads
    counters: Any = context.Array("q", 3)  # next shard, documents, bytes
    complaints = context.SimpleQueue()
    pipes = [context.Pipe(duplex=False) for _ in range(workers)]
    processes = [
        context.Process(
            target=_work, args=(reader, options, limits, counters, complaints), daemon=True
        )
        for reader, _ in pipes
    ]
    seen = [0, 0]
    try:
        # A worker whose parent is interrupted while starting it would print a traceback. Ctrl-C
        # reaches all processes of a terminal; workers inherit the mask, so only the parent acts.
        with uninterrupted():
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                with _without_main():
                    for process in processes:
                        process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        # Not as arguments of the process: if a worker died before it has read those, `start` would
        # wait for it forever. Without a reader here, writing to a dead worker fails.
        for reader, _ in pipes:
            reader.close()
        for _, writer in pipes:
            with writer, contextlib.suppress(BrokenPipeError):  # the exit code is reported below
                writer.send(shards)
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


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module, which each new process would import: scripts often import torch."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _work(
    work: Connection, options: Options, limits: Limits, counters: Any, complaints: Any
) -> None:
    """Receive the shards, and tokenize the next one until there is none. Runs in a worker."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        shards: Sequence[TokenShard] = work.recv()
    except EOFError:  # the parent has ended
        return

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
            write_shard(shards[at], options, limits, tokenizer, report)
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
