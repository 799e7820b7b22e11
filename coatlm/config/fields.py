"""Types of configuration fields: strict numbers with units, text, paths.

A field is declared with its default, its unit and its range. The docstring below it is what
`coatlm train --keys` prints:

    steps: StrictInt = number(150, "steps", ge=1, le=FOREVER)
    \"\"\"Optimizer steps of the whole run.\"\"\"

Every integer has an upper bound beyond any real run, so that products of integers do not overflow.
"""

from __future__ import annotations

import os.path
import unicodedata
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict

from coatlm.config.urls import READ_HERE, checked_url, is_url

FOREVER = 2**40  # steps
MOST_RANKS = 2**20  # processes
YEAR = 366 * 24 * 3600  # seconds: the upper bound of times; a thread's wait overflows at 292 years


class Section(BaseModel):
    """A frozen YAML mapping that rejects unknown keys and does not convert types."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def number(default: float | None, unit: str = "", **bounds: Any) -> Any:
    """A numeric field. `bounds` are pydantic's ge, gt, le and lt."""
    return Field(default, json_schema_extra={"unit": unit}, **bounds)


def _text(value: str) -> str:
    """Raise ValueError for characters that break a log line or cannot be encoded as UTF-8."""
    for character in value:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
            raise ValueError(f"has the character {character!a}; only printable ones are allowed")
    return value


def expand_user(path: str) -> str:
    """Replace `~` or `~name` by the home directory. Raises ValueError for unknown users."""
    if not _text(path):
        raise ValueError("a path has at least 1 character")
    if is_url(path):
        raise ValueError(READ_HERE)
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path.split("/")[0]
        raise ValueError(f"{user} is no user's home directory; write ./{user} for such a folder")
    return expanded


def _path(value: Any) -> Any:
    return Path(expand_user(str(value))) if isinstance(value, str | Path) else value


def _path_or_url(text: str) -> str:
    return checked_url(_text(text)) if is_url(text) else expand_user(text)


def _source(value: Any) -> Any:
    """A URL as text, any other text as a path."""
    if isinstance(value, str) and is_url(value):
        return checked_url(_text(value))
    return _path(value)


def _url(text: str) -> str:
    if not is_url(text):
        raise ValueError("must be a URL, such as s3://bucket/run")
    return checked_url(_text(text))


def _tokenizer(spec: str) -> str:
    if is_url(spec):  # hf://PLACE has the form of KIND:FILE
        raise ValueError(READ_HERE)
    kind, colon, rest = spec.partition(":")
    return f"{kind}:{expand_user(rest)}" if colon and rest else _text(spec)


def _resume(text: str) -> str:
    """Expand the path in `hf:DIR`, `PATH`, `auto` or `none`; check the URL in `hf:URL` or `URL`."""
    if text.startswith("hf:") and not is_url(text):
        return f"hf:{_path_or_url(text[3:])}"
    return _path_or_url(text)


Real = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Text = Annotated[str, Strict(), AfterValidator(_text)]
LocalText = Annotated[str, Strict(), AfterValidator(expand_user)]  # path or keyword
PathText = Annotated[str, Strict(), AfterValidator(_path_or_url)]  # path, URL, glob or keyword
UrlText = Annotated[str, Strict(), AfterValidator(_url)]
SourcePath = Annotated[Path | str, BeforeValidator(_source)]  # str: a URL
ResumeText = Annotated[str, Strict(), AfterValidator(_resume)]
UserPath = Annotated[Path, BeforeValidator(_path)]
TokenizerSpec = Annotated[str, Strict(), AfterValidator(_tokenizer)]
