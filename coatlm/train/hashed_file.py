"""Write a large file so that it is hashed on the way, and the disk is busy from the beginning.

The kernel keeps written pages in memory until they take a tenth of it (`vm.dirty_background_ratio`)
or until fsync, so a file of some gigabytes would reach the disk only after all of it was written.
Here the kernel is asked for each piece to start writing it, which waits only while the disk's queue
is full, and the piece is hashed while the disk works.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint import filesystem

from coatlm.train import manifest

PIECE = 1 << 24  # bytes that are written, hashed, and sent to the disk at a time
SUFFIX = ".distcp"  # of the files that hold tensors
WRITE = 2  # SYNC_FILE_RANGE_WRITE: start to write the dirty pages of a range, without waiting


def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux's sync_file_range(2); None where the C library has none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return cast(Callable[[int, int, int, int], int], function)


SYNC_FILE_RANGE = _sync_file_range()


class HashedFile(io.RawIOBase):
    """A new file, opened without a buffer, that is written from beginning to end.

    `described`: its entry of the manifest.
    """

    def __init__(self, file: io.FileIO) -> None:
        super().__init__()
        self._file = file
        self._size = 0
        self._sent = 0  # bytes whose writing to the disk has been started
        self._parts = [hashlib.sha256()]

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
        super().close()

    def write(self, data: Any) -> int:
        """Write all of `data`, a bytes-like object, and return its length. Raises OSError."""
        whole = left = memoryview(data).cast("B")
        while left:
            if self._size == manifest.PART * len(self._parts):
                self._parts.append(hashlib.sha256())
            room = manifest.PART * len(self._parts) - self._size
            count = self._file.write(left[: min(PIECE, room)])
            self._parts[-1].update(left[:count])
            self._size += count
            left = left[count:]
            if self._size - self._sent >= PIECE:
                self._send()
        return len(whole)

    def described(self) -> manifest.File:
        """The size and checksums of what has been written, as `manifest.describe` finds them."""
        return manifest.File.of(self._size, [part.hexdigest() for part in self._parts])

    def _send(self) -> None:
        """Start to write to the disk what has not been sent; a failure is left to fsync."""
        if SYNC_FILE_RANGE is not None:
            SYNC_FILE_RANGE(self.fileno(), self._sent, self._size - self._sent, WRITE)
        self._sent = self._size


class HashedFiles(filesystem.FileSystem):
    """The local file system for DCP. `files` describes each .distcp file that has been closed."""

    def __init__(self) -> None:
        self.files: dict[str, manifest.File] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """Open a file; a .distcp file is written without a buffer, which DCP would not fsync."""
        path = Path(path)
        if mode != "wb" or path.suffix != SUFFIX:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with HashedFile(path.open("wb", buffering=0)) as file:
            yield file
            self.files[path.name] = file.described()
