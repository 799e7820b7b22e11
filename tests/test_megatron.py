"""coatlm.megatron re-exports what the package uses of megatron-core, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "coatlm"


def exported() -> set[str]:
    for node in ast.parse((PACKAGE / "megatron.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError("coatlm/megatron.py has no __all__")


def imported() -> set[str]:
    """The names that modules of coatlm import from coatlm.megatron."""
    return {
        name.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "coatlm.megatron"
        for name in node.names
    }


def test_every_export_is_used_and_every_use_is_exported() -> None:
    assert exported() == imported()
