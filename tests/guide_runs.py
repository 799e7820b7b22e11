"""Small runs for tests of the guides: training in forks, without GPUs, and tools in this process.

A group of ranks has as many forks as environments, which are those of its launcher; it communicates
over gloo.
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import patch

import pytest

from coatlm.config import load_config
from coatlm.config.shipped import config_file
from tests import distributed
from tests.distributed import ROOT, python_path
from tests.forks import pretrain
from tools.studies import loss_runs

SMALL: dict[str, object] = {
    **{"model.layers": 1, "model.hidden": 64, "model.heads": 8, "model.ffn": 128},
    **{"model.head_dim": 16, "data.seq_len": 32},
    **{"train.eval_every": 2, "train.eval_batches": 1, "checkpoint.every": 2, "log.every": 1},
}
VOCAB = 512  # where the configuration has more tokens
STEPS = 4  # of a small run; twice as many where the command continues another run
OTHER_TEXT = ["data.paths=[]", "data.text=[text.py]", "data.tokenizer=byte"]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
TIMEOUT = 300.0  # seconds for the ranks of one command
PEERS_S = 10.0  # seconds in which each of the others ends when one has failed


def small(arguments: Sequence[str], ranks: int = 1) -> list[str]:
    """The arguments of a page's training with `ranks` processes, changed so that it is short."""
    if "--dry-run" in arguments:
        return list(arguments)
    given = [word for word in arguments[1:] if "=" in word and not word.startswith("-")]
    keys = {word.partition("=")[0] for word in given}
    path = config_file(arguments[0])
    config = load_config(path, given)
    parallel, own = config.parallel, own_data(config.data)
    sizes = dict(SMALL)
    if path.parent.name == "configs":
        sizes["model.layers"] = parallel.pp
        if (config.model.vocab or 0) > VOCAB:
            sizes["model.vocab"] = VOCAB
        if own:
            sizes["data.split"] = "[80,20,0]"
    else:  # a command of the page wrote it
        sizes = {key: value for key, value in sizes.items() if not key.startswith("model.")}
    model_ranks = parallel.tp * parallel.pp * parallel.cp
    micro = config.train.micro_batch if "train.micro_batch" in keys else 2
    assert isinstance(micro, int) and ranks % model_ranks == 0
    batch = micro * parallel.pp * ranks // model_ranks
    sizes |= {"train.micro_batch": micro, "train.global_batch": batch}
    continues = bool(keys & {"train.steps", "checkpoint.resume"})
    sizes["train.steps"] = STEPS * (1 + continues)
    if config.data.loss_mask != "all":
        sizes["data.seq_len"] = 128  # a whole conversation
    if "train.steps" not in keys:  # pages show alternatives; only more steps continue a run
        shutil.rmtree(config.run.dir, ignore_errors=True)
    instead = [] if own or "data.text" in keys else OTHER_TEXT
    return [*arguments, *instead, *(f"{key}={value}" for key, value in sizes.items())]


def own_data(data: Any) -> bool:
    """Whether the page has prepared what it trains on."""
    described = [prepared(str(source.path), data.tokenizer) for source in data.paths]
    return bool(described) and all(described)


def prepared(prefix: str, tokenizer: str) -> bool:
    """Whether the page has prepared this dataset with this tokenizer."""
    if "://" in prefix:
        return True
    described = Path(f"{prefix}.json")
    return described.exists() and tokenizer.partition("?")[0] in described.read_text()


def finish(shown: str, function: Callable[..., None], arguments: Sequence[str]) -> None:
    """Run `function` in a fork until it ends."""
    ranks(shown, function, arguments, [{}])


def ranks(
    shown: str,
    function: Callable[..., None],
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
) -> None:
    """Run `function` in a fork with each of these environments, without GPUs."""
    Path("logs").mkdir(exist_ok=True)
    common = {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), **NO_GPU}
    logs = [Path("logs", f"{rank}.log").absolute() for rank in range(len(environments))]
    for log in logs:
        log.unlink(missing_ok=True)
    with patch.dict(os.environ, NO_GPU):  # a process that is spawned asks for GPUs before `start`
        started = [
            distributed.start(
                function, *arguments, env={**os.environ, **common, **env}, log=log, cwd=Path.cwd()
            )
            for env, log in zip(environments, logs, strict=True)
        ]
    try:
        distributed.wait(started, time.monotonic() + TIMEOUT)
        for one in started:  # one has failed, and the others say so, or none has
            one.join(PEERS_S)
        codes = [one.exitcode for one in started]
    finally:
        for one in started:
            one.kill()
            one.join()
    texts = [log.read_text(errors="replace")[-3000:] for log in logs]
    said = "\n".join(text for text, code in zip(texts, codes, strict=True) if code != 0)
    assert not any(codes) and None not in codes, f"{shown}: exit codes {codes}:\n{said}"


def coatlm(*words: str) -> None:
    """What a fork does for `coatlm WORDS`."""
    sys.argv = ["coatlm", *words]
    in_this_process()
    runpy.run_module("coatlm", run_name="__main__")


def launched(*arguments: str) -> None:
    """What a fork does for `python tools/launch.py ARGUMENTS`."""
    sys.argv = ["tools/launch.py", *arguments]
    in_this_process()
    runpy.run_path("tools/launch.py", run_name="__main__")


def in_this_process() -> None:
    """Let the launcher call pretrain.py, for which it replaces its process, instead."""

    def execv(path: str, line: Sequence[str]) -> None:
        assert path == line[0] == sys.executable and Path(line[1]).name == "pretrain.py", line
        sys.argv = list(line[1:])
        pretrain(*line[2:])

    os.execv = execv  # type: ignore[assignment]


def process(shown: str, words: Sequence[str]) -> None:
    """Run a program, without GPUs; commands of this environment come first in PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": python_path(), **NO_GPU}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, f"{shown}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}"


def call(tool: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int | None:
    """The exit code of a tool's command line, run in this process."""
    monkeypatch.setattr(sys, "argv", [tool, *arguments])
    source = Path(tool).read_text() if tool.endswith(".py") else f"coatlm.commands.{tool}"
    door = re.search(r"coatlm\.commands\.\w+", source)
    name = door[0] if door else tool.removesuffix(".py").replace("/", ".")
    code = importlib.import_module(name).main()
    assert code is None or isinstance(code, int)
    return code


class Fork:
    """A fork in the place of the process that a study starts for `python pretrain.py CONFIG`."""

    def __init__(
        self, command: Sequence[str], *, env: dict[str, str], stdout: IO[bytes], **_: object
    ) -> None:
        assert command[:2] == [sys.executable, str(ROOT / "pretrain.py")]
        self.process = distributed.start(
            pretrain, *command[2:], env=env, log=Path(stdout.name), cwd=Path.cwd()
        )

    def poll(self) -> int | None:
        code: int | None = self.process.exitcode
        return code

    def send_signal(self, number: int) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid, number)


def fork_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let studies start forks."""
    names = {"DEVNULL": subprocess.DEVNULL, "STDOUT": subprocess.STDOUT, "Popen": Fork}
    monkeypatch.setattr(loss_runs, "subprocess", SimpleNamespace(**names))
