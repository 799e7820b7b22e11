"""Types are given everywhere but in Triton kernels, which have none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import coatlm

PACKAGE = Path(coatlm.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def unannotated(tree: ast.AST) -> Iterator[str]:
    """`name:line` of each function without a full signature, kernels aside."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        a = node.args
        arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
        untyped = [x.arg for x in arguments if x is not None and x.annotation is None]
        returns = node.returns is not None or node.name == "__init__"
        if not returns or set(untyped) - {"self", "cls"}:
            yield f"{node.name}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_function_but_kernels_is_fully_annotated(path: Path) -> None:
    assert list(unannotated(ast.parse(path.read_text()))) == []


def test_a_missing_annotation_is_found() -> None:
    source = "@triton.jit\ndef kernel(x): ...\ndef f(x) -> int: ...\nclass A:\n  def g(self): ...\n"
    assert list(unannotated(ast.parse(source))) == ["f:3", "g:5"]
