"""Datasets and text at URLs, read from an S3 server that fails when it is told to."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from coatlm import remote
from coatlm.config import Data
from coatlm.data.batches import BatchIterator
from coatlm.data.checksums import DatasetError
from coatlm.data.dataset import Dataset, open_datasets
from coatlm.data.preprocess import preprocess
from coatlm.data.token_shard import Options
from coatlm.data.tokenizer import make_tokenizer
from coatlm.remote import Location, RangeReader, RemoteError
from tests.object_store import FAULTS, Faults, s3

BYTE = make_tokenizer("byte")
BLOCK = 1 << 14
PAIRS = [{"prompt": f"{i}+1=", "completion": f"{i + 1};" * 9} for i in range(400)]


@pytest.fixture(scope="module")
def store() -> Iterator[Faults]:
    with s3() as faults:
        yield faults


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.01, 0.01))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, store: Faults) -> Path:
    """A dataset of some 300 KiB, here and at s3://data/text."""
    prefix = tmp_path_factory.mktemp("local") / "text"
    rng = np.random.default_rng(0)
    lines = ["".join(map(chr, rng.integers(97, 123, rng.integers(1, 900)))) for _ in range(330)]
    source = prefix.with_name("source.jsonl")
    source.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    preprocess([str(source)], prefix, Options(), workers=1)
    copy(prefix, "text")
    return prefix


def copy(prefix: Path, name: str) -> str:
    """Upload the files of a dataset; returns the URL of its prefix."""
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        if path.is_file():
            at = Location.of(f"s3://data/{name}{path.name.removeprefix(prefix.name)}")
            at.upload(path)
    return f"s3://data/{name}"


def options(path: Path | str, cache: Path, **values: Any) -> Data:
    fixed = {"seq_len": 64, "split": [90, 10, 0], "remote_block": BLOCK, "remote_cache": 64 * BLOCK}
    data = {"paths": [str(path)], "cache_dir": cache, **fixed, **values}
    return Data.model_validate(data)


def train(data: Data) -> Dataset:
    return open_datasets(data, BYTE, seed=3).train


def batches(dataset: Dataset, count: int, first: int = 0) -> list[list[int]]:
    share = {"global_batch": 16, "micro_batch": 4, "dp_rank": 1, "dp_size": 2}
    with BatchIterator(dataset, first_sample=first, **share) as iterator:
        return [b["tokens"].flatten().tolist() for _ in range(count) for b in next(iterator)]


def test_remote_samples_and_identity_are_those_of_the_local_copy(
    local: Path, store: Faults, tmp_path: Path
) -> None:
    here = open_datasets(options(local, tmp_path), BYTE, seed=3)
    there = open_datasets(options("s3://data/text", tmp_path), BYTE, seed=3)
    assert there.identity() == here.identity()
    assert batches(there.train, 30) == batches(here.train, 30)
    assert [there.validation[i].tolist() for i in range(9)] == [
        here.validation[i].tolist() for i in range(9)
    ]


def test_each_block_is_requested_once_and_a_second_start_requests_none(
    local: Path, store: Faults, tmp_path: Path
) -> None:
    store.clear()
    data = options("s3://data/text", tmp_path)
    first = batches(train(data), 60)
    blocks = [int(path.name[-8:]) for path in tmp_path.glob("remote/*/bin-*")]
    assert len(blocks) > 10
    assert store.requests["GET", "/data/text.bin"] == len(blocks)
    begins = [int(r.removeprefix("bytes=").split("-")[0]) for r in store.ranges]
    assert {n * BLOCK for n in blocks} <= set(begins)
    assert batches(train(data), 60) == first
    assert store.requests["GET", "/data/text.bin"] == len(blocks)


def test_blocks_are_requested_before_their_batch_is_read(
    local: Path, store: Faults, tmp_path: Path
) -> None:
    dataset = train(options("s3://data/text", tmp_path))
    share = {"global_batch": 2, "micro_batch": 1, "dp_rank": 0, "dp_size": 2}
    deadline = time.monotonic() + 20
    with BatchIterator(dataset, **share):  # reads two batches at most
        while [block for sample in range(8, 40, 2) for block in dataset.missing(sample)]:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_changes_no_sample(
    fault: str, local: Path, store: Faults, tmp_path: Path
) -> None:
    expected = batches(train(options(local, tmp_path)), 4)
    for name in ("text.bin", "text.idx", "text.crc32"):
        store.inject(name, fault, 2)
    assert batches(train(options("s3://data/text", tmp_path)), 4) == expected


def test_damage_at_the_store_ends_in_one_line_with_the_object_and_its_bytes(
    local: Path, store: Faults, tmp_path: Path
) -> None:
    dataset = train(options("s3://data/text", tmp_path))
    store.inject("text.bin", "flip", 10_000)
    try:
        with pytest.raises(RemoteError, match=r"s3://data/text\.bin: damaged between bytes") as e:
            batches(dataset, 1)
    finally:
        store.clear()
    assert "\n" not in str(e.value) and "4 attempts" in str(e.value)


def test_a_block_that_the_local_disk_damages_is_downloaded_again(
    local: Path, store: Faults, tmp_path: Path
) -> None:
    data = options("s3://data/text", tmp_path)
    expected = batches(train(data), 10)
    blocks = sorted(tmp_path.glob("remote/*/bin-*"))
    for number, path in enumerate(blocks):
        raw = bytearray(path.read_bytes())
        raw[number] ^= 1
        path.write_bytes(raw[: len(raw) - number % 2])  # every other one is cut off as well
    assert batches(train(data), 10) == expected


def test_the_cache_never_holds_more_than_its_limit_and_removes_the_oldest(
    local: Path, store: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = batches(train(options(local, tmp_path)), 40)
    data = options("s3://data/text", tmp_path)
    small = data.model_copy(update={"remote_cache": 8 * BLOCK})  # a configuration asks for 64
    assert batches(train(small), 40) == expected
    held = list(tmp_path.glob("remote/*/bin-*"))
    assert 0 < sum(path.stat().st_size for path in held) <= 8 * BLOCK
    oldest = min(held, key=lambda path: path.stat().st_mtime)
    dataset = train(small)
    file = dataset.sources[0].file
    absent = [n for n in range(16) if file.missing(n * BLOCK, n * BLOCK + 1)][:3]
    for number in absent:
        file.load(number)
    assert not oldest.exists()
    assert not file.missing(absent[-1] * BLOCK, absent[-1] * BLOCK + 1)


def read_in_a_process(cache: str, queue: Any) -> None:
    queue.put(batches(train(options("s3://data/text", Path(cache))), 12))


def test_processes_that_share_a_cache_download_each_block_once(
    local: Path, store: Faults, tmp_path: Path
) -> None:
    store.clear()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=read_in_a_process, args=(str(tmp_path), queue)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    found = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert found[0] == found[1] == batches(train(options(local, tmp_path)), 12)
    here = len(list(tmp_path.glob("remote/*/bin-*")))
    assert store.requests["GET", "/data/text.bin"] == here


def test_loss_masks_are_read_from_urls(store: Faults, tmp_path: Path) -> None:
    from coatlm.data.chat import NONE, chat_format

    source, prefix = tmp_path / "pairs.jsonl", tmp_path / "pairs"
    source.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    preprocess([str(source)], prefix, Options(chat=chat_format(BYTE, NONE)), workers=1)
    wanted = {"loss_mask": "completion", "packing": "best-fit", "seq_len": 100}
    here = train(options(prefix, tmp_path, **wanted))
    there = train(options(copy(prefix, "pairs"), tmp_path, **wanted))
    for sample in range(20):
        assert there[sample].tolist() == here[sample].tolist()
        assert there.counted(sample).tolist() == here.counted(sample).tolist()
    assert 0 < there.counted(0).sum() < 101


def test_what_a_url_lacks_is_one_line_that_names_it(
    local: Path, store: Faults, tmp_path: Path
) -> None:
    with pytest.raises(DatasetError, match=r"s3://data/none\.json: no such object"):
        train(options("s3://data/none", tmp_path))
    Location.of("s3://data/cut.bin").write(b"abc")
    for suffix in (".json", ".idx", ".crc32"):
        Location.of(f"s3://data/cut{suffix}").upload(local.with_suffix(suffix))
    with pytest.raises(DatasetError, match=r"s3://data/cut\.bin: 3 bytes, but"):
        train(options("s3://data/cut", tmp_path))


# text


@pytest.mark.parametrize("fault", [None, *FAULTS[:3]])
def test_text_at_urls_gives_the_tokens_of_local_files(
    fault: str | None, store: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RANGE_BYTES", 1000)
    rows = [{"text": f"document {i} " * (i % 40)} for i in range(300)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    here = tmp_path / "in"
    here.mkdir()
    (here / "a.jsonl").write_bytes(lines)
    (here / "b.jsonl.gz").write_bytes(gzip.compress(lines[:5000].rsplit(b"\n", 1)[0] + b"\n"))
    table = pyarrow.table({"text": [row["text"] for row in rows]})
    pyarrow.parquet.write_table(table, here / "c.parquet", row_group_size=100)
    (here / "d.txt").write_bytes(lines)
    for path in here.iterdir():
        Location.of(f"s3://data/in/{path.name}").upload(path)
        if fault:
            store.inject(path.name, fault, 2)
    small = Options(shard_bytes=10_000)  # a.jsonl and d.txt are cut into segments
    preprocess([f"{here}/*"], tmp_path / "local", small, workers=1)
    preprocess(["s3://data/in/*"], tmp_path / "remote", small, workers=1)
    store.clear()
    for suffix in (".bin", ".idx", ".crc32"):
        left, right = tmp_path / f"local{suffix}", tmp_path / f"remote{suffix}"
        assert left.read_bytes() == right.read_bytes()


def test_data_text_may_be_a_url(store: Faults, tmp_path: Path) -> None:
    Location.of("s3://data/words.txt").write(b"the quick brown fox\n" * 200)
    data = {"text": "s3://data/words.txt", "cache_dir": tmp_path, "seq_len": 32}
    tokens = train(Data.model_validate(data))[0]
    assert "quick brown" in BYTE.decode(tokens.tolist())


@pytest.mark.parametrize("order", ["forward", "backward", "jumps"])
def test_a_range_reader_reads_as_a_file(
    order: str, store: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RANGE_BYTES", 100)
    raw = os.urandom(1234)
    at = Location.of("memory://reader")
    at.write(raw)
    begins = list(range(0, 1300, 90))
    if order != "forward":
        begins = begins[::-1] if order == "backward" else begins[::3] + begins[1::3]
    with RangeReader(at, len(raw)) as raw_reader, io.BufferedReader(raw_reader, 40) as reader:
        for begin in begins:
            reader.seek(begin)
            assert reader.read(150) == raw[begin : begin + 150]
            assert len(raw_reader._ranges) <= remote.AHEAD + 1
