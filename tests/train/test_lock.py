"""The lock of a run directory: who gets it, when it is stale, and what its loss is noticed by."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from coatlm.config import ConfigError
from coatlm.train import lock
from coatlm.train.lock import LOCK, Holder, RunLock
from tests.distributed import processes

ROUNDS, TAKERS = 60, 6


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    monkeypatch.setattr(lock, "WATCH_S", 0.4)
    monkeypatch.setattr(lock, "DYING_S", 0.0)
    monkeypatch.setattr(lock, "POLL_S", 0.01)


def content(directory: Path) -> Holder:
    return Holder.decode((directory / LOCK).read_bytes())


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope="module")
def ended() -> Iterator[Holder]:
    """The holder of a process on this host that was killed."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    _, started = lock._state(process.pid)
    process.kill()
    process.wait()
    yield Holder("here", lock._machine(), process.pid, started, "yesterday")


def leave(directory: Path, holder: Holder) -> None:
    (directory / LOCK).write_bytes(holder.encode())


def test_a_lock_that_is_held_is_refused_with_the_name_of_its_holder(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    with pytest.raises(ConfigError, match=rf"run\.dir={tmp_path}: in use by pid {os.getpid()} on "):
        RunLock(tmp_path)
    held.close()
    assert files(tmp_path) == []
    RunLock(tmp_path).close()


def test_a_lock_of_a_process_that_was_killed_is_taken_over_at_once(
    tmp_path: Path, ended: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "WATCH_S", 600.0)
    leave(tmp_path, ended)
    taken = RunLock(tmp_path)
    assert taken.earlier == ended and taken.held()
    assert files(tmp_path) == [LOCK] and content(tmp_path).pid == os.getpid()
    taken.close()


def test_a_pid_that_another_process_has_by_now_does_not_hold_a_lock(tmp_path: Path) -> None:
    leave(tmp_path, Holder("here", lock._machine(), os.getpid(), "1", "yesterday"))
    RunLock(tmp_path).close()


def test_a_zombie_does_not_hold_a_lock(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    _, started = lock._state(process.pid)
    leave(tmp_path, Holder("here", lock._machine(), process.pid, started, "yesterday"))
    with pytest.raises(ConfigError, match="in use by"):
        RunLock(tmp_path)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # nobody has waited for it yet
    RunLock(tmp_path).close()
    process.wait()


def test_a_process_that_is_still_dying_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "DYING_S", 60.0)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    _, started = lock._state(process.pid)
    leave(tmp_path, Holder("here", lock._machine(), process.pid, started, "yesterday"))
    threading.Timer(0.3, process.kill).start()
    RunLock(tmp_path).close()
    process.wait()


def test_a_lock_from_elsewhere_is_stale_when_its_heartbeat_stands_still(
    tmp_path: Path, ended: Holder
) -> None:
    """Its pid means nothing here: that it is one of ours that has ended must not count."""
    elsewhere = replace(ended, machine="another boot pid:[1]", host="there")
    leave(tmp_path, elsewhere)
    begin = time.monotonic()
    taken = RunLock(tmp_path)
    assert time.monotonic() - begin > 0.4 and taken.earlier == elsewhere
    taken.close()


def test_a_lock_from_elsewhere_with_a_heartbeat_is_refused(
    tmp_path: Path, ended: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "WATCH_S", 600.0)
    with monkeypatch.context() as other:
        other.setattr(lock, "_machine", lambda: "another boot pid:[1]")
        held = RunLock(tmp_path)
    with pytest.raises(ConfigError, match="in use by pid"):
        RunLock(tmp_path)
    assert held.held()
    held.close()


def test_clocks_of_other_hosts_do_not_matter(tmp_path: Path, ended: Holder) -> None:
    leave(tmp_path, replace(ended, machine="another boot pid:[1]", since="2999-01-01"))
    os.utime(tmp_path / LOCK, (4e9, 4e9))
    RunLock(tmp_path).close()


@pytest.mark.parametrize(
    "damaged",
    [b"", b"[1, 2", b"[" * 4000, b"\xff\0", b'{"token": "../../x", "heartbeat": 1e999}', b"{}"],
)
def test_a_damaged_lock_is_taken_over_after_the_watch(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / LOCK).write_bytes(damaged)
    taken = RunLock(tmp_path)
    assert files(tmp_path) == [LOCK]
    taken.close()


@pytest.mark.parametrize("key", [field for field in asdict(Holder("", "", 1, "", ""))])
@pytest.mark.parametrize("value", [None, -1, 2**80, 1.5, [], {}, "a\nb", "../x" * 900])
def test_no_content_of_a_field_breaks_the_reader(key: str, value: object) -> None:
    fields = json.loads(Holder("h", "m", 1, "1", "s").encode())
    holder = Holder.decode(json.dumps(fields | {key: value}).encode())
    assert len(str(holder)) < 200 and "\n" not in str(holder)


def race(directory: Path) -> list[RunLock]:
    """The locks of all that got one out of TAKERS threads that begin at the same time."""
    begin, found = threading.Barrier(TAKERS), []

    def take() -> None:
        begin.wait()
        with suppress(ConfigError):
            found.append(RunLock(directory))

    threads = [threading.Thread(target=take) for _ in range(TAKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_of_several_that_take_a_stale_lock_exactly_one_gets_it(
    tmp_path: Path, ended: Holder, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:  # as on exFAT

        def refuse(*_: object) -> None:
            raise PermissionError(1, "no hard links here")

        monkeypatch.setattr(os, "link", refuse)
    for number in range(ROUNDS):
        directory = tmp_path / str(number)
        directory.mkdir()
        if number % 3:
            leave(directory, ended)
        if number % 3 == 2:  # a successor that died before it had taken over
            heir = replace(ended, token=f"{number:016x}")
            (directory / f"{LOCK}.after-{ended.token}").write_bytes(heir.encode())
        (winner,) = race(directory)
        assert winner.confirm()
        winner.close()
        assert files(directory) == []


def taken_by_a_process(directory: str, begin: float, log: str) -> None:
    lock.DYING_S = 0.0
    while time.monotonic() < begin:
        pass
    try:
        RunLock(Path(directory))
    except ConfigError:
        os._exit(2)
    os.kill(os.getpid(), signal.SIGKILL)


def test_processes_that_die_with_the_lock_hand_it_on_one_by_one(tmp_path: Path) -> None:
    """Each round starts two at the same time: whoever gets the lock dies of it."""
    for _ in range(2):
        begin = time.monotonic() + 0.2
        arguments = (str(tmp_path), begin, "")
        takers = [processes.Process(target=taken_by_a_process, args=arguments) for _ in range(2)]
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join()
        codes = {taker.exitcode for taker in takers}
        assert codes <= {2, -signal.SIGKILL} and -signal.SIGKILL in codes
    last = RunLock(tmp_path)
    assert last.earlier is not None
    last.close()
    assert [name for name in files(tmp_path) if name == LOCK] == []


@pytest.mark.parametrize("how", ["taken", "removed"])
def test_a_holder_notices_that_its_lock_is_gone(tmp_path: Path, ended: Holder, how: str) -> None:
    held = RunLock(tmp_path)
    if how == "taken":
        (tmp_path / "new").write_bytes(ended.encode())
        os.replace(tmp_path / "new", tmp_path / LOCK)
    else:
        (tmp_path / LOCK).unlink()
    assert not held.confirm() and not held.held()
    held.close()
    if how == "taken":  # neither a late heartbeat nor the release touches the other's lock
        assert content(tmp_path) == ended


def test_the_heartbeat_moves_while_the_lock_is_held(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    end = time.monotonic() + 60
    while content(tmp_path).heartbeat < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    held.close()


def test_held_asks_the_file_where_the_thread_has_not_lately(
    tmp_path: Path, ended: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a long suspension the first question already gets the right answer."""
    monkeypatch.setattr(lock, "BEAT_S", 3600.0)
    held = RunLock(tmp_path)
    (tmp_path / "new").write_bytes(ended.encode())
    os.replace(tmp_path / "new", tmp_path / LOCK)
    assert held.held()  # within two heartbeats of the last look
    now = lock._now()
    monkeypatch.setattr(lock, "_now", lambda: now + 3 * 3600)
    assert not held.held()
    held.close()
