"""Stored tensors are read bit by bit, in spans, wherever a region lies and however it is stored."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from coatlm.train import manifest, tensor_reader
from coatlm.train.checkpoint import Checkpointer, load, verify
from coatlm.train.metadata import read_metadata
from tests.train.layouts import (
    differing,
    edit_manifest,
    flip,
    message,
    pieces_of,
    sharded,
    targets_of,
    tensors_of,
)
from tests.train.test_shards import seal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(directory: Path, pieces: list) -> Path:  # type: ignore[type-arg]
    Checkpointer(directory, keep=1, async_save=False).save(1, pieces, {})
    return directory / manifest.step_name(1)


@pytest.mark.parametrize("stored", ["copies", "columns"])
@pytest.mark.parametrize("wanted", ["copies", "rows", "columns", "flat"])
def test_regions_are_read_in_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, wanted: str
) -> None:
    monkeypatch.setattr(tensor_reader, "SPAN", 7)
    whole = tensors_of(1)
    pieces = [p for rank in range(3) for p in pieces_of(whole, stored, rank, 3)]
    path = save(tmp_path, [p for p in pieces if p.replica_id == 0])
    for rank in range(2):
        targets, _ = targets_of(wanted, rank, 2)
        load(path, targets, allow_extra=True)
        assert differing(targets, whole) == []


def test_a_shard_that_is_stored_transposed_is_read_in_its_order(tmp_path: Path) -> None:
    data = torch.arange(12.0).reshape(3, 4).t()
    piece = sharded("a", data.contiguous(), (4, 3), ((0, 0), (4, 3), True))
    piece.data = data
    path, target = save(tmp_path, [piece]), torch.zeros(4, 3)
    load(path, [sharded("a", target, (4, 3), ((0, 0), (4, 3), True))])
    assert torch.equal(target, data)


def test_a_shard_of_another_type_than_its_metadata_is_refused(tmp_path: Path) -> None:
    data = torch.ones(4, dtype=torch.bfloat16)
    path = save(tmp_path, [sharded("a", data, (4,), ((0,), (4,), True))])
    metadata = read_metadata(path)
    metadata.state_dict_metadata["a"].properties.dtype = torch.float16
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(path)
    target = sharded("a", data.half(), (4,), ((0,), (4,), True))
    expected = "a is torch.bfloat16 [4] in its file, not torch.float16 [4]"
    assert expected in message(lambda: load(path, [target]))


def test_a_file_that_ends_within_an_archive_is_refused(tmp_path: Path) -> None:
    data = torch.zeros(1 << 16)
    path = save(tmp_path, [sharded("a", data, (1 << 16,), ((0,), (1 << 16,), True))])
    file = path / "__0_0.distcp"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 500)
    error = message(lambda: load(path, [sharded("a", data, (1 << 16,), ((0,), (1 << 16,), True))]))
    assert "is damaged" in error


@pytest.mark.parametrize("parts", [True, False])
def test_damage_anywhere_in_a_file_of_parts_is_found_once_by_one_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: bool
) -> None:
    monkeypatch.setattr(manifest, "PART", 1000)
    path = save(tmp_path, pieces_of(tensors_of(1), "copies"))
    file = path / "__0_0.distcp"
    described = manifest.read_checkpoint_manifest(path).files[file.name]
    assert len(described.parts) == -(-file.stat().st_size // 1000) > 3
    assert described.sha256 is None
    if not parts:  # as older versions wrote it
        seal(path)
    assert verify(path) == []
    for at in (0, 2500, file.stat().st_size - 1):
        flip(file, at)
        found = [problem for rank in range(3) for problem in verify(path, rank=rank, world=3)]
        assert found == [f"{file} is damaged: its checksum differs"]
        flip(file, at)


def test_every_byte_of_a_file_is_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "PART", 1000)
    hashed: list[int] = []
    original = manifest.sha256

    def count(path: Path, start: int = 0, stop: int | None = None) -> str:
        size = path.stat().st_size
        hashed.append((size if stop is None else min(stop, size)) - start)
        return original(path, start, stop)

    monkeypatch.setattr(manifest, "sha256", count)
    for size in (0, 1, 999, 1000, 1001, 2000, 2500):
        (tmp_path / "file").write_bytes(bytes(range(256)) * 10)
        with (tmp_path / "file").open("r+b") as file:
            file.truncate(size)
        hashed.clear()
        described = manifest.describe(tmp_path / "file")
        assert sum(hashed) == size and len(hashed) == max(1, -(-size // 1000))
        assert manifest.intact(tmp_path / "file", described)
        if size:
            flip(tmp_path / "file", size - 1)
            assert not manifest.intact(tmp_path / "file", described)


def test_a_manifest_of_an_older_version_has_both_kinds_of_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "PART", 1000)
    path = save(tmp_path, pieces_of(tensors_of(1), "copies"))
    files = json.loads((path / "manifest.json").read_text())["files"]
    for name, file in files.items():
        file["sha256"] = manifest.sha256(path / name)
    assert any(file["parts"] for file in files.values())
    edit_manifest(path, {"files": files})
    assert verify(path) == []
    flip(path / "__0_0.distcp", 1500)
    assert len(verify(path)) == 1


def test_a_manifest_with_too_few_parts_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "PART", 1000)
    path = save(tmp_path, pieces_of(tensors_of(1), "copies"))
    file = manifest.read_checkpoint_manifest(path).files["__0_0.distcp"]
    files = {"__0_0.distcp": {"bytes": file.bytes, "sha256": file.sha256, "parts": file.parts[1:]}}
    edit_manifest(path, {"files": files})
    assert "is damaged" in verify(path)[0] and "parts of __0_0.distcp" in verify(path)[0]
