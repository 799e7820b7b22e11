"""Collectives of one group that count the bytes they send.

Counted is what a rank of R sends with the algorithms that move least, whatever the library does:

    reduce-scatter, all-gather, all-to-all of n bytes in all     n (R - 1) / R
    all-reduce of n bytes                                        2 n (R - 1) / R
    reduce, broadcast of n bytes along a chain                   n, but on its last rank

Bytes are added where a collective is issued, by what it carries ("grad", "weights", "tp") and by
the format on the wire. Collectives that others issue, megatron-core's over tensor-parallel ranks,
are counted by `TrafficMode`: a dispatch mode sees every call of torch.distributed with its tensors.
It costs time on the host for each operation, so a run has it on for one step; steps are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FORMATS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.uint8: "fp8",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.int32: "amax",  # the bits of largest magnitudes
}

SENT: dict[str, Callable[[int, int], float]] = {  # c10d's operator -> by bytes of all and R
    "allreduce_": lambda n, r: 2 * n * (r - 1) / r,
    "_reduce_scatter_base_": lambda n, r: n * (r - 1) / r,
    "_allgather_base_": lambda n, r: n * (r - 1) / r,
    "alltoall_base_": lambda n, r: n * (r - 1) / r,
    "allgather_": lambda n, r: n * (r - 1),
    "reduce_scatter_": lambda n, r: n * (r - 1) / r,
    "broadcast_": lambda n, r: n,
    "reduce_": lambda n, r: n,
}


@dataclass(eq=False)
class Traffic:
    """Bytes that this rank has sent, by (what, format)."""

    sent: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, what: str, dtype: torch.dtype, sent: float) -> None:
        self.sent[what, FORMATS.get(dtype, str(dtype).removeprefix("torch."))] += round(sent)

    def repeat(self, times: float) -> None:
        """As if everything so far had been sent so many times."""
        for key in self.sent:
            self.sent[key] = round(self.sent[key] * times)

    def summary(self) -> dict[str, int]:
        """comm_bytes_WHAT in all, and comm_bytes_WHAT_FORMAT of each format that was used."""
        totals = {f"comm_bytes_{what}": 0 for what in ("grad", "weights", "tp")}
        parts: dict[str, int] = {}
        for (what, form), count in sorted(self.sent.items()):
            totals[f"comm_bytes_{what}"] += count
            parts[f"comm_bytes_{what}_{form}"] = count
        return totals | parts


class Pending(Protocol):
    """Something under way. `wait` returns once it is done; on a GPU, lets the stream wait."""

    def wait(self) -> object: ...


class Several:
    """Operations that are waited for together."""

    def __init__(self, works: Sequence[Pending]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Comm:
    """Asynchronous collectives over `group`, counted as `what`. Sizes are in elements."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, what: str) -> None:
        self.group, self.traffic, self.what = group, traffic, what
        self.size, self.rank = group.size(), group.rank()

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Pending:
        """In place."""
        self._count(x, 2 * x.nbytes * (self.size - 1) / self.size)
        return _work(dist.all_reduce(x, op, group=self.group, async_op=True))

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Pending:
        """Sum x; rank r then holds the sum of the r-th of `sizes` parts in its place there."""
        parts = x.split(list(sizes))
        if len(set(sizes)) == 1:
            self._count(x, x.nbytes * (self.size - 1) / self.size)
            part = parts[self.rank]
            return _work(dist.reduce_scatter_tensor(part, x, group=self.group, async_op=True))
        works = []
        for owner, part in enumerate(parts):
            if len(part):
                self._count(part, part.nbytes if owner != self.rank else 0)
                work = dist.reduce(part, group_dst=owner, group=self.group, async_op=True)
                works.append(_work(work))
        return Several(works)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Pending:
        """Rank r holds the r-th part of x; afterwards everyone holds all."""
        parts = x.split(list(sizes))
        if len(set(sizes)) == 1:
            self._count(x, x.nbytes * (self.size - 1) / self.size)
            part = parts[self.rank]
            return _work(dist.all_gather_into_tensor(x, part, group=self.group, async_op=True))
        works = []
        for owner, part in enumerate(parts):
            if len(part):
                last = (owner - 1) % self.size
                self._count(part, part.nbytes if last != self.rank else 0)
                work = dist.broadcast(part, group_src=owner, group=self.group, async_op=True)
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
        """Part r of `sent` goes to rank r; parts are equal (rows) unless sizes are given."""
        kept = sent.nbytes / self.size
        if sent_sizes is not None:
            kept = sent_sizes[self.rank] * sent.element_size()
        self._count(sent, sent.nbytes - kept)
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


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "an asynchronous collective returns its work"
    return work


class TrafficMode(TorchDispatchMode):
    """While on, counts every collective over `group`, whoever issues it, as `what`."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, what: str) -> None:
        super().__init__()
        self.group, self.traffic, self.what = group, traffic, what

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d" and self._ours(args):
            sent = SENT.get(func._opname)
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            if sent is not None and tensors:
                largest = max(tensors, key=lambda tensor: tensor.nbytes)
                count = sent(largest.nbytes, self.group.size())
                self.traffic.add(self.what, largest.dtype, count)
        return func(*args, **(kwargs or {}))

    def _ours(self, args: tuple[Any, ...]) -> bool:
        """Whether one of the arguments is our group, which operators get boxed."""
        for arg in args:
            if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
                return bool(dist.ProcessGroup.unbox(arg).group_name == self.group.group_name)
        return False
