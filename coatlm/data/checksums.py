"""PREFIX.crc32: checksums of the tokens in PREFIX.bin, verified on every read.

    .crc32 = one u32 per SUM_BYTES of .bin: the CRC-32 of these bytes

Tokens are read in whole blocks of SUM_BYTES, and only blocks that are read are verified. So a
dataset of terabytes opens without delay, and a disk that fails during the run is detected. Blocks
are small because samples lie at random offsets: a disk reads 16 KiB at once anyway, and their
CRC-32 takes 4 us. CRC-32 is in the standard library. It detects every error burst of up to 32 bits,
and all but one in 4e9 other errors. It protects against failing disks and incomplete copies, not
against manipulation, which can change the checksums too.
"""

from __future__ import annotations

import io
import os
import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SUM_BYTES = 1 << 14  # bytes of .bin per checksum
VERIFIED_BLOCKS = 1 << 10  # blocks per read (16 MiB) when a whole file is verified


class DatasetError(ValueError):
    """A prepared dataset is damaged or does not fit the run."""


class CacheFullError(OSError):
    """The disk of data.cache_dir is full."""


class BlockSums:
    """Computes the checksums of a file that is written piece by piece."""

    def __init__(self) -> None:
        self.sums = array("I")  # of 4 bytes: a corpus has millions of blocks
        self._crc32 = self._filled = 0  # CRC-32 and size of the incomplete block

    def update(self, data: memoryview) -> None:
        """Append the next bytes of the file."""
        while data:
            part, data = data[: SUM_BYTES - self._filled], data[SUM_BYTES - self._filled :]
            self._crc32 = zlib.crc32(part, self._crc32)
            self._filled += len(part)
            if self._filled == SUM_BYTES:
                self.sums.append(self._crc32)
                self._crc32 = self._filled = 0

    def array(self) -> NDArray[np.uint32]:
        """The checksums of all blocks; the last block may be short."""
        sums = np.array(self.sums, dtype="<u4")
        return np.append(sums, np.array([self._crc32], dtype="<u4")) if self._filled else sums


def damage(content: bytes | memoryview, sums: NDArray[np.uint32]) -> tuple[int, int] | None:
    """The first range of bytes whose checksum differs; `content` begins with a block of `sums`."""
    content = memoryview(content)
    for begin, expected in zip(range(0, len(content), SUM_BYTES), sums.tolist(), strict=False):
        block = content[begin : begin + SUM_BYTES]
        if zlib.crc32(block) != expected:
            return begin, begin + len(block)
    return None


@dataclass(frozen=True, eq=False)
class CheckedBytes(ABC):
    """A file, here or at a URL, whose reads are verified if it has checksums."""

    path: Path | str  # or its URL
    nbytes: int
    sums: NDArray[np.uint32] | None  # CRC-32 per block of SUM_BYTES; the last may be short

    def read(self, begin: int, end: int) -> memoryview:
        """Read bytes [begin, end). Raises DatasetError if they are damaged or cannot be read."""
        if self.sums is None or begin == end:
            return memoryview(self._pread(begin, end))
        first, stop = begin // SUM_BYTES, -(-end // SUM_BYTES)
        start = first * SUM_BYTES
        raw = memoryview(self._pread(start, min(stop * SUM_BYTES, self.nbytes)))
        if wrong := damage(raw, self.sums[first:stop]):
            raise DatasetError(
                f"{self.path}: damaged between bytes {start + wrong[0]} and {start + wrong[1]}: "
                "its checksum differs"
            )
        return raw[begin - start : end - start]

    def verify(self, workers: int = 1) -> Iterator[int]:
        """Verify all checksums; yields the number of bytes verified, piece by piece."""
        size = VERIFIED_BLOCKS * SUM_BYTES

        def check(start: int) -> int:
            return len(self.read(start, min(start + size, self.nbytes)))

        with ThreadPoolExecutor(workers) as pool:  # zlib.crc32 releases the GIL
            yield from pool.map(check, range(0, self.nbytes, size))

    @abstractmethod
    def _pread(self, begin: int, end: int) -> bytes:
        """Read bytes [begin, end), unverified."""


@dataclass(frozen=True, eq=False)
class CheckedFile(CheckedBytes):
    """An open file."""

    file: io.FileIO

    def _pread(self, begin: int, end: int) -> bytes:
        """Read with pread: a failing disk raises an error here, but SIGBUS for a mapped file."""
        try:
            raw = os.pread(self.file.fileno(), end - begin, begin)
        except OSError as error:
            raise DatasetError(f"{self.path}: at byte {begin}: {error.strerror}") from None
        if len(raw) < end - begin:
            raise DatasetError(f"{self.path}: is cut off at byte {begin + len(raw)}")
        return raw
