"""Large shards of a rank go to several files at once."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from coatlm.train import dcp, shards
from coatlm.train.checkpoint import Checkpointer, load, tensor_checksums, verify
from coatlm.train.manifest import CheckpointError, step_name
from tests.train.layouts import pieces_of, targets_of, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(directory: Path, step: int) -> Path:
    saver = Checkpointer(directory, keep=9, async_save=False)
    saver.save(step, pieces_of(tensors_of(1), "copies"), {})
    return directory / step_name(step)


def names(checkpoint: Path) -> list[str]:
    return sorted(path.name for path in checkpoint.glob("*.distcp"))


def test_several_files_hold_what_one_file_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = save(tmp_path, 1)
    monkeypatch.setattr(shards, "FILES", 4)
    monkeypatch.setattr(dcp, "FILE", 64)
    several = save(tmp_path, 2)
    assert names(one) == ["__0_0.distcp"]
    assert names(several) == [
        "__0_0.distcp",
        "__0_1_0.distcp",
        "__0_2_0.distcp",
        "__0_3_0.distcp",
    ]
    assert verify(several) == []
    assert tensor_checksums(several) == tensor_checksums(one)
    targets = targets_of("copies")[0]
    load(several, targets)
    for target in targets:
        assert target.data is not None
        wanted = tensors_of(1)[target.key]
        assert torch.equal(
            target.data.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)
        )


def test_the_error_of_any_file_is_the_error_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = dcp.ShardWriter._write_file

    def full(self: Any, plan: Any, planner: Any) -> Any:
        if plan.storage_data.prefix == "__0_2_":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, plan, planner)

    monkeypatch.setattr(dcp, "FILE", 64)
    monkeypatch.setattr(dcp.ShardWriter, "_write_file", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, 1)
    assert not any(tmp_path.iterdir())


def item(size: int) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([size]))
    data = TensorWriteData(chunk, TensorProperties(torch.bfloat16), torch.Size([size]))
    return WriteItem(MetadataIndex(str(size)), WriteItemType.SHARD, tensor_data=data)


@pytest.mark.parametrize(
    ("sizes", "parts", "expected"),  # sizes in elements of 2 bytes, of files of 8 bytes or more
    [
        ((), 4, [()]),
        ((3,), 4, [(3,)]),
        ((4, 1, 2, 1), 4, [(4,), (1, 2, 1)]),
        ((1, 2, 90, 3, 4), 2, [(90,), (1, 2, 3, 4)]),
        ((1, 100, 1), 4, [(100,), (1,), (1,)]),
        ((8, 8, 8, 8, 8), 3, [(8, 8), (8, 8), (8,)]),
    ],
)
def test_files_are_of_equal_size_in_the_order_of_tensors(
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...],
    parts: int,
    expected: list[tuple[int, ...]],
) -> None:
    monkeypatch.setattr(dcp, "FILE", 8)
    lists = dcp.split_by_size([item(size) for size in sizes], parts)
    assert [tuple(int(i.index.fqn) for i in items) for items in lists] == expected


LATE = """
import sys, time
from pathlib import Path
from coatlm.train import dcp, shards
from coatlm.train.checkpoint import Checkpointer
from tests.train.layouts import pieces_of, tensors_of

dcp.FILE, shards.FILES = 64, 4
saver = Checkpointer(Path(sys.argv[1]), keep=1, async_save=True)
finish = saver._copies.finish
saver._copies.finish = lambda: (time.sleep(1), finish())[1]
saver.save(1, pieces_of(tensors_of(1), "copies"), {})
raise SystemExit(3)
"""


def test_a_save_is_completed_after_the_main_thread_has_ended_with_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", LATE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    saved = tmp_path / step_name(1)
    assert len(names(saved)) == 4 and verify(saved) == []
