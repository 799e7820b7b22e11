"""Checksums that are computed while a file is written."""

import ctypes
import io
import os
from pathlib import Path
from typing import IO, cast

import pytest
import torch

from coatlm.train import hashed_file
from coatlm.train.hashed_file import WRITE, HashedFile, HashedFiles
from coatlm.train.manifest import describe


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 3000, 3001])
def test_a_file_is_described_as_it_would_be_when_read(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coatlm.train.manifest.PART", 1000)
    monkeypatch.setattr(hashed_file, "PIECE", 300)
    content = os.urandom(size)
    with HashedFile((tmp_path / "file").open("wb", buffering=0)) as file:
        assert file.write(content[:17]) == min(17, size)
        assert file.tell() == min(17, size)
        assert file.write(memoryview(content)[17:].cast("b")) == max(0, size - 17)
        assert file.described() == describe(tmp_path / "file")  # nothing waits in a buffer
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.skipif(hashed_file.SYNC_FILE_RANGE is None, reason="the C library has none")
def test_the_disk_starts_while_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte is sent once, and so that the kernel accepts the call."""
    call, ranges = hashed_file.SYNC_FILE_RANGE, []
    assert call is not None

    def sync(file: int, start: int, length: int, flags: int) -> int:
        assert call(file, start, length, flags) == 0, os.strerror(ctypes.get_errno())
        ranges.append((start, start + length))
        assert flags == WRITE == 2  # include/uapi/linux/fs.h
        return 0

    monkeypatch.setattr(hashed_file, "SYNC_FILE_RANGE", sync)
    monkeypatch.setattr(hashed_file, "PIECE", 4096)
    with HashedFile((tmp_path / "file").open("wb", buffering=0)) as file:
        for _ in range(10):
            file.write(bytes(5000))
    starts, ends = zip(*ranges, strict=True)
    assert starts[0] == 0 and starts[1:] == ends[:-1] and 50_000 - 4096 < ends[-1] <= 50_000


def test_files_of_tensors_are_described_and_others_are_not(tmp_path: Path) -> None:
    files = HashedFiles()
    tensor = torch.arange(100.0)
    with files.create_stream(tmp_path / "__0_0.distcp", "wb") as stream:
        torch.save(tensor, cast(IO[bytes], stream))
        stream.flush()
        assert not isinstance(stream, io.BufferedIOBase)
    with files.create_stream(tmp_path / ".metadata.tmp", "wb") as stream:
        stream.write(b"other")
    assert files.files == {"__0_0.distcp": describe(tmp_path / "__0_0.distcp")}
    assert torch.equal(torch.load(tmp_path / "__0_0.distcp"), tensor)
    with files.create_stream(tmp_path / "__0_0.distcp", "rb") as stream:
        assert torch.equal(torch.load(cast(IO[bytes], stream)), tensor)
