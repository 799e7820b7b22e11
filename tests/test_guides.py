"""The README and the guides: commands run, and numbers were measured. test_docs.py has the rest.

A fenced block says how its commands are tested:

    ```sh run      they are run, in order, in a directory of their own
    ```python run  the same for a script
    ```sh check    they need a GPU, a network, several processes or long: options and configuration
                   are parsed, training becomes a dry run for as many ranks as are started

Training that is run is made small (SMALL): the configuration's own steps and sizes take minutes.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coatlm.commands import train as pretrain
from coatlm.config import load_config
from coatlm.config.program import SCRIPTS
from coatlm.config.shipped import config_file
from tests.forks import Forks

ROOT = Path(__file__).resolve().parent.parent
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *GUIDES]
SMALL = {
    **{"model.layers": 1, "model.hidden": 64, "model.heads": 4, "model.ffn": 48},
    "data.seq_len": 32,
    **{"train.micro_batch": 2, "train.global_batch": 2, "train.eval_every": 2},
    **{"train.eval_batches": 1, "checkpoint.every": 2, "log.every": 1},
}
STEPS = 4  # of a small run; twice as many where the command asks for more than the configuration
BLOCK = re.compile(r"^```(sh|python) *(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def blocks(page: Path, mark: str) -> list[list[str]]:
    """Of every block with this mark, the words of each command; comments and line ends go.

    A Python script is the two words "python" and its text.
    """
    found = []
    for language, kind, text in BLOCK.findall(page.read_text()):
        if kind == mark and language == "python":
            found.append([language, text])
        elif kind == mark:
            lines = text.replace("\\\n", " ").splitlines()
            found += [words for line in lines if (words := shlex.split(line, comments=True))]
    return found


def commands(mark: str) -> list[Any]:
    return [
        pytest.param(words, id=f"{page.stem}: {shlex.join(words)[:70]}")
        for page in PAGES
        for words in blocks(page, mark)
    ]


def named(pages: Sequence[Path]) -> list[Any]:
    return [pytest.param(page, id=page.name) for page in pages]


# what is run


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that reads as the checkout and may be written to."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("coatlm", "configs", "tools", "pretrain.py", "README.md"):
        (root / name).symlink_to(ROOT / name)
    text = "".join(f"def f{i}():\n    return {i * i}\n" for i in range(2000))
    (root / "text.py").write_text(text)
    pairs = "".join(f'{{"prompt": "{i}+1=", "completion": "{i + 1}"}}\n' for i in range(200))
    (root / "pairs.jsonl").write_text(pairs)
    return root


@pytest.fixture(scope="module")
def forks(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Forks:
    return Forks(tmp_path_factory.mktemp("output"), cwd=checkout)


def script(words: Sequence[str]) -> tuple[str, list[str]]:
    """The script that is run, or a command of coatlm that has none, and the arguments."""
    if Path(words[0]).name == "coatlm":
        return SCRIPTS.get(words[1], words[1]), list(words[2:])
    assert words[0] == ".venv/bin/python", f"{shlex.join(words)}: commands name .venv/bin/python"
    return words[1], list(words[2:])


def small(arguments: Sequence[str]) -> list[str]:
    """The same training, but little of it."""
    if "--dry-run" in arguments:
        return list(arguments)
    given = [word for word in arguments if "=" in word]
    steps = STEPS * (2 if any(word.startswith("train.steps=") for word in given) else 1)
    data = load_config(config_file(arguments[0]), given).data
    prepared = bool(data.paths) and all(
        "://" in path or any(Path().glob(f"{path}*"))
        for path in (str(source.path) for source in data.paths)
    )
    own = prepared or "data.text=" in " ".join(given)
    text = [] if own else ["data.paths=[]", "data.text=[text.py]", "data.tokenizer=byte"]
    sizes = [f"{key}={value}" for key, value in SMALL.items()]
    return [*arguments, *text, *sizes, f"train.steps={steps}"]


def call(tool: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int | None:
    """The exit code of a tool's command line, run in this process."""
    monkeypatch.setattr(sys, "argv", [tool, *arguments])
    source = Path(tool).read_text() if tool.endswith(".py") else f"coatlm.commands.{tool}"
    door = re.search(r"coatlm\.commands\.\w+", source)
    name = door[0] if door else tool.removesuffix(".py").replace("/", ".")
    code = importlib.import_module(name).main()
    assert code is None or isinstance(code, int)
    return code


@pytest.mark.parametrize("page", named(PAGES))
def test_commands_that_are_marked_run(
    page: Path,
    forks: Forks,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(checkout)
    for words in blocks(page, "run"):
        if words[0] == "python":
            exec(compile(words[1], str(page), "exec"), {})
            continue
        if words[1] == "-m":  # of another package
            done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True)
            assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stderr[-3000:]}"
            continue
        file, arguments = script(words)
        if file == "pretrain.py":
            code, output = forks.run(*small(arguments))
        else:
            found = call(file, arguments, monkeypatch)
            code, output = found or 0, "".join(capsys.readouterr())
        assert code == 0, f"{shlex.join(words)} ended with {code}:\n{output[-3000:]}"


def test_commands_of_the_page_on_urls_run_against_a_store(
    forks: Forks, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bucket of text, from which the page prepares a dataset and trains."""
    import pyarrow
    import pyarrow.parquet
    import zstandard
    from s3fs import S3FileSystem

    from coatlm.remote import Location
    from tests.bpe import train_bpe
    from tests.object_store import s3

    monkeypatch.chdir(checkout)
    texts = [f"{i} squared is {i * i}, and cubed it is {i**3}." for i in range(4000)]
    Path("data").mkdir(exist_ok=True)
    train_bpe(texts, vocab_size=400).save("data/tokenizer.json")
    lines = "".join(f'{{"text": "{text}"}}\n' for text in texts)
    Path("a.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[:100]}), "books.parquet")
    trained = 0
    with s3():
        for bucket in ("corpus", "runs"):
            S3FileSystem().mkdir(bucket)
        Location.of("s3://corpus/web/a.jsonl.zst").upload(Path("a.jsonl.zst"))
        Location.of("s3://corpus/books.parquet").upload(Path("books.parquet"))
        for words in blocks(ROOT / "docs/guides/remote.md", "check"):
            if Path(words[0]).name == "pip":
                continue
            file, arguments = script(words)
            if file != "pretrain.py":
                fewer = ["2" if word == "32" else word for word in arguments]
                assert not call(file, fewer, monkeypatch)
                for path in Path("data").glob("web.*"):
                    Location.of(f"s3://corpus/tokens/{path.name}").upload(path)
                continue
            trained += 1
            own = [f"run.dir=runs/url{trained}", f"train.steps={STEPS * (trained - 1) or STEPS}"]
            more = ["model.heads=4", "data.split=[90,10,0]", "data.remote_block=16384", *own]
            code, output = forks.run(*small(arguments), *more)
            assert code == 0, f"{shlex.join(words)} ended with {code}:\n{output[-3000:]}"
    assert trained == 3 and f"at step {STEPS}" in output


# what is checked


class Parsed(Exception):
    """Raised in the place of what a tool would do next."""


def parse(tool: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tool read its command line, and no more."""
    for name in ("parse_args", "parse_intermixed_args"):
        original = getattr(argparse.ArgumentParser, name)

        def stop(self: Any, *args: Any, original: Any = original) -> None:
            original(self, *args)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, name, stop)
    with pytest.raises(Parsed):
        call(tool, arguments, monkeypatch)


def dry_run(arguments: Sequence[str], ranks: int) -> None:
    """A run of `ranks` processes, checked and planned."""
    assert pretrain.main([*arguments, "--dry-run", "--ranks", str(ranks)]) == 0


def option(words: Sequence[str], name: str) -> int:
    """The number behind `--name=`, 1 where it is not given."""
    values = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return int(values[0]) if values else 1


def check_launch(words: Sequence[str]) -> None:
    """torchrun and srun."""
    at = next(i for i, word in enumerate(words) if word in ("pretrain.py", "train"))
    start, arguments = words[:at], words[at + 1 :]
    if start[0] == "srun":
        dry_run(arguments, option(start, "nodes") * option(start, "ntasks-per-node"))
    else:
        dry_run(arguments, option(start, "nnodes") * option(start, "nproc-per-node"))


def check_make(words: Sequence[str]) -> None:
    """The target exists, and what it would train is a configuration."""
    done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given = dict(word.split("=", 1) for word in words if "=" in word)
    if "CONFIG" in given:
        load_config(ROOT / given["CONFIG"], shlex.split(given.get("ARGS", "")))


def check_pip(words: Sequence[str]) -> None:
    """Extras and the file of constraints exist; a wheel is of this project."""
    if words[1] == "wheel":
        assert words[2:] == ["--no-deps", "--wheel-dir", "dist", "."]
        return
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert words[1:3] == ["install", "-c"] and (ROOT / words[3]).is_file() and words[4] == "-e"
    for name in re.fullmatch(r"\.\[([a-z,]+)\]", words[5])[1].split(","):  # type: ignore[index]
        assert name in extras["optional-dependencies"]


@pytest.mark.parametrize("words", commands("check"))
def test_commands_that_are_marked_check_would_start(
    words: list[str], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout)
    name = Path(words[0]).name
    if name == "make":
        check_make(words)
    elif name == "pip":
        check_pip(words)
    elif name in ("torchrun", "srun"):
        check_launch(words)
    elif script(words)[0] == "pretrain.py":
        dry_run(words[2:], 1)
    else:
        parse(*script(words), monkeypatch)


@pytest.mark.parametrize("page", named(GUIDES))
def test_every_command_of_a_guide_is_run_or_checked(page: Path) -> None:
    kinds = {kind for language, kind, _ in BLOCK.findall(page.read_text()) if language == "sh"}
    assert kinds <= {"run", "check"}, "mark every sh block: ```sh run or ```sh check"
    assert blocks(page, "run") or blocks(page, "check")


def test_a_command_that_is_wrong_is_found(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(checkout)
    with pytest.raises(AssertionError):
        check_launch(shlex.split("torchrun --nproc-per-node=3 pretrain.py configs/llama3-8b.yaml"))
    with pytest.raises(AssertionError):
        check_make(["make", "trian"])
    with pytest.raises(SystemExit):
        parse("tools/estimate_memory.py", ["a.yaml", "--rank-count", "8"], monkeypatch)


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
