"""The configurations that the package ships: `llama3-8b` names configs/llama3-8b.yaml."""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def shipped() -> dict[str, Path]:
    """The files of the shipped configurations by name."""
    return {path.stem: path for path in sorted(CONFIGS.glob("*.yaml"))}


def config_file(name: str | Path) -> Path:
    """The path `name`, or the shipped configuration of that name if there is no such file."""
    path, known = Path(name), shipped()
    return known[str(name)] if str(name) in known and not path.is_file() else path
