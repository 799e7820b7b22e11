"""Accuracies of a fine-tuning study: means over seeds with standard errors, as a table.

    mean = sum a_s / n      standard error = sqrt(sum (a_s - mean)^2 / (n - 1) / n)

a_s is the accuracy of seed s in %: of a task the share of its test examples, of a run the mean over
tasks. The difference to the reference, in points, is paired by seed, with the same formulas.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from tools.studies.loss_lines import DONE, FAILED, Line, check_all_comparable, newest

AccuracyRow = dict[str, Any]


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean and its standard error; None where there are too few values."""
    mean = statistics.fmean(values) if values else None
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return mean, error


def overall(line: Line) -> float:
    """The mean accuracy over tasks, in %."""
    return statistics.fmean(line["accuracy"].values())


def tabulate(lines: Sequence[Line], reference: str) -> list[AccuracyRow]:
    """A row per recipe, the reference first. Raises ValueError for lines that do not compare."""
    check_all_comparable(lines)
    found = {(recipe, seed): line for (recipe, seed, _), line in newest(lines).items()}
    return [
        _row(found, name, reference) for name in dict.fromkeys([reference, *(r for r, _ in found)])
    ]


def _row(found: dict[tuple[str, int], Line], name: str, reference: str) -> AccuracyRow:
    mine = {s: x for (r, s), x in found.items() if r == name and x["state"] == DONE}
    theirs = {s: x for (r, s), x in found.items() if r == reference and x["state"] == DONE}
    tasks = sorted({task for x in mine.values() for task in x["accuracy"]})
    both = sorted(mine.keys() & theirs.keys())
    return {
        "recipe": name,
        "runs": len(mine),
        "failed": sum(r == name and x["state"] == FAILED for (r, _), x in found.items()),
        "accuracy": {t: mean_and_error([x["accuracy"][t] for x in mine.values()]) for t in tasks},
        "overall": mean_and_error([overall(x) for x in mine.values()]),
        "difference": mean_and_error([overall(mine[s]) - overall(theirs[s]) for s in both]),
        "val_loss": mean_and_error([x["val_loss"] for x in mine.values()]),
    }


def markdown(rows: Sequence[AccuracyRow]) -> Iterator[str]:
    """Yield the lines of the table."""
    tasks = list(rows[0]["accuracy"])
    names = [f"{task}, %" for task in tasks]
    heads = ["recipe", "seeds", "failed", *names, "mean, %", f"points from {rows[0]['recipe']}"]
    yield "| " + " | ".join([*heads, "validation loss"]) + " |"
    yield "| --- |" + " ---: |" * len(heads)
    for row in rows:
        values = [row["accuracy"].get(task, (None, None)) for task in tasks]
        cells = [f"`{row['recipe']}`", str(row["runs"]), str(row["failed"])]
        cells += [_text(value, ".2f") for value in (*values, row["overall"])]
        cells += ["" if row is rows[0] else _text(row["difference"], "+.2f")]
        cells += [_text(row["val_loss"], ".4f")]
        yield "| " + " | ".join(cells) + " |"


def _text(value: tuple[float | None, float | None], form: str) -> str:
    """mean +- standard error."""
    mean, error = value
    if mean is None:
        return ""
    digits = form.removeprefix("+")
    return f"{mean:{form}}" + ("" if error is None else f" +- {error:{digits}}")
