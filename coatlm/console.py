"""Errors, progress bars and byte counts on the console, for the command-line tools."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

import argcomplete
from tqdm import tqdm

from coatlm.config.errors import one_line, shortened
from coatlm.config.program import as_typed
from coatlm.config.urls import READ_HERE, WRITTEN_HERE, is_url, without_secrets

DELAY = 2.0  # seconds before a progress bar appears, so that short work shows none
REDRAW = 0.1  # seconds between redraws of a bar
RARE = 60.0  # seconds between progress lines without a terminal

Advance = Callable[[int], object]  # called with the units of work done since the last call


def ignore_library_warnings() -> None:
    """Ignore warnings that are of no use to users, for the rest of the process.

    megatron-core warns of deprecated values in its configuration; torch, when one process saves,
    and that a group's timeout replaces that of the options which only set its priority.
    """
    for module in (r"megatron\.", r"torch\.distributed\.checkpoint\."):
        warnings.filterwarnings("ignore", category=UserWarning, module=module)
    warnings.filterwarnings("ignore", message=r"backend_options\._timeout was specified")


class Parser(argparse.ArgumentParser):
    """An argument parser that prints its description verbatim and each error in one line.

    `command` is one of `coatlm`; its help and errors name what the user typed.
    """

    def __init__(self, description: str | None, command: str | None = None) -> None:
        super().__init__(
            prog=as_typed(f"coatlm {command}") if command else None,
            description=as_typed(description or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add an argument. An option of several values that is given again adds to them."""
        if names[0].startswith("-") and options.get("nargs") in ("+", "*"):
            options.setdefault("action", _Several)
        return super().add_argument(*names, **options)

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse the command line, or print what a shell asks for to complete it, and exit.

        Options may stand between the other arguments.
        """
        argcomplete.autocomplete(self)
        return self.parse_intermixed_args(arguments)

    def error(self, message: str) -> NoReturn:
        """Print `message` in one line, without argparse's usage text, and exit with code 2."""
        self.exit(2, f"error: {one_line(message)} ({self.prog} --help lists the options)\n")


class _Several(argparse.Action):
    """The values of all occurrences of an option, in place of its default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is self.default else [*before, *values])


def local_path(text: str, allowed: str = READ_HERE) -> Path:
    """The `type` of an argument that names what is read from this machine: a URL is an error.

    `~` is the home directory, also where a shell leaves it, as in `--out=~/x`. `//` at the
    beginning becomes `/`: a tokenizer's spec hf://PLACE would be read as a URL.
    """
    return Path(os.path.expanduser(re.sub("^//+", "/", local_text(text, allowed))))


def output_path(text: str) -> Path:
    """The `type` of an argument that names what is written on this machine."""
    if not text:
        raise argparse.ArgumentTypeError("'': a path has at least 1 character")
    path = local_path(text, WRITTEN_HERE)
    try:
        file = next((parent for parent in path.parents if parent.is_file()), None)
    except OSError as error:  # a name that is too long, or a directory that must not be searched
        raise argparse.ArgumentTypeError(explain(error)) from None
    if file is not None:
        raise argparse.ArgumentTypeError(f"{text}: {file} is a file, not a directory")
    return path


def local_text(text: str, allowed: str = READ_HERE) -> str:
    """The `type` of an argument that is a path or KIND:PATH of this machine, left as it is typed.

    A `Path` would make one slash of the two in a URL.
    """
    if is_url(text) or is_url(text.partition(":")[2]):
        raise argparse.ArgumentTypeError(f"{without_secrets(text)}: {allowed}")
    return text


def tokenizer_spec(text: str) -> str:
    """The `type` of a tokenizer, KIND or KIND:PATH, where `~` is the home directory."""
    kind, colon, path = local_text(text).partition(":")
    return f"{kind}{colon}{os.path.expanduser(path)}"


def fail(error: Exception, code: int = 2, *, label: str = "error") -> int:
    """Print `error` on stderr, one line per mistake, and return the exit code."""
    for line in shortened(explain(error)).splitlines():
        print(f"{label}: {line}", file=sys.stderr)
    return code


def explain(error: BaseException) -> str:
    """The message of an exception; for an OSError `path: reason`, without errno."""
    if isinstance(error, OSError) and error.strerror:
        name = None if error.filename is None else str(error.filename).replace("\n", "\\n")
        return error.strerror if name is None else f"{name}: {error.strerror}"
    return str(error) or type(error).__name__


def duration(seconds: float) -> str:
    """Seconds as text in one or two units, such as `2 h 5 min`."""
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if seconds >= size:
            parts = round(seconds / part)
            return f"{parts * part // size} {unit} {parts % (size // part)} {smaller}"
    return f"{round(seconds / 60)} min" if seconds >= 90 else f"{round(seconds)} s"


def in_bytes(count: float) -> str:
    """A byte count for people: `1.234 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


@contextmanager
def progress(
    what: str,
    total: int,
    *,
    unit: str = "B",
    show: bool = True,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:
    """Show the progress of `total` units of work; yields `advance(n)`, to call after each n units.

    On a terminal, a bar appears after `DELAY` seconds and disappears at the end. Elsewhere, for
    example in the log of a batch system, a line is printed every `RARE` seconds. `show=False`
    prints nothing.
    """
    stream = stream or sys.stderr
    if not show or not stream.isatty():
        yield _Lines(what, total, stream, clock) if show else _silent
        return
    scale = 1024 if unit == "B" else 1000
    with tqdm(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=True,
        unit_divisor=scale,
        file=stream,
        leave=False,
        delay=DELAY,
        mininterval=REDRAW,
        miniters=1,
    ) as bar:
        yield bar.update


def _silent(amount: int) -> None:
    """Ignore progress, in a process that does not show it."""


class _Lines:
    """Prints the share of work done, at most once every `RARE` seconds."""

    def __init__(self, what: str, total: int, stream: TextIO, clock: Callable[[], float]) -> None:
        self._what, self._total, self._stream, self._clock = what, total, stream, clock
        self._done, self._last = 0, clock()

    def __call__(self, amount: int) -> None:
        self._done += amount
        if self._clock() - self._last >= RARE:
            self._last = self._clock()
            share = self._done / max(self._total, 1)
            print(f"{self._what}: {share:.0%}", file=self._stream, flush=True)
