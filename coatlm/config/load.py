"""Load a YAML file with overrides into a Config, and explain every mistake in them.

An override is `section.key=value`. The value of a key that holds text or a path is taken literally,
including ` #` and `: `, unless it is `null`, a list `[...]` or entirely in quotes. All other values
are parsed as YAML. `preset=NAME` is the one override of a key without a section (presets.py). It
and `parallel.layout=auto` replace keys that the file gives; other overrides win over them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from coatlm.config.combined import LAYOUT, Config
from coatlm.config.errors import ConfigError, one_line, printable, shown
from coatlm.config.hints import hint
from coatlm.config.keys import keys, type_name
from coatlm.config.presets import with_preset, without, without_formats
from coatlm.config.program import as_typed
from coatlm.config.shipped import config_file, shipped
from coatlm.config.urls import without_secrets
from coatlm.config.yaml_text import MOST_CHARACTERS, has_comment, parse_yaml

KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)
# pydantic's errors of values of another type, whose messages name types of Python
MISTYPED = {"model_type", "tuple_type", "too_long", "path_type", "string_type", "missing"}
IN_WORDS = {  # types as `coatlm train --keys` prints them -> in a message
    "list of section": "list of paths or of mappings",
    "list of choice": "list of names",
    "list of number": "list of numbers",
    "section": "mapping",
}
QUOTED = re.compile(r"""(?s)"(?:[^"\\]|\\.)*"|'(?:[^']|'')*'""")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read YAML, apply `a.b=c` overrides, validate. Raises ConfigError, one line per mistake."""
    return make_config(override(read_mapping(path), overrides))


def make_config(data: Any) -> Config:
    """Resolve a nested mapping's preset and validate. Raises ConfigError, one line per mistake."""
    try:
        return Config.model_validate(with_preset(data) if isinstance(data, Mapping) else data)
    except pydantic.ValidationError as error:
        # a default that depends on a key with a mistake is no mistake of its own
        own = [e for e in error.errors() if e["type"] != "default_factory_not_called"]
        raise ConfigError("\n".join(dict.fromkeys(map(_explain, own)))) from None


def override(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply overrides `a.b=c` to a copy of `data`. Raises ConfigError for the first invalid one.

    `preset=NAME` replaces the number formats that `data` gives and `parallel.layout=auto` the
    layout; other overrides win over both.
    """
    changes = [(_nested(item), item) for item in overrides]
    merged = dict(data)
    if any("preset" in change for change, _ in changes):
        merged = without_formats(merged)
    if "parallel.layout=auto" in overrides:
        merged = without(merged, LAYOUT)
    for change, item in changes:
        merged = _merged(merged, change, item)
    return merged


def _shipped_like(name: str) -> str:
    """A hint at the shipped configurations with names like this one."""
    near = difflib.get_close_matches(name, shipped(), n=3, cutoff=0.5)
    if near:
        return f"do you mean {' or '.join(near)}?"
    return as_typed("coatlm train --help lists the names that coatlm has")


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping, or the shipped configuration of that name.

    Raises ConfigError with one line.
    """
    path, name = config_file(path), printable(str(path))
    try:
        with path.open("rb") as file:
            content = file.read(4 * MOST_CHARACTERS + 1)  # UTF-8 takes up to 4 bytes
        data = parse_yaml(content.decode("utf-8-sig"))
    except FileNotFoundError:
        hint = "" if path.suffix or path.name != name else f"; {_shipped_like(name)}"
        raise ConfigError(f"{name}: no such configuration file{hint}") from None
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not valid UTF-8 at byte {error.start}") from None
    except ValueError as error:
        raise ConfigError(f"{name}: {one_line(error)}") from None
    if data is None:
        raise ConfigError(
            f"{name}: the file is empty; write {{}} for a configuration of defaults only"
        )
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: a configuration is a mapping of sections, not {shown(data)}")
    return data


def dotted(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The (dotted key, value) pairs of a nested mapping."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from dotted(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def _nested(item: str) -> dict[str, Any]:
    """`a.b=c` -> {a: {b: c}}."""
    key, equals, text = item.partition("=")
    if not equals or not KEY.fullmatch(key):
        raise ConfigError(f"{item!r}: an override is key=value, for example optim.lr=3e-4")
    try:
        value = _value(key, text)
    except ValueError as error:
        raise ConfigError(f"{item}: {one_line(error)}") from None
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _value(key: str, text: str) -> Any:
    """Parse the value of an override. Raises ValueError if it is not valid YAML."""
    textual = any(known.name == key and known.textual for known in keys())
    yaml = not text.strip() or text == "null" or text.startswith("[") or QUOTED.fullmatch(text)
    if textual and not yaml:
        return text
    value = parse_yaml(text)
    if has_comment(text):
        raise ValueError("` #` starts a comment in YAML; put text that contains it in quotes")
    return value


def _merged(base: Mapping[str, Any], change: Mapping[str, Any], item: str) -> dict[str, Any]:
    """Merge `change` into a copy of `base`: mappings are merged, other values are replaced."""
    result = dict(base)
    for key, value in change.items():
        old = base.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            result[key] = _merged(old, value, item)
        elif isinstance(value, Mapping) and old is not None:
            raise ConfigError(f"{item}: {key}={shown(old)} in the file is not a mapping")
        else:
            result[key] = value
    return result


def _explain(error: Any) -> str:
    """Describe a pydantic error in one line: dotted path, value, what is allowed."""
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown key; {hint(error['loc'])}"
    if error["type"] == "invalid_key":
        return f"{path}: a key must be text"
    if error["type"] == "missing" and isinstance(error["input"], Mapping):
        return f"{path}: must be given"
    message = error["msg"].removeprefix("Value error, ").replace("True, False", "true, false")
    if error["type"] == "value_error" and isinstance(error["input"], Mapping):  # of a section
        return f"{path}: {message}" if path else message
    if error["type"] in MISTYPED:
        path, message = _mistyped(error["loc"], whole=error["type"] == "missing")
    value = "null" if error["input"] is None else without_secrets(shown(error["input"]))
    return f"{path}={value}: {message}"


def _mistyped(location: Sequence[str | int], *, whole: bool) -> tuple[str, str]:
    """The path of the key at `location`, or of an item of its list unless `whole`, and what it
    takes. pydantic's location goes on with members of unions."""
    known = {key.name: key for key in keys()}
    names = [
        "".join(f".{p}" if isinstance(p, str) else "[]" for p in location[:n])[1:]
        for n in range(1, len(location) + 1)
    ]
    end = max((n for n, name in enumerate(names, 1) if name in known), default=0)
    kind = type_name(known[names[end - 1]].field.annotation) if end else "section"
    if not whole and end < len(location) and isinstance(location[end], int):
        kind, end = kind.removeprefix("list of "), end + 1
        kind = "path or a mapping" if kind == "section" else kind
    for name, words in IN_WORDS.items():
        kind = kind.replace(name, words)
    article = "" if kind.startswith(("[", "text")) else "a "
    return ".".join(map(str, location[:end])), f"must be {article}{kind}"
