"""Measure times on a device: with CUDA events on a GPU, with the wall clock on a CPU."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARMUP, REPS = 3, 20
SETTLE, MEASURE = 0.5, 0.4  # seconds of `sustained`: until the clock is steady, and of measurement


def mark() -> Any:
    """Record the current time of the device, for `elapsed`."""
    if DEVICE == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed(start: Any, end: Any) -> float:
    """Milliseconds between two marks; call `synchronize` first."""
    return 1000 * (end - start) if DEVICE == "cpu" else start.elapsed_time(end)


def synchronize() -> None:
    """Wait until the device has finished all queued work."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def milliseconds(launch: Callable[[], object], reps: int = REPS) -> float:
    """The median time of `launch`, after a warm-up."""
    for _ in range(WARMUP):
        launch()
    laps = []
    for _ in range(reps):
        start = mark()
        launch()
        laps.append((start, mark()))
    synchronize()
    return statistics.median(elapsed(start, end) for start, end in laps)


def sustained(launch: Callable[[], object]) -> float:
    """The median milliseconds of `launch` on a GPU that has been busy for a while, as in training.

    The clock of a GPU follows its power, and with it the time of the same kernels. On a CPU as
    `milliseconds`.
    """
    if DEVICE == "cpu":
        return milliseconds(launch)
    once = milliseconds(launch, 1)
    milliseconds(launch, math.ceil(1000 * SETTLE / once))
    return milliseconds(launch, max(REPS, math.ceil(1000 * MEASURE / once)))


def release() -> None:
    """Free unreferenced memory, so that the allocator counts only what is in use."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
