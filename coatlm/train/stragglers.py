"""Find the slowest rank: the time of each phase of a step, compared over the ranks.

    data               reading a batch and taking this rank's share of it    by the host's clock
    forward_backward   from the first microbatch to the last gradient        on a GPU: by CUDA
    update             the optimizer, and launching the weight all-gather    events

Time between the phases is spent waiting for other ranks and is not counted, because a slow rank
makes all others wait. Under tensor and pipeline parallelism ranks also wait for each other inside
forward and backward; the report then names one rank of a slow group. With CUDA graphs the forward
pass itself starts the all-gathers of weights: all ranks take as long for the first one of a step as
the slowest, and only time that a rank loses elsewhere tells it apart.

Events are recorded in each step and read on log steps, when the device is synchronized anyway. A
CUDA graph of whole steps holds its events, so only the last replay before a log step is timed; it
counts for all replays since the log step before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

PHASES = ("data", "forward_backward", "update")
HOST = ("data",)


class PhaseTimer:
    """Accumulates the time of each phase. With `cuda`, phases except `data` use CUDA events."""

    def __init__(
        self, *, cuda: bool = False, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.cuda, self.clock = cuda, clock
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._captured: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._open: tuple[str, Any] | None = None
        self._capturing = False
        self._steps = self._replays = 0

    def enter(self, phase: str | None) -> None:
        """End the current phase and begin another; None begins none: the rank waits for others.

        In a capture, the phases are those of each replay; one that begins there ends there, and no
        other does.
        """
        capturing = self.cuda and torch.cuda.is_current_stream_capturing()
        if capturing and not self._capturing:
            self._captured.clear()
        self._capturing = capturing
        if self._open is not None:
            last, start = self._open
            if isinstance(start, float):
                self._seconds[last] += self.clock() - start
            else:
                events = self._captured if capturing else self._events
                events.append((last, start, self._event()))
        self._open = None
        if phase is not None:
            assert phase in PHASES
            self._steps += phase == PHASES[0]
            on_device = self.cuda and phase not in HOST
            self._open = (phase, self._event() if on_device else self.clock())

    def count_replay(self) -> None:
        """Count a replay of the captured phases."""
        self._replays += 1

    def read(self) -> list[float]:
        """Milliseconds per step of each phase since the last call.

        On a GPU, synchronize first.
        """
        self.enter(None)
        for phase, start, stop in self._events:
            self._seconds[phase] += start.elapsed_time(stop) / 1000
        for phase, start, stop in self._captured if self._replays else ():
            self._seconds[phase] += self._replays * start.elapsed_time(stop) / 1000
        result = [1000 * seconds / max(1, self._steps) for seconds in self._seconds.values()]
        self._seconds, self._steps, self._replays = dict.fromkeys(PHASES, 0.0), 0, 0
        self._events.clear()
        return result

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, external=self._capturing)
        event.record()
        return event


class Slowest(NamedTuple):
    """The rank with the longest time in phases, and its phase that exceeds the median most."""

    rank: int
    phase: str
    ms: float  # the rank's own time per step
    median_ms: float  # over all ranks; the lower median if their number is even


def slowest(times_RP: list[list[float]]) -> Slowest:
    """The slowest rank, given the milliseconds of each rank and phase."""
    times = torch.tensor(times_RP, dtype=torch.float64)
    totals_R = times.sum(1)
    rank = int(totals_R.argmax())
    lost_P = times[rank] - times.median(dim=0).values
    phase = PHASES[int(lost_P.argmax())]
    return Slowest(rank, phase, float(totals_R[rank]), float(totals_R.median()))


def compare(times_P: list[float], group: dist.ProcessGroup) -> Slowest:
    """The slowest rank of a gloo group; every rank calls it with its own times."""
    mine = torch.tensor(times_P, dtype=torch.float64)
    everyone = [torch.zeros_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    return slowest([times.tolist() for times in everyone])
