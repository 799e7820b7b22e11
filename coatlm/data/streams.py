"""Read plain and compressed text sequentially, in bounded memory.

    file -> [gzip | zstandard] -> pieces of about BLOCK_BYTES that end with a line | lines

Memory is bounded for any input, also a malicious one. Decompressors return a few MiB at a time. A
line of plain text that is longer than a block is returned in parts, cut between characters. A JSON
line, which is parsed whole, and the window of a zstandard frame may have at most
`Limits.max_record` bytes. `Limits.max_expansion` limits the decompressed size of a file, and so the
time and disk space that a small file can take: 128 KiB of zstandard can expand to 4 GiB.
"""

from __future__ import annotations

import contextlib
import gzip
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from coatlm.config.urls import is_url
from coatlm.remote import Location, RangeReader

BLOCK_BYTES = 1 << 20  # read at once and, for plain text, encoded at once; extended to a line end
EXPANSION_FLOOR = 64 << 20  # decompressed bytes that are allowed for any compressed file
MIN_WINDOW = 8 << 20  # zstandard asks every decoder to support this window (RFC 8878, 3.1.1.1.2)
# Bytes passed to zstandard at once. A block of 4 bytes may decompress to 128 KiB, so 1 KiB becomes
# at most 32 MiB; larger inputs are not measurably faster.
FEED_BYTES = 1 << 10
SHOWN = 150  # characters of a quotation in a message


@dataclass(frozen=True)
class Limits:
    """Limits on the input, which bound memory, time and disk space."""

    max_expansion: float = 1000.0  # bytes of text per byte of a compressed file
    max_record: int = 128 << 20  # bytes of a JSON line, a parquet value or a zstandard window

    def text_bytes(self, nbytes: int) -> int:
        """The allowed bytes of text in a compressed file of `nbytes`."""
        return max(EXPANSION_FLOOR, int(self.max_expansion * nbytes))

    def expansion_error(self, path: str, nbytes: int) -> ValueError:
        """The error for a compressed file with more text than allowed."""
        return ValueError(
            f"{path}: its {nbytes:,} compressed bytes hold more than {self.text_bytes(nbytes):,} "
            f"bytes of text; for a trusted file raise data.max_expansion={self.max_expansion:g} "
            "(--max-expansion), the allowed factor"
        )

    def record_error(self, where: str, what: str) -> ValueError:
        """The error for a record that is too long."""
        return ValueError(
            f"{where}: {what} of more than data.max_record={self.max_record:,} bytes; raise it "
            "(--max-record-mb) if the file is trusted"
        )


DEFAULT_LIMITS = Limits()


class TextStream:
    """The bytes of a text file after decompression, from its start or from the start of a line."""

    def __init__(
        self, raw: IO[bytes], path: str, compression: str, nbytes: int, limits: Limits
    ) -> None:
        self.offset = 0  # of the next byte, after decompression
        self._inside = False  # inside a line: the last byte read was not a line end
        self._raw, self._at_disk = raw, 0
        self._path, self._nbytes, self._limits = path, nbytes, limits
        self._most = limits.text_bytes(nbytes) if compression else None
        file: Any = raw
        if compression == ".gz":
            file = io.BufferedReader(gzip.GzipFile(fileobj=raw), BLOCK_BYTES)
        elif compression == ".zst":
            file = io.BufferedReader(_ZstdReader(raw, path, limits), BLOCK_BYTES)
        self._file = file

    def seek_line(self, start: int, reach: int) -> None:
        """Seek to the first line that begins at or after `start` of a plain file.

        If no line begins before `start + reach`, seek to the first character there.
        """
        if start:
            self._file.seek(start - 1)
            self.offset, self._inside = start - 1, True
        end = start + reach
        while self._inside and self.offset < end:
            if not self._take(self._file.readline(min(BLOCK_BYTES, end - self.offset))):
                break
        else:
            if self._inside:
                self._rest_of_character(3)
        if start:
            self._at_disk = self._raw.tell()  # the segment before counts what is left out here

    def read_piece(self, stop: int, reach: int) -> bytes:
        """Read about a block of bytes before `stop`, and the rest of the line in which they end.

        A line longer than a block is returned in pieces, up to `stop + reach`. Returns b"" at the
        end.
        """
        end = stop + reach
        piece = b""
        if self.offset < stop:
            piece = self._take(self._file.read(min(BLOCK_BYTES, stop - self.offset)))
        if self._inside and self.offset < end:
            piece += self._take(self._file.readline(min(BLOCK_BYTES, end - self.offset)))
            if self._inside and self.offset < end:
                piece += self._rest_of_character(min(3, end - self.offset))
            if self._inside and self.offset == end:
                piece += self._rest_of_character(3)
        return piece

    def read_line(self) -> bytes:
        """Read a whole line. Raises ValueError if it is longer than `Limits.max_record`."""
        begin, most = self.offset, self._limits.max_record
        line = self._take(self._file.readline(most + 1))
        if len(line) > most:
            raise self._limits.record_error(f"{self._path}: at byte {begin}", "a JSON line")
        return line

    def skip_to_line(self, start: int) -> None:
        """`seek_line` for lines that are never cut. Raises ValueError as `read_line` does."""
        self.seek_line(start, self._limits.max_record)
        if self._inside and self._file.peek(1):
            where = f"{self._path}: before byte {self.offset}"
            raise self._limits.record_error(where, "a JSON line")

    def at_end(self) -> bool:
        """Whether the whole text has been read."""
        return not self._file.peek(1)

    def bytes_from_disk(self) -> int:
        """Bytes of the file on disk that were read since the last call."""
        before, self._at_disk = self._at_disk, self._raw.tell()
        return self._at_disk - before

    def _take(self, data: bytes) -> bytes:
        """Update offset and line state for data that was read, and check the size limit."""
        if data:
            self.offset += len(data)
            self._inside = not data.endswith(b"\n")
            if self._most is not None and self.offset > self._most:
                raise self._limits.expansion_error(self._path, self._nbytes)
        return data

    def _rest_of_character(self, most: int) -> bytes:
        """Read up to `most` UTF-8 continuation bytes, so that no character is cut."""
        rest = b""
        while len(rest) < most and self._file.peek(1)[:1] and 0x80 <= self._file.peek(1)[0] < 0xC0:
            rest += self._file.read(1)
        return self._take(rest)


@contextlib.contextmanager
def open_text_stream(
    path: str, compression: str, nbytes: int, limits: Limits
) -> Iterator[TextStream]:
    """Open the text of a file of `nbytes`; `compression` is "", ".gz" or ".zst"."""
    with open_input(path, nbytes) as raw:
        yield TextStream(raw, path, compression, nbytes, limits)


def open_input(path: str, nbytes: int) -> IO[bytes]:
    """Open a file, or an object at a URL, of `nbytes`."""
    if is_url(path):
        return io.BufferedReader(RangeReader(Location.of(path), nbytes), BLOCK_BYTES)
    return open(path, "rb")


def quoted(message: object) -> str:
    """A library's message on one line, cut to SHOWN characters."""
    text = " ".join(str(message).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def some(names: Iterable[str]) -> str:
    """Names from a file as a list for a message, cut to SHOWN characters."""
    return quoted(", ".join(names)) or "none"


class _ZstdReader(io.RawIOBase):
    """Decompresses zstandard frames; unlike the library's reader it detects a truncated file."""

    def __init__(self, raw: IO[bytes], path: str, limits: Limits) -> None:
        try:
            import zstandard
        except ImportError:
            raise ValueError(".zst needs zstandard: pip install zstandard") from None
        self._raw, self._path, self._limits = raw, path, limits
        window = max(limits.max_record, MIN_WINDOW)
        self._make = zstandard.ZstdDecompressor(max_window_size=window).decompressobj
        self._error = zstandard.ZstdError
        self._frame: Any = None  # decompressor of the current frame
        self._compressed = memoryview(b"")  # read, not yet decompressed
        self._ready = memoryview(b"")  # decompressed, not yet returned

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._compressed = self._compressed or memoryview(self._raw.read(1 << 17))
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the file ends inside a frame")
                return 0
            self._decompress()
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self) -> None:
        """Decompress the next input of the current frame, or begin a new frame."""
        self._frame = self._frame or self._make()
        feed = self._compressed[:FEED_BYTES]
        try:
            self._ready = memoryview(self._frame.decompress(feed))
        except self._error as error:
            if "too much memory" in str(error):
                raise self._limits.record_error(self._path, "a zstandard window") from None
            raise OSError(f"broken .zst: {error}") from None
        self._compressed = self._compressed[len(feed) - len(self._frame.unused_data) :]
        if self._frame.eof:
            self._frame = None
