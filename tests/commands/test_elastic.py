"""Command lines of the launcher that torchrun would answer with a traceback, and exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from coatlm.commands.elastic import main, wrong_count


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nproc-per-node=0"], "--nproc-per-node 0: at least 1"),
        (["--nproc_per_node", "-1"], "--nproc-per-node -1: at least 1"),
        (["--standalone", "--nnodes=0:2"], "--nnodes 0:2: at least 1"),
        (["--nproc-per-node=a"], "--nproc-per-node a: a number, or one of auto, cpu, gpu, xpu"),
    ],
)
def test_a_number_that_cannot_be_is_one_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "pretrain.py", "x.yaml"]) == 2
    assert capsys.readouterr().err == f"error: {told}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc-per-node=gpu", "--nnodes", "1:4", "pretrain.py", "x.yaml"],
        ["--nproc-per-node", "2", "script.py", "--nnodes=0"],  # an argument of the script
        ["--nnodes"],
        [],
    ],
)
def test_others_are_left_to_torchrun(words: list[str]) -> None:
    assert wrong_count(words) == ""


# In a process of its own, because the thread that repeats signals does not end with `main`.
ENDINGS = """
import json, os, sys
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from coatlm.commands import elastic

def torchrun(arguments):
    if number:
        os.kill(os.getpid(), number)
    if code:
        raise ChildFailedError("pretrain.py", {0: ProcessFailure(0, 1, code, "")})

elastic.torchrun, found = torchrun, []
for number, code in json.loads(sys.argv[1]):
    found.append(elastic.main(["pretrain.py", "x.yaml"]))
print(json.dumps(found))
"""
USR1, TERM = signal.SIGUSR1, signal.SIGTERM


def test_the_exit_code_is_that_of_the_signal_only_if_the_signal_ended_the_ranks() -> None:
    expected = {
        (0, 4): 4,
        (0, -9): 137,
        (USR1, 85): 85,
        (USR1, 0): 85,  # under --max-restarts
        (USR1, 138): 85,  # before the first step
        (USR1, -10): 85,  # before Python handled signals
        (TERM, 143): 143,
        (USR1, 4): 4,  # the checkpoint was not written
        (USR1, -9): 137,  # killed while saving
        (TERM, 1): 1,
    }
    words = [sys.executable, "-W", "ignore", "-c", ENDINGS, json.dumps([*expected])]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [*expected.values()]
