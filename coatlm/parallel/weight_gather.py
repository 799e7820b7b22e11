"""All-gather of one model chunk's updated weights under ZeRO, overlapped with forward.

After the update each rank holds the new weights of its shards. The buckets are all-gathered in the
order in which forward uses them (`fp8_gather` has the formats), and every layer waits for its own
buckets only.

Every all-gather of a step is started right after the update. Only with CUDA graphs does forward
start them (`in_forward`), each `AHEAD` buckets before its use: a device has few hardware queues for
the parallel branches of a graph, and if all of them came first, they would fill these queues and
delay the kernels of forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from coatlm.parallel.buckets import Bucket
from coatlm.parallel.collectives import Comm
from coatlm.parallel.fp8_gather import gather

AHEAD = 4  # with `in_forward`: buckets between an all-gather that starts and the one in use


class WeightGather:
    """All-gathers `buckets`, which are in the order of backward; see the module's docstring.

    `enabled`: there are shards to all-gather. `overlap`: `start` does not wait. `stream`: the CUDA
    stream on which FP8 weights are cast, other than the model's.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        comm: Comm,
        *,
        enabled: bool,
        overlap: bool,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.buckets, self.comm = buckets, comm
        self.enabled, self.overlap, self.stream = enabled, overlap, stream
        self.in_forward = False  # the next forward starts the all-gathers, not the update
        self.due = False  # weights have changed since the last all-gather
        self.gathering: Iterator[None] = iter(())  # each `next` starts one all-gather
        self.not_started = 0  # buckets that `gathering` has yet to start: the first of `buckets`

    def start(self) -> None:
        """All-gather the weights that the ranks have updated, in the order of forward."""
        if not self.enabled:
            return
        self.due = True
        if not self.overlap:
            self.finish()
        elif not self.in_forward:
            self.start_due()

    def start_due(self) -> None:
        """If weights have changed, start every all-gather; with `in_forward` forward does it."""
        if self.due:
            self.due = False
            self.gathering = gather(self.buckets[::-1], self.comm, self.stream)
            self.not_started = len(self.buckets)
            if not self.in_forward:
                self._start_until(0)

    def finish(self) -> None:
        """Wait until all weights are all-gathered."""
        self.start_due()
        self._start_until(0)
        for bucket in self.buckets:
            bucket.finish_gather()

    def mark_replayed(self) -> None:
        """Update the bookkeeping after the replay of a CUDA graph that all-gathers weights."""
        self.due = False

    def mark_updated(self) -> None:
        """Update the bookkeeping after a replayed step: its update has changed the weights."""
        self.due = self.enabled and self.in_forward  # else the step has all-gathered them itself

    def wait_before_use(self, units: Sequence[tuple[nn.Module, Sequence[Bucket]]]) -> None:
        """Let each unit wait for its own buckets before its forward pass."""
        for unit, used in units:
            start = min(map(self.buckets.index, used), default=len(self.buckets))

            def wait(*_: Any, buckets: Sequence[Bucket] = used, start: int = start) -> None:
                self.start_due()
                self._start_until(start - AHEAD)
                for bucket in buckets:
                    bucket.finish_gather()

            unit.register_forward_pre_hook(wait)

    def _start_until(self, index: int) -> None:
        """Start the all-gathers of `buckets[index:]` that have not been started."""
        while self.not_started > max(index, 0):
            next(self.gathering)
            self.not_started -= 1
