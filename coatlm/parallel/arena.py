"""One allocation for buffers that are not all needed at the same time, at addresses that stay.

A buffer has a lifetime, the first and the last of a sequence of events between which it is needed.
Two buffers may overlap in memory if their lifetimes do not:

    buffer     lifetime      memory
    a, 4       0 to 0        0 1 2 3
    b, 2       0 to 1                4 5
    c, 3       1 to 2        0 1 2

The largest buffers are placed first, each at the lowest address that is free in all of its
lifetime. With train.update=backward the buffers are buckets of gradients, and the events are the
units that backward reaches in turn: the output layer, the layers from the last to the first, the
embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Lifetime = tuple[int, int]  # the first and the last event, both included


def place(sizes: Sequence[int], lives: Sequence[Lifetime]) -> tuple[list[int], int]:
    """The start of each buffer, and the size of the allocation that holds all."""
    starts = [0] * len(sizes)
    placed: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        (first, last), at = lives[i], 0
        beside = [j for j in placed if lives[j][0] <= last and first <= lives[j][1]]
        for j in sorted(beside, key=starts.__getitem__):
            if at + sizes[i] <= starts[j]:
                break
            at = max(at, starts[j] + sizes[j])
        starts[i] = at
        placed.append(i)
    return starts, max((a + n for a, n in zip(starts, sizes, strict=True)), default=0)


def with_reductions(lives: Sequence[Lifetime]) -> list[Lifetime]:
    """Extend each lifetime to the end of the lifetime that ends next.

    A bucket that is complete then has memory while it is reduced, until the next one is complete.
    """
    order = sorted(range(len(lives)), key=lambda i: (lives[i][1], i))
    longer = list(lives)
    for i, following in pairwise(order):
        longer[i] = (lives[i][0], lives[following][1])
    return longer
