"""Run a function on all ranks; if it fails on one, every rank raises an error with the reason.

Ranks that are done wait for the others in a collective, which fails after its group's timeout (half
an hour). Where one rank may take longer than that, `unhurried` lets the others wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
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
    late_peer,
    lost_peer,
    merged,
    print_error,
    print_traceback,
)

Group = dist.ProcessGroup
T = TypeVar("T")
PATIENCE_S = 60.0  # seconds that a failed rank waits for the others to finish the same phase
ROUND_S = 10.0  # seconds between two rounds of `unhurried`


@dataclass(frozen=True)
class Peers:
    """All ranks of a run, and the gloo group over which they compare the outcome of each phase."""

    rank: int
    hosts: tuple[str, ...]  # host name of each rank
    group: Group  # gloo, over all ranks

    def agree(self, phase: Callable[[], T]) -> T:
        """Run `phase` on every rank and return this rank's result.

        If it fails on any rank, rank 0 prints the reason once and every rank raises AgreedError. A
        single process raises the exception of `phase`, with a ValueError turned into ConfigError.
        """
        error: Exception | None = None
        try:
            result = phase()
        except Exception as caught:  # any type, since the other ranks wait for this one
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
        """Run `phase` on rank 0, then on the first rank of each host, then on the others.

        Later ranks reuse the files that earlier ones wrote, also if these are local to each host.
        `phase` may take hours, such as tokenizing a large text. Errors are raised as by `agree`.
        """
        made: list[T] = []

        def take_turn(turn: int) -> None:
            with unhurried(self.group):
                if turn == self.rank and not made:
                    made.append(phase())

        for turn in (0, self.hosts.index(self.hosts[self.rank]), self.rank):
            self.agree(partial(take_turn, turn))
        return made[0]

    def _compare(self, error: Exception | None) -> None:
        """Raise AgreedError on every rank if any rank has an error."""
        mine = None if error is None else Failure.of(error)
        if error is not None and exit_code(error) == UNEXPECTED and not lost_peer(error):
            print_traceback(error, self.rank)
        found = self._gather(mine) if error is None else self._gather_with_patience(mine)
        if found is None:  # the other ranks are in a collective that this rank will not join
            assert error is not None
            raise error
        failures = {rank: failure for rank, failure in enumerate(found) if failure is not None}
        if not failures:
            return
        message = merged({rank: f.message for rank, f in failures.items()}, self.hosts)
        if self.rank == 0:
            print_error(message)
        with suppress(RuntimeError):  # a launcher ends rank 0 as soon as another rank exits
            dist.barrier(group=self.group)
        raise AgreedError(message, max(f.code for f in failures.values())) from error

    def _gather(self, mine: Failure | None) -> list[Failure | None]:
        outcomes: list[Any] = [None] * self.group.size()
        try:
            dist.all_gather_object(outcomes, mine, group=self.group)
        except RuntimeError as gone:
            exited = "another rank exited while the run started"
            raise LostPeerError(late_peer(gone) or exited) from gone
        return outcomes

    def _gather_with_patience(self, mine: Failure | None) -> list[Failure | None] | None:
        """Like `_gather`, but return None after PATIENCE_S: others may be in another collective."""
        found: list[list[Failure | None]] = []

        def gather() -> None:
            with suppress(LostPeerError):
                found.append(self._gather(mine))

        thread = threading.Thread(target=gather, name="agreement", daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        return found[0] if found else None


@contextmanager
def unhurried(group: Group | None) -> Iterator[None]:
    """End this block on all ranks of a gloo group together, however long one of them takes.

    A thread tells the other ranks every ROUND_S whether this one is done, until all are, so the
    block must not use the group. A rank that is interrupted or exits does not wait for the others.
    """
    if group is None or group.size() == 1:
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_rounds, args=(done, group), name="rounds", daemon=True)
    thread.start()

    def wait() -> None:
        done.set()
        thread.join()

    try:
        yield
    except Exception:
        wait()
        raise
    wait()


def _rounds(done: threading.Event, group: Group) -> None:
    """Exchange whether ranks are done until all are; a lost rank is seen by the next collective."""
    finished: list[Any] = [False] * group.size()
    with suppress(RuntimeError):
        while not all(finished):
            dist.all_gather_object(finished, done.wait(ROUND_S), group=group)


def together(action: Callable[[], T], group: Group | None, *, hurried: bool = True) -> list[T]:
    """Run `action` on every rank of a gloo group (None: one process); returns results by rank.

    If it fails on any rank, every rank raises CheckpointError with the ranks and the reasons. With
    `hurried` false the ranks may finish further apart than the group's timeout.
    """
    outcome: tuple[T | None, str | None]
    cause: Exception | None = None
    try:
        with nullcontext() if hurried else unhurried(group):
            outcome = action(), None
    except Exception as error:  # any type, since the other ranks wait for this one
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
    """The reasons of failures with their ranks; equal reasons are merged. `world`: all ranks."""
    if world == 1:
        return failures[0]
    ranks: dict[str, list[int]] = {}
    for rank, reason in failures.items():
        ranks.setdefault(reason, []).append(rank)
    return "; ".join(
        reason if len(who) == world else f"{reason} (rank {', '.join(map(str, who))})"
        for reason, who in ranks.items()
    )
