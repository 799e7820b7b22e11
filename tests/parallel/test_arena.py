"""Buffers in one allocation: those that are needed at the same time never overlap."""

from __future__ import annotations

import random

import pytest

from coatlm.parallel.arena import Lifetime, place, with_reductions


def overlapping(sizes: list[int], lives: list[Lifetime], starts: list[int]) -> list[tuple]:
    """Pairs of buffers that are needed at the same time and share memory."""
    spans = [(a, a + n) for a, n in zip(starts, sizes, strict=True)]
    return [
        (i, j)
        for i in range(len(sizes))
        for j in range(i)
        if lives[i][0] <= lives[j][1]
        and lives[j][0] <= lives[i][1]
        and spans[i][0] < spans[j][1]
        and spans[j][0] < spans[i][1]
    ]


def most_at_once(sizes: list[int], lives: list[Lifetime]) -> int:
    """The largest sum of sizes that are needed at one time, the least any allocation can have."""
    events = range(max(last for _, last in lives) + 1)
    return max(
        sum(n for n, (first, last) in zip(sizes, lives, strict=True) if first <= at <= last)
        for at in events
    )


def test_the_example_of_the_docstring() -> None:
    assert place([4, 2, 3], [(0, 0), (0, 1), (1, 2)]) == ([0, 4, 0], 6)
    assert place([], []) == ([], 0)


@pytest.mark.parametrize("seed", range(20))
def test_no_two_buffers_that_are_needed_at_once_overlap(seed: int) -> None:
    draw = random.Random(seed)
    firsts = [draw.randrange(12) for _ in range(30)]
    lives = [(first, first + draw.randrange(4)) for first in firsts]
    sizes = [draw.randrange(1, 50) for _ in lives]
    starts, size = place(sizes, lives)
    assert not overlapping(sizes, lives, starts)
    assert size == max(a + n for a, n in zip(starts, sizes, strict=True))
    least = most_at_once(sizes, lives)
    assert least <= size <= 1.2 * least < sum(sizes)


def test_buckets_of_a_backward_pass_take_turns_in_two_or_three_places() -> None:
    straddling = [(max(0, i - 1), i) for i in range(10)]  # each shares a layer with the next
    assert place([5] * 10, straddling)[1] == 10
    assert place([5] * 10, with_reductions(straddling))[1] == 15
    assert place([5] * 10, [(i, i) for i in range(10)])[1] == 5


def test_a_bucket_is_reduced_until_the_next_one_is_complete() -> None:
    assert with_reductions([(0, 2), (1, 3), (3, 3), (0, 6)]) == [(0, 3), (1, 3), (3, 6), (0, 6)]
