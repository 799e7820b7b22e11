"""Good bytes -> damaged ones: bits, lengths, numbers and structure change, enough stays to be read.

A change is a function of hypothesis' `draw` and the good content.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

Change = Callable[[DrawFn, bytes], bytes]

NUMBERS = (0, 1, -1, 2, 3, 255, 256, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63)
ODD: tuple[Any, ...] = (  # values of JSON in the place of others
    *NUMBERS,
    2**64,
    -(2**63),
    10**30,
    10**400,
    0.5,
    1e308,
    -1e-320,
    math.nan,
    math.inf,
    -math.inf,
    None,
    True,
    False,
    "",
    "x",
    "nan",
    "1",
    "../../x",
    "/nowhere",
    "~",
    "${oc.env:HOME}",
    "${run.dir}",
    "\x1b[31mred\x00",
    "\ud800",
    "\u202e",
    "long " * 2000,
    [],
    {},
    [[]],
    [1, 2],
    {"a": 1},
    {"": None},
)
SPELLED = ("-5", "1e999", "NaN", "0x7", "1_0", "9" * 5000)
DEPTHS = (20, 1000, 12_000)
LINE_ENDS = (b"\n", b"\r\n", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"#", b": ", b"- ", b"'", b"{")


def whole_number(draw: DrawFn, below: int) -> int:
    return draw(st.integers(0, max(below - 1, 0)))


def odd(draw: DrawFn) -> Any:
    """A value of its own: later changes may be made in it."""
    return copy.deepcopy(draw(st.sampled_from(ODD)))


def damaged(draw: DrawFn, good: bytes) -> bytes:
    """Bytes flipped, cut, doubled, moved, inserted, or replaced by numbers."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        at = whole_number(draw, len(data) + 1)
        size = draw(st.sampled_from((1, 2, 4, 8, 16, 100, 5000)))
        kind = draw(
            st.sampled_from(("flip", "number", "cut", "end", "double", "move", "insert", "zero"))
        )
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << whole_number(draw, 8)
        elif kind == "number":
            value = draw(st.sampled_from((*NUMBERS, -(2**31), -(2**63))))
            width = draw(st.sampled_from((4, 8)))
            data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == "cut":
            del data[at : at + size]
        elif kind == "end":
            del data[at:]
        elif kind == "double":
            data[at:at] = data[at : at + size]
        elif kind == "move":
            start = whole_number(draw, len(data) + 1)
            data[at : at + size] = data[start : start + size]
        elif kind == "insert":
            data[at:at] = draw(st.one_of(st.binary(max_size=16), st.sampled_from(LINE_ENDS)))
        elif kind == "zero":
            data[at : at + size] = bytes(len(data[at : at + size]))
    return bytes(data)


def renumbered(draw: DrawFn, good: bytes) -> bytes:
    """One of the numbers that a text spells out becomes another one."""
    found = list(re.finditer(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?", good))
    if not found:
        return damaged(draw, good)
    place = found[whole_number(draw, len(found))]
    value = draw(st.sampled_from((*map(str, NUMBERS), *SPELLED)))
    return good[: place.start()] + value.encode() + good[place.end() :]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside a value of JSON, from the outside in."""
    keys: Any = ()
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
    for key in keys:
        yield from places(value[key])


def restructured(draw: DrawFn, good: bytes) -> bytes:
    """A document of JSON in which values, keys or lengths are others, or which nests deeply."""
    value = json.loads(good)
    depth = 0
    for _ in range(draw(st.integers(1, 2))):
        found = list(places(value))
        if not found:
            break
        inside, key = found[whole_number(draw, len(found))]
        kind = draw(
            st.sampled_from(("value", "value", "value", "delete", "rename", "add", "swap", "nest"))
        )
        if kind == "delete":
            del inside[key]
        elif kind in ("rename", "add") and isinstance(inside, dict):
            name = draw(st.sampled_from(("x", "", "\x1b[2J", "../x", "n" * 3000, "layers", "step")))
            inside[name] = inside.pop(key) if kind == "rename" else odd(draw)
        elif kind == "add":
            inside.insert(key, inside[key])
        elif kind == "swap":
            other, name = found[whole_number(draw, len(found))]
            inside[key], other[name] = json.loads(json.dumps([other[name], inside[key]]))
        elif kind == "nest":
            inside[key], depth = "NEST", draw(st.sampled_from(DEPTHS))
        else:
            inside[key] = odd(draw)
    if draw(st.integers(0, 30)) == 30:
        value = odd(draw)
    text = json.dumps(value, indent=draw(st.sampled_from((None, 1))))
    return text.replace('"NEST"', "[" * depth + "]" * depth).encode()


def in_lines(change: Change, draw: DrawFn, good: bytes) -> bytes:
    """One line changed, doubled, or moved to the end."""
    lines = good.splitlines(keepends=True)
    at = whole_number(draw, len(lines))
    kind = draw(st.sampled_from(("change", "change", "change", "double", "last")))
    if kind == "change":
        lines[at] = change(draw, lines[at].rstrip(b"\n")) + b"\n"
    elif kind == "double":
        lines.insert(at, lines[at])
    else:
        lines.append(lines.pop(at))
    return b"".join(lines)


def one_of(*changes: Change) -> Change:
    def change(draw: DrawFn, good: bytes) -> bytes:
        return changes[whole_number(draw, len(changes))](draw, good)

    return change


JSON = one_of(restructured, restructured, restructured, renumbered, damaged)
LINES = one_of(partial(in_lines, restructured), partial(in_lines, renumbered), damaged)
TEXT = one_of(renumbered, damaged)
