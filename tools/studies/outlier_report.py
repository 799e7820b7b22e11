"""What the study of outliers has measured, as a table, a plot and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

SMOOTHED = " + smoothing"  # the end of the name of a recipe with smoothed down projections
SAME = 1e-3  # relative difference of losses in fp32 that counts as the same function


@dataclass(frozen=True)
class Point:
    """A stress with a factor, in fp32."""

    stress: str
    factor: int
    loss: float  # nats per token
    change: float  # of the loss, relative to that of the checkpoint
    ratio: float  # of the largest channel of the stressed tensor to its median channel


@dataclass(frozen=True)
class RecipeErrors:
    """The errors of a recipe at a point: means over microbatches, and their standard errors."""

    stress: str
    factor: int
    recipe: str  # with SMOOTHED at its end or without
    loss: float
    loss_error: float
    loss_error_se: float
    gradient_error: float
    gradient_error_se: float
    worst: str  # the key of the matrix whose gradient has the largest error


@dataclass(frozen=True)
class OutlierStudy:
    """The measurements of all stresses, factors and recipes."""

    points: list[Point]
    found: list[RecipeErrors]


def markdown(result: OutlierStudy) -> Iterator[str]:
    """Yield the lines of one table per stress, errors in percent."""
    for stress in dict.fromkeys(p.stress for p in result.points):
        points = [p for p in result.points if p.stress == stress]
        found = {(f.recipe, f.factor): f for f in result.found if f.stress == stress}
        factors = [p.factor for p in points]
        yield f"{stress}: loss error, gradient error in % +- standard error"
        yield ""
        yield "| factor | " + " | ".join(str(factor) for factor in factors) + " |"
        yield "| --- |" + " ---: |" * len(factors)
        yield "| largest / median channel | " + " | ".join(f"{p.ratio:.3g}" for p in points) + " |"
        cells = [f"{p.loss:.4f} ({100 * p.change:+.2f} %)" for p in points]
        yield "| loss in fp32 | " + " | ".join(cells) + " |"
        for recipe in dict.fromkeys(name for name, _ in found):
            cells = [_cell(found[recipe, factor]) for factor in factors]
            yield f"| {recipe} | " + " | ".join(cells) + " |"
        yield ""


def _cell(found: RecipeErrors) -> str:
    loss = _percent(found.loss_error, found.loss_error_se)
    return f"{loss}, {_percent(found.gradient_error, found.gradient_error_se)}"


def _percent(mean: float, error: float) -> str:
    spread = "" if math.isnan(error) else f" +- {100 * error:.2g}"
    return f"{100 * mean:.3g}{spread}"


def draw(result: OutlierStudy, path: Path) -> None:
    """Plot both errors over the factor, a column of panels per stress and a line per recipe.

    A recipe with smoothing has the color of the recipe and is dotted.
    """
    stresses = list(dict.fromkeys(p.stress for p in result.points))
    figure = Figure(figsize=(1 + 4 * len(stresses), 7), layout="constrained")
    axes = figure.subplots(2, len(stresses), squeeze=False, sharex=True, sharey="row")
    recipes = list(dict.fromkeys(f.recipe for f in result.found))
    numbers = {name: i for i, name in enumerate(r for r in recipes if not r.endswith(SMOOTHED))}
    for column, stress in zip(axes.T, stresses, strict=True):
        for recipe in recipes:
            number = numbers[recipe.removesuffix(SMOOTHED)]
            line = "-" if number < 10 else "--"
            rows = [f for f in result.found if (f.stress, f.recipe) == (stress, recipe)]
            for ax, name in zip(column, ("loss_error", "gradient_error"), strict=True):
                ax.errorbar(
                    [f.factor for f in rows],
                    [100 * getattr(f, name) for f in rows],
                    yerr=[100 * getattr(f, f"{name}_se") for f in rows],
                    color=f"C{number % 10}",
                    linestyle=":" if recipe.endswith(SMOOTHED) else line,
                    marker="o",
                    markersize=3,
                    linewidth=1.0,
                    label=recipe,
                )
        losses = [p.loss for p in result.points if p.stress == stress]
        same = max(losses) - min(losses) < SAME * min(losses)
        column[0].set_title(stress if same else f"{stress} (the function changes)")
        column[1].set_xlabel("factor")
    for ax, label in zip(axes[:, 0], ("loss error, %", "gradient error, %"), strict=True):
        ax.set_ylabel(label)
    for ax in axes.flat:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.grid(alpha=0.3)
    axes[0, 0].legend(frameon=False, fontsize="small")
    figure.savefig(path, format="png", dpi=130)


def as_json(result: OutlierStudy, about: Mapping[str, Any]) -> str:
    """The contents of outliers.json; numbers that are not finite become null."""

    def plain(row: Point | RecipeErrors) -> dict[str, Any]:
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(row).items()
        }

    rows = {"points": [plain(p) for p in result.points], "found": [plain(f) for f in result.found]}
    return json.dumps({**about, **rows}, indent=1, allow_nan=False) + "\n"
