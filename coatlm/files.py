"""Read untrusted JSON; write output files and directories atomically.

Output is written under a temporary name in the same directory and renamed when it is complete. If
that fails (the disk is full or read-only, the directory is not writable), the temporary file is
removed and a ValueError names the path and the reason (`durable_file`: an OSError).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

STATE_PREFIX = "optimizer.state."  # prefix of a checkpoint's tensors that are not weights


def check_regular(path: Path) -> None:
    """Raise OSError for a pipe, a socket or a device, whose reading may block or never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises ValueError that names the file."""
    try:
        check_regular(path)
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"{path}: not JSON that can be read: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, not an object")
    return content


def check_output(path: Path) -> None:
    """Raise ValueError if no file can be written at `path`; call it before work that takes long."""
    made = _make_directories(path.parent, path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not _in_place(path):
            temporary = _beside(path)
            temporary.touch()
            temporary.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        _remove_directories(made)


def check_replaced(path: Path, begin: str, what: str) -> None:
    """Raise ValueError if `path`, of the option --out, is a file that does not begin with `begin`
    as a `what` does: it is not the command's to replace."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        start = file.read(len(begin))
    if start != begin.encode():
        raise ValueError(f"--out {path}: exists and is no {what}; give another name")


def open_locked(path: Path, *, wait: bool = True) -> IO[str]:
    """Open a file, which is created if it does not exist, and lock it against all other threads and
    processes until it is closed.

    The kernel also releases the lock when the process ends. The file can be read and appended to.
    Raises OSError; without `wait`, BlockingIOError if the file is locked.
    """
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


@contextmanager
def whole_file(final: Path) -> Iterator[Path]:
    """Yield a temporary path whose file is renamed to `final` at the end, or removed on an error.

    Missing parent directories are created. A device or a pipe is written in place. Raises
    ValueError if `final` cannot be written.
    """
    made = _make_directories(final.parent, final)
    temporary = final if _in_place(final) else _beside(final)
    try:
        yield temporary
        if temporary != final:
            temporary.replace(final)
    except BaseException as error:
        if temporary != final:
            with contextlib.suppress(OSError):
                temporary.unlink()
        _remove_directories(made)
        if _is_about(temporary, error):
            raise _unwritable(final, error) from error
        raise


@contextmanager
def durable_file(final: Path) -> Iterator[IO[bytes]]:
    """Yield a binary file that is flushed to the disk (fsync) and then replaces `final`.

    After a crash `final` has its old or its new content. On an error, which is raised as it is, it
    has the old one, and the temporary file is removed.
    """
    temporary = _beside(final)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(final)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def whole_directory(final: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `final` at the end, or removed on an error.

    Raises ValueError at the start if `final` exists and is not an empty directory, and if it cannot
    be written.
    """
    made = _make_directories(final.parent, final)
    temporary = _beside(final)
    try:
        if final.exists() and (not final.is_dir() or any(final.iterdir())):
            raise ValueError(f"{final}: exists already; give a new directory")
        temporary.mkdir()
        yield temporary
        temporary.replace(final)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        _remove_directories(made)
        if _is_about(temporary, error):
            raise _unwritable(final, error) from error
        raise


def _is_about(temporary: Path, error: BaseException) -> bool:
    """Whether an error is an OSError about `temporary`; an OSError of `write` names no file."""
    if not isinstance(error, OSError):
        return False
    named = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return not named or any(name.startswith(str(temporary)) for name in named)


def _beside(path: Path) -> Path:
    if not path.name:  # . or /
        raise ValueError(f"{path}: exists already; give the path of a new file or directory")
    # process ids repeat: nodes that share a disk may be containers
    return path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")


def _in_place(path: Path) -> bool:
    """Whether `path` is a device or a pipe, which must not be replaced by a file."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _make_directories(path: Path, final: Path) -> list[Path]:
    """Create a directory with its parents; returns the created ones, innermost first."""
    missing: list[Path] = []
    try:
        missing = [p for p in (path, *path.parents) if not p.exists()]
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _remove_directories(missing)
        if isinstance(error, FileExistsError):  # mkdir raises it where a parent is a file
            error = NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        raise _unwritable(final, error) from error
    return missing


def _remove_directories(made: list[Path]) -> None:
    for directory in made:
        with contextlib.suppress(OSError):  # it does not exist or is not empty
            directory.rmdir()


def _unwritable(path: Path, error: BaseException) -> ValueError:
    reason = error.strerror if isinstance(error, OSError) else None
    return ValueError(f"{path}: cannot be written: {reason or error}")
