"""One name stands for one thing, and a file is short enough to be read at once."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# torch's process group, also where megatron-core is not loaded (coatlm/train/agreement.py).
SAME = {"Group"}
LONGEST = 350  # lines
TABLES: set[str] = set()  # files that may be longer, because they are one table


def names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Name and line of every class, and of every type alias of the module.

    An alias is a name in CapWords that is assigned to, or declared by `type`. Type variables have
    one letter.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if name[0].isupper() and not name.isupper():
                    yield name, node.lineno
            case _ if type(node).__name__ == "TypeAlias":  # of Python 3.12 and later
                yield node.name.id, node.lineno  # type: ignore[attr-defined]


def repeated(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names that occur more than once in (file, text), with `file:line` of each."""
    places: dict[str, list[str]] = defaultdict(list)
    for file, text in sources:
        for name, line in names(ast.parse(text)):
            places[name].append(f"{file}:{line}")
    return {name: found for name, found in places.items() if len(found) > 1}


def sources() -> dict[str, str]:
    files = [p for folder in ("coatlm", "tools") for p in sorted((ROOT / folder).rglob("*.py"))]
    return {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in files}


def test_every_class_and_every_type_alias_of_coatlm_and_tools_has_its_own_name() -> None:
    found = sources()
    assert len(found) > 200
    assert repeated(found.items()).keys() == SAME


def test_a_class_name_is_found_in_another_file_in_a_function_and_in_a_class() -> None:
    inner = "def f():\n  class A: ...\nclass B:\n  class C: ...\n"
    outer = "class A: ...\nclass C: ...\nclass D: ...\n"
    texts = [("x.py", inner), ("y.py", outer)]
    assert repeated(texts) == {"A": ["x.py:2", "y.py:1"], "C": ["x.py:4", "y.py:2"]}


def test_a_type_alias_is_found_with_and_without_annotation() -> None:
    classes = "class Row: ...\nclass Key: ...\nclass T: ...\n"
    aliases = "Row = tuple[int, ...]\nKey: TypeAlias = str\nT = TypeVar('T')\n"
    found = repeated([("x.py", classes), ("y.py", aliases)])
    assert found == {"Row": ["x.py:1", "y.py:1"], "Key": ["x.py:2", "y.py:2"]}


def test_no_file_of_coatlm_and_tools_is_longer_than_350_lines() -> None:
    lengths = {file: len(text.splitlines()) for file, text in sources().items()}
    assert {file: n for file, n in lengths.items() if n > LONGEST and file not in TABLES} == {}
