"""The rounds of a drill as JSON lines, and their table by fault."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROUNDS = "rounds.jsonl"
HEAD = ("fault", "rounds", "s to next step, median", "max", "steps lost, median", "max", "failures")


@dataclass(frozen=True)
class Round:
    """A fault, and how the run continued."""

    round: int
    fault: str
    phase: str
    kind: str  # of the job
    notes: str
    codes: list[int | None]  # of the processes that were started
    done: int  # steps before the fault
    resumed: int | None  # the step from which the run continued, restarted or not
    seconds: float | None  # from the restart, or the end of the fault, to the next step
    lost: int | None  # done - resumed
    verdict: str  # ok, or what went wrong


def append(path: Path, found: Round) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(found)) + "\n")


def read(paths: Iterable[Path]) -> list[Round]:
    """Read the rounds in several files. Raises ValueError for an invalid line."""
    rounds = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                rounds.append(Round(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}: line {number} is not a round: {error}") from None
    return rounds


def rows(rounds: Sequence[Round]) -> Iterator[tuple[str, ...]]:
    """The rows of the table: one per fault, summed over phases, and one in total."""
    names = sorted({found.fault for found in rounds})
    for name, some in [*((n, [r for r in rounds if r.fault == n]) for n in names), ("all", rounds)]:
        seconds = [r.seconds for r in some if r.seconds is not None]
        lost = [r.lost for r in some if r.lost is not None]
        yield (
            name,
            str(len(some)),
            f"{statistics.median(seconds):.1f}" if seconds else "",
            f"{max(seconds):.1f}" if seconds else "",
            f"{statistics.median(lost):g}" if lost else "",
            str(max(lost)) if lost else "",
            str(sum(r.verdict != "ok" for r in some)),
        )


def markdown(rounds: Sequence[Round]) -> str:
    """The table of docs/results/faults.md."""
    lines = [HEAD, ("---", *["---:"] * (len(HEAD) - 1)), *rows(rounds)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(rounds: Sequence[Round]) -> str:
    """The table of `rows` as text for a terminal."""
    lines = [HEAD, *rows(rounds)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )
