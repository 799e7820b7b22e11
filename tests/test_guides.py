"""The README and the guides: commands run, and numbers were measured. test_docs.py has the rest.

A fenced block says how its commands are tested, in order, in a directory of their page:

    ```sh run      all are run; guides.py says what makes them small
    ```python run  the same for a script
    ```sh check    some are of the kinds that follow, which are checked, and the others are run

What is not run, and why:

    make install   it downloads packages. The target exists
    pip install    the same. Its extras and the file of constraints exist
    pip wheel      it downloads setuptools; test_installed.py builds the wheel without a network
    make test      it would run this test. The target exists
    tools/bench.py its rows end-to-end, memory and rates need a GPU, and complain of nothing else
    .ci/slurm, squeue, scancel     they need root and SLURM; tests marked `slurm` do the same

test_guides_ranks.py has the pages that start several processes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import guide_inputs
from tests.distributed import ROOT
from tests.guide_launchers import launch
from tests.guide_runs import SMALL, STEPS, call
from tests.guides import (
    BLOCK,
    GUIDES,
    PAGES,
    blocks,
    commands,
    not_run,
    perform,
    perform_all,
    script,
    starts_ranks,
)

pytestmark = pytest.mark.slow

LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
FENCE = re.compile(r"^ *```(.*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(\.venv/|\.ci/|make |torchrun |srun |coatlm |python |pip |eval )", re.M)
REMOTE = ROOT / "docs/guides/remote.md"


def named(pages: Sequence[Path]) -> list[Any]:
    return [pytest.param(page, id=page.name) for page in pages]


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("materials")
    guide_inputs.common(root)
    return root


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# what is run


@pytest.mark.parametrize("page", named([p for p in PAGES if p != REMOTE and not starts_ranks(p)]))
def test_commands_of_a_page_run(
    page: Path, materials: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide_inputs.given(page, materials, directory)
    perform_all(page, monkeypatch)


def test_commands_of_the_page_on_urls_run_against_a_store(
    materials: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has a bucket of text, from which the page prepares a dataset and trains."""
    import pyarrow
    import pyarrow.parquet
    from s3fs import S3FileSystem

    from coatlm.remote import Location
    from tests.object_store import s3

    guide_inputs.given(REMOTE, materials, directory)
    table = pyarrow.table({"text": guide_inputs.TEXTS[:100]})
    pyarrow.parquet.write_table(table, "books.parquet")
    # training on blocks of this size downloads several
    monkeypatch.setitem(SMALL, "data.remote_block", 16384)
    guide_inputs.save_llama_3(Path("llama"))
    with s3():
        for bucket in ("corpus", "runs", "models"):
            S3FileSystem().mkdir(bucket)
        S3FileSystem().put("llama/", "models/llama3-8b/", recursive=True)
        Location.of("s3://corpus/web/a.jsonl.zst").upload(Path("corpus/a.jsonl.zst"))
        Location.of("s3://corpus/books.parquet").upload(Path("books.parquet"))
        for words in commands(REMOTE):
            if not not_run(words):
                perform(words, monkeypatch)
            for path in Path("data").glob("web.*"):
                Location.of(f"s3://corpus/tokens/{path.name}").upload(path)
    assert f"at step {STEPS}" in Path("runs/llama-125m/train.log").read_text()
    assert "weights of s3://models/llama3-8b" in Path("runs/llama3-8b/train.log").read_text()


# what is checked


def check_make(words: Sequence[str]) -> None:
    """The target exists."""
    done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_pip(words: Sequence[str]) -> None:
    """Extras and the file of constraints exist; a wheel is of this project."""
    if words[1] == "wheel":
        assert words[2:] == ["--no-deps", "--wheel-dir", "dist", "."]
        return
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert words[1:3] == ["install", "-c"] and (ROOT / words[3]).is_file() and words[4] == "-e"
    for name in re.fullmatch(r"\.\[([a-z,]+)\]", words[5])[1].split(","):  # type: ignore[index]
        assert name in extras["optional-dependencies"]


def check_bench(
    words: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The benchmark has these options, and lacks nothing but a GPU."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    try:
        code = call(*script(words), monkeypatch)
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr().err
    assert code == 2 and "needs 1 GPU, this machine has 0" in said, said


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=f"{page.stem}: {shlex.join(words)[:70]}")
        for page in PAGES
        for words in commands(page)
        if not_run(words)
    ],
)
def test_commands_that_are_not_run_would_start(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    name = Path(words[0]).name
    if name == "make":
        check_make(words)
    elif name == "pip":
        check_pip(words)
    elif "tools/bench.py" in words:
        check_bench(words, monkeypatch, capsys)
    elif "/slurm" in shlex.join(words):
        assert os.access(".ci/slurm", os.X_OK)


@pytest.mark.parametrize("page", named(PAGES))
def test_every_command_of_a_page_is_in_a_block_that_says_how_it_is_tested(page: Path) -> None:
    for language, text in FENCE.findall(page.read_text()):
        if language not in ("sh run", "sh check", "python run"):
            assert not COMMAND.search(text), f"mark this block:\n{text}"
    assert len(BLOCK.findall(page.read_text())) == sum(1 for _ in blocks(page))
    for mark, found in blocks(page):
        left = [shlex.join(words) for words in found if not_run(words)]
        assert bool(left) == (mark == "check"), f"{mark}: not run are {left}"


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nproc-per-node=3 pretrain.py configs/llama3-8b.yaml",
        "torchrun --nproc-per-host=8 pretrain.py configs/llama3-8b.yaml",
        "torchrun --nproc-per-node=8 --no-python pretrain.py configs/llama3-8b.yaml",
        "torchrun --nproc-per-node=8 --no-python coatlm trian llama3-8b",
        "srun --nodes=4 --ntasks-per-node=8 .venv/bin/python pretrain.py configs/llama3-8b",
        "srun --nodes=4 --tasks-per-node=8 .venv/bin/python pretrain.py configs/llama3-8b.yaml",
        "make trian CONFIG=configs/quickstart.yaml",
        "make train CONFIG=configs/quickstrat.yaml",
        'make train CONFIG=configs/quickstart.yaml ARGS="optim.lrr=3e-4"',
        ".venv/bin/coatlm train quickstart optim.recipe=adam",
        ".venv/bin/python pretrain.py configs/quickstart.yaml parallel.tp=2",
        ".venv/bin/python tools/estimate_memory.py configs/llama-1b.yaml --rank-count 8",
        ".venv/bin/python tools/preprocess_data.py --input corpus/*.txt --output-prefix data/x",
        ".venv/bin/python tools/submit_slurm.py configs/llama3-8b.yaml --nodes 4 --gpus-per-host 8",
        ".venv/bin/python tools/submit_slurm.py configs/llama3-8b.yaml --nodes 5 --gpus-per-node 7",
        'eval "$(register-argcomplete coatlm)"',
    ],
)
def test_a_command_that_is_wrong_is_found(
    line: str, materials: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide_inputs.given(ROOT / "README.md", materials, directory)
    with pytest.raises((AssertionError, ValueError, SystemExit)):
        perform(shlex.split(line), monkeypatch)


def test_ranks_of_a_wrong_command_fail(
    materials: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What planning does not find: here a checkpoint is missing."""
    guide_inputs.given(ROOT / "README.md", materials, directory)
    line = "torchrun --nproc-per-node=4 pretrain.py configs/quickstart.yaml checkpoint.resume=gone"
    line += " train.micro_batch=2"
    with pytest.raises(AssertionError, match=r"exit codes \[2, 2, 2, 2\](.|\n)*gone"):
        launch(shlex.split(line))


def test_a_bench_row_that_does_not_exist_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(AssertionError):
        check_bench(shlex.split(".venv/bin/python tools/bench.py end"), monkeypatch, capsys)


# what is said


def test_the_readme_links_every_guide() -> None:
    linked = {(ROOT / target).resolve() for target in LINK.findall(PAGES[0].read_text())}
    assert set(GUIDES) <= linked


def test_numbers_of_the_recipes_page_stand_in_the_results() -> None:
    results = "".join(page.read_text() for page in (ROOT / "docs/results").glob("*.md"))
    measured = set(re.findall(r"\d+(?:\.\d+)?", results))
    rows = [line for line in (ROOT / "docs/guides/recipes.md").open() if line.startswith("| `")]
    assert len(rows) >= 14
    for row in rows:
        for number in re.findall(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w.])", row.split("|", 2)[2]):
            assert number in measured, f"{number} of {row}"
