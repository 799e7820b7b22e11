"""Read stored tensors into the memory that they are for, in several threads.

torch.distributed.checkpoint (DCP) plans which region of which stored shard goes where. Its own
reader loads one shard after the other into new memory and copies it from there. A stored shard is
an archive of torch.save: a zip file whose entry `data/0` is the bytes of the tensor, uncompressed.
Where the region and its target are contiguous, threads read these bytes straight into the target,
or, if that is on a GPU, into page-locked memory from which they are copied. Otherwise a thread
reads the whole shard and copies the region.

The archive also has the dtype and shape of the shard, as a pickle: torch's `weights_only` unpickler
reads them on the meta device, without the bytes.
"""

from __future__ import annotations

import ctypes
import io
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from coatlm.train.manifest import THREADS, CheckpointError

SPAN = 1 << 24  # bytes that a thread reads at a time
# lengths of the name and of the extra field, in the local header of a zip file's entry
LENGTHS = struct.Struct("<26xHH")


class Shard(NamedTuple):
    """A stored shard: a contiguous tensor on the meta device, and its first byte in the file."""

    like: Tensor
    offset: int


class Archive(io.RawIOBase):
    """Bytes [start, start + length) of an open file, as a file that is only read."""

    def __init__(self, file: int, start: int, length: int) -> None:
        super().__init__()
        self.file, self.start, self.length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.length}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer)[: max(0, self.length - self._at)]
        count = os.preadv(self.file, [room], self.start + self._at)
        self._at += count
        return count


class TensorReader(filesystem.FileSystemReader):
    """DCP's reader of a checkpoint's tensors, with a parallel `read_data`."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the targets of `plan`, whose values are copied bit by bit.

        Raises CheckpointError for a shard of another type or shape than the target expects, and
        nearly anything for a damaged file.
        """
        targets = [(item, planner.resolve_tensor(item).detach()) for item in plan.items]
        buffers: SimpleQueue[Tensor] = SimpleQueue()
        if any(target.is_cuda for _, target in targets):
            for _ in range(THREADS):
                buffers.put(torch.empty(SPAN, dtype=torch.uint8, pin_memory=True))
        with ExitStack() as stack, ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(lambda job: job(), self._jobs(targets, buffers, stack)):
                pass
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _jobs(
        self,
        targets: list[tuple[ReadItem, Tensor]],
        buffers: SimpleQueue[Tensor],
        stack: ExitStack,
    ) -> Iterator[Callable[[], None]]:
        """Yield the reads that together fill the targets. `stack` closes the files."""
        files: dict[str, int] = {}
        likes: dict[bytes, Tensor] = {}  # by the pickle in the archive: most shards share a few
        for item, target in targets:
            place = self.storage_data[item.storage_index]
            name = place.relative_path
            if name not in files:
                opened = stack.enter_context((Path(self.path) / name).open("rb", buffering=0))
                files[name] = opened.fileno()
            file = files[name]
            archive = Archive(file, place.offset, place.length)
            shard = _find(archive, likes)
            if shard is None:
                _copy(_load(archive), item, target)
                continue
            region = _region(shard.like, item, target)
            if not (region.is_contiguous() and target.is_contiguous()):
                yield partial(_read_shard, file, shard, item, target)
                continue
            first = shard.offset + int(region.storage_offset()) * region.itemsize
            bytes_ = target.reshape(-1).view(torch.uint8)
            for start in range(0, len(bytes_), SPAN):
                span = bytes_[start : start + SPAN]
                yield partial(_read_span, file, first + start, span, buffers)


def _find(archive: Archive, likes: dict[bytes, Tensor]) -> Shard | None:
    """The shard in an archive; None if its bytes are not those of one contiguous tensor."""
    try:
        with zipfile.ZipFile(archive) as entries:
            found = {entry.filename.partition("/")[2]: entry for entry in entries.infolist()}
            pickled = entries.read(found["data.pkl"])
    except zipfile.BadZipFile:  # torch says what is wrong with it
        return None
    if pickled not in likes:
        likes[pickled] = _load(archive, "meta")
    like, data = likes[pickled], found.get("data/0")
    plain = like.is_contiguous() and not like.storage_offset()
    if data is None or data.compress_type or data.file_size != like.nbytes or not plain:
        return None
    archive.seek(data.header_offset)
    name, extra = LENGTHS.unpack(archive.read(LENGTHS.size))
    return Shard(like, archive.start + data.header_offset + LENGTHS.size + name + extra)


def _load(archive: Archive, device: str = "cpu") -> Tensor:
    """The tensor in an archive, by torch."""
    archive.seek(0)
    tensor = torch.load(cast(IO[bytes], archive), weights_only=True, map_location=device)
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"a {type(tensor).__name__} is stored in place of a tensor")
    return tensor


def _region(shard: Tensor, item: ReadItem, target: Tensor) -> Tensor:
    """The part of a shard for `target`. Raises CheckpointError if shapes or dtypes differ."""
    region = narrow_tensor_by_index(shard, item.storage_offsets, item.lengths)
    if region.shape != target.shape or region.dtype != target.dtype:
        stored, wanted = (f"{t.dtype} {list(t.shape)}" for t in (region, target))
        raise CheckpointError(f"{item.storage_index.fqn} is {stored} in its file, not {wanted}")
    return region


def _copy(shard: Tensor, item: ReadItem, target: Tensor) -> None:
    target.copy_(_region(shard, item, target))


def _read_shard(file: int, shard: Shard, item: ReadItem, target: Tensor) -> None:
    """Read a whole shard, and copy a region of it."""
    whole = torch.empty_like(shard.like, device="cpu")
    _read(file, shard.offset, whole.reshape(-1).view(torch.uint8))
    _copy(whole, item, target)


def _read_span(file: int, offset: int, target: Tensor, buffers: SimpleQueue[Tensor]) -> None:
    """Read the bytes of `target`, uint8 [n] on the host or on a GPU."""
    if not target.is_cuda:
        _read(file, offset, target)
        return
    buffer = buffers.get()
    try:
        _read(file, offset, buffer[: len(target)])
        target.copy_(buffer[: len(target)])  # waits, so that the buffer can be used again
    finally:
        buffers.put(buffer)


def _read(file: int, offset: int, target: Tensor) -> None:
    """Read len(target) bytes into uint8 memory of the host. Raises EOFError if there are fewer."""
    # not by numpy, whose view of a tensor makes its storage impossible to resize
    memory = (ctypes.c_char * len(target)).from_address(target.data_ptr())
    left = memoryview(memory).cast("B")
    while left:
        count = os.preadv(file, [left], offset)
        if not count:
            raise EOFError(f"ends before byte {offset + len(left)}")
        left, offset = left[count:], offset + count
