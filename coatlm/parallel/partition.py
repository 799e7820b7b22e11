"""Who owns which weights: equal flat parts, or whole tensors (FP8-LM, section 3.3).

FP8 states with one scale a tensor are simplest where a tensor is never cut, so FP8-LM gives whole
tensors to ranks: in order of size, largest first, each to the rank that holds least so far. This is
Graham's rule (SIAM J. Appl. Math. 17, 1969): the fullest rank holds at most 4/3 of the optimum.
What matters for memory is the fullest rank: `waste`, max / mean - 1, is what it has to hold beyond
an equal share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """`owner[i]` is the rank of tensor i, `loads[r]` the elements on rank r."""

    owner: tuple[int, ...]
    loads: tuple[int, ...]

    @property
    def waste(self) -> float:
        return max(self.loads) * len(self.loads) / sum(self.loads) - 1.0

    def __str__(self) -> str:
        return (
            f"{len(self.owner)} whole tensors over {len(self.loads)} ranks: "
            f"{min(self.loads):,} to {max(self.loads):,} elements each, "
            f"the fullest {self.waste:.0%} above the mean"
        )


def largest_first(sizes: Sequence[int], ranks: int, *, pinned: Sequence[int] = ()) -> Plan:
    """Distribute tensors of `sizes` elements; those whose indices are `pinned` go to rank 0 first.

    The same on every rank, for it depends on sizes alone. Raises ValueError where a rank would own
    nothing, as it would have nothing to update.
    """
    if len(sizes) < ranks:
        raise ValueError(
            f"parallel.partition=whole-tensor: {len(sizes)} tensors cannot be spread over {ranks} "
            "data-parallel ranks; use parallel.partition=flat"
        )
    loads, owner = [0] * ranks, [0] * len(sizes)
    for i in pinned:
        loads[0] += sizes[i]
    for i in sorted(set(range(len(sizes))) - set(pinned), key=lambda i: (-sizes[i], i)):
        owner[i] = loads.index(min(loads))
        loads[owner[i]] += sizes[i]
    return Plan(tuple(owner), tuple(loads))
