"""Intervals of a trace: what is communication alone."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from tools.benchmarks.overlap import exposed, idle, length, trace, union


def test_intervals_that_touch_are_one() -> None:
    assert union([(4, 5), (0, 2), (1, 3), (3, 3.5)]) == [(0, 3.5), (4, 5)]


def test_communication_is_exposed_where_nothing_else_runs() -> None:
    communication = [(0.0, 4.0), (3.0, 6.0), (10.0, 11.0)]
    compute = [(1.0, 2.0), (1.5, 5.0), (20.0, 30.0)]
    assert length(communication) == 7
    assert exposed(communication, compute) == 1 + 1 + 1
    assert exposed(communication, [(0.0, 40.0)]) == 0
    assert exposed([], compute) == 0


def test_the_device_is_idle_where_nothing_runs_between_the_first_and_the_last() -> None:
    assert idle([(0.0, 4.0), (10.0, 11.0)], [(3.0, 6.0), (12.0, 13.0)]) == 4 + 1
    assert idle([], []) == 0


def test_a_trace_is_written_where_it_is_told(tmp_path: Path) -> None:
    keep = tmp_path / "traces" / "rank0.json.gz"
    found = trace(lambda: torch.ones(8).exp(), 2, keep)
    assert found == ([], [])  # a CPU is no device
    with gzip.open(keep, "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("aten::exp") == 2
