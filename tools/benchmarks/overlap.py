"""The exposed communication of a step, that is, without concurrent compute, from a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from tools.benchmarks.clock import synchronize

Interval = tuple[float, float]
# NCCL's kernels, and those that pack and unpack FP8 payloads and find their shared scales
COMMUNICATION = (
    "nccl",
    "_pack_kernel",
    "_unpack_kernel",
    "_largest_kernel",
    "_row_amax_kernel",
    "_saturated_kernel",
)


def trace(
    step: Callable[[], object], steps: int, keep: Path | None = None
) -> tuple[list[Interval], list[Interval]]:
    """(begin, end) in milliseconds of the communication and of all other kernels of `steps`.

    `keep`: a file for the trace itself, as chrome://tracing reads it.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(steps):
            step()
        synchronize()
    if keep is not None:
        keep.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(keep))
    communication: list[Interval] = []
    compute: list[Interval] = []
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
            continue
        span = (event.time_range.start / 1000, event.time_range.end / 1000)
        ours = any(name in event.name.lower() for name in COMMUNICATION)
        (communication if ours else compute).append(span)
    return communication, compute


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals as disjoint intervals in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """The total length of the union of intervals."""
    return sum(end - begin for begin, end in union(intervals))


def idle(communication: Sequence[Interval], compute: Sequence[Interval]) -> float:
    """The time between the first and the last interval without communication and compute."""
    busy = union([*communication, *compute])
    return busy[-1][1] - busy[0][0] - length(busy) if busy else 0.0


def exposed(communication: Sequence[Interval], compute: Sequence[Interval]) -> float:
    """The time with communication and without compute."""
    return length([*communication, *compute]) - length(compute)
