"""Signals, closed output streams and exit codes of a command.

A script imports this module first, calls `listen`, imports the rest and ends in `run(main)`:

    while importing      SIGINT, SIGTERM, SIGHUP   one line, immediate exit, code 128 + signal
    in main()            the same signals          one line, clean-up, exit code 128 + signal
    stdout is closed     (`| head`)                no line, exit code 141 = 128 + SIGPIPE
    stdout fails         (the disk is full)        one line, exit code 1

What cannot be written to stdout raises StdoutError, which is no OSError: a command that handles
errors of its files does not take it for one of them. Characters that the encoding of stdout lacks
are written as escapes.

A thread writes the line, because Python runs signal handlers only between bytecodes of the main
thread, which may block in C for minutes in a collective or a device synchronization. The same
thread ends a process whose clean-up hangs.

SIGHUP stays ignored if it was ignored at the start, as nohup requests.
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

NAMES = {1: "<stdout>", 2: "<stderr>"}
STDERR = 2  # file descriptor, usable from any thread and without sys.stderr
ERASE_LINE = "\r\x1b[K"
CLOSED_STDOUT = 128 + signal.SIGPIPE
CLEAN_UP_S = 5.0  # seconds for the clean-up of an interrupted command
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GONE = (errno.EPIPE, errno.EIO)  # from writing to a pipe without a reader or a closed terminal


class Interrupted(KeyboardInterrupt):
    """A signal interrupted the command; its message was already printed."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StdoutError(Exception):
    """Writing to stdout failed with the OSError `cause`."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.strerror)
        self.cause = cause


class Wakeup:
    """Calls `action(number)` in a thread as soon as a signal with a Python handler arrives.

    Create and close it in the main thread. Of nested instances only the innermost is called.
    """

    def __init__(self, action: Callable[[int], None]) -> None:
        self._action = action
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after `action` has been called for every signal received so far."""
        signal.set_wakeup_fd(self._previous)
        os.close(self._write)  # ends the thread
        self._thread.join(CLEAN_UP_S)

    def _listen(self) -> None:
        while byte := os.read(self._read, 1):
            self._action(byte[0])
        os.close(self._read)


def say(line: str) -> None:
    """Write one line to stderr, on a terminal in place of a progress bar; safe in any thread and
    signal handler."""
    erased = ERASE_LINE if os.isatty(STDERR) else ""
    with contextlib.suppress(OSError):
        os.write(STDERR, f"{erased}{line}\n".encode())


def handled(signals: tuple[signal.Signals, ...]) -> tuple[signal.Signals, ...]:
    """`signals` without SIGHUP if that is ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(s for s in signals if s is not signal.SIGHUP or not ignored)


def listen(*also: signal.Signals, speaks: bool = True) -> None:
    """Let INTERRUPTS and `also` end the process with one line, without clean-up, until `run`.

    `speaks=False` omits the line.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        if speaks:
            say(f"error: interrupted by {signal.Signals(number).name}")
        os._exit(128 + number)

    for number in handled((*INTERRUPTS, *also)):
        signal.signal(number, leave)


def run(
    main: Callable[[], int | None], *also: signal.Signals, hint: str = "", speaks: bool = True
) -> NoReturn:
    """Run `main` and exit with its code. INTERRUPTS and `also` raise Interrupted in it, once.

    `hint` is appended to the line about a signal; `speaks=False` omits that line.
    """
    open_descriptors()
    sys.stdout = _rewrapped(sys.stdout, _Stdout)
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if _is_importing(frame):
            leave(number)
        if len(received) == 1:
            raise Interrupted(number)

    def leave(number: int) -> None:
        wakeup.close()  # waits until the line is written
        os._exit(128 + number)

    def dropped(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, Interrupted):  # in a finalizer or a callback
            leave(unraisable.exc_value.number)
        sys.__unraisablehook__(unraisable)

    leaving = threading.Event()

    def insist(number: int) -> None:
        if signal.getsignal(number) is not interrupt:  # main has installed its own handler
            return
        if leaving.is_set():  # the second signal
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
    except StdoutError as error:
        code = _given_up(sys.stdout, error.cause)
    except OSError:
        code = flush()  # fails again if a closed stream was the cause
        if not code and not received and not _is_closed(sys.stdout):
            raise
        code = code or CLOSED_STDOUT
    except Interrupted as error:
        received.append(error.number)
    except BaseException:  # a library may have turned the interruption into another exception
        if not received:
            raise
    wakeup.close()
    code = flush() or code
    if received:
        os._exit(128 + received[0])  # does not wait for threads
    sys.exit(code)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer INTERRUPTS until the block is done. Outside the main thread this does nothing.

    Blocking the signals in the main thread would not help: another thread would receive them, and
    Python would still run the handler in the main thread.
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
    """End the process with exit code 1 and the line `problem` unless the block ends in `seconds`.

    Use it for calls that block in C on other processes, which no exception can interrupt.
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
    """End the process after `seconds`, even if its threads hang."""
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


def flush() -> int:
    """Flush stdout and stderr, so that the interpreter does not fail at exit.

    Returns 0, or an exit code if a stream cannot be written.
    """
    code = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except StdoutError as error:
            code = code or _given_up(stream, error.cause)
        except OSError as error:
            code = code or _given_up(stream, error)
    return code


def _given_up(stream: TextIO, error: OSError) -> int:
    """Discard what is written to `stream`, which failed with `error`; the exit code."""
    gone = error.errno in GONE
    if not gone:
        say(f"error: {NAMES.get(stream.fileno(), stream.name)}: {error.strerror}")
    discard(stream.fileno())
    return CLOSED_STDOUT if gone else 1


def discard(descriptor: int) -> None:
    """Redirect `descriptor` to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def open_descriptors() -> None:
    """Open stdin, stdout and stderr on /dev/null where they are closed (`>&-`).

    Otherwise the next file that the process opens gets their number, and C code prints into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(STDERR, "w", encoding="utf-8", closefd=False)


class _Stdout(io.FileIO):
    """An output stream whose errors are StdoutErrors."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise StdoutError(error) from error


class _Lasting(io.FileIO):
    """An output stream that discards output, instead of raising, once it cannot be written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE and self.fileno() != STDERR:
                say(f"error: <stdout>: {error.strerror}; output is discarded from here on")
            discard(self.fileno())
            return super().write(data)


def outlive_streams() -> None:
    """Continue without stdout and stderr when they cannot be written, as when their readers close.

    Use it for commands whose results are files, which a closed pager or terminal must not end.
    """
    sys.stdout, sys.stderr = (_rewrapped(s, _Lasting) for s in (sys.stdout, sys.stderr))


def _rewrapped(stream: TextIO, kind: type[io.FileIO]) -> TextIO:
    """A stream like `stream`, with its descriptor and encoding, on a file of this kind.

    Characters that the encoding lacks are escaped. A stream without a descriptor is returned
    unchanged.
    """
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:  # an in-memory stream
        return stream
    stream.flush()
    raw = kind(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        # unbuffered like the original under `python -u`
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace" if stream.errors == "strict" else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _is_closed(stream: TextIO) -> bool:
    """Whether the reader of the pipe behind `stream` has closed."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported; some modules swallow even KeyboardInterrupt there."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
