"""Assignment of whole tensors to ranks, instead of equal flat shards (FP8-LM, section 3.3).

FP8 states with tensor-wise scales are simplest where no tensor is cut, so that ranks need not share
scales. FP8-LM therefore assigns whole tensors to ranks: in order of size, largest first, each to
the rank with the smallest load so far. This is Graham's rule (SIAM J. Appl. Math. 17, 1969): the
largest load is at most 4/3 of the optimum. Memory is limited by the rank with the largest load;
`waste`, max / mean - 1, is what that rank holds beyond an equal share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ownership:
    """An assignment: `owner[i]` is the rank of tensor i, `loads[r]` the elements on rank r."""

    owner: tuple[int, ...]
    loads: tuple[int, ...]

    @property
    def waste(self) -> float:
        return max(self.loads) * len(self.loads) / sum(self.loads) - 1.0

    def __str__(self) -> str:
        return (
            f"{len(self.owner)} whole tensors over {len(self.loads)} ranks: "
            f"{min(self.loads):,} to {max(self.loads):,} elements each, "
            f"the largest {self.waste:.0%} above the mean"
        )


def largest_first(sizes: Sequence[int], ranks: int, *, pinned: Sequence[int] = ()) -> Ownership:
    """Assign tensors of `sizes` elements to ranks, those with `pinned` indices first, to rank 0.

    The result depends only on the arguments, so all ranks compute the same. Raises ValueError if
    there are fewer tensors than ranks: a rank without a tensor has nothing to update.
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
    return Ownership(tuple(owner), tuple(loads))
