"""The files that the package ships, by name.

llama3-8b       configs/llama3-8b.yaml, where a configuration is expected
python-lines    configs/tasks/python-lines.yaml, in eval.tasks
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def shipped() -> dict[str, Path]:
    """The files of the shipped configurations by name."""
    return {path.stem: path for path in sorted(CONFIGS.glob("*.yaml"))}


def shipped_tasks() -> dict[str, Path]:
    """The files of the shipped tasks by name. Their data lie beside them."""
    return {path.stem: path for path in sorted((CONFIGS / "tasks").glob("*.yaml"))}


def config_file(name: str | Path) -> Path:
    """The path `name`, or the shipped configuration of that name if there is no such file."""
    return _file(name, shipped())


def task_file(name: str | Path) -> Path:
    """The path `name`, or the shipped task of that name if there is no such file."""
    return _file(name, shipped_tasks())


def _file(name: str | Path, known: Mapping[str, Path]) -> Path:
    path = Path(name)
    return known[str(name)] if str(name) in known and not path.is_file() else path
