"""Command lines of the launcher that torchrun would answer with a traceback."""

from __future__ import annotations

import pytest

from coatlm.commands.elastic import main, wrong_count


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nproc-per-node=0"], "--nproc-per-node 0: at least 1"),
        (["--nproc_per_node", "-1"], "--nproc-per-node -1: at least 1"),
        (["--standalone", "--nnodes=0:2"], "--nnodes 0:2: at least 1"),
    ],
)
def test_a_number_below_1_is_one_line(
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
