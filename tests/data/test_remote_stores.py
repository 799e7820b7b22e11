"""gs://, hf:// and http://: datasets, text and checkpoints, as test_remote.py has them at s3://."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coatlm import remote
from coatlm.data.dataset import open_datasets
from coatlm.data.preprocess import preprocess
from coatlm.data.token_shard import Options
from coatlm.remote import Location, RemoteError
from coatlm.train.checkpoint import Checkpointer
from coatlm.train.manifest import step_name, verify
from coatlm.train.remote_checkpoint import download_checkpoint, remote_candidates
from tests.data.test_remote import BLOCK, BYTE, batches, options, train
from tests.distributed import python_path
from tests.object_store import FAULTS, REPOSITORY, Faults, gs, hub
from tests.train.layouts import pieces_of, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LOG = logging.getLogger("test_remote_stores")


@dataclass
class Store:
    """A store, and the directory whose files `fill` makes its objects."""

    url: str
    faults: Faults
    root: Path

    def fill(self) -> None:
        if self.url.startswith("gs://"):  # the other servers read the directory
            for path in sorted(self.root.rglob("*")):
                if path.is_file():
                    Location.of(f"{self.url}/{path.relative_to(self.root)}").upload(path)


@pytest.fixture(scope="module", params=["gs", "hf", "http"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A store with a dataset of some 300 KiB, `text`, and its sources, `in/*`."""
    root = tmp_path_factory.mktemp("root")
    rng = np.random.default_rng(0)
    lines = ["".join(map(chr, rng.integers(97, 123, rng.integers(1, 900)))) for _ in range(330)]
    (root / "in").mkdir()
    for number in range(2):
        rows = [json.dumps({"text": line}) + "\n" for line in lines[number::2]]
        (root / f"in/{number}.jsonl").write_text("".join(rows))
    preprocess([f"{root}/in/*.jsonl"], root / "text", Options(), workers=1)
    shutil.rmtree(root / "text.shards", ignore_errors=True)
    with gs() if request.param == "gs" else hub(root) as faults:
        endpoint = os.environ.get("HF_ENDPOINT")
        urls = {
            "gs": "gs://data",
            "hf": f"hf://datasets/{REPOSITORY}",
            "http": f"{endpoint}/datasets/{REPOSITORY}/resolve/main",
        }
        here = Store(urls[request.param], faults, root)
        here.fill()
        yield here


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch, store: Store) -> Iterator[None]:
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.01, 0.01))
    yield
    store.faults.clear()


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_samples_and_identity_are_those_of_the_local_copy_whatever_fails(
    fault: str | None, store: Store, tmp_path: Path
) -> None:
    for name in ("text.bin", "text.idx", "text.crc32") if fault else ():
        store.faults.inject(name, fault or "", 1)
    here = open_datasets(options(store.root / "text", tmp_path), BYTE, seed=3)
    there = open_datasets(options(f"{store.url}/text", tmp_path), BYTE, seed=3)
    assert there.identity() == here.identity()
    assert batches(there.train, 6) == batches(here.train, 6)


def test_each_block_is_one_request_of_its_bytes_alone(store: Store, tmp_path: Path) -> None:
    store.faults.clear()
    batches(train(options(f"{store.url}/text", tmp_path)), 20)
    blocks = sorted(int(path.name[-8:]) for path in tmp_path.glob("remote/*/bin-*"))
    size = (store.root / "text.bin").stat().st_size
    wanted = [f"bytes={n * BLOCK}-{min(n * BLOCK + BLOCK, size) - 1}" for n in blocks]
    assert len(blocks) > 10 and sorted(wanted) == sorted(
        asked for asked in store.faults.ranges if asked in wanted
    )
    small = {(store.root / f"text{suffix}").stat().st_size - 1 for suffix in (".idx", ".crc32")}
    others = [asked for asked in store.faults.ranges if asked not in wanted]
    assert all(int(asked.split("-")[1]) in small | {size_of(store, ".json")} for asked in others)


def size_of(store: Store, suffix: str) -> int:
    """The last byte of a file of the dataset."""
    return (store.root / f"text{suffix}").stat().st_size - 1


def test_what_is_missing_or_refused_is_one_line_without_repetition(store: Store) -> None:
    for name in ("text.none", "nowhere/text"):
        with pytest.raises(RemoteError, match=r"no such object or bucket$"):
            Location.of(f"{store.url}/{name}").info()
    with pytest.raises(RemoteError, match=r"no such object or bucket$"):
        other = {"gs": "gs://none/a", "hf": "hf://datasets/org/none/a"}
        Location.of(other.get(store.url.split(":")[0], f"{store.url}/../none")).info()
    at = Location.of(f"{store.url}/text.bin")
    store.faults.clear()
    store.faults.inject("text.bin", "403", 9)
    with pytest.raises(RemoteError, match=r"text\.bin: [^\n]*Forbidden[^\n]*$") as error:
        at.read(0, 100)
    assert "attempts" not in str(error.value) and store.faults.ranges == ["bytes=0-99"]


@pytest.mark.parametrize("fault", [None, "503"])
def test_text_is_prepared_from_urls_by_the_command(
    fault: str | None, store: Store, tmp_path: Path
) -> None:
    if fault:
        store.faults.inject("0.jsonl", fault, 1)
    prefix = tmp_path / "there"
    files = [f"{store.url}/in/*.jsonl"]
    if store.url.startswith("http"):  # has no globs
        files = [f"{store.url}/in/{number}.jsonl" for number in range(2)]
    words = ["--input", *files, "--output-prefix", str(prefix)]
    done = subprocess.run(
        [sys.executable, "-m", "coatlm", "prepare", *words, "--tokenizer", "byte"],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert any(path.endswith("0.jsonl") for _, path in store.faults.requests)
    for suffix in (".bin", ".idx", ".crc32"):
        here, there = store.root / f"text{suffix}", prefix.with_name(f"there{suffix}")
        assert here.read_bytes() == there.read_bytes()


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_checkpoints_are_downloaded_whole(fault: str | None, store: Store, tmp_path: Path) -> None:
    """The saver uploads those at gs://; the others are written to the directory of the server."""
    name = f"run-{fault}"
    upload = f"{store.url}/{name}" if store.url.startswith("gs") else None
    directory = store.root / name if upload is None else tmp_path / "checkpoints"
    saver = Checkpointer(directory, keep=2, async_save=True, upload=upload)
    for step in (1, 2):
        saver.save(step, pieces_of(tensors_of(step), "copies"), {"step": step})
    saver.wait()
    (directory / "latest").unlink(missing_ok=True)
    url = f"{store.url}/{name}"
    if store.url.startswith("http"):  # has no listings
        url += f"/{step_name(2)}"
    found = [candidate.rsplit("/", 1)[1] for candidate in remote_candidates(url)]
    assert found == [step_name(2), step_name(1)][: len(found)]
    if fault:
        store.faults.inject(".distcp", fault, 1)
    fetched = download_checkpoint(url, tmp_path / "downloads", LOG)
    assert fetched.name == step_name(2) and verify(fetched) == []
    saved = directory / step_name(2)
    assert {p.name: p.read_bytes() for p in fetched.iterdir()} == {
        p.name: p.read_bytes() for p in saved.iterdir()
    }
