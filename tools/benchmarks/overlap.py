"""What a trace says of a step: exposed communication, and the kernels' time by part of the step.

Communication is exposed where no other kernel runs at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tools.benchmarks.clock import synchronize
from tools.benchmarks.layer_profile import kind

Interval = tuple[float, float]
UPDATE = "update of the parameters"  # a range of the profiler
OUTPUT_LAYER = "_LinearCrossEntropy"  # an autograd function; its backward's name begins with it
TRACED = 3  # steps; of long ones 1
LONG = 0.5  # seconds of a long step
# NCCL's kernels, and those that pack and unpack FP8 payloads and find their shared scales
COMMUNICATION = (
    "nccl",
    "_pack_kernel",
    "_unpack_kernel",
    "_largest_kernel",
    "_row_amax_kernel",
    "_saturated_kernel",
)


class Trace(NamedTuple):
    """(begin, end) in milliseconds of the kernels of some steps, and the sums of their times.

    `parts` may have output_layer, gemm, attention, elementwise and update; the kernels of the first
    and the last are in no other part. Kernels that a CUDA graph launches have no part.
    """

    communication: list[Interval]
    compute: list[Interval]
    parts: dict[str, float]


def traced_steps(seconds: float) -> int:
    """How many steps of `seconds` are traced: a trace is evaluated kernel by kernel."""
    return 1 if seconds > LONG else TRACED


def trace_values(
    step: Callable[[], object], seconds: float, keep: Path | None, *, by_part: bool
) -> dict[str, float]:
    """Milliseconds per step of `seconds` from a trace: of communication, exposed and idle ones, and
    with `by_part` the kernels' time by part of the step. `keep` as in `trace`.
    """
    count = traced_steps(seconds)
    found = trace(step, count, keep)
    both = found.communication, found.compute
    sums = {"comm": length(found.communication), "exposed": exposed(*both), "idle": idle(*both)}
    sums |= found.parts if by_part else {}
    return {f"{name}_ms": round(ms / count, 1) for name, ms in sums.items()}


def trace(step: Callable[[], object], steps: int, keep: Path | None = None) -> Trace:
    """Trace `steps` steps. `keep`: a file for the trace, as chrome://tracing reads it."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds):
        pass  # which loads its library
    if dist.is_initialized():
        dist.barrier()
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
    return Trace(communication, compute, parts(profiler.events()))


def parts(events: Iterable[Any]) -> dict[str, float]:
    """Milliseconds of kernels by part of a step. `events`: FunctionEvents of torch's profiler."""
    found: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU or not event.kernels:
            continue
        around, owner = event, ""
        while around is not None and not owner:
            if around.name == UPDATE:
                owner = "update"
            elif around.name.startswith(OUTPUT_LAYER):
                owner = "output_layer"
            around = around.cpu_parent
        for kernel in event.kernels:
            if event.is_user_annotation and kernel.name == event.name:
                continue  # a range of the profiler on the GPU, which is no kernel
            if not any(name in kernel.name.lower() for name in COMMUNICATION):
                found[owner or kind(kernel.name, {})] += kernel.duration / 1000
    return dict(found)


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
