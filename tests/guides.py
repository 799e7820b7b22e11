"""The commands of the README and the guides, run small; test_guides*.py are the tests.

A command is run as it stands on the page, with these changes:

    training       keys of SMALL and a text of its own, unless the page has prepared data before;
                   a configuration that the page itself wrote keeps its model
    coatlm train   as many forks as its tensor, pipeline and context parallelism need
    torchrun       up to REAL_RANKS processes: torchrun itself; else forks with its environment,
                   as many as the page starts, over gloo. torchrun's parser reads the options
    srun           forks with SLURM's environment, over gloo: as many nodes as on the page, and
                   MOST_RANKS // nodes tasks per node, all on this host
    make train     what `make -n` says that the target runs
    workers        2
    studies        one seed; recipes neither capture CUDA graphs nor need TransformerEngine
    submit_slurm   sbatch and srun only record their words; the script is checked by shellcheck,
                   run by bash, and starts as srun does above

Training of several ranks, and of a job, is planned as well, with its own sizes and number of ranks.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from coatlm.config.program import SCRIPTS
from tests.distributed import ROOT
from tests.forks import pretrain
from tests.guide_launchers import elastic, launch, submit, train
from tests.guide_runs import (
    OTHER_TEXT,
    SMALL,
    STEPS,
    call,
    finish,
    fork_jobs,
    launched,
    process,
    small,
)

GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *GUIDES]
BLOCK = re.compile(r"^```(sh|python) *(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LAUNCHERS = ("torchrun", "srun")
NOT_RUN = (
    ("make", "install"),
    ("make", "test"),
    (".venv/bin/pip", "install"),
    (".venv/bin/pip", "wheel"),
    (".venv/bin/python", "tools/bench.py"),
    (".ci/slurm",),
    ("eval", "$(.ci/slurm start)"),
    ("squeue",),
    ("scancel",),
)


def blocks(page: Path) -> Iterator[tuple[str, list[list[str]]]]:
    """The mark of every block and the words of its commands; comments and line ends go.

    A Python script is the two words "python" and its text.
    """
    for language, mark, text in BLOCK.findall(page.read_text()):
        if language == "python":
            yield mark, [[language, text]]
        else:
            lines = text.replace("\\\n", " ").splitlines()
            yield mark, [words for line in lines if (words := shlex.split(line, comments=True))]


def commands(page: Path) -> list[list[str]]:
    return [words for _, found in blocks(page) for words in found]


def not_run(words: Sequence[str]) -> bool:
    """Whether a command is of a kind that no test runs: test_guides.py lists them, and why."""
    return any(words[: len(kind)] == list(kind) for kind in NOT_RUN)


def starts_ranks(page: Path) -> bool:
    """Whether a command of the page starts several ranks, or writes a job that does."""
    launchers = (*LAUNCHERS, "elastic.py", "submit_slurm.py")
    return any(Path(word).name in launchers for words in commands(page) for word in words[:2])


def perform_all(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of a page in the working directory, as far as tests run them."""
    fork_jobs(monkeypatch)
    for words in commands(page):
        if not not_run(words):
            perform(words, monkeypatch)


def perform(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one command in the working directory; AssertionError if it fails."""
    name, shown = Path(words[0]).name, shlex.join(words)
    if words[0] == "python":
        exec(compile(words[1], "a block of the page", "exec"), {})
    elif name in LAUNCHERS:
        launch(words)
    elif name == "make":
        finish(shown, launched, small(made(words)))
    elif name == "eval":
        process(shown, ["bash", "-c", f'set -e; text={words[1]}; eval "$text"'])
    elif name == "coatlm" and words[1] == "train":
        train(words[2:])
    elif words[1] == "-m":  # of another package
        process(shown, [sys.executable, *words[1:]])
    else:
        file, arguments = script(words)
        if file == "pretrain.py":
            finish(shown, pretrain, small(arguments))
        elif file == "tools/elastic.py":
            elastic(arguments)
        elif file == "tools/submit_slurm.py":
            submit(arguments, monkeypatch)
        else:
            code = call(file, ADAPT.get(file, list)(arguments), monkeypatch)
            assert not code, f"{shown} ended with {code}"


# tools


def script(words: Sequence[str]) -> tuple[str, list[str]]:
    """The script that is run, or a command of coatlm that has none, and the arguments."""
    if words[0] == ".venv/bin/coatlm":
        return SCRIPTS.get(words[1], words[1]), list(words[2:])
    assert words[0] == ".venv/bin/python", f"{shlex.join(words)}: commands name .venv/bin/python"
    return words[1], list(words[2:])


def two_workers(arguments: Sequence[str]) -> list[str]:
    """The arguments of tools/preprocess_data.py with --workers 2, if they have another number."""
    before = ["", *arguments]
    pairs = zip(before, arguments, strict=False)  # `before` has one more
    return ["2" if last == "--workers" else word for last, word in pairs]


def study(arguments: Sequence[str], *more: str) -> list[str]:
    """A study of one seed, of SMALL runs; its file comes first."""
    sizes = SMALL | {"train.micro_batch": 2, "train.global_batch": 2, "train.steps": STEPS}
    keys = [f"{key}={value}" for key, value in sizes.items()]
    return [arguments[0], *keys, *more, *arguments[1:], "--seeds", "1"]


def branches(arguments: Sequence[str]) -> list[str]:
    """The arguments of a study that branches: half of the STEPS are the trunk's."""
    found, half = yaml.safe_load((ROOT / arguments[0]).read_text()), STEPS // 2
    base, copy = (ROOT / arguments[0]).parent / found["base"], Path("study.yaml")
    trunk = [*found["trunk"], f"train.steps={half}", f"checkpoint.every={half}"]
    keys = ["optim.warmup_steps=1", f"optim.decay_steps={half}", "model.vocab=512"]
    keys += [*OTHER_TEXT, "data.split=[80,20,0]"]
    copy.write_text(yaml.safe_dump(found | {"base": str(base), "trunk": trunk}))
    return study([str(copy), *arguments[1:]], *keys)


def fine_tuning_study(arguments: Sequence[str]) -> list[str]:
    """The arguments of a study of fine-tuning with few examples and its checkpoint's model."""
    words = study(arguments, "data.seq_len=64", "data.split=[80,20,0]")
    kept = [word for word in words if not word.startswith("model.")]
    return [*kept, "--train", "60", "--test", "10"]


ADAPT: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "tools/preprocess_data.py": two_workers,
    "tools/study_loss.py": branches,
    "tools/study_finetune.py": fine_tuning_study,
}


def made(words: Sequence[str]) -> list[str]:
    """The arguments of tools/launch.py that a target of the Makefile runs."""
    outer = ("MAKE", "MFLAGS", "ARGS", "CONFIG", "VENV")  # of the `make test` that runs this test
    env = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
    command = ["make", "-n", *words[1:]]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = shlex.split(done.stdout.splitlines()[-1])  # installation may come before
    assert line[:2] == [".venv/bin/python", "tools/launch.py"], f"{shlex.join(words)} runs {line}"
    return line[2:]
