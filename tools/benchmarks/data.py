"""Tokens per second of preparing data and of reading it, from a disk and from an object store.

    prepare coatlm      coatlm.data.preprocess with one worker
    prepare megatron    as Megatron-LM's tools/preprocess_data.py: a pool of one process encodes a
                        document at a time with the same tokenizer, the main process writes with
                        megatron-core's IndexedDatasetBuilder; the pool starts before the clock
    read local          the batches of a data-parallel rank from files
    read s3, empty      the same from an S3 server on loopback (moto), with an empty cache
    read s3, cached     the same once more

Text is the source of Python's standard library as JSON lines, repeated to `mb` MB; the tokenizer is
a byte-level BPE of `vocab` ids, trained on its first 2 MB. The rows that read take a dataset of
bytes and `seq` tokens per sample for one epoch. Rates are medians of `reps` repetitions after one
that prepares; cpu_s has the CPU time of all processes but the server, a Python process, which may
be the limit instead of the reader. coatlm's includes reading the tokenizer, checksums and fsync.
Options: mb=16 vocab=8192 seq=2048 reps=3. No GPU is needed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import psutil

from coatlm.config import Data
from coatlm.data.batches import BatchIterator
from coatlm.data.dataset import open_datasets
from coatlm.data.documents import stdlib_sources
from coatlm.data.preprocess import preprocess
from coatlm.data.token_shard import Options
from coatlm.data.tokenizer import make_tokenizer
from coatlm.remote import Location

OPTIONS = ("mb", "reps", "seq", "vocab")
TRAINED_BYTES = 2_000_000
BATCH = 64  # samples
KEYS = {
    "AWS_ACCESS_KEY_ID": "public",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def rows(options: dict[str, str]) -> list[str]:
    """The rows in the order of measurement: preparing first, as it takes longest."""
    read = ["read local", "read s3, empty", "read s3, cached"]
    return ["prepare coatlm", "prepare megatron", *read]


def prepare(row: str) -> None:
    """Import what writing a dataset takes, which is seconds."""
    import coatlm.megatron  # noqa: F401


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs that the benchmark needs: none."""
    return 0


def measure(row: str, options: dict[str, str]) -> dict[str, Any]:
    """Measure a row, in a temporary directory."""
    sizes = {key: int(options.get(key, default)) for key, default in _DEFAULTS.items()}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        text = _corpus(directory / "text.jsonl", sizes["mb"] * 1_000_000)
        if row.startswith("prepare"):
            return _prepare(row, text, sizes)
        return _read(row, text, sizes)


_DEFAULTS = {"mb": 16, "reps": 3, "seq": 2048, "vocab": 8192}


def _corpus(path: Path, nbytes: int) -> Path:
    """Write documents of source text as JSON lines until they have `nbytes`."""
    sources = [p.read_text(encoding="utf-8", errors="replace") for p in stdlib_sources()]
    lines = [json.dumps({"text": source}) + "\n" for source in sources]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < nbytes:
            for line in lines:
                file.write(line)
                if file.tell() >= nbytes:
                    break
    return path


def _train(text: Path, vocab: int) -> str:
    """Train the tokenizer; returns its spec."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    end = "<|end_of_text|>"
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    with text.open(encoding="utf-8") as file:
        sample = [json.loads(line)["text"] for line in file.readlines(TRAINED_BYTES)]
    model.train_from_iterator(sample, trainer)
    path = text.with_name("tokenizer.json")
    model.save(str(path))
    return f"hf:{path}?eod={end}"


def _prepare(row: str, text: Path, sizes: dict[str, int]) -> dict[str, Any]:
    spec = _train(text, sizes["vocab"])
    prefix = text.with_name("out")

    def coatlm() -> int:
        options = Options(tokenizer=spec)
        return preprocess([str(text)], prefix, options, workers=1, overwrite=True).tokens

    def remove() -> None:
        for path in prefix.parent.glob(f"{prefix.name}.*"):
            path.unlink()

    if row == "prepare coatlm":
        coatlm()  # the first time imports
        seconds, cpu, tokens = _timed(coatlm, sizes["reps"], before=remove)
    else:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peer, encoder = partial(_megatron, text, spec, prefix, pool), pool.apply(os.getpid)
            peer()
            seconds, cpu, tokens = _timed(peer, sizes["reps"], before=remove, also=[encoder])
    return {
        "tokens/s": round(tokens / seconds),
        "MB/s of text": round(text.stat().st_size / seconds / 1e6, 2),
        "seconds": round(seconds, 2),
        "cpu_s": round(cpu, 2),
        "tokens per cpu_s": round(tokens / cpu),
    }


class _Encoder:
    """Encodes a JSON line in a process of the pool, as Megatron-LM's class of that name."""

    tokenizer: Any = None

    @classmethod
    def begin(cls, spec: str) -> None:
        cls.tokenizer = make_tokenizer(spec)

    @classmethod
    def encode(cls, line: str) -> list[int]:
        return [*cls.tokenizer.encode(json.loads(line)["text"]), cls.tokenizer.eod]


def _megatron(text: Path, spec: str, prefix: Path, pool: Pool) -> int:
    import numpy as np
    from megatron.core.datasets import indexed_dataset

    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    tokens = 0
    pool.apply(_Encoder.begin, (spec,))  # as in a new process: a tokenizer caches words
    with text.open(encoding="utf-8") as file:
        for ids in pool.imap(_Encoder.encode, file, 32):
            builder.add_document(np.array(ids, np.uint16), [len(ids)])
            tokens += len(ids)
    builder.finalize(f"{prefix}.idx")
    return tokens


def _read(row: str, text: Path, sizes: dict[str, int]) -> dict[str, Any]:
    prefix = text.with_name("bytes")
    tokens = preprocess([str(text)], prefix, Options(), workers=1).tokens
    if row == "read local":
        return _epochs(str(prefix), text, tokens, sizes, fresh=False)
    with _server() as address:
        os.environ.update(KEYS, AWS_ENDPOINT_URL=address)
        Location.of("s3://data").fs.mkdir("data")
        for path in text.parent.glob("bytes.*"):
            Location.of(f"s3://data/{path.name}").upload(path)
        return _epochs("s3://data/bytes", text, tokens, sizes, fresh=row.endswith("empty"))


def _epochs(
    source: str, text: Path, tokens: int, sizes: dict[str, int], *, fresh: bool
) -> dict[str, Any]:
    """Read one epoch per repetition; `fresh` begins each with an empty cache."""
    number = 0
    count = tokens // (sizes["seq"] * BATCH)

    def epoch() -> int:
        nonlocal number
        number += fresh
        data = Data.model_validate(
            {
                **{"paths": [source], "cache_dir": text.with_name(f"cache{number}")},
                **{"seq_len": sizes["seq"], "split": [1, 0, 0]},
            }
        )
        dataset = open_datasets(data, make_tokenizer("byte"), seed=1).train
        share = {"global_batch": BATCH, "micro_batch": 8, "dp_rank": 0, "dp_size": 1}
        with BatchIterator(dataset, **share) as batches:
            for _ in range(count):
                next(batches)
        return count * BATCH * sizes["seq"]

    if not fresh:
        epoch()
    seconds, cpu, read = _timed(epoch, sizes["reps"])
    return {
        "tokens/s": round(read / seconds),
        "MB/s": round(2 * read / seconds / 1e6, 1),
        "seconds": round(seconds, 2),
        "cpu_s": round(cpu, 2),
        "tokens per cpu_s": round(read / cpu),
    }


def _timed(
    action: Callable[[], int],
    reps: int,
    *,
    before: Callable[[], None] = lambda: None,
    also: Sequence[int] = (),
) -> tuple[float, float, int]:
    """Medians of seconds and of CPU seconds, and the result.

    CPU seconds are those of this process, of its children that have ended, and of `also`, which
    are ids of children that run.
    """
    found, result = [], 0
    for _ in range(reps):
        before()
        begin, cpu = time.monotonic(), _cpu_seconds(also)
        result = action()
        found.append((time.monotonic() - begin, _cpu_seconds(also) - cpu))
    walls, cpus = zip(*found, strict=True)
    return statistics.median(walls), statistics.median(cpus), result


def _cpu_seconds(also: Sequence[int]) -> float:
    usages = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    running = [psutil.Process(number).cpu_times() for number in also]
    ended = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return ended + sum(times.user + times.system for times in running)


@contextmanager
def _server() -> Iterator[str]:
    """An S3 server in a process of its own; yields its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def _serve(pipe: Any) -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    pipe.send(f"http://{host}:{port}")
    time.sleep(3600)
