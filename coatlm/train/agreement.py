"""Steps that all ranks take or none: a failure on one rank is an error, with its reason, on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from coatlm.train.manifest import CheckpointError

Group = dist.ProcessGroup
T = TypeVar("T")


def together(action: Callable[[], T], group: Group | None) -> list[T]:
    """Run `action` on every rank of a gloo group (None: one process); results in rank order.

    If it fails anywhere, CheckpointError is raised on every rank and says where and why.
    """
    outcome: tuple[T | None, str | None]
    cause: Exception | None = None
    try:
        outcome = action(), None
    except Exception as error:  # of any kind: the others must not wait for this rank
        outcome, cause = (None, one_line(error)), error
    outcomes: list[Any] = [outcome]
    if group is not None:
        outcomes = [None] * group.size()
        dist.all_gather_object(outcomes, outcome, group=group)
    failures = {rank: reason for rank, (_, reason) in enumerate(outcomes) if reason is not None}
    if failures:
        raise CheckpointError(summary(failures, len(outcomes))) from cause
    return [result for result, _ in outcomes]


def one_line(error: BaseException) -> str:
    """An exception as a message of one line."""
    text = next(iter(str(error).splitlines()), "")
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


def summary(failures: Mapping[int, str], world: int) -> str:
    """What failed on which ranks of `world`; ranks that failed alike share one entry."""
    if world == 1:
        return failures[0]
    ranks: dict[str, list[int]] = {}
    for rank, reason in failures.items():
        ranks.setdefault(reason, []).append(rank)
    return "; ".join(
        reason if len(who) == world else f"{reason} (rank {', '.join(map(str, who))})"
        for reason, who in ranks.items()
    )
