"""Run a phase on all ranks; if it fails on one, every rank raises an error with the reason."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from coatlm.config import ConfigError
from coatlm.train.manifest import CheckpointError, LostPeerError
from coatlm.train.reports import (
    UNEXPECTED,
    AgreedError,
    Failure,
    error_line,
    exit_code,
    lost_peer,
    merged,
    print_error,
    print_traceback,
)

Group = dist.ProcessGroup
T = TypeVar("T")
PATIENCE_S = 60.0  # a rank that failed waits so long for the others to finish the same phase


@dataclass(frozen=True)
class Peers:
    """All ranks of a run, and the gloo group over which they agree on each phase of the set-up."""

    rank: int
    hosts: tuple[str, ...]  # of each rank
    group: Group  # gloo over all ranks

    def agree(self, phase: Callable[[], T]) -> T:
        """Run `phase` on every rank; its result here.

        If it fails anywhere, rank 0 prints why, once, and AgreedError is raised on every rank. One
        process raises what `phase` raised, with a ValueError as ConfigError.
        """
        error: Exception | None = None
        try:
            result = phase()
        except Exception as caught:  # of any kind: the others must not wait for this rank
            error = caught
            if isinstance(caught, ValueError) and not isinstance(caught, ConfigError):
                error = ConfigError(str(caught))
                error.__cause__ = caught
        if len(self.hosts) > 1:
            self._compare(error)
        if error is not None:
            raise error
        return result

    def rank_zero_first(self, phase: Callable[[], T]) -> T:
        """Run `phase` on rank 0, then on the others, which find what it made. Agreed as above."""
        made = self.agree(lambda: phase() if self.rank == 0 else None)
        return self.agree(lambda: phase() if made is None else made)

    def _compare(self, error: Exception | None) -> None:
        """Raise AgreedError on every rank if any has an error."""
        mine = None if error is None else Failure.of(error)
        if error is not None and exit_code(error) == UNEXPECTED and not lost_peer(error):
            print_traceback(error, self.rank)
        found = self._gather(mine) if error is None else self._gather_with_patience(mine)
        if found is None:  # the others are in a collective that this rank will never join
            assert error is not None
            raise error
        failures = {rank: failure for rank, failure in enumerate(found) if failure is not None}
        if not failures:
            return
        message = merged({rank: f.message for rank, f in failures.items()}, self.hosts)
        if self.rank == 0:
            print_error(message)
        with suppress(RuntimeError):  # a launcher would end rank 0 once another rank has left
            dist.barrier(group=self.group)
        raise AgreedError(message, max(f.code for f in failures.values())) from error

    def _gather(self, mine: Failure | None) -> list[Failure | None]:
        outcomes: list[Any] = [None] * self.group.size()
        try:
            dist.all_gather_object(outcomes, mine, group=self.group)
        except RuntimeError as gone:
            raise LostPeerError("another rank has gone while the run started") from gone
        return outcomes

    def _gather_with_patience(self, mine: Failure | None) -> list[Failure | None] | None:
        """None if the others do not come: they may wait for this rank in another collective."""
        found: list[list[Failure | None]] = []

        def gather() -> None:
            with suppress(LostPeerError):
                found.append(self._gather(mine))

        thread = threading.Thread(target=gather, name="agreement", daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        return found[0] if found else None


def together(action: Callable[[], T], group: Group | None) -> list[T]:
    """Run `action` on every rank of a gloo group (None: one process); results in rank order.

    If it fails anywhere, CheckpointError is raised on every rank and says where and why.
    """
    outcome: tuple[T | None, str | None]
    cause: Exception | None = None
    try:
        outcome = action(), None
    except Exception as error:  # of any kind: the others must not wait for this rank
        outcome, cause = (None, error_line(error)), error
    outcomes: list[Any] = [outcome]
    if group is not None:
        outcomes = [None] * group.size()
        dist.all_gather_object(outcomes, outcome, group=group)
    failures = {rank: reason for rank, (_, reason) in enumerate(outcomes) if reason is not None}
    if failures:
        raise CheckpointError(describe_failures(failures, len(outcomes))) from cause
    return [result for result, _ in outcomes]


def describe_failures(failures: Mapping[int, str], world: int) -> str:
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
