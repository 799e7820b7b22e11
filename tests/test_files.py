"""Results are whole or not there, and files of strangers are read or refused by name."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coatlm.files import (
    check_output,
    durable_file,
    open_locked,
    read_json,
    whole_directory,
    whole_file,
)


@contextmanager
def small_disk(limit: int) -> Iterator[None]:
    """No file grows beyond `limit` bytes here: writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b'{"a":' * 100_000, "nested too deeply"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[1]", "holds a list, not an object"),
        (None, "No such file"),
    ],
)
def test_what_is_no_object_of_json_is_refused_by_its_path(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"config\.json: .*{complaint}"):
        read_json(path)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    with whole_file(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole" and os.listdir(path.parent) == ["out.json"]
    with pytest.raises(RuntimeError), whole_file(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "whole" and os.listdir(path.parent) == ["out.json"]


def test_a_small_disk_is_named_with_the_path_and_leaves_nothing(tmp_path: Path) -> None:
    file, directory = tmp_path / "a" / "out.json", tmp_path / "b" / "out"
    with small_disk(100):
        named = pytest.raises(ValueError, match=r"/a/out.json: cannot be written: File too large")
        with named, whole_file(file) as temporary:
            temporary.write_bytes(b"x" * 1000)
        named = pytest.raises(ValueError, match=r"/b/out: cannot be written: File too large")
        with named, whole_directory(directory) as temporary:
            (temporary / "part").write_bytes(b"x" * 1000)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_content_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"first", b"old"):
        with durable_file(path) as file:
            file.write(content)
            assert not path.exists() or path.read_bytes() == b"first"
    with pytest.raises(ZeroDivisionError), durable_file(path) as file:
        file.write(bytes(1 // 0))
    with small_disk(100), pytest.raises(OSError, match="File too large"), durable_file(path) as new:
        new.write(b"x" * 1000)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_device_is_written_in_place(tmp_path: Path) -> None:
    full = Path("/dev/full")
    check_output(full)
    named = pytest.raises(ValueError, match="/dev/full: cannot be written: No space left on device")
    with named, whole_file(full) as temporary:
        temporary.write_text("x")
    assert full.is_char_device()


def test_an_error_of_another_file_is_not_blamed_on_the_result(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "out") as temporary:
        temporary.write_text("x")
        (tmp_path / "missing").read_text()
    with pytest.raises(FileNotFoundError), whole_directory(tmp_path / "out"):
        (tmp_path / "missing").read_text()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, reason in [
        (tmp_path / "file" / "out.json", "Not a directory"),
        (tmp_path, "Is a directory"),
        (Path("/proc/nowhere/out.json"), "No such file or directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ]:
        with pytest.raises(ValueError, match=f"{path}: cannot be written: {reason}"):
            check_output(path)
    check_output(tmp_path / "deep" / "er" / "out.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), whole_directory(tmp_path / "a") as directory:
        (directory / "part").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with whole_directory(tmp_path / "a") as directory:
        (directory / "part").touch()
        assert not (tmp_path / "a").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "part"]
    for path in (tmp_path / "a", Path("."), Path("/")):
        with pytest.raises(ValueError, match="exists already"), whole_directory(path):
            pass


def test_a_locked_file_is_locked_against_threads_and_processes_until_it_is_closed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lock"
    path.write_text("kept")
    child = (
        "import sys; from pathlib import Path; from coatlm.files import open_locked\n"
        "try: open_locked(Path(sys.argv[1]), wait=False)\n"
        "except BlockingIOError: sys.exit(9)"
    )

    def elsewhere() -> int:
        return subprocess.run([sys.executable, "-c", child, str(path)]).returncode

    with open_locked(path) as lock:
        with pytest.raises(BlockingIOError):
            open_locked(path, wait=False)
        assert elsewhere() == 9
        lock.seek(0)
        assert lock.read() == "kept"
    assert elsewhere() == 0
    open_locked(path, wait=False).close()
