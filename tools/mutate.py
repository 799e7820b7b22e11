"""Change one constant or operator of a file at a time, and list the changes that its tests pass.

    python tools/mutate.py coatlm/optim/schedule.py tests/optim/test_schedule.py
    python tools/mutate.py FILE TEST... --sample 20 --seed 1       # 20 of its mutants, at random

Mutants: integers n -> n + 1, floats doubled, booleans and conditions negated, operators exchanged
(`SWAPS`), names too (`NAMES`), a call whose result is not used deleted. Annotations, decorators,
errors that are raised, `strict` of zip and Triton kernels stay as they are.

The tests run in a temporary copy of the tree without hidden files, in a process forked from this
one, which has imported --preload: that saves the import of torch per mutant. A mutant whose tests
exceed --timeout counts as found. Exit code: 0, 1 if a mutant survived, 2 for invalid arguments.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import ast
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from coatlm.console import Parser, local_path, local_text

ROOT = Path(__file__).resolve().parent.parent
PAIRS = (
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.FloorDiv, ast.Mod), (ast.UAdd, ast.USub)),
    *((ast.LShift, ast.RShift), (ast.And, ast.Or), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)),
    *((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
)
SWAPS: dict[type, type] = {ast.Pow: ast.Mult} | dict(PAIRS) | {b: a for a, b in PAIRS}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "MAX": "SUM", "SUM": "MAX"}


Mutant = tuple[int, str, str]  # line, description, text of the module


def changes(node: ast.AST) -> Iterator[tuple[str, object]]:
    """The fields of a node that can be changed, each with another value."""
    match node:
        case ast.Constant(value=bool(value)):
            yield "value", not value
        case ast.Constant(value=int(value)):
            yield "value", value + 1
        case ast.Constant(value=float(value)):
            yield "value", 2 * value or 1.0
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.UnaryOp(op=op) if type(op) in SWAPS:
            yield "op", SWAPS[type(op)]()
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield "ops", [*ops[:i], SWAPS[type(op)](), *ops[i + 1 :]]
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield "test", ast.UnaryOp(ast.Not(), test)
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in NAMES:
            yield "id" if isinstance(node, ast.Name) else "attr", NAMES[name]
        case ast.Expr(value=ast.Call()):
            yield "value", ast.Constant(...)


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that may be changed, from top to bottom."""
    decorators = getattr(node, "decorator_list", [])
    kernel = any("triton" in ast.unparse(each) for each in decorators)
    if kernel or isinstance(node, ast.Raise) or getattr(node, "arg", None) == "strict":
        return
    yield node
    fixed = [*decorators, getattr(node, "annotation", None), getattr(node, "returns", None)]
    for child in ast.iter_child_nodes(node):
        if child not in fixed:
            yield from nodes(child)


def mutants(text: str) -> Iterator[Mutant]:
    """Line, description and text of every mutant of a module."""
    tree = ast.parse(text)
    for node in nodes(tree):
        for field, value in list(changes(node)):
            before, old = ast.unparse(node).split("\n")[0], getattr(node, field)
            setattr(node, field, value)
            after = ast.unparse(ast.fix_missing_locations(node)).split("\n")[0]
            yield node.lineno, f"{before} -> {after}", ast.unparse(tree)  # type: ignore[attr-defined]
            setattr(node, field, old)


def sample(found: Sequence[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """`count` of the mutants, or all, from top to bottom; a seed gives the same ones each time."""
    shuffled = random.Random(seed).sample(found, len(found))
    return sorted(shuffled[:count])


def run(tests: Sequence[str], root: Path, timeout: float) -> bool:
    """Whether the tests pass in `root`, in a process forked from this one."""
    with warnings.catch_warnings():  # Python 3.12 warns of threads: torch's are idle here
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(root)
        for stream in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        for name in [n for n in sys.modules if n.split(".")[0] in ("coatlm", "tools", "tests")]:
            del sys.modules[name]  # those of the checkout
        sys.path[:0] = [str(root)]
        os._exit(pytest.main(["-x", "-p", "no:cacheprovider", "-o", "addopts=", *tests]))
    end = time.monotonic() + timeout
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while os.waitid(os.P_PID, pid, ended) is None and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)  # the processes that tests have started, too
    return os.waitpid(pid, 0)[1] == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("file", type=local_text, metavar="FILE", help="a module, relative to --root")
    add("tests", nargs="+", metavar="TEST", help="arguments for pytest, relative to --root")
    add("--sample", type=int, help="run so many mutants, chosen at random (default: all)")
    add("--seed", type=int, default=0, help="of the sample (default: %(default)s)")
    add("--timeout", type=float, default=120.0, help="seconds per mutant (default: %(default)s)")
    add("--preload", nargs="*", default=["torch"], metavar="MODULE")
    add("--root", type=local_path, default=ROOT, help="the tree (default: this checkout)")
    options = parser.parse_args(arguments)
    if not (options.root / options.file).is_file():
        parser.error(f"{options.file}: no such file in {options.root}")
    for name in options.preload:
        try:
            __import__(name)
        except ImportError as error:
            parser.error(f"--preload {name}: {error}")
    for plugin in entry_points(group="pytest11"):
        plugin.load()  # as pytest would in every fork
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy = Path(folder) / "tree"
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
        skipped = shutil.ignore_patterns(".*", "__pycache__", "build")
        shutil.copytree(options.root, copy, ignore=skipped, symlinks=True)
        file = copy / options.file
        if not run(options.tests, copy, options.timeout):
            parser.error("the tests fail without a change, or exceed --timeout")
        found = sample(list(mutants(file.read_text("utf-8"))), options.sample, options.seed)
        survived = 0
        for line, change, text in found:
            file.write_text(text, "utf-8")
            if run(options.tests, copy, options.timeout):
                survived += 1
                print(f"{options.file}:{line}: {change}", flush=True)
    print(f"{len(found)} mutants, {survived} survived")
    return int(survived > 0)


if __name__ == "__main__":
    process.run(main)
