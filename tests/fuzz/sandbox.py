"""Run a reader of files on one input in a process of its own, and judge how that ended.

The process changes to the input's directory and calls the reader of a `Target`. It has bounded
memory and time, its output goes to a file, and one that has crashed or hangs is replaced, so that
an input cannot harm those after it. A reader ends well if it works, or if it refuses the input by
an exception or an exit code that is documented, in lines that a terminal can show.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.distributed import ROOT, processes

LINE = 400  # characters of a message's line at most
MEMORY = 2 << 30  # bytes of address space above what the process starts with
CPU_S = 10.0  # processor time of an input: a busy machine does not count
WALL_S = 90.0  # seconds after which a process that neither works nor ends is taken for hung
LIVES = 300  # inputs that a process takes before another one replaces it
REFUSALS = ("ConfigError", "CheckpointError", "DatasetError", "LostPeerError", "ValueError")
NO_MEMORY = re.compile(r"can't allocate memory|Unable to allocate|MemoryError|bad_alloc")
CANARY = "executed"  # what planted code would create in the input's directory

Files = Mapping[str, bytes | None]  # by path; None: the file is missing


@dataclass(frozen=True)
class Target:
    """Something that reads what others wrote.

    `read` is called in a directory with the good files, some of which were replaced, and returns
    an exit code or None. Files that begin with one of `writes` may change; all others must not.
    """

    name: str
    read: Callable[[], int | None]
    codes: tuple[int, ...] = (0, 2)
    writes: tuple[str, ...] = ("out",)
    fresh: bool = False  # each input needs a process that has read none before


@dataclass
class Ending:
    """How a reader ended."""

    how: str  # returned | raised | died | hung
    code: int | None = 0
    error: str = ""  # the class of the exception
    message: str = ""
    place: str = ""  # the innermost frame of this repository, `file:function`
    trace: str = ""
    cpu_s: float = 0.0
    out: str = ""
    err: str = ""


@dataclass(frozen=True)
class Finding:
    """A bad ending; those with the same signature are taken for the same fault."""

    target: str
    problem: str
    signature: str
    details: str = field(compare=False, default="")

    def __str__(self) -> str:
        return f"{self.target}: {self.problem}\n{self.details}"


class Sandbox:
    """Runs targets in `directory`/case, one input after another."""

    def __init__(self, directory: Path) -> None:
        self.case, self.log = directory / "case", directory / "log"
        self.log.mkdir(parents=True, exist_ok=True)
        self.last = Ending("returned")  # of the latest input
        self._process: Any = None
        self._lives = 0

    def run(self, target: Target, good: Path, files: Files) -> Finding | None:
        """What is wrong with how `target` takes the good files with `files` in their place."""
        shutil.rmtree(self.case, ignore_errors=True)
        shutil.copytree(good, self.case, symlinks=True)
        for name, content in files.items():
            path = self.case / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)
        before = contents(self.case, target.writes)
        self.last = ending = self._end(target)
        after = contents(self.case, target.writes)
        changed = sorted(n for n in before | after if before.get(n) != after.get(n))
        return judge(target, ending, changed)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = None

    def _end(self, target: Target) -> Ending:
        if target.fresh or self._lives >= LIVES:
            self.close()
        if self._process is None:
            self._start()
        self._lives += 1
        try:
            self._pipe.send((target.read, str(self.case)))
            if not self._pipe.poll(WALL_S):
                os.kill(self._process.pid, signal.SIGABRT)  # leaves stacks in the log
                self._process.join(10)
                stacks = self._text("err")
                self.close()
                return Ending("hung", None, trace=stacks[-3000:])
            ending: Ending = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(10)
            code = self._process.exitcode
            self.close()
            return Ending("died", code, trace=self._text("err")[-3000:])
        ending.out, ending.err = self._text("out"), self._text("err")
        if target.fresh:
            self.close()
        return ending

    def _start(self) -> None:
        for name in ("out", "err"):
            (self.log / name).write_bytes(b"")
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(
            target=serve, args=(theirs, str(self.log)), daemon=True, name="fuzz"
        )
        self._process.start()
        theirs.close()
        self._lives = 0

    def _text(self, name: str) -> str:
        return (self.log / name).read_bytes().decode(errors="backslashreplace")


def contents(directory: Path, without: tuple[str, ...]) -> dict[str, str]:
    """A digest of each file below `directory`, and the names of its directories."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if not name.startswith(without):
            content = path.read_bytes() if path.is_file() else b""
            found[name] = f"{path.is_file()} {hashlib.sha256(content).hexdigest()}"
    return found


def judge(target: Target, ending: Ending, changed: list[str]) -> Finding | None:
    """The first thing that is wrong with an ending."""
    problem = _problem(target, ending, changed)
    if problem is None:
        return None
    details = "\n".join(
        f"  {name}: {text[-2500:]}"
        for name, text in (
            ("message", ending.message),
            ("trace", ending.trace),
            ("stdout", ending.out),
            ("stderr", ending.err),
        )
        if text
    )
    where = ending.place or f"{ending.how} {ending.code}"
    kind = ending.error if ending.error not in REFUSALS else ""
    kind = kind or re.sub(r"[0-9]+|'[^']*'|\"[^\"]*\"", "#", problem)[:45]
    return Finding(target.name, problem, f"{target.name}: {where}: {kind}", details)


def _problem(target: Target, ending: Ending, changed: list[str]) -> str | None:
    said = ending.err
    if CANARY in changed:
        return "code from a file was executed"
    if ending.how in ("died", "hung"):
        return f"the process {ending.how}" + (f" with {ending.code}" if ending.code else "")
    if NO_MEMORY.search(f"{said} {ending.error} {ending.message}"):
        return f"more than {MEMORY >> 30} GiB of memory were asked for"
    if ending.how == "raised" and ending.error not in REFUSALS:
        return f"{ending.error} in {ending.place}: {ending.message[:200]}"
    if ending.how == "returned" and ending.code not in (None, *target.codes):
        return f"exit code {ending.code}, not one of {target.codes}"
    if "Traceback (most recent call last)" in ending.out + ending.err:
        return "a traceback was printed"
    refused = ending.how == "raised" or ending.code not in (0, None)
    if refused and not (said + ending.out).strip():
        return "it was refused without a word"
    if "weights_only" in said and "checkpoint.weights_only" not in said:
        return "torch's advice about weights_only was printed"
    for line in said.splitlines():
        if len(line) > LINE:
            return f"a line of {len(line)} characters: {line[:150]}..."
    for character in said + ending.out:
        if character not in "\n\t\r" and unicodedata.category(character) in ("Cc", "Cs"):
            return f"the control character {character!r} was printed"
    if ending.cpu_s > CPU_S:
        return f"{ending.cpu_s:.0f} s of processor time"
    if changed:
        return f"changed or left behind: {', '.join(changed[:5])}"
    return None


def serve(pipe: Any, log: str) -> None:
    """What the process does: one request after another, until the pipe ends."""
    sys.path[:0] = [str(ROOT)]
    from coatlm.commands import train as pretrain  # noqa: F401 so that all inputs find it imported

    warnings.simplefilter("ignore")
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(Path(log) / name, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
    faulthandler.enable(2)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(EOFError):
        while True:
            read, directory = pipe.recv()
            os.chdir(directory)
            for descriptor in (1, 2):
                os.ftruncate(descriptor, 0)
            begin = time.process_time()
            ending = attempt(read)
            ending.cpu_s = time.process_time() - begin
            os.chdir("/")  # the directory will be replaced, and imports need one
            sys.stdout.flush()
            sys.stderr.flush()
            os.chdir(ROOT)  # the input's directory is removed before the next one is received
            pipe.send(ending)


def attempt(read: Callable[[], int | None]) -> Ending:
    """Call a reader."""
    try:
        return Ending("returned", read())
    except SystemExit as error:
        return Ending("returned", error.code if isinstance(error.code, int) else 1)
    except BaseException as error:  # of any kind: Rust's panics are no Exceptions
        frames = traceback.extract_tb(error.__traceback__)
        if type(error).__name__ in REFUSALS:
            tell(error)
        ours = [f for f in frames if f.filename.startswith((f"{ROOT}/coatlm", f"{ROOT}/tools"))]
        last = ours[-1] if ours else frames[-1]
        return Ending(
            "raised",
            None,
            type(error).__name__,
            str(error)[:20000],
            f"{Path(last.filename).name}:{last.name}",
            "".join(traceback.format_list(frames[-6:]))[-3000:],
        )


def tell(error: BaseException) -> None:
    """Print a refusal as the tools do."""
    from coatlm.console import fail

    assert isinstance(error, Exception)
    fail(error)
