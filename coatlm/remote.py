"""Read and write objects at URLs through fsspec: in whole, by byte ranges, and ahead of a reader.

    Location.of("s3://bucket/a.bin").read(begin, end)   a range request
    RangeReader(location, nbytes)                       a file that requests the next ranges ahead

Every request is repeated after a failure, PAUSES seconds later, since object stores ask their
clients to (503, dropped connections). A missing object and a refused permission are final. What
a range request returns is compared with the length asked for: a body that ends early, or a server
that ignores ranges, is a failure too. Errors are RemoteErrors of one line, without the queries of
URLs, in which back ends put signatures.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import logging
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from coatlm.config.errors import one_line
from coatlm.config.urls import BACK_ENDS, checked_url, without_secrets

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before the second and later attempts, +- 50 %
PIECE_BYTES = 8 << 20  # of an object that is copied to a file
RANGE_BYTES = 4 << 20  # per request of a RangeReader
AHEAD = 4  # requests in flight ahead of a reader that reads in order
VERSIONS = ("ETag", "etag", "blob_id", "mtime", "created", "LastModified")  # keys of fsspec's info
FINAL = (PermissionError, IsADirectoryError, NotImplementedError)
REFUSED = (401, 403)  # status codes that no repetition changes
READ_OPTIONS = {  # of cat_file: hf:// would read 5 MiB beyond every range
    "hf": {"cache_type": "none"},
}

logger = logging.getLogger("coatlm")
T = TypeVar("T")


class RemoteError(ValueError):
    """An object at a URL cannot be read or written."""


class MissingError(RemoteError):
    """There is no object at a URL."""


class WrongBytesError(ValueError):
    """What arrived is not what is stored; the request is repeated."""


class Info(NamedTuple):
    """The size of an object, and a number that changes when the object does (0 if unknown)."""

    nbytes: int
    version: int


def retried(action: Callable[[], T], url: str) -> T:
    """The result of `action`, repeated after failures. Raises RemoteError with the last reason."""
    for pause in (*PAUSES, None):
        try:
            return action()
        except (FileNotFoundError, NotADirectoryError):
            raise MissingError(f"{url}: no such object or bucket") from None
        except Exception as error:  # back ends raise nearly anything
            if _is_final(error):
                raise RemoteError(f"{url}: {_reason(error)}") from None
            if pause is None:
                tries = len(PAUSES) + 1
                raise RemoteError(f"{url}: {_reason(error)} ({tries} attempts)") from None
            logger.warning("%s: %s; trying again", url, _reason(error))
            time.sleep(pause * random.uniform(0.5, 1.5))
    raise AssertionError("the last attempt returns or raises")


@dataclass(frozen=True)
class Location:
    """An object or a directory of objects at a URL."""

    url: str
    fs: Any  # fsspec's file system, whose methods may be called from any thread
    path: str  # in it

    @classmethod
    def of(cls, url: str) -> Location:
        """Raises RemoteError for a URL that is refused, or whose back end is not installed."""
        try:
            url = checked_url(url)
        except ValueError as error:
            raise RemoteError(f"{without_secrets(url)}: {error}") from None
        protocol = url.split("://")[0]
        module = BACK_ENDS[protocol]
        if module and importlib.util.find_spec(module) is None:
            raise RemoteError(f"{url}: {protocol}:// needs {module}: pip install 'coatlm[remote]'")
        import fsspec

        options = {"auto_mkdir": True} if protocol == "file" else {}
        # Listings are not cached: a checkpoint may appear while this process runs.
        fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
        return cls(url, fs, path)

    def __truediv__(self, name: str) -> Location:
        return Location(f"{self.url}/{name}", self.fs, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rsplit("/", 1)[-1]

    def suffixed(self, suffix: str) -> Location:
        """The object whose name has `suffix` appended."""
        return Location(self.url + suffix, self.fs, self.path + suffix)

    def info(self) -> Info:
        """Size and version of the object. Raises RemoteError."""
        found = retried(lambda: self.fs.info(self.path), self.url)
        if found.get("type") == "directory":
            raise RemoteError(f"{self.url}: is a directory; name its objects, for example with *")
        if found.get("size") is None:
            raise RemoteError(f"{self.url}: the server does not say how large it is")
        version = next((str(found[key]) for key in VERSIONS if found.get(key)), None)
        digest = hashlib.sha256(str(version).encode()).digest()
        return Info(int(found["size"]), int.from_bytes(digest[:7]) if version else 0)

    def found(self) -> Info | None:
        """`info`, or None if there is no such object. Raises RemoteError."""
        try:
            return self.info()
        except MissingError:
            return None

    def exists(self) -> bool:
        """Whether there is such an object. Raises RemoteError."""
        return self.found() is not None

    def names(self) -> list[str]:
        """The names in a directory, sorted; none if there is no such directory."""

        def listed() -> list[str]:
            try:
                self.fs.invalidate_cache()
                return [str(name) for name in self.fs.ls(self.path, detail=False)]
            except FileNotFoundError:
                return []

        found = retried(listed, self.url)
        return sorted({name.rstrip("/").rsplit("/", 1)[-1] for name in found})

    def matches(self) -> list[str]:
        """The URLs of the objects that match this one as a glob, sorted."""
        found = retried(lambda: self.fs.glob(self.path), self.url)
        return sorted(str(self.fs.unstrip_protocol(path)) for path in found)

    def read(self, begin: int, end: int) -> bytes:
        """Read bytes [begin, end). Raises RemoteError."""
        return retried(lambda: self.read_once(begin, end), self.url)

    def read_once(self, begin: int, end: int) -> bytes:
        """`read` without repetitions, for an `action` of `retried`."""
        options = READ_OPTIONS.get(self.url.split("://")[0], {})
        raw = bytes(self.fs.cat_file(self.path, start=begin, end=end, **options))
        if len(raw) != end - begin:
            raise WrongBytesError(f"{len(raw)} bytes arrived of [{begin}, {end})")
        return raw

    def pieces(self, nbytes: int) -> Iterator[bytes]:
        """The first `nbytes` of the object, a piece at a time. Raises RemoteError."""
        for begin in range(0, nbytes, PIECE_BYTES):
            yield self.read(begin, min(begin + PIECE_BYTES, nbytes))

    def write(self, content: bytes) -> None:
        """Replace the object. Raises RemoteError."""
        retried(lambda: self.fs.pipe_file(self.path, content), self.url)

    def upload(self, file: Path) -> None:
        """Replace the object by the content of a file, and compare sizes. Raises RemoteError."""

        def put() -> None:
            self.fs.put_file(str(file), self.path)
            arrived, size = self.fs.info(self.path)["size"], file.stat().st_size
            if arrived != size:
                raise WrongBytesError(f"{arrived} bytes are stored of {size}")

        retried(put, self.url)

    def remove(self) -> None:
        """Remove the object if it exists. Raises RemoteError."""
        if self.exists():
            retried(lambda: self.fs.rm_file(self.path), self.url)


class RangeReader(io.RawIOBase):
    """A seekable object of `nbytes` that requests the next ranges while it is read in order.

    It holds at most AHEAD + 1 ranges of RANGE_BYTES. Reads raise RemoteError.
    """

    def __init__(self, location: Location, nbytes: int) -> None:
        self._location, self._nbytes = location, nbytes
        self._at, self._latest = 0, -1  # the position, and the range read last
        self._ranges: dict[int, Future[bytes]] = {}
        self._threads = ThreadPoolExecutor(AHEAD, thread_name_prefix="ranges")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        number, skipped = divmod(self._at, RANGE_BYTES)
        if self._at >= self._nbytes:
            return 0
        content = self._range(number)[skipped : skipped + len(buffer)]
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _range(self, number: int) -> memoryview:
        if number != self._latest:
            ahead = AHEAD if number == self._latest + 1 else 0  # else a jump
            last = (self._nbytes - 1) // RANGE_BYTES
            wanted = range(number, min(number + ahead, last) + 1)
            self._ranges = {n: self._ranges.get(n) or self._request(n) for n in wanted}
            self._latest = number
        return memoryview(self._ranges[number].result())

    def _request(self, number: int) -> Future[bytes]:
        begin = number * RANGE_BYTES
        end = min(begin + RANGE_BYTES, self._nbytes)
        return self._threads.submit(self._location.read, begin, end)


def _is_final(error: Exception) -> bool:
    """Whether no repetition can help: by its type, by a status code, or by gcsfs' text for one."""
    if isinstance(error, FINAL):
        return True
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    return status in REFUSED or str(error).startswith("Forbidden: ")


def _reason(error: Exception) -> str:
    """The reason of a back end's error in one line, without queries of URLs."""
    if isinstance(error, WrongBytesError):
        return str(error)
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return one_line(without_secrets(f"{type(error).__name__}: {text}"))[:200]
