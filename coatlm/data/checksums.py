"""PREFIX.crc32: checksums of the tokens in PREFIX.bin, compared each time that they are read.

    .crc32 = u32 per SUM_BYTES of .bin: the CRC-32 of these bytes

Tokens are read in whole blocks of SUM_BYTES. So a dataset of terabytes opens at once, nothing but
what is read is paid for, and a disk that fails during the run is noticed too. The blocks are small
because samples lie at random places: 16 KiB is no more than a disk reads at once anyway, and its
CRC-32 takes 4 us. CRC-32 is in the standard library and finds every error of up to 32 bits in a
row, and all others but one in 4e9. It is made against failing disks and careless copies, not
against forgers, who can write the checksums too.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SUM_BYTES = 1 << 14  # of .bin under one checksum
VERIFIED_BLOCKS = 1 << 10  # 16 MiB: read at once to compare all


class DatasetError(ValueError):
    """A prepared dataset is damaged, or not one that the run can train on."""


class BlockSums:
    """The checksums of a file that is written piece by piece."""

    def __init__(self) -> None:
        self.sums: list[int] = []
        self._crc32 = self._filled = 0  # of the block that is not full

    def update(self, data: memoryview) -> None:
        """Add the file's next bytes."""
        while data:
            part, data = data[: SUM_BYTES - self._filled], data[SUM_BYTES - self._filled :]
            self._crc32 = zlib.crc32(part, self._crc32)
            self._filled += len(part)
            if self._filled == SUM_BYTES:
                self.sums.append(self._crc32)
                self._crc32 = self._filled = 0

    def array(self) -> NDArray[np.uint32]:
        """The sums of all blocks, of which the last may be short."""
        rest = [self._crc32] if self._filled else []
        return np.asarray(self.sums + rest, dtype="<u4")


@dataclass(frozen=True)
class CheckedFile:
    """An open file whose bytes are compared with checksums, where it has any."""

    path: Path
    file: io.FileIO
    nbytes: int
    sums: NDArray[np.uint32] | None  # of blocks of SUM_BYTES; the last may be short

    def read(self, begin: int, end: int) -> memoryview:
        """Bytes [begin, end). Raises DatasetError where one is damaged or cannot be read."""
        if self.sums is None or begin == end:
            return memoryview(self._pread(begin, end))
        first, stop = begin // SUM_BYTES, -(-end // SUM_BYTES)
        start = first * SUM_BYTES
        raw = memoryview(self._pread(start, min(stop * SUM_BYTES, self.nbytes)))
        for at, expected in enumerate(self.sums[first:stop].tolist()):
            block = raw[at * SUM_BYTES : (at + 1) * SUM_BYTES]
            if zlib.crc32(block) != expected:
                at_byte = start + at * SUM_BYTES
                raise DatasetError(
                    f"{self.path}: damaged between bytes {at_byte} and {at_byte + len(block)}: "
                    "its checksum differs"
                )
        return raw[begin - start : end - start]

    def verify(self, workers: int = 1) -> Iterator[int]:
        """Compare all bytes with their checksums; yields how many, piece by piece."""
        size = VERIFIED_BLOCKS * SUM_BYTES

        def check(start: int) -> int:
            return len(self.read(start, min(start + size, self.nbytes)))

        with ThreadPoolExecutor(workers) as pool:  # zlib.crc32 releases the interpreter's lock
            yield from pool.map(check, range(0, self.nbytes, size))

    def _pread(self, begin: int, end: int) -> bytes:
        """Unlike with a mapped file, a disk that fails is an error here, and not a signal."""
        try:
            raw = os.pread(self.file.fileno(), end - begin, begin)
        except OSError as error:
            raise DatasetError(f"{self.path}: at byte {begin}: {error.strerror}") from None
        if len(raw) < end - begin:
            raise DatasetError(f"{self.path}: is cut off at byte {begin + len(raw)}")
        return raw
