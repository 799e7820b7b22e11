"""How a command meets its terminal: signals end it with one line, and a closed stdout is quiet.

A script imports this module first, listens while the rest is imported, and ends in `run(main)`:

    while importing      SIGINT, SIGTERM, SIGHUP   one line, exit code 128 + signal, at once
    else in main()       the same signals          one line, clean-up, exit code 128 + signal
    stdout is closed     (`| head`)                no line, exit code 141 = 128 + SIGPIPE

The line is written by a thread, because Python runs signal handlers only between bytecodes of the
main thread, which may wait in C for minutes: for other ranks, for a collective, for a device. The
same thread ends a process whose clean-up does not end.

SIGHUP stays ignored where it is ignored on entry: that is what nohup asks for.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, TextIO

STDERR = 2  # the descriptor: it works in a thread and without sys.stderr
CLOSED_STDOUT = 128 + signal.SIGPIPE
CLEAN_UP_S = 5.0  # seconds that an interrupted command has to release what it holds
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GONE = (errno.EPIPE, errno.EIO)  # writing to a pipe without reader, to a terminal that was closed


class Interrupted(KeyboardInterrupt):
    """A signal ended the command; the line about it was written already."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Wakeup:
    """Calls `action(number)` in a thread as soon as a signal arrives that Python has a handler for.

    Make and close it in the main thread. Where they are nested, the innermost one hears.
    """

    def __init__(self, action: Callable[[int], None]) -> None:
        self._action = action
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, after `action` was called for all signals so far."""
        signal.set_wakeup_fd(self._previous)
        os.close(self._write)  # which ends the thread
        self._thread.join(CLEAN_UP_S)

    def _listen(self) -> None:
        while byte := os.read(self._read, 1):
            self._action(byte[0])
        os.close(self._read)


def say(line: str) -> None:
    """One line on stderr, from any thread or signal handler."""
    with contextlib.suppress(OSError):
        os.write(STDERR, f"{line}\n".encode())


def handled(signals: tuple[signal.Signals, ...]) -> tuple[signal.Signals, ...]:
    """`signals` without a SIGHUP that is ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(s for s in signals if s is not signal.SIGHUP or not ignored)


def listen(*also: signal.Signals, speaks: bool = True) -> None:
    """Until `run`, let INTERRUPTS and `also` end the process with one line: nothing is held yet."""

    def leave(number: int, frame: FrameType | None) -> None:
        if speaks:
            say(f"error: interrupted by {signal.Signals(number).name}")
        os._exit(128 + number)

    for number in handled((*INTERRUPTS, *also)):
        signal.signal(number, leave)


def run(
    main: Callable[[], int | None], *also: signal.Signals, hint: str = "", speaks: bool = True
) -> NoReturn:
    """Exit with the code of `main`. INTERRUPTS and `also` raise Interrupted in it, once.

    `hint` ends the line about a signal. Processes that do not speak leave that line to another.
    """
    open_descriptors()
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if _is_importing(frame):
            leave(number)
        if len(received) == 1:
            raise Interrupted(number)

    def leave(number: int) -> None:
        wakeup.close()  # after the line was written
        os._exit(128 + number)

    def dropped(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, Interrupted):  # in a finalizer or a callback
            leave(unraisable.exc_value.number)
        sys.__unraisablehook__(unraisable)

    leaving = threading.Event()

    def insist(number: int) -> None:
        if signal.getsignal(number) is not interrupt:  # main has a handler of its own
            return
        if leaving.is_set():  # asked twice
            os._exit(128 + number)
        leaving.set()
        if speaks:
            say(f"error: interrupted by {signal.Signals(number).name}{hint and '; '}{hint}")
        exit_after(CLEAN_UP_S, 128 + number)

    wakeup = Wakeup(insist)
    for number in handled((*INTERRUPTS, *also)):
        signal.signal(number, interrupt)
    sys.unraisablehook = dropped
    code: Any = None
    try:
        code = main()
    except SystemExit as error:
        code = error.code
    except OSError:
        code = flush()  # fails again where a stream was the reason
        if not code and not received and not _is_closed(sys.stdout):
            raise
        code = code or CLOSED_STDOUT
    except Interrupted as error:
        received.append(error.number)
    except BaseException:  # what a library made of the interruption
        if not received:
            raise
    wakeup.close()
    code = flush() or code
    if received:
        os._exit(128 + received[0])  # without waiting for threads
    sys.exit(code)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold INTERRUPTS back until the block is done. Outside the main thread nothing changes.

    A blocked mask would not do: another thread takes the signal then, and the main thread runs its
    handler all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held_back: list[int] = []

    def hold_back(number: int, frame: FrameType | None) -> None:
        held_back.append(number)

    previous = {number: signal.signal(number, hold_back) for number in handled(INTERRUPTS)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for late in held_back:
            signal.raise_signal(late)


@contextlib.contextmanager
def within(seconds: float, problem: str) -> Iterator[None]:
    """End the process with exit code 1 and a line unless the block is done in `seconds`.

    For calls that wait in C for other processes, and that no exception can interrupt.
    """

    def end() -> None:
        say(f"error: {problem}")
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def exit_after(seconds: float, code: int) -> None:
    """End the process in `seconds`, whatever its threads wait for."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


def flush() -> int:
    """Write what the streams hold, so that nothing is left to fail at exit; a code if it cannot."""
    code = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if error.errno not in GONE:
                say(f"error: {stream.name}: {error.strerror}")
            code = code or (CLOSED_STDOUT if error.errno in GONE else 1)
            discard(stream.fileno())
    return code


def discard(descriptor: int) -> None:
    """Send what is written to `descriptor` from now on to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def open_descriptors() -> None:
    """Open those of stdin, stdout and stderr that are closed (`>&-`) on /dev/null.

    Otherwise the next file that the process opens, maybe a checkpoint, is what C code prints to.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(STDERR, "w", encoding="utf-8", closefd=False)


class _Lasting(io.FileIO):
    """An output stream that discards what is written once its reader has gone, instead of
    raising.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            discard(self.fileno())
            return super().write(data)


def outlive_streams() -> None:
    """Go on without stdout and stderr when their other ends are closed.

    For commands whose results are files: a pager or a terminal that goes away must not end them.
    """
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)


def _lasting(stream: TextIO) -> TextIO:
    """The same descriptor and encoding; streams without a descriptor stay as they are."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:  # it writes to memory
        return stream
    stream.flush()
    raw = _Lasting(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        # python -u writes through to the file, and so must this
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _is_closed(stream: TextIO) -> bool:
    """Whether nobody reads the pipe at the other end."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: some drop exceptions then, even KeyboardInterrupt."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
