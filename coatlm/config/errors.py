"""What a user is told about a mistake: short lines that cannot write to the terminal's controls."""

from __future__ import annotations

from typing import Any

LONGEST = 400 - len("error: ")  # characters of a line that a program prints behind `error: `
TAIL = 140  # of them, those of the end: it says what is allowed
MOST_LINES = 10


class ConfigError(ValueError):
    """A run that cannot be started; each line names a field and what is allowed."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def shortened(message: str) -> str:
    """At most 10 lines of at most 393 printable characters each, and a line that counts the others.

    A line that is too long loses its middle.
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
    """`text` with control characters and lone surrogates as Python escapes them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(value: Any) -> str:
    """A value as Python writes it."""
    try:
        return repr(value)
    except ValueError:  # Python converts no number of more than 4300 digits
        return f"<{type(value).__name__}>"


def one_line(message: object) -> str:
    """`message` as one printable line of at most 393 characters."""
    return shortened(" ".join(str(message).split()))
