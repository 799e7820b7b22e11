"""Optimizer states in host memory, which pass through the GPU a piece at a time during an update.

    copy to the GPU    0  1  2  3  4              on a stream of its own
    update                0  1  2  3  4           on the current stream
    copy to the host         0  1  2  3  4        on another stream

The idea is that of ZeRO-Infinity (arXiv 2104.07857), without its disks. Piece j is in buffer
j mod 3; these three buffers are the only memory on the GPU that states take. Each byte of the
states crosses the bus twice per step, once in each direction, and both directions are used at once.
The host queues all copies without waiting for any of them; `synchronize` waits for the last.

A piece is a run of elements of all shards, which are concatenated. Pieces end where blocks of 128
elements do, and with tensor-wise scales where parameters do, so the bits of the states do not
depend on them. Host memory is page-locked, without which copies would not be asynchronous.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from coatlm.optim.host_memory import lock_pages

BUFFERS = 3  # one is filled, one is updated, one is emptied
PIECE = 1 << 24  # elements: a copy of milliseconds, next to which starting it costs little

Span = tuple[int, int, int]  # (shard, start, stop): elements [start, stop) of a shard


class Piece(NamedTuple):
    """Elements [start, stop) of all shards, concatenated, and the spans in it to update."""

    start: int
    stop: int
    spans: tuple[Span, ...]


def cut_pieces(spans: Iterable[Span], starts: Sequence[int], longest: int) -> list[Piece]:
    """Join consecutive spans to pieces of at most `longest` elements; a longer span is one piece.

    `starts` are the first elements of the shards in the concatenation.
    """
    pieces: list[Piece] = []
    for shard, first, last in spans:
        start, stop = starts[shard] + first, starts[shard] + last
        if pieces and stop - pieces[-1].start <= longest:
            joined = pieces.pop()
            pieces.append(Piece(joined.start, stop, (*joined.spans, (shard, first, last))))
        else:
            pieces.append(Piece(start, stop, ((shard, first, last),)))
    return pieces


def make_pieces(
    spans: Sequence[Span], starts: Sequence[int], longest: int | None, *, by_shard: bool
) -> list[Piece]:
    """The pieces of an update of all `spans`, in order; with `by_shard` each is in one shard.

    Without `longest` there is one piece, or one per shard.
    """
    apart = [spans]
    if by_shard:
        apart = [tuple(each) for _, each in groupby(spans, key=lambda span: span[0])]
    pieces: list[Piece] = []
    for some in apart:
        if longest is None:
            pieces.append(Piece(starts[some[0][0]], starts[some[-1][0] + 1], tuple(some)))
        else:
            pieces += cut_pieces(some, starts, longest)
    return pieces


def parts(states: Mapping[str, Tensor], start: int, stop: int, n: int) -> dict[str, Tensor]:
    """Views of elements [start, stop) of n, in states of n entries or of one entry per block."""
    found = {}
    for name, tensor in states.items():
        each = n // tensor.numel()
        found[name] = tensor[start // each : stop // each]
    return found


class StateOffload:
    """Passes states through `device` in pieces; on a CPU by the same copies, one after the other.

    `host` are the states of all shards, concatenated, of `host_zeros`; n elements in all.
    """

    def __init__(
        self, host: Mapping[str, Tensor], pieces: Sequence[Piece], n: int, device: torch.device
    ) -> None:
        longest = max(piece.stop - piece.start for piece in pieces)
        buffers = [
            {
                name: torch.empty(longest * t.numel() // n, dtype=t.dtype, device=device)
                for name, t in host.items()
            }
            for _ in range(min(BUFFERS, len(pieces)))
        ]
        self.host = [parts(host, piece.start, piece.stop, n) for piece in pieces]
        self.device = [
            {name: t[: here[name].numel()] for name, t in buffers[j % len(buffers)].items()}
            for j, here in enumerate(self.host)
        ]
        self.streams: tuple[torch.cuda.Stream, ...] = ()  # to the device, to the host
        self.emptied: list[torch.cuda.Event] = []  # per buffer: its last copy to the host is done
        if device.type == "cuda":
            self.streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self.emptied = [torch.cuda.Event() for _ in buffers]
            # the buffers' memory may still be in use by earlier work of the current stream
            self.streams[0].wait_stream(torch.cuda.current_stream())
            for tensor in host.values():
                lock_pages(tensor, self.streams[1], self)

    def passes(self, which: Collection[int]) -> Iterator[dict[str, Tensor]]:
        """Yield the states of the pieces numbered `which`, on the device, to be updated in place on
        the current stream.
        """
        for j in which:
            self._copy_in(j)
            yield self.device[j]
            self._copy_out(j)

    def synchronize(self) -> None:
        """Wait until the states in host memory are those of the last update."""
        if self.streams:
            self.streams[1].synchronize()

    def _copy_in(self, j: int) -> None:
        if self.streams:
            self.streams[0].wait_event(self.emptied[j % len(self.emptied)])
            with torch.cuda.stream(self.streams[0]):
                _copy_(self.device[j], self.host[j])
            torch.cuda.current_stream().wait_stream(self.streams[0])
        else:
            _copy_(self.device[j], self.host[j])

    def _copy_out(self, j: int) -> None:
        if self.streams:
            self.streams[1].wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.streams[1]):
                _copy_(self.host[j], self.device[j])
                self.emptied[j % len(self.emptied)].record()
        else:
            _copy_(self.host[j], self.device[j])


def _copy_(to: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    for name, tensor in to.items():
        tensor.copy_(source[name], non_blocking=True)
