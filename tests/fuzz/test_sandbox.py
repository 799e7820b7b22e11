"""Whatever a reader must not do is found."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coatlm.config import ConfigError
from tests.fuzz import sandbox
from tests.fuzz.conftest import Lab
from tests.fuzz.formats import Planted
from tests.fuzz.sandbox import Target


def works() -> int:
    print("well")
    return 0


def refuses() -> None:
    raise ConfigError("train.steps=0: at least 1")


def ends_the_command() -> None:
    print("usage", file=sys.stderr)
    sys.exit(2)


def hangs() -> None:
    time.sleep(1000)


def dies() -> None:
    os.abort()


def takes_memory() -> None:
    bytearray(sandbox.MEMORY)


def takes_time() -> None:
    begin = time.process_time()
    while time.process_time() - begin < 1:
        pass


def raises() -> None:
    raise KeyError("a")


def raises_a_subclass() -> None:
    b"\xff".decode()


def ends_with_another_code() -> int:
    print("error: x", file=sys.stderr)
    return 7


def says_nothing() -> int:
    return 2


def prints_a_traceback() -> int:
    print("Traceback (most recent call last)")
    return 0


def prints_an_escape_sequence() -> int:
    print("error: \x1b[31m", file=sys.stderr)
    return 2


def prints_a_long_line() -> int:
    print("error: " + "x" * 400, file=sys.stderr)
    return 2


def changes_a_file() -> None:
    Path("file").write_text("b")


def leaves_a_directory_behind() -> None:
    Path("left").mkdir()


def runs_code() -> None:
    pickle.loads(Path("planted").read_bytes())


GOOD = (works, refuses, ends_the_command)
BAD = {
    hangs: "hung",
    dies: "died",
    takes_memory: "memory",
    takes_time: "processor time",
    raises: "KeyError",
    raises_a_subclass: "UnicodeDecodeError",
    ends_with_another_code: "exit code 7",
    says_nothing: "without a word",
    prints_a_traceback: "traceback",
    prints_an_escape_sequence: "control character",
    prints_a_long_line: "a line of 407 characters",
    changes_a_file: "changed or left behind: file",
    leaves_a_directory_behind: "changed or left behind: left",
    runs_code: "code from a file was executed",
}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("a")
    return tmp_path


@pytest.mark.parametrize("read", GOOD, ids=lambda read: read.__name__)
def test_a_good_ending_is_no_finding(read: Callable[[], int | None], lab: Lab, good: Path) -> None:
    assert lab.sandbox.run(Target("t", read), good, {}) is None


@pytest.mark.parametrize("read", BAD, ids=lambda read: read.__name__)
def test_a_bad_ending_is_found(
    read: Callable[[], int | None], lab: Lab, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "WALL_S", 2.0 if read is hangs else 60.0)
    monkeypatch.setattr(sandbox, "CPU_S", 0.5)
    found = lab.sandbox.run(Target("t", read), good, {"planted": pickle.dumps(Planted())})
    assert found is not None and BAD[read] in found.problem, found
