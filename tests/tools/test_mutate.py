"""tools/mutate.py on a package of one module: what its tests pass is listed, with its line."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tools.mutate import ROOT, mutants, sample

MODULE = '''"""1 + 1 in a docstring."""

LIMIT = 3

def clipped(x: int = 0) -> int:
    if x < 0:
        raise ValueError(f"{x + 1}")
    return min(x, LIMIT)
'''
TESTS = """
import pytest
from tiny.clip import clipped

def test_clipped():
    assert clipped(5) == 3 and clipped(2) == 2 and clipped() == 0
    pytest.raises(ValueError, clipped, -1)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in {"__init__": "", "clip": MODULE}.items():
        (tmp_path / "tiny").mkdir(exist_ok=True)
        (tmp_path / "tiny" / f"{name}.py").write_text(text)
    (tmp_path / "test_clip.py").write_text(TESTS)
    return tmp_path


def mutate(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "mutate.py"), "tiny/clip.py", "test_clip.py"]
    command += ["--root", str(root), "--preload"]
    return subprocess.run([*command, *words], capture_output=True, text=True)


def test_a_mutant_that_no_test_finds_is_listed_and_the_tree_stays_as_it_is(package: Path) -> None:
    done = mutate(package)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "6 mutants, 0 survived\n"
    tests = package / "test_clip.py"
    tests.write_text(TESTS.replace(" and clipped() == 0", ""))
    done = mutate(package)
    assert done.stdout.splitlines() == [
        "tiny/clip.py:5: 0 -> 1",
        "tiny/clip.py:6: 0 -> 1",
        "tiny/clip.py:6: x < 0 -> x <= 0",
        "6 mutants, 3 survived",
    ]
    assert (done.returncode, done.stderr) == (1, "")
    assert (package / "tiny" / "clip.py").read_text() == MODULE


def test_a_sample_depends_on_its_seed_alone() -> None:
    found = list(mutants(MODULE))
    first, again, other = (sample(found, 3, seed) for seed in (1, 1, 2))
    assert first == again != other and len(first) == len(set(first) & set(found)) == 3
    assert first == sorted(first) and sample(found, None, 1) == sorted(found)


def test_a_mutant_that_does_not_end_is_stopped_and_counts_as_found(package: Path) -> None:
    (package / "tiny" / "clip.py").write_text("n = True\nwhile not n: ...\n")
    (package / "test_clip.py").write_text("import tiny.clip\ndef test(): pass\n")
    done = mutate(package, "--sample", "1", "--timeout", "6")  # all are loops without an end
    assert done.stdout == "1 mutants, 0 survived\n"


def test_tests_that_fail_without_a_change_are_refused(package: Path) -> None:
    (package / "test_clip.py").write_text("def test(): assert False\n")
    done = mutate(package)
    assert done.returncode == 2 and "the tests fail without a change" in done.stderr


def test_a_module_that_cannot_be_loaded_before_is_refused(package: Path) -> None:
    done = mutate(package, "--preload", "no_such_module")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--preload no_such_module: No module named" in done.stderr


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = 2 * 0.5", {"x = 2 / 0.5", "x = 3 * 0.5", "x = 2 * 1.0"}),
        ("a < b <= c", {"a <= b <= c", "a < b < c"}),
        ("x = y if True else z", {"x = y if not True else z", "x = y if False else z"}),
        ("f(op=MAX)", {"...", "f(op=SUM)"}),
        ("@triton.jit\ndef kernel():\n    return 1", set()),
        ("zip(strict=True)", {"..."}),
    ],
)
def test_each_mutant_has_one_change(before: str, after: set[str]) -> None:
    assert {text for *_, text in mutants(before)} == {ast.unparse(ast.parse(t)) for t in after}
