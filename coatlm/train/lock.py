"""One run at a time in a run directory, on one host or on many that share a file system.

RUN/lock.json says who holds the lock: host, pid, when the process started, a random token, and a
heartbeat, a number that a thread of the holder increases every BEAT_S seconds. No clock is compared
with another one, as those of hosts differ. A lock is stale

    if pids can be compared (same boot, same pid namespace): when its process has gone
    otherwise: when its heartbeat changes less than twice within WATCH_S seconds

To take a free lock, a process hard-links its own complete file to lock.json, which only one
process can do, also on NFS. A stale lock is not removed first, as a slow process could then remove
the lock of a faster one. To take over a stale lock, a process hard-links its own file to
lock.json.after-TOKEN, TOKEN being the stale holder's; only one process can succeed. It then renames
its file to lock.json. If it dies before the rename, the next process links to lock.json.after- plus
that process's token; the end of this chain holds the lock.

On a file system without hard links the file is created with O_EXCL instead, which only one process
can do as well. Others may read it before it is complete; they then watch it as one of an unknown
holder.

The heartbeat is written into the open file, not to its name: a holder that was suspended and has
lost its lock meanwhile writes to a file that nobody reads any more.
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
WATCH_S = 30.0  # ten heartbeats: one may be late where a file server or the process is busy
DYING_S = 5.0  # seconds that a process which was killed may take to go, after a restart say
POLL_S = 0.25
LONGEST = 4096  # bytes of a lock file that are read
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)  # exFAT, some of FUSE

logger = logging.getLogger("coatlm")


class LostLockError(CheckpointError):
    """lock.json no longer names this run: it was deleted, or another run took run.dir over."""

    def __init__(self) -> None:
        super().__init__(
            f"{LOCK} is gone or names another run: it was deleted, or this run was suspended or "
            "cut off so long that another run took run.dir over; this run ends without saving"
        )


@dataclass(frozen=True)
class Holder:
    """What a lock file says. `machine` is empty where the file could not be understood."""

    host: str
    machine: str  # boot id and pid namespace: equal ones have comparable pids
    pid: int
    started: str  # in ticks since the boot: tells a process from a later one with its pid
    since: str
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    heartbeat: int = 0

    def encode(self) -> bytes:
        """One line of JSON, of the same length for every heartbeat."""
        return (json.dumps(asdict(self) | {"heartbeat": f"{self.heartbeat:012d}"}) + "\n").encode()

    @classmethod
    def decode(cls, content: bytes) -> Holder:
        """What `encode` wrote, or for any other content a holder of which only a token is known."""
        errors = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)
        with contextlib.suppress(*errors):
            found = json.loads(content)
            holder = cls(**found | {"heartbeat": int(found["heartbeat"])})
            texts = (holder.host, holder.machine, holder.started, holder.since)
            if (
                re.fullmatch("[0-9a-f]{16}", holder.token)  # it becomes part of a file's name
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
    """Holds RUN/lock.json from its creation until `close`.

    Waits up to DYING_S for a holder on this host, up to WATCH_S for one elsewhere. Raises
    ConfigError where another run holds the lock, OSError where it cannot be written. `earlier` is
    the holder from whom a stale lock was taken over.
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
        """Whether the lock is ours. Reads the file only where the thread has not done so lately."""
        return self.confirm() if _now() - self._confirmed > 2 * BEAT_S else not self._lost

    def require(self) -> None:
        """Raise LostLockError unless the lock is ours, which the file is asked for."""
        if not self.confirm():
            raise LostLockError

    def confirm(self) -> bool:
        """Whether the lock is ours, from the file. While it cannot be read, nothing changes."""
        now = _now()
        with contextlib.suppress(OSError):
            found = _read(self._path)
            self._lost = self._lost or found is None or found.token != self._me.token
            self._confirmed = now
        return not self._lost

    def close(self) -> None:
        """Release the lock if it is ours."""
        self._closed.set()
        self._thread.join(WATCH_S)  # longer only where the file system hangs
        os.close(self._file)  # before the file is removed: NFS would rename it instead
        if self.confirm():
            self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        heartbeat = 0
        while not self._closed.wait(BEAT_S) and self.confirm():
            heartbeat += 1
            beat = Holder(**asdict(self._me) | {"heartbeat": heartbeat})
            with contextlib.suppress(OSError):  # of a file server that is away for a while
                os.pwrite(self._file, beat.encode(), 0)
                os.fsync(self._file)  # which also shows it to other hosts

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
        """The holder that lock.json names, its successor, and so on; the last one counts."""
        line: list[Holder] = []
        found = _read(self._path)
        while found is not None and found.token not in {holder.token for holder in line}:
            line.append(found)
            found = _read(self._after(found))
        return line

    def _after(self, holder: Holder) -> Path:
        return self._path.with_name(f"{LOCK}.after-{holder.token}")

    def _succeed(self, holder: Holder) -> bool:
        """Take the lock over from a holder that has gone; False where another one did."""
        if not self._link(self._after(holder)):
            return False
        line = self._line()
        if not line or line[-1].token != self._me.token:  # `holder` was succeeded and forgotten
            self._after(holder).unlink(missing_ok=True)
            return False
        os.replace(self._own, self._path)
        for former in line[:-1]:
            self._after(former).unlink(missing_ok=True)
        return True

    def _link(self, path: Path) -> bool:
        """Give our file the name `path` as well; False where that exists."""
        try:
            os.link(self._own, path)
        except FileExistsError:
            found = _read(path)  # NFS may repeat a request that had succeeded
            return found is not None and found.token == self._me.token
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            try:
                _create(path, self._me.encode())  # others may see it half written, and then wait
            except FileExistsError:
                return False
        return True

    def _is_stale(self, holder: Holder) -> bool:
        """Wait until we know. False: the lock has changed hands. Raises ConfigError if in use."""
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
            # one change may be an old value that this host's cache of the file system still had
            if (_now() > end and here) or len(beats) > 2:
                raise ConfigError(
                    f"run.dir={self._run_dir}: in use by {holder} (heartbeat {max(beats)}); choose "
                    "another run.dir or end that run"
                )
            if _now() > end:
                return True
            time.sleep(POLL_S)


def take_lock(run_dir: Path, stack: contextlib.ExitStack) -> RunLock:
    """The lock of a run directory that exists, released with `stack`. Raises ConfigError."""
    try:
        lock = RunLock(run_dir)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"run.dir={run_dir}: {LOCK}: {error.strerror}") from error
    stack.callback(lock.close)
    return lock


def _create(path: Path, content: bytes) -> None:
    """A new file that other hosts see whole once this returns. Raises FileExistsError."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> Holder | None:
    """The holder that a lock file names, None without a file."""
    try:
        with path.open("rb") as file:
            return Holder.decode(file.read(LONGEST))
    except FileNotFoundError:
        return None


def _now() -> float:
    """Seconds since the boot, also those in which the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _machine() -> str:
    """The boot and the pid namespace of this process; empty where the system does not tell."""
    boot = boot_id()
    try:
        return boot and f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state(pid: int) -> tuple[bool, str]:
    """Whether a process has ended, waited for or not, and when it started, in ticks since the boot.

    Raises OSError where /proc does not show it.
    """
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    threads, started = int(fields[16]), fields[18]
    return state in "ZX" and threads <= 1, started


def _is_running(pid: int, started: str) -> bool:
    """Whether there is a process with this pid that has started then."""
    try:
        return _state(pid) == (False, started)
    except OSError:  # no such process, or one of another user, which /proc may hide
        return bool(psutil.pid_exists(pid))
