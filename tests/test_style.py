"""One name stands for one thing: no two classes of coatlm and tools have the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def repeated(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The class names that occur more than once in (file, text), with `file:line` of each."""
    places: dict[str, list[str]] = defaultdict(list)
    for file, text in sources:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}


def test_every_class_name_of_coatlm_and_tools_occurs_once() -> None:
    files = [p for folder in ("coatlm", "tools") for p in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 200
    found = repeated((str(p.relative_to(ROOT)), p.read_text(encoding="utf-8")) for p in files)
    assert found == {}


def test_a_class_name_is_found_in_another_file_in_a_function_and_in_a_class() -> None:
    inner = "def f():\n  class A: ...\nclass B:\n  class C: ...\n"
    outer = "class A: ...\nclass C: ...\nclass D: ...\n"
    sources = [("x.py", inner), ("y.py", outer)]
    assert repeated(sources) == {"A": ["x.py:2", "y.py:1"], "C": ["x.py:4", "y.py:2"]}
