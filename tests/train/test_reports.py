"""Errors of many ranks as few lines."""

from __future__ import annotations

import pytest

from coatlm.config import ConfigError
from coatlm.train.faults import NonFiniteError
from coatlm.train.manifest import CheckpointError, LostPeerError
from coatlm.train.reports import (
    FOREIGN,
    MAX_LINES,
    AgreedError,
    error_line,
    exit_code,
    merged,
    number_list,
    report_error,
)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "3"), ([5, 3], "3, 5"), ([1, 2], "1, 2"), ([0, 1, 2, 5, 7, 8, 9], "0-2, 5, 7-9")],
)
def test_ranks_are_listed_as_ranges(numbers: list[int], text: str) -> None:
    assert number_list(numbers) == text


def test_equal_errors_share_a_line_that_names_ranks_and_hosts() -> None:
    hosts = ["a", "b", "a", "b"]
    assert merged({1: "no", 3: "no"}, hosts) == "ranks 1, 3 (b): no"
    assert merged({0: "no", 3: "no"}, hosts) == "rank 0 (a), rank 3 (b): no"
    assert merged({1: "no", 2: "full"}, hosts) == "rank 1 (b): no\nrank 2 (a): full"
    assert merged(dict.fromkeys(range(4), "no\nnor this"), hosts) == "no\nnor this"
    assert merged({1: "no\nnor this"}, hosts) == "rank 1 (b): no\nrank 1 (b): nor this"


def test_thousands_of_ranks_stay_few_short_lines() -> None:
    hosts = [f"host{rank // 8}" for rank in range(4096)]
    alike = merged(dict.fromkeys(range(1, 4096), "no"), hosts)
    assert alike == "4095 ranks on 512 hosts, first rank 1 (host0): no"
    different = merged({rank: f"no {rank}" for rank in range(4096)}, hosts).splitlines()
    assert len(different) == MAX_LINES + 1 and different[-1] == "and 4086 more lines"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (ValueError("x"), 1),
        (NonFiniteError("x", 3), 3),
        (CheckpointError("x"), 4),
        (LostPeerError("x"), 1),
        (OSError(28, "full"), 4),
        (OSError(2, "none"), 1),
        (AgreedError("x", 4), 4),
    ],
)
def test_the_exit_code_belongs_to_the_error(error: Exception, code: int) -> None:
    assert exit_code(error) == code


def test_every_line_of_an_unexpected_errors_traceback_has_its_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert report_error(KeyError("config"), rank=3, world_size=4) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("[rank 3, ") for line in lines)
    assert lines[-1].endswith("KeyError: 'config'")


def test_what_was_agreed_on_is_not_said_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(AgreedError("no", 2), rank=1, world_size=2) == 2
    assert capsys.readouterr().err == ""


def test_a_message_of_another_library_is_cut_and_coatlms_own_is_whole() -> None:
    assert error_line(RuntimeError("short\nmore")) == "RuntimeError: short"
    assert error_line(RuntimeError("x" * 500)) == f"RuntimeError: {'x' * FOREIGN} ..."
    assert error_line(CheckpointError("x" * 500)) == "x" * 500
