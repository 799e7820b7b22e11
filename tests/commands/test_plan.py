"""`coatlm plan` with several numbers of GPUs, failures, and the tables of the page on planning."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from coatlm.commands.plan import main
from coatlm.model.failures import checkpoint_interval, lost_share, time_between

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/planning.md"
BLOCK = re.compile(r"^\.venv/bin/coatlm plan (.*,.*)\n```\n\n((?:\|.*\n)+)", re.MULTILINE)
REFUSED = re.compile(r"`\.venv/bin/coatlm plan (.*)` begins with\n\n```\n(.*)\n```")


@pytest.mark.parametrize("command", [found[1] for found in BLOCK.finditer(PAGE.read_text())])
def test_a_table_of_the_page_is_what_its_command_prints(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (table,) = (found[2] for found in BLOCK.finditer(PAGE.read_text()) if found[1] == command)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == table


def test_the_page_has_three_models() -> None:
    assert len(BLOCK.findall(PAGE.read_text())) == 3


def test_the_example_of_the_page_in_which_nothing_fits_proposes_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (found,) = REFUSED.finditer(PAGE.read_text())
    assert main(shlex.split(found[1])) == 1
    first, _, head, _, layout, _, time, words, _, *changes, step = (
        capsys.readouterr().out.splitlines()
    )
    assert first == found[2] and head.startswith("| layout | ")
    assert layout.startswith("| one rank, ") and time.startswith("Time of the first: ")
    named = first.partition("; with ")[2].rstrip(":").split()
    assert words.startswith(f"As overrides: {' '.join(named)} parallel.tp=1 ")
    assert [line.partition(": ")[0] for line in changes] == named
    assert step.startswith("A step of the first layout takes ")


def test_the_overrides_that_are_printed_give_the_first_layout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["llama3.1-70b", "--gpus", "64"]
    assert main([*command, "--top", "1"]) == 0
    _, _, first, _, _, words, *_ = capsys.readouterr().out.splitlines()
    overrides = words.removeprefix("As overrides: ").split()
    assert "tp_chunks 4, " in first and "parallel.tp_chunks=4" in overrides
    assert main([*command, *overrides, "--keep"]) == 0
    assert capsys.readouterr().out.splitlines()[2] == first


def test_cuda_graphs_that_are_given_exclude_layouts_that_cannot_be_captured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["llama3.2-1b", "train.cuda_graphs=true", "--gpus", "8"]
    assert main([*command, "--top", "3"]) == 0
    _, _, *layouts, _, _, words = capsys.readouterr().out.splitlines()
    assert len(layouts) == 3  # with train.cuda_graphs=auto, the first has zero 2
    assert all("zero 1, recompute none" in row and "pp" not in row for row in layouts)
    overrides = words.removeprefix("As overrides: ").split()
    assert main([*command, *overrides, "--keep"]) == 0
    assert capsys.readouterr().out.splitlines()[2] == layouts[0]
    assert main(["qwen3-14b", "train.cuda_graphs=true", "--gpus", "1"]) == 1
    none = "no layout of 1 x NVIDIA H100 80GB HBM3 with train.cuda_graphs=true fits 79.2 GiB"
    assert capsys.readouterr().out.startswith(none)


def test_layouts_without_context_parallelism_are_compared_when_an_option_needs_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["llama3-8b", "precision.recipe=coat-lean", "--gpus", "8"]
    assert main([*command, "--top", "1"]) == 0
    _, _, first, *_ = capsys.readouterr().out.splitlines()
    assert "cp" not in first
    command += ["parallel.cp=2", "parallel.cp_comm_kv=fp8"]
    assert main([*command, "--top", "1"]) == 0
    _, _, same, _, _, note, words = capsys.readouterr().out.splitlines()
    assert same == first
    assert note == "parallel.cp_comm_kv=fp8 applies only to layouts with cp above 1."
    overrides = words.removeprefix("As overrides: ").split()
    assert {"parallel.cp=1", "parallel.cp_comm_kv=bf16"} < {*overrides}
    assert main([*command, *overrides, "--keep"]) == 0
    assert capsys.readouterr().out.splitlines()[2] == first


def test_a_run_that_no_change_fits_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama3.1-405b", "--gpus", "1"]) == 1
    assert capsys.readouterr().out == (
        "no layout of 1 x NVIDIA H100 80GB HBM3 fits 79.2 GiB, nor does one with other formats, "
        "offloaded states or steps of one microbatch\n"
    )


def test_a_number_of_gpus_that_nothing_fits_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama3.1-405b", "--gpus", "1,2"]) == 1
    head, _, one, two = capsys.readouterr().out.splitlines()
    assert one.startswith("| 1 | none fits | ") and two.startswith("| 2 | none fits | ")
    assert one.count("|") == head.count("|")


def test_a_layout_that_is_kept_and_does_not_fit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    alone = ["parallel.tp=1", "parallel.sequence_parallel=false"]
    assert main(["qwen3-14b", "--gpus", "1", "--keep", *alone]) == 1
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("it does not fit: ") and last.endswith(" GiB of a GPU can be used")
    assert main(["qwen3-14b", "--gpus", "8", "--keep"]) == 0
    assert "it does not fit" not in capsys.readouterr().out


def test_a_number_of_gpus_that_divides_nothing_is_told_from_one_that_is_too_small(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["llama2-7b", "--gpus", "3"]) == 2
    assert "--gpus 3: no layout is valid: tp x cp x pp x dp must be 3, " in (
        told := capsys.readouterr().err
    )
    assert told.rstrip().endswith("; 2 GPUs have one")
    assert main(["llama2-7b", "--gpus", "3,8"]) == 0
    assert "| 3 | none divides model and batch | " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpus", "8,x"], "argument --gpus: '8,x': whole numbers, several with commas"),
        (["--gpus", "8,0"], "--gpus 0: 1 to"),
        (["--gpus", "8,16", "--keep"], "--gpus [8, 16]: one number with --keep"),
        (["--gpus", "8,16", "--tokens", "0"], "--tokens 0.0: at least 1"),
        (["--gpus", "8,16", "--save", "inf"], "--save inf: at least 0.001"),
        (["--gpus", "8", "--save", "9"], "--save 9.0: needs several numbers of --gpus"),
        (["--gpus", "8,16", "--top", "3"], "--top 3: needs one number of --gpus, without --keep"),
        (["--gpus", "8", "--keep", "--top", "3"], "--top 3: needs one number of --gpus, without"),
        (["--gpus", "8", "--top", "0"], "--top 0: at least 1"),
    ],
)
def test_wrong_numbers_are_one_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["llama3-8b", *words])
    except SystemExit as stop:
        code = int(stop.code or 0)
    error = capsys.readouterr().err
    assert code == 2 and told in error and error.count("\n") == 1


def test_no_more_than_all_time_is_lost() -> None:
    assert lost_share(save=1e6, between=11_000.0) == 1.0


def test_interruptions_of_llama_3_are_reproduced() -> None:
    assert 54 * 86400 / time_between(16384) == pytest.approx(419)
    assert time_between(2 * 16384) == time_between(16384) / 2


def test_the_interval_loses_the_least() -> None:
    """Daly's model: an interval of work succeeds, with its save, between exponential failures."""
    save, between = 60.0, 11_000.0

    def time_of(interval: float) -> float:  # relative to the work, without restarts
        return between * (2.718281828 ** ((interval + save) / between) - 1) / interval

    best = checkpoint_interval(save, between)
    assert min((time_of(x), x) for x in range(100, 5000, 10))[1] == pytest.approx(best, abs=10)
    assert time_of(best) - 1 == pytest.approx(lost_share(save, between), rel=0.15)
    assert checkpoint_interval(500.0, 100.0) == 100.0
