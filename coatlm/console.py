"""What command-line tools print besides their results: one line for an error, progress, sizes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TextIO

from tqdm import tqdm

from coatlm.config.errors import one_line, shortened

DELAY = 2.0  # seconds before a progress bar appears: short work needs none
REDRAW = 0.1  # seconds between redraws of a bar
RARE = 60.0  # seconds between lines of progress where there is no terminal

Advance = Callable[[int], object]  # told how much has been done since the last call


class Parser(argparse.ArgumentParser):
    """Shows the module docstring as it is written, and reports a mistake in one line."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        """Exit with code 2; argparse itself would print its usage before the message."""
        self.exit(2, f"error: {one_line(message)} (--help lists the options)\n")


def fail(error: Exception, code: int = 2, *, label: str = "error") -> int:
    """Print `error` on stderr, one line per mistake, and return the exit code."""
    for line in shortened(explain(error)).splitlines():
        print(f"{label}: {line}", file=sys.stderr)
    return code


def explain(error: BaseException) -> str:
    """The message of an exception; that of an OSError is `path: reason`, without a number."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def in_bytes(count: float) -> str:
    """`1.234 GiB`."""
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
    """Yield `advance(n)` for work of `total` units; `show`: whether this process reports it.

    On a terminal a bar appears after `DELAY` and goes when the work is done. Elsewhere, as in the
    log of a batch system, there is a line every `RARE` seconds.
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
    """The progress of a process that does not report it."""


class _Lines:
    """Counts, and prints a line when `RARE` seconds have passed since the last one."""

    def __init__(self, what: str, total: int, stream: TextIO, clock: Callable[[], float]) -> None:
        self._what, self._total, self._stream, self._clock = what, total, stream, clock
        self._done, self._last = 0, clock()

    def __call__(self, amount: int) -> None:
        self._done += amount
        if self._clock() - self._last >= RARE:
            self._last = self._clock()
            share = self._done / max(self._total, 1)
            print(f"{self._what}: {share:.0%}", file=self._stream, flush=True)
