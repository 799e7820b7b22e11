"""The keys of the configuration as data, and the table that `coatlm train --keys` prints."""

from __future__ import annotations

import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from coatlm.config.combined import Config
from coatlm.config.errors import ConfigError
from coatlm.config.fields import Section
from coatlm.config.presets import presets_table

WIDTH = 100  # columns of the table
UNIONS = (Union, types.UnionType)
NAMES = {bool: "boolean", int: "integer", float: "number", str: "text", Path: "path"}


@dataclass(frozen=True)
class Key:
    """A field with its dotted name; `[]` stands for any item of a list: `data.paths[].weight`."""

    name: str
    field: FieldInfo

    @property
    def section(self) -> type[Section] | None:
        """The section that the key holds, alone or in a list; None for a key that holds a value."""
        found = [t for t in scalars(self.field.annotation) if issubclass(t, Section)]
        return found[0] if found else None

    @property
    def textual(self) -> bool:
        """Whether the key takes only text, paths, lists of them, or null."""
        return set(scalars(self.field.annotation)) <= {str, Path, type(None)}


def keys(section: type[Section] = Config, prefix: str = "") -> Iterator[Key]:
    """All keys of a section, depth first: a section comes before the keys inside it."""
    for name, field in section.model_fields.items():
        key = Key(f"{prefix}{name}", field)
        yield key
        if key.section is not None:
            inner = "[]" if tuple in _origins(field.annotation) else ""
            yield from keys(key.section, f"{key.name}{inner}.")


def scalars(annotation: Any) -> Iterator[type]:
    """The classes of the scalars that a value of this type contains."""
    if get_origin(annotation) is Literal:
        yield from {type(value) for value in get_args(annotation)}
    elif get_origin(annotation) is Annotated:
        yield from scalars(get_args(annotation)[0])
    elif get_args(annotation):
        for argument in get_args(annotation):
            if argument is not ...:
                yield from scalars(argument)
    else:
        yield annotation


def _origins(annotation: Any) -> set[Any]:
    inner = get_args(annotation) if get_origin(annotation) in UNIONS else ()
    return {get_origin(annotation), *map(get_origin, inner)}


def keys_table(wanted: str = "") -> str:
    """The table of all keys, or of the section or key `wanted`, without a final newline.

    One line per key shows its name, type, default and range; the text below explains it. The table
    of all keys begins with the presets. Raises ConfigError if there is no such section or key.
    """
    presets = presets_table(WIDTH)
    if wanted == "preset":
        return presets
    inside = (f"{wanted}.", f"{wanted}[]")
    chosen = [k for k in keys() if not wanted or k.name == wanted or k.name.startswith(inside)]
    if not chosen:
        raise ConfigError(
            f"--keys {wanted}: no such section or key; "
            f"the sections are {', '.join(Config.model_fields)}, and preset"
        )
    rows = {k.name: (k.name, type_name(k.field.annotation), default(k.field)) for k in chosen}
    widths = {  # of the columns, aligned within a section
        place: [max(map(len, c)) for c in zip(*(rows[k.name] for k in block), strict=True)]
        for place, block in _by_section(chosen).items()
    }
    lines = [] if wanted else [presets]
    for key in chosen:
        place = _place(key)
        if not place:
            lines += _title(key)
            continue
        cells = zip(rows[key.name], widths[place], strict=True)
        start = "".join(f"{cell:<{width}}  " for cell, width in cells)
        limits = textwrap.wrap(allowed(key.field), WIDTH - len(start), break_on_hyphens=False)
        lines += [(start + "".join(limits[:1])).rstrip()]
        lines += [" " * len(start) + more for more in limits[1:]]
        lines += [textwrap.indent(textwrap.fill(sentence(key.field), WIDTH - 4), "    ")]
    return "\n".join(lines).strip("\n")


def _place(key: Key) -> str:
    return key.name.rpartition(".")[0]


def _by_section(chosen: Sequence[Key]) -> dict[str, list[Key]]:
    blocks: dict[str, list[Key]] = {}
    for key in chosen:
        blocks.setdefault(_place(key), []).append(key)
    return blocks


def _title(key: Key) -> list[str]:
    """The heading of a section: its name and docstring, between empty lines."""
    assert key.section is not None
    text = " ".join((key.section.__doc__ or "").split())
    return ["", *textwrap.wrap(f"{key.name}: {text}", WIDTH), ""]


def sentence(field: FieldInfo) -> str:
    """The explanation of a field, which is the docstring below it."""
    return " ".join((field.description or "").split())


def type_name(annotation: Any) -> str:
    """The type as the table shows it: `integer`, `choice or null`, `[number, number]`."""
    arguments = get_args(annotation)
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is Literal:
        return "choice"
    if get_origin(annotation) is Annotated:
        return type_name(arguments[0])
    if get_origin(annotation) in UNIONS:
        return " or ".join(map(type_name, arguments))
    if get_origin(annotation) is tuple:
        if arguments[-1] is ...:
            return f"list of {type_name(arguments[0])}"
        return f"[{', '.join(map(type_name, arguments))}]"
    return "section" if issubclass(annotation, Section) else NAMES[annotation]


def default(field: FieldInfo) -> str:
    """The default, written as in an override, or in words; empty for a required key."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "default" in extra:  # it depends on other keys
        return str(extra["default"])
    value = field.get_default()
    if value is PydanticUndefined:
        return ""
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def allowed(field: FieldInfo) -> str:
    """The allowed choices, or the range with its unit."""
    choices = list(_choices(field.annotation))
    if choices:
        return " | ".join(str(c).lower() if isinstance(c, bool) else str(c) for c in choices)
    bounds = [
        f"{sign} {_short(getattr(bound, name))}"
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="))
        for bound in field.metadata
        if hasattr(bound, name)
    ]
    extra = field.json_schema_extra
    unit = str(extra["unit"]) if isinstance(extra, dict) and extra.get("unit") else ""
    return " ".join([", ".join(bounds), unit]).strip()


def _choices(annotation: Any) -> Iterator[Any]:
    if annotation is bool:
        yield from (True, False)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for argument in get_args(annotation):
            yield from _choices(argument)


def _short(bound: Any) -> str:
    """A bound as text; large powers of two are written as powers."""
    exponent = int(bound + 1).bit_length() - 1
    for number, text in ((2**exponent, f"2^{exponent}"), (2**exponent - 1, f"2^{exponent} - 1")):
        if exponent > 13 and bound == number:
            return text
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
