"""`tools/bench.py data`: both ways of preparing do the same work, and neither's start is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tools.benchmarks import data

SMALL = {"mb": "1", "reps": "1", "vocab": "300"}


def test_both_ways_prepare_the_same_tokens_and_the_peers_pool_starts_before_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed, before, tokens = data._timed, list[float](), list[int]()

    def watched(action: Callable[[], int], reps: int, **options: Any) -> Any:
        for number in options.get("also", ()):
            times = psutil.Process(number).cpu_times()
            before.append(times.user + times.system)
        found = timed(action, reps, **options)
        tokens.append(found[-1])
        return found

    monkeypatch.setattr(data, "_timed", watched)
    for row in ("prepare coatlm", "prepare megatron"):
        found = data.measure(row, SMALL)
        assert found["cpu_s"] > 0 and found["tokens/s"] > 0
    assert tokens[0] == tokens[1] > 100_000
    (imports,) = before
    assert imports > 0.5  # of torch, which the pool's process imports too


def test_cpu_seconds_are_those_of_running_children_too() -> None:
    own = data._cpu_seconds(())
    with psutil.Popen(["sh", "-c", "while :; do :; done"]) as child:
        while sum(child.cpu_times()[:2]) < 0.3:
            pass
        assert data._cpu_seconds([child.pid]) > own + 0.3
        child.kill()
