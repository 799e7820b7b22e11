"""Ranks without processes: generators of one process that go on in step.

A gradient format is a generator that starts collectives and yields what it must wait for. `run`
advances the generators of all ranks in turn; `Rank` stands for a `Comm` and computes a collective
when the last member of its group has called it. What is in flight is therefore as unfinished as it
can be when a generator goes on, and a format that reads a result before it yields is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(eq=False)
class Call:
    """A collective in flight. It is done once every member has joined."""

    kind: str
    compute: Callable[[list[Any]], None]
    members: dict[int, Any] = field(default_factory=dict)
    done: bool = False

    def wait(self) -> None:
        assert self.done, f"{self.kind}: waited for before all ranks have called it"


class Group:
    """The calls of one group, in the order in which its members make them."""

    def __init__(self, size: int) -> None:
        self.size, self.calls = size, list[Call]()

    def join(
        self, rank: int, number: int, kind: str, tensors: Any, compute: Callable[..., None]
    ) -> Call:
        if number == len(self.calls):
            self.calls.append(Call(kind, compute))
        call = self.calls[number]
        assert call.kind == kind, f"rank {rank} calls {kind}, others {call.kind}"
        call.members[rank] = tensors
        if len(call.members) == self.size:
            call.compute([call.members[r] for r in range(self.size)])
            call.done = True
        return call


class Rank:
    """`Comm` for one member of a group. Sizes are in elements."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self.calls: list[str] = []

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Call:
        def compute(members: list[Tensor]) -> None:
            values = torch.stack(members)
            result = values.amax(0) if op == dist.ReduceOp.MAX else values.sum(0).to(x.dtype)
            for member in members:
                member.copy_(result)

        return self._join(f"all_reduce {x.dtype} {op}", x, compute)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Call:
        def compute(members: list[Tensor]) -> None:
            totals = torch.stack(members).sum(0).to(x.dtype).split(list(sizes))
            for rank, member in enumerate(members):
                member.fill_(torch.nan)  # undefined but for the rank's own part
                member.split(list(sizes))[rank].copy_(totals[rank])

        return self._join(f"reduce_scatter {x.dtype}", x, compute)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Call:
        def compute(members: list[Tensor]) -> None:
            parts = [member.split(list(sizes))[rank] for rank, member in enumerate(members)]
            whole = torch.cat(parts)
            for member in members:
                member.copy_(whole)

        assert sum(sizes) == x.numel() and len(sizes) == self.size
        return self._join(f"all_gather {x.dtype}", x, compute)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        *,
        received_sizes: Sequence[int] | None = None,
        sent_sizes: Sequence[int] | None = None,
    ) -> Call:
        arriving = received_sizes or (len(received) // self.size,) * self.size
        leaving = sent_sizes or (len(sent) // self.size,) * self.size

        def compute(members: list[tuple[Tensor, Tensor, Any, Any]]) -> None:
            parts = [sent.split(list(leaving)) for _, sent, _, leaving in members]
            for rank, (received, _, arriving, _) in enumerate(members):
                for source, place in enumerate(received.split(list(arriving))):
                    place.copy_(parts[source][rank])

        return self._join("all_to_all", (received, sent, arriving, leaving), compute)

    def _join(self, kind: str, tensors: Any, compute: Callable[..., None]) -> Call:
        self.calls.append(kind)
        return self.group.join(self.rank, len(self.calls) - 1, kind, tensors, compute)


def ranks(size: int) -> list[Rank]:
    """The members of one group."""
    group = Group(size)
    return [Rank(group, rank) for rank in range(size)]


def run(steps: Iterable[Iterable[Any]]) -> None:
    """Advance all generators together until they end, which they must do together."""
    for pending in zip_longest(*steps):
        for call in pending:
            assert call is not None, "one rank waits when another one has ended"
            call.wait()
