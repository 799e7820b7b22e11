"""The timer of phases with a clock of its own, and who is called slow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coatlm.train.stragglers import PHASES, PhaseTimer, Slowest, slowest


def test_only_the_time_inside_phases_counts() -> None:
    now = [0.0]
    timer = PhaseTimer(clock=lambda: now[0])
    for _ in range(2):  # two steps: ms per step
        for phase, seconds in (
            ("data", 0.1),
            (None, 5.0),
            ("forward_backward", 0.5),
            (None, 7.0),
            ("update", 0.25),
            (None, 1.0),
        ):
            timer.enter(phase)
            now[0] += seconds
    assert timer.read() == pytest.approx([100.0, 500.0, 250.0])
    assert timer.read() == [0.0, 0.0, 0.0]


def test_a_phase_ends_where_the_next_begins() -> None:
    now = [0.0]
    timer = PhaseTimer(clock=lambda: now[0])
    timer.enter("data")
    now[0] += 1.0
    timer.enter("forward_backward")
    now[0] += 2.0
    assert timer.read() == pytest.approx([1000.0, 2000.0, 0.0])


def test_the_captured_phases_of_a_graph_count_once_per_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, capturing = [0.0], [False]

    class Event:
        """Inside a capture, `external` events have the time of the last replay."""

        def __init__(self, *, enable_timing: bool, external: bool) -> None:
            assert enable_timing and external == capturing[0]

        def record(self) -> None:
            self.at = now[0]

        def elapsed_time(self, end: Any) -> float:
            return 1000 * (end.at - self.at)

    def step(seconds: float) -> None:
        for phase in ("forward_backward", "update", None):
            timer.enter(phase)
            now[0] += seconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    timer = PhaseTimer(cuda=True, clock=lambda: now[0])
    for seconds, replays in ((0.5, 3), (0.25, 1)):  # and captured again
        timer.enter("data")
        now[0] += 0.1
        timer.enter(None)
        capturing[0] = True
        step(seconds)
        capturing[0] = False
        for _ in range(replays - 1):
            timer.count_replay()
            timer.enter("data")
            now[0] += 0.1
            timer.enter(None)
        timer.count_replay()
        assert timer.read() == pytest.approx([100.0, 1000 * seconds, 1000 * seconds])
    timer.enter("data")
    timer.enter(None)
    step(2.0)  # eagerly
    assert timer.read() == pytest.approx([0.0, 2000.0, 2000.0])


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("phase", range(3))
def test_the_slowest_rank_and_where_it_loses(rank: int, phase: int) -> None:
    times = [[10.0, 200.0, 20.0] for _ in range(4)]
    times[rank][phase] += 90.0
    found = slowest(times)
    assert found == Slowest(rank, PHASES[phase], 320.0, 230.0)


def test_of_two_ranks_the_slower_one_is_held_against_the_other() -> None:
    assert slowest([[1.0, 10.0, 1.0], [1.0, 40.0, 1.0]]) == (1, "forward_backward", 42.0, 12.0)
