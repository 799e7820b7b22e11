"""Equal time: the seconds of training until the reference's final validation loss.

    target_s = final validation loss of the reference with seed s
    t_s      = seconds at which the loss of a recipe falls to target_s for the last time, linear
               between two evaluations; None if its final loss is above
    ratio_s  = t_s / seconds of the whole run of the reference

A table has the mean ratio over seeds with its standard error, as loss_table has for losses. Only
runs of the same machine are comparable in time: their lines must name the same GPU.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from coatlm.files import whole_file
from tools.studies.loss_lines import Line, newest
from tools.studies.loss_study import TRUNK
from tools.studies.loss_table import finished

Evaluation = Sequence[float]  # step, seconds, validation loss


@dataclass(frozen=True)
class TimeRow:
    """One recipe, over the seeds that it and the reference have finished."""

    recipe: str
    pairs: int
    reached: int  # pairs in which the recipe reached the reference's final loss
    seconds: float | None  # mean over those
    ratio: float | None
    error: float | None  # standard error of the ratio; None with fewer than two
    tokens: float | None  # mean number of tokens by then, in those of the reference; after a trunk
    final: float | None  # mean seconds of whole runs


def reached(evaluations: Sequence[Evaluation], target: float) -> tuple[float, float] | None:
    """(step, seconds) at which the loss falls to `target` and stays there; None if it does not."""
    later: Evaluation | None = None
    for now in reversed(evaluations):
        if now[2] > target:
            if later is None:
                return None
            share = (now[2] - target) / (now[2] - later[2])
            return now[0] + share * (later[0] - now[0]), now[1] + share * (later[1] - now[1])
        later = now
    return None if later is None else (later[0], later[1])


def tabulate(lines: Sequence[Line], reference: str) -> list[TimeRow]:
    """A row per recipe, the reference first; [] without runs of several evaluations.

    Raises ValueError for runs on different GPUs.
    """
    lines = timed(lines)
    found = newest(lines)
    names = dict.fromkeys([reference, *(recipe for recipe, _, _ in found)]) if lines else {}
    return [_row(finished(found, name), finished(found, reference), name) for name in names]


def timed(lines: Sequence[Line]) -> list[Line]:
    """The lines with a curve over time. Raises ValueError if these are of different GPUs."""
    found = [x for x in lines if x["recipe"] != TRUNK and len(x.get("evaluations") or ()) > 1]
    gpus = {(x.get("versions") or {}).get("gpu") for x in found}
    if len(gpus) > 1:
        names = " and ".join(sorted(map(str, gpus)))
        raise ValueError(f"gpu: {names}: times of different GPUs are not compared")
    return found


def _row(
    mine: dict[tuple[int, str | None], Line],
    theirs: dict[tuple[int, str | None], Line],
    name: str,
) -> TimeRow:
    both = [key for key in mine if key in theirs]
    seconds, ratios, tokens = [], [], []
    for key in both:
        end = theirs[key]["evaluations"][-1]
        at = reached(mine[key]["evaluations"], end[2])
        if at is not None:
            seconds.append(at[1])
            ratios.append(at[1] / end[1])
            steps = (at[0] - mine[key].get("begin", 0), end[0] - theirs[key].get("begin", 0))
            tokens.append(steps[0] / steps[1])
    error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else None
    whole = [mine[key]["evaluations"][-1][1] for key in both]
    means = [statistics.fmean(x) if x else None for x in (seconds, ratios, tokens, whole)]
    return TimeRow(name, len(both), len(ratios), means[0], means[1], error, means[2], means[3])


def markdown(rows: Sequence[TimeRow]) -> Iterator[str]:
    """Yield the lines of the table."""
    name = rows[0].recipe
    yield (
        f"| recipe | pairs | reached | seconds to the final loss of {name} | of its time "
        "| of its tokens | seconds of the whole run |"
    )
    yield "| --- |" + " ---: |" * 6
    for row in rows:
        error = "" if row.error is None else f" +- {row.error:.3f}"
        cells = [f"`{row.recipe}`", str(row.pairs), str(row.reached)]
        cells += ["" if row.seconds is None else f"{row.seconds:.1f}"]
        cells += ["" if row.ratio is None else f"{row.ratio:.3f}{error}"]
        cells += ["" if row.tokens is None else f"{row.tokens:.3f}"]
        cells += ["" if row.final is None else f"{row.final:.1f}"]
        yield "| " + " | ".join(cells) + " |"


def draw(lines: Sequence[Line], reference: str, path: Path) -> None:
    """Plot validation losses over seconds, a color per recipe, and the reference's final loss."""
    found = newest(timed(lines))
    names = list(dict.fromkeys([reference, *(recipe for recipe, _, _ in found)]))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    for index, name in enumerate(names):
        for number, line in enumerate(finished(found, name).values()):
            _, seconds, losses = zip(*line["evaluations"], strict=True)
            label = name if number == 0 else None
            axis.plot(seconds, losses, color=f"C{index}", linewidth=1.2, label=label)
            if name == reference:
                axis.axhline(losses[-1], color="0.6", linewidth=0.8, linestyle="--")
    axis.set(xlabel="seconds of training", ylabel="validation loss", yscale="log")
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=130)
