"""Report the errors of a run: each one once, with its ranks and hosts.

    error: ranks 1, 3 (hostB): data.tokenizer=hf:tok.json: no such file    collected by rank 0
    error: [rank 3, hostB] the disk of run.dir is full                      printed by one rank

The exit code depends on the type of the error. Under torchrun the same line is written to the
error file of this process, which torchrun shows at the end of its own report.
"""

from __future__ import annotations

import errno
import hashlib
import json
import platform
import re
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from coatlm.config import ConfigError
from coatlm.config.errors import shortened
from coatlm.data.checksums import CacheFullError, DatasetError
from coatlm.remote import RemoteError
from coatlm.train.faults import ExitCode, NonFiniteError
from coatlm.train.manifest import CheckpointError, LostPeerError

FOREIGN = 200  # torch explains at length what a damaged file may be
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # full, at a limit, read-only
UNEXPECTED = 1  # Python's code for an uncaught exception; launchers restart after it
TIMED_OUT = re.compile(r"Timed out waiting (\d+)ms")  # of gloo
PEER_GRACE_S = 2.0  # seconds to wait for the rank that failed to print the reason first
MAX_LINES = 10  # listed errors
MAX_HOSTS = 4  # named hosts per error


class AgreedError(Exception):
    """At least one rank failed. Raised on all ranks, after rank 0 has printed the reason."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


# errors whose messages need no type name in front
OURS = (
    *(ConfigError, DatasetError, CacheFullError, RemoteError, CheckpointError, NonFiniteError),
    AgreedError,
)


@dataclass(frozen=True)
class Failure:
    """The reason why a rank failed, and its exit code."""

    message: str
    code: int

    @classmethod
    def of(cls, error: Exception) -> Failure:
        text = str(error) if isinstance(error, ConfigError) else error_line(error)
        return cls(text, exit_code(error))


def exit_code(error: BaseException) -> int:
    """The exit code for an error. A ValueError outside set-up is a bug, so it is unexpected."""
    if isinstance(error, AgreedError):
        return error.code
    if isinstance(error, ConfigError | DatasetError):
        return ExitCode.USER_ERROR
    if isinstance(error, NonFiniteError):
        return ExitCode.NONFINITE
    if isinstance(error, LostPeerError):
        return UNEXPECTED
    if isinstance(error, CheckpointError | CacheFullError | RemoteError):
        return ExitCode.CHECKPOINT
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        return ExitCode.CHECKPOINT
    return UNEXPECTED


def error_line(error: BaseException) -> str:
    """The first line of an exception's message. If its type is not in OURS, the type comes first
    and the line ends after FOREIGN characters.
    """
    text = next(iter(str(error).splitlines()), "")
    if isinstance(error, OURS):
        return text
    if len(text) > FOREIGN:
        text = f"{text[:FOREIGN]} ..."
    return f"{type(error).__name__}: {text}"


def lost_peer(error: BaseException) -> bool:
    """Whether an error only means that another process has closed its connections, or is late."""
    if isinstance(error, LostPeerError | dist.DistError):
        return True
    return type(error) is RuntimeError and "gloo/transport" in str(error)


def late_peer(error: BaseException) -> str | None:
    """What to say if an error means that a rank did not join a collective in time; else None."""
    waited = TIMED_OUT.search(str(error))
    if waited is None:
        return None
    return (
        f"another rank did not join a collective within {int(waited[1]) / 60_000:g} minutes; with "
        "log.hang_timeout=SECONDS each rank writes the stacks of its threads"
    )


def number_list(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: [0, 1, 2, 5] -> `0-2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs]
    return ", ".join(parts)


def plural(ranks: Sequence[int]) -> str:
    """Format ranks: `rank 3` or `ranks 3, 5`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {number_list(ranks)}"


def merged(failures: Mapping[int, str], hosts: Sequence[str | None]) -> str:
    """Merge equal messages into one line each, with their ranks and hosts.

    `hosts` has the host of every rank, None if it is unknown.
    """
    alike: dict[str, list[int]] = {}
    for rank, message in sorted(failures.items()):
        alike.setdefault(message, []).append(rank)
    said = []
    for message, ranks in alike.items():
        where = "" if len(ranks) == len(hosts) else f"{_where(ranks, hosts)}: "
        said += [where + line for line in message.splitlines()]
    if len(said) > MAX_LINES:
        said[MAX_LINES:] = [f"and {len(said) - MAX_LINES} more lines"]
    return "\n".join(said)


def print_error(message: str) -> None:
    """Print every line of an error message to stderr, after `error: `."""
    for line in shortened(message).splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)


def report_error(
    error: Exception, *, rank: int = 0, world_size: int = 1, file: Path | None = None
) -> int:
    """Print why this process ends, unless another rank has printed it. Returns the exit code.

    An error that is neither the user's mistake nor a lost peer is printed with its traceback.
    `file` is where torchrun expects the error of a worker.
    """
    if world_size > 1 and lost_peer(error):
        time.sleep(PEER_GRACE_S)
    code = exit_code(error)
    line = _line(error, f"[rank {rank}, {platform.node()}] " if world_size > 1 else "")
    if file is not None:
        _write_error_file(file, line)
    if isinstance(error, AgreedError):
        return code
    if code == UNEXPECTED and not lost_peer(error):
        _print_traceback(error, f"[rank {rank}, {platform.node()}] " if world_size > 1 else "")
    elif _first_to_say("lost" if lost_peer(error) else line):
        print_error(line)
    return code


def print_traceback(error: Exception, rank: int) -> None:
    """Print the traceback of an unexpected error, each line prefixed with rank and host."""
    _print_traceback(error, f"[rank {rank}, {platform.node()}] ")


def _line(error: Exception, prefix: str) -> str:
    """The message of an error; without rank and host where every rank has the same error."""
    if isinstance(error, LostPeerError) or not lost_peer(error):
        text = str(error) if isinstance(error, ConfigError) else error_line(error)
    else:
        closed = "a connection to another rank was closed; that rank's own output says why it ended"
        text = late_peer(error) or closed
    common = isinstance(error, AgreedError | NonFiniteError) or type(error) is CheckpointError
    return text if common else "\n".join(prefix + line for line in text.splitlines())


def _where(ranks: Sequence[int], hosts: Sequence[str | None]) -> str:
    """Format ranks by host: `ranks 1, 3 (hostB), rank 5 (hostC)`."""
    by_host: dict[str | None, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    if len(by_host) > MAX_HOSTS:
        first = hosts[ranks[0]]
        return f"{len(ranks)} ranks on {len(by_host)} hosts, first rank {ranks[0]} ({first})"
    return ", ".join(
        plural(members) + (f" ({host})" if host else "") for host, members in by_host.items()
    )


def _print_traceback(error: Exception, prefix: str) -> None:
    text = "".join(traceback.format_exception(error))
    print("".join(f"{prefix}{line}\n" for line in text.splitlines()), end="", file=sys.stderr)
    sys.stderr.flush()


def _first_to_say(what: str) -> bool:
    """Whether no other rank has printed this; True if the store cannot be asked."""
    if dist.is_initialized():
        key = f"said/{hashlib.sha256(what.encode()).hexdigest()}"
        with suppress(RuntimeError):  # the store ends with the process that serves it
            return dist.distributed_c10d._get_default_store().add(key, 1) == 1
    return True


def _write_error_file(path: Path, message: str) -> None:
    """Write the error file in the format of torch.distributed.elastic's ErrorHandler."""
    text = "\n".join(f"error: {line}" for line in message.splitlines())
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with suppress(OSError):  # the line itself is on stderr
        path.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
