"""The bytes of plain and compressed text, front to back, in bounded memory.

    file -> [gzip | zstandard] -> pieces of about BLOCK_BYTES that end with a line | lines

No file can take more than a bound of memory, however it was made. A decompressor hands out a few
MiB at a time. A line of plain text beyond a block is handed out in parts, cut between characters.
A JSON line, which is parsed whole, and the window of a zstandard frame are at most
`Limits.max_record` bytes. `Limits.max_expansion` bounds what a compressed file may grow to, and
with it the time and the disk that a small file can take: 128 KiB of zstandard can expand to 4 GiB.
"""

from __future__ import annotations

import contextlib
import gzip
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

BLOCK_BYTES = 1 << 20  # read, and of plain text encoded, at once; ends with a line
EXPANSION_FLOOR = 64 << 20  # bytes that a compressed file may grow to, however small it is
MIN_WINDOW = 8 << 20  # zstandard asks every decoder to support this window (RFC 8878, 3.1.1.1.2)
# Fed at once to zstandard. A block of 4 bytes may decompress to 128 KiB, so that 1 KiB becomes at
# most 32 MiB; a larger feed is not measurably faster.
FEED_BYTES = 1 << 10
SHOWN = 150  # characters that a message quotes of what a file or a library says


@dataclass(frozen=True)
class Limits:
    """What reading a file may take."""

    max_expansion: float = 1000.0  # bytes of text per byte of a compressed file
    max_record: int = 128 << 20  # bytes of a JSON line, a parquet value or a zstandard window

    def text_bytes(self, nbytes: int) -> int:
        """The most bytes of text that `nbytes` of a compressed file may hold."""
        return max(EXPANSION_FLOOR, int(self.max_expansion * nbytes))

    def expansion_error(self, path: str, nbytes: int) -> ValueError:
        """What to raise where there are more."""
        return ValueError(
            f"{path}: its {nbytes:,} compressed bytes hold more than {self.text_bytes(nbytes):,} "
            f"bytes of text; data.max_expansion={self.max_expansion:g} (--max-expansion), the "
            "factor allowed, can be raised for a file that is to be trusted"
        )

    def record_error(self, where: str, what: str) -> ValueError:
        """What to raise for a record that is too long."""
        return ValueError(
            f"{where}: {what} of more than data.max_record={self.max_record:,} bytes "
            "(--max-record-mb), which can be raised"
        )


DEFAULT_LIMITS = Limits()


class TextStream:
    """A file's text from its first byte or from the beginning of a line."""

    def __init__(
        self, raw: IO[bytes], path: str, compression: str, nbytes: int, limits: Limits
    ) -> None:
        self.offset = 0  # of the next byte, after decompression
        self._inside = False  # a line: the last byte read was not a line end
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
        """Go to the first line that begins at or after `start` of a plain file.

        Where none begins before `start + reach`, go there, or to the next character.
        """
        if start:
            self._file.seek(start - 1)
            self.offset, self._inside = start - 1, True
        end = start + reach
        while self._inside and self.offset < end:
            if not self._take(self._file.readline(min(BLOCK_BYTES, end - self.offset))):
                return
        if self._inside:
            self._rest_of_character(3)

    def read_piece(self, stop: int, reach: int) -> bytes:
        """The next bytes before `stop`, about a block, with the rest of the line they end in.

        That line is cut into pieces where it is longer than a block, and left where it goes on
        beyond `stop + reach`. Empty at the end.
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
        """The next line, whole. Raises ValueError where it is too long to be held in memory."""
        begin, most = self.offset, self._limits.max_record
        line = self._take(self._file.readline(most + 1))
        if len(line) > most:
            raise self._limits.record_error(f"{self._path}: at byte {begin}", "a JSON line")
        return line

    def skip_to_line(self, start: int) -> None:
        """As `seek_line`, for lines that cannot be cut. Raises ValueError like `read_line`."""
        self.seek_line(start, self._limits.max_record)
        if self._inside and self._file.peek(1):
            where = f"{self._path}: before byte {self.offset}"
            raise self._limits.record_error(where, "a JSON line")

    def at_end(self) -> bool:
        """Whether all has been read."""
        return not self._file.peek(1)

    def bytes_from_disk(self) -> int:
        """Bytes read from the file, as it lies on disk, since the last call."""
        before, self._at_disk = self._at_disk, self._raw.tell()
        return self._at_disk - before

    def _take(self, data: bytes) -> bytes:
        """Account for what was read."""
        if data:
            self.offset += len(data)
            self._inside = not data.endswith(b"\n")
            if self._most is not None and self.offset > self._most:
                raise self._limits.expansion_error(self._path, self._nbytes)
        return data

    def _rest_of_character(self, most: int) -> bytes:
        """Up to `most` continuation bytes of UTF-8, which a cut would part from what they end."""
        rest = b""
        while len(rest) < most and self._file.peek(1)[:1] and 0x80 <= self._file.peek(1)[0] < 0xC0:
            rest += self._file.read(1)
        return self._take(rest)


@contextlib.contextmanager
def open_text_stream(
    path: str, compression: str, nbytes: int, limits: Limits
) -> Iterator[TextStream]:
    """The text of a file of `nbytes` that is compressed in one of "", ".gz" and ".zst"."""
    with open(path, "rb") as raw:
        yield TextStream(raw, path, compression, nbytes, limits)


def quoted(message: object) -> str:
    """What a library says, as far as a message of one line can hold it."""
    text = " ".join(str(message).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def some(names: Iterable[str]) -> str:
    """Names that a file gives, as far as a message can hold them."""
    return quoted(", ".join(names)) or "none"


class _ZstdReader(io.RawIOBase):
    """Frames of zstandard, decompressed; unlike the library's reader it notices a cut-off end."""

    def __init__(self, raw: IO[bytes], path: str, limits: Limits) -> None:
        try:
            import zstandard
        except ImportError:
            raise ValueError(".zst needs zstandard: pip install zstandard") from None
        self._raw, self._path, self._limits = raw, path, limits
        window = max(limits.max_record, MIN_WINDOW)
        self._make = zstandard.ZstdDecompressor(max_window_size=window).decompressobj
        self._error = zstandard.ZstdError
        self._frame: Any = None  # of the frame being read
        self._compressed = memoryview(b"")  # read, not yet decompressed
        self._ready = memoryview(b"")  # decompressed, not yet asked for

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
        """Feed the frame, and begin another one where it ends."""
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
