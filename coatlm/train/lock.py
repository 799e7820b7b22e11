"""A lock that admits one run at a time to a run directory, also across hosts that share it.

RUN/lock.json names the holder of the lock: host, pid, start time of the process, a random token,
and a heartbeat, a counter that a thread of the holder increments every BEAT_S seconds. Clocks of
different hosts are never compared. A lock is stale

    if pids can be compared (same boot and pid namespace): once its process has exited
    otherwise: if its heartbeat changes less than twice within WATCH_S seconds

To take a free lock, a process hard-links its own complete file to lock.json. Only one process can
succeed, also on NFS. A stale lock is not removed first, because a slow process could then remove
the new lock of a faster one. To take over a stale lock, a process hard-links its own file to
lock.json.after-TOKEN, TOKEN being the stale holder's; only one process can succeed. It then renames
its file to lock.json. If it dies before the rename, the next process links to lock.json.after- plus
that process's token; the last process of this chain holds the lock.

On a file system without hard links the file is created with O_EXCL instead; again only one process
can succeed. Others may read the file before it is complete; they then treat its holder as unknown
and watch its heartbeat.

The heartbeat is written to the open file, not to its path, so a holder that was suspended and lost
its lock writes to an unlinked file that nobody reads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import threading
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil

from coatlm.config import ConfigError
from coatlm.platform import boot_id
from coatlm.train.manifest import CheckpointError

LOCK = "lock.json"
BEAT_S = 3.0  # seconds between heartbeats
WATCH_S = 30.0  # seconds, ten heartbeats; some may be late on a busy file server
DYING_S = 5.0  # seconds that a killed process may take to exit, for example before a restart
POLL_S = 0.25
LONGEST = 4096  # bytes read of a lock file
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)  # exFAT, some FUSE

logger = logging.getLogger("coatlm")


class LostLockError(CheckpointError):
    """lock.json no longer names this run: it was deleted, or another run took run.dir over."""

    def __init__(self) -> None:
        super().__init__(
            f"{LOCK} is missing or names another run: it was deleted, or this run was suspended or "
            "cut off so long that another run took run.dir over; this run ends without saving"
        )


@dataclass(frozen=True)
class Holder:
    """The content of a lock file. `machine` is empty where the file could not be parsed."""

    host: str
    machine: str  # boot id and pid namespace; pids are comparable where they are equal
    pid: int
    started: str  # ticks since boot; distinguishes the process from a later one with its pid
    since: str
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    heartbeat: int = 0

    def encode(self) -> bytes:
        """One line of JSON, whose length does not depend on the heartbeat."""
        return (json.dumps(asdict(self) | {"heartbeat": f"{self.heartbeat:012d}"}) + "\n").encode()

    @classmethod
    def decode(cls, content: bytes) -> Holder:
        """Parse what `encode` wrote; any other content gives an unknown holder with a token."""
        errors = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)
        with contextlib.suppress(*errors):
            found = json.loads(content)
            holder = cls(**found | {"heartbeat": int(found["heartbeat"])})
            texts = (holder.host, holder.machine, holder.started, holder.since)
            if (
                re.fullmatch("[0-9a-f]{16}", holder.token)  # the token becomes part of a file name
                and type(holder.pid) is int
                and 0 < holder.pid < 2**31
                and all(text.isprintable() for text in texts)
            ):
                return holder
        token = hashlib.sha256(content).hexdigest()[:16]
        return cls("an unknown host", "", 0, "", "an unknown time", token)

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host[:100]} since {self.since[:40]}"


class RunLock:
    """Holds RUN/lock.json from construction until `close`.

    The constructor waits up to DYING_S seconds for a holder on this host to exit, and watches one
    elsewhere for up to WATCH_S seconds. It raises ConfigError if another run holds the lock, and
    OSError if the lock cannot be written. `earlier` is the holder of a stale lock taken over.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._path = run_dir, run_dir / LOCK
        self._me = Holder(
            host=platform.node(),
            machine=_machine(),
            pid=os.getpid(),
            started=_state(os.getpid())[1],
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self.earlier: Holder | None = None
        self._own = self._path.with_name(f"{LOCK}.{self._me.token}")
        try:
            _create(self._own, self._me.encode())
            self._acquire()
        finally:
            self._own.unlink(missing_ok=True)
        self._lost = False
        self._file = os.open(self._path, os.O_RDWR)
        self._confirmed = _now()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._thread.start()

    def held(self) -> bool:
        """Whether this process holds the lock. Reads the file unless the thread did so recently."""
        return self.confirm() if _now() - self._confirmed > 2 * BEAT_S else not self._lost

    def require(self) -> None:
        """Read the lock file and raise LostLockError unless this process holds the lock."""
        if not self.confirm():
            raise LostLockError

    def confirm(self) -> bool:
        """Read the lock file; whether this process holds the lock, or last did if unreadable."""
        now = _now()
        with contextlib.suppress(OSError):
            found = _read(self._path)
            self._lost = self._lost or found is None or found.token != self._me.token
            self._confirmed = now
        return not self._lost

    def close(self) -> None:
        """Release the lock if this process holds it."""
        self._closed.set()
        self._thread.join(WATCH_S)  # times out only where the file system hangs
        os.close(self._file)  # before its removal, since NFS renames an open file instead
        if self.confirm():
            self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        heartbeat = 0
        while not self._closed.wait(BEAT_S) and self.confirm():
            heartbeat += 1
            beat = Holder(**asdict(self._me) | {"heartbeat": heartbeat})
            with contextlib.suppress(OSError):  # a file server may be unreachable for a while
                os.pwrite(self._file, beat.encode(), 0)
                os.fsync(self._file)  # also makes it visible to other hosts

    def _acquire(self) -> None:
        while True:
            line = self._line()
            if not line:
                if self._link(self._path):
                    return
            elif self._is_stale(line[-1]) and self._succeed(line[-1]):
                self.earlier = line[-1]
                return

    def _line(self) -> list[Holder]:
        """The holder in lock.json, its successor, and so on; the last one holds the lock."""
        line: list[Holder] = []
        found = _read(self._path)
        while found is not None and found.token not in {holder.token for holder in line}:
            line.append(found)
            found = _read(self._after(found))
        return line

    def _after(self, holder: Holder) -> Path:
        return self._path.with_name(f"{LOCK}.after-{holder.token}")

    def _succeed(self, holder: Holder) -> bool:
        """Take the lock over from a holder that has exited; False if another process did."""
        if not self._link(self._after(holder)):
            return False
        line = self._line()
        if not line or line[-1].token != self._me.token:  # a successor has released the lock again
            self._after(holder).unlink(missing_ok=True)
            return False
        os.replace(self._own, self._path)
        for former in line[:-1]:
            self._after(former).unlink(missing_ok=True)
        return True

    def _link(self, path: Path) -> bool:
        """Hard-link this process's file to `path`; False if `path` exists."""
        try:
            os.link(self._own, path)
        except FileExistsError:
            found = _read(path)  # NFS may repeat a request that had succeeded
            return found is not None and found.token == self._me.token
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            try:
                _create(path, self._me.encode())  # others that read it half written wait
            except FileExistsError:
                return False
        return True

    def _is_stale(self, holder: Holder) -> bool:
        """Wait until it is known whether the lock is stale; False if its holder has changed.

        Raises ConfigError if the lock is in use.
        """
        here = holder.machine == self._me.machine != ""
        end = _now() + (DYING_S if here else WATCH_S)
        beats = {holder.heartbeat}
        if not here:
            logger.warning(
                "%s: locked by %s; watching its heartbeat for %g s", self._path, holder, WATCH_S
            )
        while True:
            if here and not _is_running(holder.pid, holder.started):
                return True
            line = self._line()
            if not line or line[-1].token != holder.token:
                return False
            beats.add(line[-1].heartbeat)
            # a single change may come from an outdated file-system cache of this host
            if (_now() > end and here) or len(beats) > 2:
                raise ConfigError(
                    f"run.dir={self._run_dir}: in use by {holder} (heartbeat {max(beats)}); choose "
                    "another run.dir or end that run"
                )
            if _now() > end:
                return True
            time.sleep(POLL_S)


def take_lock(run_dir: Path, stack: contextlib.ExitStack) -> RunLock:
    """Lock an existing run directory until `stack` closes. Raises ConfigError."""
    try:
        lock = RunLock(run_dir)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"run.dir={run_dir}: {LOCK}: {error.strerror}") from error
    stack.callback(lock.close)
    return lock


def _create(path: Path, content: bytes) -> None:
    """Write a new file and fsync it, so that other hosts see it. Raises FileExistsError."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> Holder | None:
    """The holder in a lock file; None if there is no file."""
    try:
        with path.open("rb") as file:
            return Holder.decode(file.read(LONGEST))
    except FileNotFoundError:
        return None


def _now() -> float:
    """Seconds since boot, including those in which the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _machine() -> str:
    """The boot id and pid namespace of this process; empty where /proc does not show them."""
    boot = boot_id()
    try:
        return boot and f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state(pid: int) -> tuple[bool, str]:
    """Whether a process has exited (also as a zombie), and its start time in ticks since boot.

    Raises OSError where /proc does not show it.
    """
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    threads, started = int(fields[16]), fields[18]
    return state in "ZX" and threads <= 1, started


def _is_running(pid: int, started: str) -> bool:
    """Whether the process with this pid and this start time is running."""
    try:
        return _state(pid) == (False, started)
    except OSError:  # no such process, or one of another user, which /proc may hide
        return bool(psutil.pid_exists(pid))
