"""The time of an optimizer's updates in a training loop: events around each call of its step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from tools.benchmarks.overlap import UPDATE


def record_updates(optimizer: Any) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
    """Record events around every call of `optimizer.step`: norm, clipping and update.

    An update that is captured in a graph of the whole step is not called again.
    """
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    inner = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return inner(*args, **kwargs)
        events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        events[-1][0].record()
        with torch.profiler.record_function(UPDATE):
            result = inner(*args, **kwargs)
        events[-1][1].record()
        return result

    optimizer.step = step
    return events


def update_ms(updates: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> dict[str, float]:
    """The median time of an update, where updates run apart from other work."""
    if not updates:
        return {}
    return {"update_ms": round(statistics.median(a.elapsed_time(b) for a, b in updates), 1)}
