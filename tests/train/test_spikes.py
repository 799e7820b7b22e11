"""The spike guard against its definition, and its state."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest
import torch

from coatlm.train.spikes import SpikeGuard


def reference(values: list[float], sigma: float, window: int) -> list[bool]:
    """For one series of values: which are spikes, by the module's formula."""
    seen: list[float] = []
    spikes = []
    for value in values:
        limit = math.inf
        if len(seen) >= window:
            last = seen[-window:]
            limit = statistics.fmean(last) + sigma * statistics.pstdev(last)
        spikes.append(value > limit)
        seen.append(min(value, limit))
    return spikes


def verdicts(guard: SpikeGuard, losses: list[float], norms: list[float]) -> list[bool]:
    """Whether each step is a spike."""
    return [
        not bool(guard.accepts(torch.tensor(loss), torch.tensor(norm)))
        for loss, norm in zip(losses, norms, strict=True)
    ]


def series(seed: int, count: int = 200) -> list[float]:
    """A noisy fall with some jumps."""
    draw = random.Random(seed)
    jumps = [3.0 * (draw.random() < 0.05) for _ in range(count)]
    return [5.0 - 0.01 * i + draw.gauss(0, 0.1) + jumps[i] for i in range(count)]


@pytest.mark.parametrize("seed", range(3))
def test_a_spike_is_what_the_formula_says_for_loss_or_norm(seed: int) -> None:
    losses, norms = series(seed), series(seed + 100)
    expected = [
        a or b for a, b in zip(reference(losses, 4.0, 16), reference(norms, 4.0, 16), strict=True)
    ]
    assert verdicts(SpikeGuard(4.0, 16), losses, norms) == expected
    assert 5 < sum(expected) < 40


def test_a_level_that_stays_becomes_the_new_normal() -> None:
    losses = [2.0 + 0.01 * (i % 7) for i in range(64)] + [4.0 + 0.01 * (i % 7) for i in range(200)]
    found = verdicts(SpikeGuard(4.0, 32), losses, [1.0] * len(losses))
    assert found[64] and not any(found[:64]) and not any(found[-64:])


def test_the_verdict_is_written_in_place_where_a_graph_of_the_step_leaves_it() -> None:
    guard = SpikeGuard(4.0, 2)
    spike = guard.spike
    verdicts(guard, [2.0, 2.0, 2.0], [1.0, 1.0, 9.0])
    assert guard.spike is spike and bool(spike)


def test_nan_is_left_to_the_optimizer_and_stays_out_of_the_window() -> None:
    guard, other = SpikeGuard(4.0, 4), SpikeGuard(4.0, 4)
    finite = [2.0, 2.1, 1.9, 2.0, 2.05]
    verdicts(guard, finite, finite)
    verdicts(other, [*finite[:2], math.nan, *finite[2:]], [*finite[:2], math.inf, *finite[2:]])
    assert guard.state() == other.state()


def test_the_state_survives_json_and_continues_exactly() -> None:
    losses, norms = series(7), series(8)
    guard, later = SpikeGuard(3.0, 16), SpikeGuard(3.0, 16)
    verdicts(guard, losses[:100], norms[:100])
    later.restore(json.loads(json.dumps(guard.state())))
    assert verdicts(later, losses[100:], norms[100:]) == verdicts(guard, losses[100:], norms[100:])
    assert later.state() == guard.state()


def test_another_window_starts_anew() -> None:
    guard, other = SpikeGuard(3.0, 16), SpikeGuard(3.0, 8)
    verdicts(guard, series(1), series(2))
    other.restore(guard.state())
    assert other.state() == SpikeGuard(3.0, 8).state()


@pytest.mark.parametrize(("sigma", "window"), [(0.0, 8), (-1.0, 8), (3.0, 1)])
def test_what_is_no_guard_is_refused(sigma: float, window: int) -> None:
    with pytest.raises(ValueError, match=r"sigma=|window="):
        SpikeGuard(sigma, window)
