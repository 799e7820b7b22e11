"""Error messages for users: at most ten short lines without control characters."""

from __future__ import annotations

from typing import Any

LONGEST = 400 - len("error: ")  # characters of a line; programs print it after `error: `
TAIL = 140  # characters at the end of a shortened line, which say what is allowed
MOST_LINES = 10


class ConfigError(ValueError):
    """The configuration cannot be used; each line names a field and what is allowed."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def shortened(message: str) -> str:
    """`message` in at most 10 lines of at most 393 printable characters, plus a count of the rest.

    The middle of a longer line is replaced by `...`.
    """
    lines = [printable(line) for line in message.split("\n") if line.strip()]
    more = len(lines) - MOST_LINES
    if more > 0:
        lines[MOST_LINES:] = [f"and {more} more"]
    return "\n".join(
        line if len(line) <= LONGEST else f"{line[: LONGEST - TAIL - 5]} ... {line[-TAIL:]}"
        for line in lines
    )


def printable(text: str) -> str:
    """`text` with control characters and lone surrogates escaped as in Python."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(value: Any) -> str:
    """The repr of a value, or its type where Python refuses to convert it."""
    try:
        return repr(value)
    except ValueError:  # Python converts no number of more than 4300 digits
        return f"<{type(value).__name__}>"


def one_line(message: object) -> str:
    """`message` as one printable line of at most 393 characters."""
    return shortened(" ".join(str(message).split()))


def divides(name: str, value: int, by_name: str, by: int) -> None:
    """Raise ValueError unless `by` divides `value`."""
    if value % by:
        raise ValueError(f"{name}={value} is not a multiple of {by_name}={by}")
