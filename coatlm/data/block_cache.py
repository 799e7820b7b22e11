"""Blocks of remote datasets on the local disk: verified when they arrive and on every read.

    data.cache_dir/remote/KEY/text.json .idx .crc32   whole files of a dataset; KEY is of its
                                                      manifest's SHA-256 and the block size,
                                                      so copies share blocks
    data.cache_dir/remote/KEY/bin-00000012            bytes [12 B, 13 B) of .bin, B = remote_block
    data.cache_dir/remote/locks/                      one process per node downloads a block

The processes of a node share the blocks. A block is downloaded under a lock that the kernel
releases with its process, and renamed when it is complete. What was read last is known from the
mtime of a block, which every read renews.

Space: a process that has written LIMIT / 64 bytes since it last looked removes the blocks that were
read the longest time ago, until 3/4 of LIMIT are left. LIMIT is
data.remote_cache, at least 64 blocks; up to 8 processes never exceed it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coatlm.data.checksums import SUM_BYTES, CacheFullError, CheckedBytes, DatasetError, damage
from coatlm.files import open_locked
from coatlm.remote import Location, WrongBytesError, retried

LOCKS = 256  # lock files; blocks that share one are downloaded one after the other
SHARE = 64  # a process may write LIMIT / SHARE bytes between two looks at the space
STALE_SECONDS = 3600.0  # age at which the file of a download is one of a killed process


class BlockCache:
    """The blocks of all remote datasets that `directory` holds, at most `limit` bytes."""

    def __init__(self, directory: Path, *, limit: int, block_bytes: int) -> None:
        assert block_bytes % SUM_BYTES == 0
        self.directory, self.block_bytes = directory / "remote", block_bytes
        self._limit = limit
        self._unseen = limit  # bytes written since the last look; the first write looks
        self._mutex = threading.Lock()
        self._make(self.directory / "locks")

    def folder(self, manifest: bytes) -> Path:
        """The directory of the dataset with this manifest."""
        folder = self.directory / f"{hashlib.sha256(manifest).hexdigest()[:32]}-{self.block_bytes}"
        self._make(folder)
        return folder

    def read(self, path: Path, begin: int, end: int) -> bytes | None:
        """Bytes [begin, end) of a block, or None if it is not here or cut off."""
        try:
            with open(path, "rb", buffering=0) as file:
                os.utime(file.fileno())
                raw = os.pread(file.fileno(), end - begin, begin)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DatasetError(f"{path}: {error.strerror}") from None
        return raw if len(raw) == end - begin else None

    def write(self, path: Path, content: bytes) -> None:
        """Add a file. Raises CacheFullError, or DatasetError if the directory is not writable."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise self._unwritable(error) from None
        with self._mutex:
            self._unseen += len(content)
            looks = self._unseen >= self._limit // SHARE
            self._unseen = 0 if looks else self._unseen
        if looks:
            self._evict()

    @contextlib.contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Lock a file of the cache against all other threads and processes."""
        number = zlib.crc32(str(path).encode()) % LOCKS
        with open_locked(self.directory / "locks" / f"{number:03d}"):
            yield

    def _evict(self) -> None:
        """Remove the blocks that were read the longest time ago, until 3/4 of the limit are left.

        Processes may do this at once: a block that is gone is what each of them wants.
        """
        found = []
        for path in self.directory.glob("*/*-*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        for path in self.directory.glob("*/.*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()
        surplus = sum(size for _, size, _ in found) - self._limit * 3 // 4
        for _, size, path in sorted(found):
            if surplus <= 0:
                return
            path.unlink(missing_ok=True)
            surplus -= size

    def _make(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> Exception:
        reason = f"data.cache_dir={self.directory.parent}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return CacheFullError(f"{reason}; data.remote_cache limits what is written there")
        return DatasetError(f"{reason}; it must be a directory that can be written to")


@dataclass(frozen=True, eq=False)
class RemoteFile(CheckedBytes):
    """A file of a remote dataset, read through a cache of its blocks."""

    location: Location
    cache: BlockCache
    base: Path  # the cache's name of a block without its number

    def read(self, begin: int, end: int) -> memoryview:
        """Read bytes [begin, end); blocks damaged on the local disk are downloaded again."""
        try:
            return super().read(begin, end)
        except DatasetError:
            for number in self.blocks(begin, end):
                self._path(number).unlink(missing_ok=True)
            return super().read(begin, end)

    def blocks(self, begin: int, end: int) -> range:
        """The numbers of the blocks that hold bytes [begin, end)."""
        return range(begin // self.cache.block_bytes, -(-end // self.cache.block_bytes))

    def missing(self, begin: int, end: int) -> list[int]:
        """The numbers of the blocks that hold bytes [begin, end) and are not in the cache."""
        return [n for n in self.blocks(begin, end) if not self._path(n).exists()]

    def load(self, number: int) -> None:
        """Download a block unless it is in the cache. Raises RemoteError or DatasetError."""
        self._part(number, 0, 0)

    def _pread(self, begin: int, end: int) -> bytes:
        size = self.cache.block_bytes
        parts = []
        for number in self.blocks(begin, end):
            first = number * size
            parts.append(
                self._part(number, max(begin - first, 0), min(end - first, size)),
            )
        return b"".join(parts)

    def _part(self, number: int, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of a block, which is downloaded if it is not in the cache."""
        path = self._path(number)
        raw = self.cache.read(path, begin, end)
        if raw is None:
            with self.cache.locked(path):
                raw = self.cache.read(path, begin, end)  # another process was first
                if raw is None:
                    content = retried(lambda: self._download(number), self.location.url)
                    self.cache.write(path, content)
                    raw = content[begin:end]
        return raw

    def _download(self, number: int) -> bytes:
        """One attempt. Raises WrongBytesError if a checksum differs."""
        first = number * self.cache.block_bytes
        content = self.location.read_once(first, min(first + self.cache.block_bytes, self.nbytes))
        assert self.sums is not None  # `open_remote` refuses datasets without checksums
        if wrong := damage(content, self.sums[first // SUM_BYTES :]):
            raise WrongBytesError(
                f"damaged between bytes {first + wrong[0]} and {first + wrong[1]}: "
                "its checksum differs"
            )
        return content

    def _path(self, number: int) -> Path:
        return self.base.with_name(f"{self.base.name}-{number:08d}")


def whole_file(cache: BlockCache, path: Path, location: Location, crc32: int) -> None:
    """Download a small file to `path` unless it is there with this CRC-32.

    Raises RemoteError if it cannot be read, or if its checksum differs each time.
    """
    with cache.locked(path):
        if path.is_file() and zlib.crc32(path.read_bytes()) == crc32:
            return

        def download() -> bytes:
            content = b"".join(location.pieces(location.info().nbytes))
            if zlib.crc32(content) != crc32:
                raise WrongBytesError("damaged: its checksum differs from that in the manifest")
            return content

        cache.write(path, retried(download, location.url))
