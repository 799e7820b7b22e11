"""The order of samples: sample i is a pure function of (seed, i).

    stream(e) = documents of a split, concatenated in the order shuffled(documents; seed, source, e)
    window(e, w) = stream(e)[w * S : w * S + S + 1],  w = 0 .. (tokens - 1) // S - 1
    sample j of a source = window(e, shuffled(windows; seed, source, e)[j mod windows]),
                           e = j // windows
    sample i of a blend  = sample n of source s = source(i), n = number of samples j < i from s

S = seq_len and e is the epoch. Every epoch shuffles documents, cuts windows and shuffles them; the
tokens after its last window are dropped. Nothing depends on the number of ranks or training steps,
so a run that is resumed, extended or moved to another layout reads the same samples in the same
order.

A source is divided by tokens into contiguous training, validation and test splits. Their boundaries
move to the nearest document boundary, unless a split would lose more than half of its tokens (with
few or huge documents); then they stay where they are and cut a document.

Shapes: D documents, W windows, P = PERIOD samples of a blend.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PERIOD = 1 << 18  # samples after which the order of sources in a blend repeats


def shuffled(count: int, *key: object) -> NDArray[np.int64]:
    """A permutation of 0..count-1 that is a pure function of (count, key): sorted by hash.

    hash(i) = mix(h + i * golden), h = sha256(key), mix = SplitMix64's finalizer (Steele et al.,
    2014). `mix` is a bijection of 64-bit words, so hashes never tie. Unlike a random generator's
    shuffle, the permutation does not depend on the version of a library.
    """
    digest = hashlib.sha256(" ".join(map(str, key)).encode()).digest()
    x = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64(int.from_bytes(digest[:8], "little"))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ (x >> np.uint64(31)))


def split_bounds(bounds_D1: NDArray[np.int64], ratios: Sequence[float]) -> list[NDArray[np.int64]]:
    """The document bounds (token offsets) of each split, by the rule in the module docstring."""
    total = int(bounds_D1[-1])
    share = np.asarray(ratios, dtype=np.float64) / sum(ratios)
    exact = np.rint(total * np.cumsum(share)).astype(np.int64)[:-1]
    above = np.clip(np.searchsorted(bounds_D1, exact), 1, len(bounds_D1) - 1)
    low, high = bounds_D1[above - 1], bounds_D1[above]
    moved = np.where(exact - low < high - exact, low, high)
    sizes = np.diff(moved, prepend=0, append=total)
    cuts = moved if (2 * sizes >= share * total).all() else exact
    edges = [0, *(int(cut) for cut in cuts), total]
    splits = []
    for begin, end in itertools.pairwise(edges):
        inside = bounds_D1[(bounds_D1 > begin) & (bounds_D1 < end)]
        splits.append(np.concatenate(([begin], inside, [end])).astype(np.int64))
    return splits


class _StreamEpoch(NamedTuple):
    """The order of one epoch: token p of the stream is tokens[p + shift_D[d(p)]]."""

    ends_D: NDArray[np.int64]  # stream offset at which the d-th document ends
    shift_D: NDArray[np.int64]
    windows_W: NDArray[np.int64]


class Stream:
    """One split of one source as an infinite sequence of windows with random access."""

    def __init__(
        self,
        read: Callable[[int, int], NDArray[Any]],
        bounds_D1: NDArray[np.int64],
        *,
        seq_len: int,
        key: tuple[int, ...],
    ) -> None:
        self.windows = max(int(bounds_D1[-1] - bounds_D1[0]) - 1, 0) // seq_len
        self._read = read  # tokens [begin, end) of the source
        self._bounds_D1 = bounds_D1
        self._seq_len = seq_len
        self._key = key
        self._epochs: dict[int, _StreamEpoch] = {}

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        """The seq_len + 1 tokens of a sample, for sample >= 0."""
        return np.concatenate([self._read(a, b) for a, b in self.ranges(sample)], dtype=np.int64)

    def ranges(self, sample: int) -> list[tuple[int, int]]:
        """The ranges [begin, end) of the source's tokens that make up a sample, in order."""
        number, place = divmod(sample, self.windows)
        epoch = self._epochs.get(number) or self._open_epoch(number)
        begin = int(epoch.windows_W[place]) * self._seq_len
        end = begin + self._seq_len + 1
        first, last = np.searchsorted(epoch.ends_D, (begin, end - 1), side="right")
        ends = epoch.ends_D[first : last + 1].clip(max=end)
        shifts = epoch.shift_D[first : last + 1]
        begins = np.concatenate(([begin], ends[:-1]))
        parts = np.stack((begins + shifts, ends + shifts), axis=1).tolist()  # one per document
        return [(a, b) for a, b in parts if a < b]

    def _open_epoch(self, number: int) -> _StreamEpoch:
        order_D = shuffled(len(self._bounds_D1) - 1, "documents", *self._key, number)
        ends_D = np.cumsum(np.diff(self._bounds_D1)[order_D])
        shift_D = self._bounds_D1[1:][order_D] - ends_D
        windows_W = shuffled(self.windows, "windows", *self._key, number)
        kept = {n: e for n, e in self._epochs.items() if n == number - 1}  # a step may straddle two
        self._epochs = {**kept, number: _StreamEpoch(ends_D, shift_D, windows_W)}
        return self._epochs[number]


class Blend:
    """A blend of sources by weight, which maps sample i to a source and a sample of that source.

    Of the first n samples, floor(n * w) or ceil(n * w) come from a source whose share of the
    weights is w. w is rounded to 1/PERIOD, so the order repeats every PERIOD samples and a table
    of one period is enough for any i.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._quota: list[int] = []  # empty for a single source, which needs no table
        if len(weights) > 1:
            self._quota = quotas(weights)
            self._source_P, self._rank_P = _blend_period(self._quota)

    def locate(self, sample: int) -> tuple[int, int]:
        """The source of a sample and the sample's number within that source, for sample >= 0."""
        if not self._quota:
            return 0, sample
        period, place = divmod(sample, PERIOD)
        source = int(self._source_P[place])
        return source, period * self._quota[source] + int(self._rank_P[place])

    def counts(self, samples: int) -> list[int]:
        """How many of the first `samples` samples are of each source."""
        if not self._quota:
            return [samples]
        periods, place = divmod(samples, PERIOD)
        last = np.bincount(self._source_P[:place], minlength=len(self._quota)).tolist()
        return [periods * quota + rest for quota, rest in zip(self._quota, last, strict=True)]


def quotas(weights: Sequence[float]) -> list[int]:
    """Samples of each source per PERIOD, rounded by the largest-remainder method.

    Raises ValueError for a source without a sample.
    """
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * PERIOD
    quota = np.floor(exact).astype(np.int64)
    quota[np.argsort(quota - exact, kind="stable")[: PERIOD - quota.sum()]] += 1
    if quota.min() == 0:
        raise ValueError(
            f"data.paths: weight={weights[int(quota.argmin())]} is less than 1/{PERIOD} of the sum"
        )
    samples: list[int] = quota.tolist()
    return samples


def _blend_period(quota: Sequence[int]) -> tuple[NDArray[np.int16], NDArray[np.int32]]:
    """The source of each of PERIOD samples, and the number of earlier samples from that source.

    Sample c of a source with share w must come at a place in floor(c / w) .. ceil((c + 1) / w) - 1.
    Choosing the earliest deadline among samples whose interval has begun meets every deadline, as
    for unit jobs on one machine whose shares sum to 1 (Baruah et al., "Proportionate progress",
    1996).
    """
    source_P = np.zeros(PERIOD, dtype=np.int16)
    rank_P = np.zeros(PERIOD, dtype=np.int32)
    waiting = [(0, source, 0) for source in range(len(quota))]  # (first place, source, rank)
    ready: list[tuple[int, int, int]] = []  # (deadline, source, rank)
    for place in range(PERIOD):
        while waiting and waiting[0][0] <= place:
            _, source, rank = heapq.heappop(waiting)
            deadline = -(-(rank + 1) * PERIOD // quota[source])
            heapq.heappush(ready, (deadline, source, rank))
        _, source, rank = heapq.heappop(ready)
        source_P[place], rank_P[place] = source, rank
        heapq.heappush(waiting, ((rank + 1) * PERIOD // quota[source], source, rank + 1))
    return source_P, rank_P
