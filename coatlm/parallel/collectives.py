"""Asynchronous collectives of one process group that count the bytes they send.

The count for one of R ranks assumes the algorithm that sends the fewest bytes, whichever algorithm
the library uses:

    reduce-scatter, all-gather, all-to-all of n bytes in total   n (R - 1) / R
    all-reduce of n bytes                                        2 n (R - 1) / R
    reduce, broadcast of n bytes along a chain                   n, except on its last rank

Bytes of gradients and weights are counted where a collective is issued, by its content ("grad",
"weights") and by the format of the bytes sent. Bytes that layers send over tensor- and
context-parallel groups ("tp", "cp"), most of them in megatron-core, are computed in closed form by
coatlm.model.traffic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has new names for these, and warns of the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

FORMATS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.uint8: "fp8",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.int32: "amax",  # fp32 amaxes, reduced as integers
}


@dataclass(eq=False)
class Traffic:
    """Bytes that this rank has sent, by (content, format)."""

    sent: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, what: str, dtype: torch.dtype, sent: float) -> None:
        self.sent[what, FORMATS.get(dtype, str(dtype).removeprefix("torch."))] += round(sent)

    def summary(self) -> dict[str, int]:
        """The totals comm_bytes_WHAT, and comm_bytes_WHAT_FORMAT for each format that was used.

        The totals of grad, weights and tp are always included, that of cp if it is not zero.
        """
        totals = {f"comm_bytes_{what}": 0 for what in ("grad", "weights", "tp")}
        parts: dict[str, int] = {}
        for (what, form), count in sorted(self.sent.items()):
            totals[f"comm_bytes_{what}"] = totals.get(f"comm_bytes_{what}", 0) + count
            parts[f"comm_bytes_{what}_{form}"] = count
        return totals | parts


class Pending(Protocol):
    """An operation in flight. `wait` blocks until it is done; on a GPU, only the stream waits."""

    def wait(self) -> object: ...


class Several:
    """Several operations in flight with one `wait`."""

    def __init__(self, works: Sequence[Pending]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def swap(
    sent: Tensor, received: Tensor, *, to: int, source: int, group: dist.ProcessGroup
) -> Pending:
    """Start to send rows to the rank `to` of a group and to receive rows from the rank `source`.

    All ranks swap at the same time. It is an all-to-all of one block: NCCL's process group keeps
    the tensors until the wait alone, also in a CUDA graph, and those of sends and receives in a
    batch until the host has seen them arrive.
    """
    arriving, leaving = (
        [len(rows) if rank == other else 0 for rank in range(group.size())]
        for rows, other in ((received, source), (sent, to))
    )
    return _work(
        dist.all_to_all_single(received, sent, arriving, leaving, group=group, async_op=True)
    )


class Comm:
    """Asynchronous collectives over `group`, counted as `what`. Sizes are in elements."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, what: str) -> None:
        self.group, self.traffic, self.what = group, traffic, what
        self.size, self.rank = group.size(), group.rank()

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Pending:
        """Reduce x over the process group, in place."""
        self._count(x, 2 * x.nbytes * (self.size - 1) / self.size)
        return _work(dist.all_reduce(x, op, group=self.group, async_op=True))

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Pending:
        """Sum x, in place: slice r, of sizes[r] elements, holds the sum on rank r alone."""
        slices = x.split(list(sizes))
        if len(set(sizes)) == 1:
            self._count(x, x.nbytes * (self.size - 1) / self.size)
            own = slices[self.rank]
            return _work(reduce_scatter_single(own, x, group=self.group, async_op=True))
        works = []
        for owner, owned in enumerate(slices):
            if len(owned):
                self._count(owned, owned.nbytes if owner != self.rank else 0)
                work = dist.reduce(owned, group_dst=owner, group=self.group, async_op=True)
                works.append(_work(work))
        return Several(works)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Pending:
        """Fill x, in place, from slice r of rank r, which has sizes[r] elements."""
        slices = x.split(list(sizes))
        if len(set(sizes)) == 1:
            self._count(x, x.nbytes * (self.size - 1) / self.size)
            own = slices[self.rank]
            return _work(all_gather_single(x, own, group=self.group, async_op=True))
        works = []
        for owner, owned in enumerate(slices):
            if len(owned):
                last = (owner - 1) % self.size
                self._count(owned, owned.nbytes if last != self.rank else 0)
                work = dist.broadcast(owned, group_src=owner, group=self.group, async_op=True)
                works.append(_work(work))
        return Several(works)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        *,
        received_sizes: Sequence[int] | None = None,
        sent_sizes: Sequence[int] | None = None,
    ) -> Pending:
        """Send slice r of `sent` to rank r. Slices have equal sizes unless sizes are given."""
        own = sent.nbytes / self.size
        if sent_sizes is not None:
            own = sent_sizes[self.rank] * sent.element_size()
        self._count(sent, sent.nbytes - own)
        return _work(
            dist.all_to_all_single(
                received,
                sent,
                output_split_sizes=None if received_sizes is None else list(received_sizes),
                input_split_sizes=None if sent_sizes is None else list(sent_sizes),
                group=self.group,
                async_op=True,
            )
        )

    def _count(self, x: Tensor, sent: float) -> None:
        self.traffic.add(self.what, x.dtype, sent)


def all_reduce(x: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduce x over `group`, in place; nothing for one rank, so that its graphs need no NCCL."""
    if group.size() > 1:
        dist.all_reduce(x, op, group=group)


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "an asynchronous collective returns its work"
    return work
