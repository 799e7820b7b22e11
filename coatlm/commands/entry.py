"""How launchers start other processes of coatlm: by scripts of a checkout, else by module.

An installed package is started with `python -P`, which does not search the working directory for
modules; a file there could otherwise replace one of Python's own.
"""

from __future__ import annotations

from pathlib import Path

from coatlm.config.program import SCRIPTS

ROOT = Path(__file__).resolve().parents[2]  # of the checkout, or what the package is installed in
IS_CHECKOUT = all((ROOT / script).is_file() for script in SCRIPTS.values())


def entry(command: str) -> list[str]:
    """The words after the interpreter that start `train` or `elastic`."""
    script = SCRIPTS.get(command, f"tools/{command}.py")
    return [str(ROOT / script)] if IS_CHECKOUT else ["-P", "-m", f"coatlm.commands.{command}"]


def torchrun(python: str, *options: str) -> list[str]:
    """The command line up to CONFIG that starts the ranks through `elastic`, with its options."""
    ranks = [] if IS_CHECKOUT else ["--no-python", python, "-u"]
    return [python, *entry("elastic"), *options, *ranks, *entry("train")]
