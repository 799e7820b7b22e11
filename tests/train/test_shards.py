"""What a checkpoint holds is not trusted: no code in it is run, no file outside it is read."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from coatlm.train import manifest, shards
from coatlm.train.checkpoint import Checkpointer, load, tensor_checksums, verify
from coatlm.train.metadata import read_metadata
from tests.train.layouts import edit_manifest, message, pieces_of, targets_of, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(directory: Path) -> Path:
    saver = Checkpointer(directory, keep=1, async_save=False)
    saver.save(1, pieces_of(tensors_of(1), "copies"), {})
    return directory / manifest.step_name(1)


def seal(path: Path) -> None:
    """Give the manifest the sizes and checksums of the files as they are now."""
    files = {
        p.name: {"bytes": p.stat().st_size, "sha256": manifest.sha256(p)}
        for p in path.iterdir()
        if p.name != "manifest.json"
    }
    edit_manifest(path, {"files": files})


class Touch:
    """Unpickled without care, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self.path),)


def test_code_in_the_metadata_is_refused(tmp_path: Path) -> None:
    path, created = save(tmp_path / "checkpoints"), tmp_path / "created"
    attack = pickle.dumps(Touch(created))
    pickle.loads(attack)
    assert created.exists()  # the attack works
    created.unlink()
    (path / ".metadata").write_bytes(attack)
    seal(path)
    assert verify(path) == []
    targets, _ = targets_of("copies")
    assert "mknod is not a part of metadata, refused" in message(lambda: load(path, targets))
    assert "refused" in message(lambda: tensor_checksums(path))
    assert not created.exists()


def test_code_in_the_tensors_is_refused(tmp_path: Path) -> None:
    path, created = save(tmp_path / "checkpoints"), tmp_path / "created"
    data = path / "__0_0.distcp"
    attack = pickle.dumps(Touch(created), protocol=2)
    data.write_bytes(attack.ljust(data.stat().st_size, b"\0"))
    seal(path)
    targets, _ = targets_of("copies")
    error = message(lambda: load(path, targets))
    assert "holds something other than tensors, refused" in error
    assert "weights_only" not in error  # torch advises to switch the protection off
    assert not created.exists()


def test_entries_that_torch_would_unpickle_freely_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    metadata = read_metadata(path)
    for key in metadata.state_dict_metadata:
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(path)
    targets, _ = targets_of("copies")
    expected = "BytesStorageMetadata is not a part of metadata, refused"
    assert expected in message(lambda: load(path, targets))


@pytest.mark.parametrize("size", [torch.Size([2**40, 2**20]), torch.Size([-1, 4])])
def test_metadata_of_more_than_the_files_hold_is_refused_before_it_is_allocated(
    tmp_path: Path, size: torch.Size
) -> None:
    path = save(tmp_path)
    metadata = read_metadata(path)
    next(iter(metadata.state_dict_metadata.values())).size = size
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(path)
    error = message(lambda: shards.StoredTensors(path))
    assert ("has the shape [-1, 4]" if size[0] < 0 else "of tensors, the files hold") in error


def test_metadata_cannot_point_outside_the_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path)
    metadata = read_metadata(path)
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere.distcp"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(path)
    targets, _ = targets_of("copies")
    assert "refers to data outside the checkpoint" in message(lambda: load(path, targets))
