"""Documents -> samples without cutting a document that fits (`data.packing=best-fit`).

    C = seq_len + 1                                      tokens of a sample
    pieces of a document of L tokens = the document      if L <= C
                                     | tokens[k * S : k * S + C], k = 0, 1, ..   S = seq_len
    bins of the pieces: from the longest to the shortest, each goes into the bin with the least
    room that has room for it, or into a new one         (best-fit decreasing)
    sample = the pieces of a bin, then padding

Best-fit decreasing depends on the lengths alone, so every epoch has the same number of samples.
What an epoch shuffles is which of the pieces of one length goes into which bin, the order of pieces
in a bin, and the order of the bins. Pieces of a longer document overlap by a token, since a
sample's first token is not predicted; where such a piece is not the first of its sample, that token
was predicted in the piece before and is not counted again.

Ding et al., "Fewer truncations improve language modeling", 2024 (arXiv 2404.10830), section 3.

Shapes: P pieces, B bins.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coatlm.data.order import shuffled


def pieces(bounds_D1: NDArray[np.int64], seq_len: int) -> tuple[NDArray[np.int64], ...]:
    """The begins [P] and lengths [P] of all pieces, in token offsets; empty documents have none."""
    sizes_D = np.diff(bounds_D1)
    count_D = np.where(sizes_D > seq_len + 1, -(-(sizes_D - 1) // seq_len), np.minimum(sizes_D, 1))
    document_P = np.repeat(np.arange(len(sizes_D)), count_D)
    first_D = np.cumsum(count_D) - count_D
    offset_P = (np.arange(len(document_P)) - first_D[document_P]) * seq_len
    length_P = np.minimum(sizes_D[document_P] - offset_P, seq_len + 1)
    return bounds_D1[document_P] + offset_P, length_P


def best_fit(length_P: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The bin [P] of each length; they do not increase, are positive and at most `capacity`.

    Of several bins with the least room that fits, the one that was filled last is taken. Equal
    lengths are placed together: a bin with room r takes floor(r / length) in a row, since what it
    has left is still the least room that fits.
    """
    bin_P = np.empty(len(length_P), np.int64)
    count = 0
    open_bins: dict[int, list[NDArray[np.int64]]] = {}  # room -> bins with this room, last on top
    rooms: list[int] = []  # the keys of open_bins, sorted

    def leave_open(room: int, bin_N: NDArray[np.int64]) -> None:
        if room and len(bin_N):
            if room not in open_bins:
                open_bins[room] = []
                insort(rooms, room)
            open_bins[room].append(bin_N)

    ends = np.append(np.flatnonzero(np.diff(length_P)) + 1, len(length_P))
    at = 0
    for end in ends.tolist():
        while at < end:
            length = int(length_P[at])
            found = bisect_left(rooms, length)
            room = rooms[found] if found < len(rooms) else capacity
            fits = room // length  # per bin
            wanted = -(-(end - at) // fits)  # bins
            if found < len(rooms):
                stack_N = open_bins[room].pop()
                if not open_bins[room]:
                    del open_bins[room], rooms[found]
                taken_N = stack_N[::-1][:wanted]
                leave_open(room, stack_N[: len(stack_N) - len(taken_N)])
            else:
                taken_N = np.arange(count, count + wanted)
                count += wanted
            placed = min(fits * len(taken_N), end - at)
            bin_P[at : at + placed] = np.repeat(taken_N, fits)[:placed]
            full, more = divmod(placed, fits)
            leave_open(room - fits * length, taken_N[:full])
            leave_open(room - more * length, taken_N[full:])
            at += placed
    return bin_P


class PackingCost(NamedTuple):
    """What one value of data.packing costs per epoch."""

    samples: int
    padded: float  # share of padding in the samples
    cut: int  # documents that no sample holds whole


def packing_cost(bounds_D1: NDArray[np.int64], seq_len: int) -> dict[str, PackingCost]:
    """The cost of each value of data.packing for documents with these bounds (token offsets).

    With concat, `cut` depends on the order of documents: it is that of one epoch, and others differ
    a little. Documents that reach into the tokens left over after the last sample count as cut.
    """
    capacity = seq_len + 1
    sizes_D = np.diff(bounds_D1)
    _, length_P = pieces(bounds_D1, seq_len)
    samples = int(best_fit(np.sort(length_P)[::-1], capacity).max(initial=-1)) + 1
    padded = 1.0 - int(length_P.sum()) / max(samples * capacity, 1)
    order_D = shuffled(len(sizes_D), "documents", 0)
    ends_D = np.cumsum(sizes_D[order_D])
    begins_D = ends_D - sizes_D[order_D]
    windows = max(int(sizes_D.sum()) - 1, 0) // seq_len
    end_of_all = windows * seq_len + 1 if windows else 0
    window_end_D = np.minimum((begins_D // seq_len + 1) * seq_len + 1, end_of_all)
    cut_D = (ends_D > window_end_D) & (ends_D > begins_D)
    return {
        "best-fit": PackingCost(samples, padded, int((sizes_D > capacity).sum())),
        "concat": PackingCost(windows, 0.0, int(cut_D.sum())),
    }


class _Epoch(NamedTuple):
    """One epoch: the pieces of the bins, by bin, and the order of the bins."""

    piece_P: NDArray[np.int64]
    place_P: NDArray[np.int64]  # of a piece in the shuffled order of all pieces
    bin_B: NDArray[np.int64]


class PackedStream:
    """One part of one source as an infinite sequence of packed samples with random access."""

    def __init__(
        self,
        read: Callable[[int, int], NDArray[Any]],
        bounds_D1: NDArray[np.int64],
        *,
        seq_len: int,
        key: tuple[int, ...],
        padding: int,
    ) -> None:
        self._read, self._key, self._padding = read, key, padding
        self._capacity = seq_len + 1
        self._starts = bounds_D1[:-1]
        self._begin_P, self._length_P = pieces(bounds_D1, seq_len)
        bin_P = best_fit(np.sort(self._length_P)[::-1], self._capacity)
        self._rank_P = np.argsort(bin_P, kind="stable")
        self._bounds_B1 = np.concatenate(([0], np.cumsum(np.bincount(bin_P))))
        self.windows = len(self._bounds_B1) - 1
        self._epochs: dict[int, _Epoch] = {}

    @property
    def padded(self) -> float:
        """The share of padding in the samples."""
        return 1.0 - int(self._length_P.sum()) / max(self.windows * self._capacity, 1)

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        """The seq_len + 1 tokens of a sample, for sample >= 0; the end may be padding."""
        ids = np.full(self._capacity, self._padding, dtype=np.int64)
        parts = [self._read(a, b) for a, b in self.ranges(sample)]
        filled = np.concatenate(parts)
        ids[: len(filled)] = filled
        return ids

    def ranges(self, sample: int) -> list[tuple[int, int]]:
        """The ranges [begin, end) of the source's tokens that make up a sample, in order."""
        number, place = divmod(sample, self.windows)
        epoch = self._epochs.get(number) or self._open_epoch(number)
        at = int(epoch.bin_B[place])
        inside = slice(self._bounds_B1[at], self._bounds_B1[at + 1])
        chosen = epoch.piece_P[inside][np.argsort(epoch.place_P[inside])]
        begins = self._begin_P[chosen]
        ends = begins + self._length_P[chosen]
        return list(zip(begins.tolist(), ends.tolist(), strict=True))

    def repeats(self, begin: int) -> bool:
        """Whether a range that begins there repeats the last token of the piece before it."""
        at = int(np.searchsorted(self._starts, begin, side="right")) - 1
        return int(self._starts[at]) != begin

    def _open_epoch(self, number: int) -> _Epoch:
        order_P = shuffled(len(self._begin_P), "pieces", *self._key, number)
        by_length = order_P[np.argsort(-self._length_P[order_P], kind="stable")]
        place_P = np.empty_like(order_P)
        place_P[order_P] = np.arange(len(order_P))
        piece_P = by_length[self._rank_P]
        bin_B = shuffled(self.windows, "bins", *self._key, number)
        kept = {n: e for n, e in self._epochs.items() if n == number - 1}  # a step may straddle two
        self._epochs = {**kept, number: _Epoch(piece_P, place_P[piece_P], bin_B)}
        return self._epochs[number]
