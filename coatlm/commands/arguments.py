"""Arguments that several commands have, with what the shell completes."""

from __future__ import annotations

import argparse
from typing import Any

from argcomplete.completers import FilesCompleter

from coatlm.config.keys import keys
from coatlm.config.shipped import shipped
from coatlm.console import Parser, local_text


def add_config(parser: Parser, *, required: bool = True) -> None:
    """Add CONFIG, a YAML file or the name of a shipped configuration, and `key=value ...`."""
    config = parser.add_argument(
        "config",
        metavar="CONFIG",
        type=local_text,
        nargs=None if required else "?",
        help=f"a YAML file, or one of {', '.join(shipped())}",
    )
    overrides = parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for example optim.lr=1e-4"
    )
    config.completer = complete_config  # type: ignore[attr-defined]
    overrides.completer = complete_key  # type: ignore[attr-defined]


def complete_config(prefix: str, **_: Any) -> list[str]:
    """Names of shipped configurations, YAML files and directories."""
    return [*shipped(), *FilesCompleter(("yaml", "yml"))(prefix)]


def complete_key(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """The keys that take a value, `optim.lr=`, once CONFIG is given."""
    if parsed_args.config is None:
        return []
    return [f"{key.name}=" for key in keys() if key.section is None and "[]" not in key.name]
