"""Paired differences of a loss study: their mean with its standard error, as a table and a plot.

    d_s = 100 (loss of the recipe / loss of the reference - 1)       of seed s, in %
    mean = sum d_s / n      sd^2 = sum (d_s - mean)^2 / (n - 1)      standard error = sd / sqrt(n)

Only seeds that both have finished count, with a trunk only runs from the same one. A run whose
loss is not finite has failed; the table counts the failed runs of each recipe beside its pairs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from coatlm.files import whole_file
from tools.studies.loss_lines import (
    DONE,
    FAILED,
    LOSSES,
    Line,
    LineKey,
    check_all_comparable,
    newest,
)
from tools.studies.loss_study import TRUNK

TITLES = {"val_loss": "validation loss", "last_loss": "training loss, last 5 %"}


@dataclass(frozen=True)
class PairedDifference:
    """The differences of n pairs, in % of the reference's loss."""

    pairs: int
    mean: float | None  # None without a pair
    error: float | None  # standard error; None with fewer than two pairs
    sd: float | None
    smallest: float | None
    largest: float | None


@dataclass(frozen=True)
class RecipeRow:
    """One recipe: differences by loss, and medians over its finished runs."""

    recipe: str
    runs: int
    failed: int
    differences: dict[str, PairedDifference]  # by key of LOSSES; 0 for the reference
    losses: dict[str, float | None]  # key of LOSSES -> mean over runs; None for several texts
    tokens_per_s: float | None
    peak_gib: float | None


def difference(values: Sequence[float], reference: Sequence[float]) -> PairedDifference:
    """The differences of paired losses, by the formulas of the module docstring."""
    d = 100 * (np.asarray(values, dtype=np.float64) / np.asarray(reference) - 1)
    n = len(d)
    if not n:
        return PairedDifference(0, None, None, None, None, None)
    sd = float(d.std(ddof=1)) if n > 1 else None
    error = None if sd is None else sd / math.sqrt(n)
    return PairedDifference(n, float(d.mean()), error, sd, float(d.min()), float(d.max()))


def tabulate(lines: Sequence[Line], reference: str) -> list[RecipeRow]:
    """A row per recipe, the reference first. Raises ValueError for lines that do not compare."""
    check_all_comparable(lines)
    found = newest([line for line in lines if line["recipe"] != TRUNK])
    names = dict.fromkeys([reference, *(recipe for recipe, _, _ in found)])
    return [_row(found, name, reference) for name in names]


def finished(found: Mapping[LineKey, Line], name: str) -> dict[tuple[int, str | None], Line]:
    """The finished runs of a recipe, by seed and trunk."""
    return {(s, t): x for (r, s, t), x in found.items() if r == name and x["state"] == DONE}


def _row(found: Mapping[LineKey, Line], name: str, reference: str) -> RecipeRow:
    mine, theirs = finished(found, name), finished(found, reference)
    both = [key for key in mine if key in theirs]
    texts = {line["data"] for line in found.values()}
    return RecipeRow(
        name,
        runs=len(mine),
        failed=sum(r == name and x["state"] == FAILED for (r, _, _), x in found.items()),
        differences={
            key: difference([mine[s][key] for s in both], [theirs[s][key] for s in both])
            for key in LOSSES
        },
        losses={
            key: None if len(texts) > 1 else _mean([x[key] for x in mine.values()])
            for key in LOSSES
        },
        tokens_per_s=_median([x["tokens_per_s"] for x in mine.values() if x["tokens_per_s"]]),
        peak_gib=_median([x["peak_gib"] for x in mine.values() if x["peak_gib"] is not None]),
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def markdown(rows: Sequence[RecipeRow]) -> Iterator[str]:
    """Yield the lines of the table: mean difference +- standard error, sd, smallest to largest."""
    yield (
        f"| recipe | pairs | failed | validation loss, % of {rows[0].recipe} | sd | range "
        "| last 5 % of training | sd | range | tokens/s | peak GiB |"
    )
    yield "| --- |" + " ---: |" * 10
    for row in rows:
        cells = [f"`{row.recipe}`", row.differences["val_loss"].pairs, row.failed]
        for key in LOSSES:
            d, loss = row.differences[key], row.losses[key]
            if row is rows[0]:
                cells += ["" if loss is None else f"mean {loss:.4f}", "", ""]
                continue
            error = "" if d.error is None else f" +- {d.error:.3f}"
            cells += ["" if d.mean is None else f"{d.mean:+.3f}{error}"]
            cells += ["" if d.sd is None else f"{d.sd:.3f}"]
            cells += ["" if d.pairs < 2 else f"{d.smallest:+.2f} to {d.largest:+.2f}"]
        cells += ["" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}"]
        cells += ["" if row.peak_gib is None else f"{row.peak_gib:.1f}"]
        yield "| " + " | ".join(map(str, cells)) + " |"


def as_json(rows: Sequence[RecipeRow]) -> list[dict[str, Any]]:
    """The table as JSON values."""
    return [
        {**vars(row), "differences": {k: vars(d) for k, d in row.differences.items()}}
        for row in rows
    ]


def draw(rows: Sequence[RecipeRow], path: Path) -> None:
    """Plot mean differences with standard errors (thick) and ranges (thin), a row per recipe."""
    shown = [row for row in rows[1:] if row.differences["val_loss"].pairs]
    figure = Figure(figsize=(11, 1.2 + 0.32 * max(len(shown), 3)), layout="constrained")
    axes = figure.subplots(1, len(LOSSES), sharey=True)
    for axis, key in zip(axes, LOSSES, strict=True):
        for place, row in enumerate(shown):
            d = row.differences[key]
            axis.plot([d.smallest, d.largest], [place, place], color="0.7", linewidth=1.0)
            axis.errorbar(
                d.mean, place, xerr=d.error or 0.0, fmt="o", color="C0", elinewidth=2.5, capsize=3
            )
        axis.axvline(0.0, color="0.3", linewidth=0.8)
        axis.set(title=TITLES[key], xlabel=f"difference to {rows[0].recipe} (%)")
        axis.set_yticks(range(len(shown)), [f"{r.recipe} ({r.runs})" for r in shown])
        axis.grid(alpha=0.3)
    axes[0].invert_yaxis()
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=130)
