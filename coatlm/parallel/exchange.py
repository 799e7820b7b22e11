"""Gradient format: an FP8 all-to-all with sums in fp32, so that each gradient is rounded once.

Every rank packs its bucket into FP8 codes with scales, shard by shard (`fp8.payload`), and sends
shard r to rank r. Rank r decodes the shards of the other ranks and adds them, in fp32, to its own,
which is not rounded. R - 1 of R contributions are rounded, so for any number of ranks the error is
sqrt((R - 1) / R) times that of a cast. At ZeRO stage 0 the sums are all-gathered in FP8 as well,
each block with its own scale, which rounds a second time.

With slower links between nodes the exchange has two levels. The L ranks inside a node sum their
contributions to each of the N nodes; then ranks with the same position in their nodes exchange
these sums, which are rounded to FP8 once more. Each rank sends n / L of its n elements between
nodes.

A bucket is sent in pieces: packing a piece overlaps with the exchange of the piece before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coatlm.fp8.formats import E4M3, SCALE_BLOCK, Coding
from coatlm.fp8.payload import pack, unpack
from coatlm.fp8.payload_layout import Layout, Own, Shared
from coatlm.parallel.collectives import Comm, Pending
from coatlm.parallel.wire import Steps, Sum, shared_scales

GradGranularity = Literal["block", "tensor", "bucket"]
PIECE = 1 << 27  # elements of a piece


@dataclass(frozen=True)
class Levels:
    """Two levels: the ranks `inside` a node, and those with one local rank `across` the nodes."""

    inside: Comm
    across: Comm


@dataclass(frozen=True)
class Fp8Exchange:
    """The gradient format of an FP8 all-to-all with sums in fp32.

    `scaling` is the scale granularity. "block": each rank sends its own scale per 128 elements.
    "tensor", "bucket": the ranks share one scale. With current scaling they first all-reduce the
    amax, which costs another read of the gradients, overlapped with backward; with delayed scaling
    (`reduction_scales`) it is known before. All-gathered sums always have block scales.
    """

    fmt: Coding = E4M3
    scaling: GradGranularity = "block"
    piece: int = PIECE
    levels: Levels | None = None
    automatic: bool = False

    def steps(self, job: Sum, comm: Comm) -> Steps:
        shared = None
        if self.scaling != "block":
            bucket = self.scaling == "bucket"
            shared = yield from shared_scales(job, comm, self.fmt, per_bucket=bucket)
        if len(set(job.sizes)) > 1:
            yield from self._scatter_uneven(job, comm, shared)
            return
        shard = job.sizes[0]
        pieces = list(_pieces(shard, max(self.piece // comm.size, SCALE_BLOCK)))
        out = job.out
        if job.whole:
            out = torch.empty(shard, dtype=torch.float32, device=job.grads.device)
        if self.levels is None:
            yield from self._scatter(job.grads, out, pieces, comm, shared, job)
        else:
            yield from self._scatter_levels(job.grads, out, pieces, self.levels, shared, job)
        if job.whole:
            yield from self._gather(out, job.out, pieces, comm)

    def _scatter(
        self,
        grads: Tensor,
        out: Tensor,
        pieces: Sequence[tuple[int, int]],
        comm: Comm,
        scale: Tensor | None,
        job: Sum,
    ) -> Steps:
        """Sum this rank's shard of all ranks' `grads` into `out`, in one exchange."""
        x_RP = grads.view(comm.size, -1)
        owner_RG = job.tensors.owner.view(comm.size, -1)

        def send(begin: int, end: int) -> tuple[Pending, Tensor]:
            owner = owner_RG[:, None, begin // SCALE_BLOCK : end // SCALE_BLOCK]
            shared = _shared(scale, owner, job.tensors.amax)
            return self._send(x_RP[:, None, begin:end], comm, shared)

        def land(begin: int, end: int, received: Tensor) -> None:
            shared = _shared(
                scale, owner_RG[comm.rank, begin // SCALE_BLOCK : end // SCALE_BLOCK][None, None]
            )
            y, own = out[begin:end][None, None], x_RP[comm.rank, begin:end][None, None]
            self._land(received, y, Own(own, comm.rank), shared, add=self._adds(job))

        yield from _pipeline(pieces, send, land)

    def _scatter_levels(
        self,
        grads: Tensor,
        out: Tensor,
        pieces: Sequence[tuple[int, int]],
        levels: Levels,
        scale: Tensor | None,
        job: Sum,
    ) -> Steps:
        """Sum in two exchanges. Ranks are numbered node by node: N nodes of L ranks."""
        inside, across = levels.inside, levels.across
        x_LNP = grads.view(across.size, inside.size, -1).transpose(0, 1)
        owner_LNG = job.tensors.owner.view(across.size, inside.size, -1).transpose(0, 1)
        sums_NP = torch.empty(across.size, x_LNP.shape[2], dtype=torch.float32, device=grads.device)

        def send(begin: int, end: int) -> tuple[Pending, Tensor]:
            owner = owner_LNG[:, :, begin // SCALE_BLOCK : end // SCALE_BLOCK]
            shared = _shared(scale, owner, job.tensors.amax)
            return self._send(x_LNP[:, :, begin:end], inside, shared)

        def land(begin: int, end: int, received: Tensor) -> None:
            mine = owner_LNG[inside.rank, None, :, begin // SCALE_BLOCK : end // SCALE_BLOCK]
            shared = _shared(scale, mine)
            y, own = sums_NP[None, :, begin:end], x_LNP[inside.rank, None, :, begin:end]
            self._land(received, y, Own(own, inside.rank), shared, add=False)

        def send_sums(begin: int, end: int) -> tuple[Pending, Tensor]:
            return self._send(sums_NP[:, None, begin:end], across, None)

        def land_sums(begin: int, end: int, received: Tensor) -> None:
            y, own = out[begin:end][None, None], sums_NP[across.rank, begin:end][None, None]
            self._land(received, y, Own(own, across.rank), None, add=self._adds(job))

        yield from _pipeline(pieces, send, land)
        yield from _pipeline(pieces, send_sums, land_sums)

    def _gather(
        self, shard: Tensor, out: Tensor, pieces: Sequence[tuple[int, int]], comm: Comm
    ) -> Steps:
        """All-gather the sums `shard` of every rank: the second half of an all-reduce."""
        levels = self.levels
        y_ABP = out.view(comm.size, -1)[:, None]
        if levels is not None:
            y_ABP = out.view(levels.across.size, levels.inside.size, -1).transpose(0, 1)

        def send(begin: int, end: int) -> tuple[Pending, Tensor]:
            layout = self._layout(end - begin, None)
            payloads = layout.empty(*y_ABP.shape[:2], device=out.device)
            first = payloads if levels is None else payloads[levels.inside.rank]
            where = comm if levels is None else levels.across
            mine = first.view(where.size, -1)[where.rank]
            pack(shard[begin:end][None, None], mine[None, None], layout=layout)
            return where.all_gather(first.view(-1), [layout.nbytes] * where.size), payloads

        def land(begin: int, end: int, payloads: Tensor) -> None:
            y = y_ABP[:, :, begin:end]
            unpack(payloads[None], y, layout=self._layout(end - begin, None))

        if levels is None:
            yield from _pipeline(pieces, send, land)
            return
        for begin, end in pieces:
            work, payloads = send(begin, end)
            yield work
            sizes = [payloads[0].numel()] * levels.inside.size
            yield levels.inside.all_gather(payloads.view(-1), sizes)
            land(begin, end, payloads)

    def _scatter_uneven(self, job: Sum, comm: Comm, scale: Tensor | None) -> Steps:
        """Sum shards of different sizes, in one exchange."""
        layouts = [Layout(size, self.fmt, scaled=scale is None) for size in job.sizes]
        sizes = [layout.nbytes for layout in layouts]
        sent = torch.empty(sum(sizes), dtype=torch.uint8, device=job.grads.device)
        owners = job.tensors.owner.split([size // SCALE_BLOCK for size in job.sizes])
        shards = job.grads.split(list(job.sizes))
        for rank, (x, payload, layout, owner) in enumerate(
            zip(shards, sent.split(sizes), layouts, owners, strict=True)
        ):
            if rank == comm.rank:
                continue
            shared = _shared(scale, owner[None, None], job.tensors.amax)
            pack(x[None, None], payload[None, None], layout=layout, shared=shared)
        mine = layouts[comm.rank]
        received = torch.empty(comm.size * mine.nbytes, dtype=torch.uint8, device=sent.device)
        each = [mine.nbytes] * comm.size
        yield comm.all_to_all(received, sent, received_sizes=each, sent_sizes=sizes)
        shared = _shared(scale, owners[comm.rank][None, None])
        own = Own(shards[comm.rank][None, None], comm.rank)
        payloads = received.view(comm.size, 1, mine.nbytes)
        self._land(payloads, job.out[None, None], own, shared, add=job.add)

    def _send(self, x_ABP: Tensor, comm: Comm, shared: Shared | None) -> tuple[Pending, Tensor]:
        """Pack x and start to send x[a] to rank a.

        Returns the handle and the buffer [source, B, bytes] of the payloads that are received.
        """
        layout = self._layout(x_ABP.shape[2], shared)
        payloads = layout.empty(*x_ABP.shape[:2], device=x_ABP.device)
        pack(x_ABP, payloads, layout=layout, shared=shared, skip=comm.rank)
        received = torch.empty_like(payloads)
        return comm.all_to_all(received, payloads), received

    def _land(
        self, received: Tensor, y_ABP: Tensor, own: Own, shared: Shared | None, *, add: bool
    ) -> None:
        """Sum `received` [source, B, bytes] and this rank's own values into y."""
        layout = self._layout(y_ABP.shape[2], shared)
        unpack(received[:, None], y_ABP, layout=layout, shared=shared, own=own, add=add)

    def _layout(self, elements: int, shared: Shared | None) -> Layout:
        return Layout(elements, self.fmt, scaled=shared is None)

    def _adds(self, job: Sum) -> bool:
        return job.add and not job.whole


def _shared(scale: Tensor | None, owner: Tensor, amax: Tensor | None = None) -> Shared | None:
    return None if scale is None else Shared(scale, owner, amax)


def _pieces(size: int, longest: int) -> Iterator[tuple[int, int]]:
    """Cut [0, size) at multiples of 128 into pieces of equal length, except for the last."""
    count = -(-size // longest)
    step = -(-size // (count * SCALE_BLOCK)) * SCALE_BLOCK if count else 1
    for begin in range(0, size, step):
        yield begin, min(begin + step, size)


def _pipeline(
    pieces: Sequence[tuple[int, int]],
    send: Callable[[int, int], tuple[Pending, Tensor]],
    land: Callable[[int, int, Tensor], None],
) -> Steps:
    """Send all pieces; each is started before the previous one is waited for and unpacked."""
    previous: tuple[int, int, Pending, Tensor] | None = None
    for begin, end in pieces:
        work, received = send(begin, end)
        if previous is not None:
            yield previous[2]
            land(previous[0], previous[1], previous[3])
        previous = (begin, end, work, received)
    if previous is not None:
        yield previous[2]
        land(previous[0], previous[1], previous[3])
