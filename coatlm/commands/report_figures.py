"""The figures of a report: curves by step, and heat maps of FP8 errors by layer.

A figure is the JSON that plotly.js draws. Names of runs and tensors are escaped twice: for plotly,
whose labels may have HTML tags, and for the page, by plotly's own conversion to HTML.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plotly.io import to_html
from plotly.offline import get_plotlyjs

from coatlm.commands.curves import (
    PANELS,
    Curve,
    Panel,
    by_key,
    curves_of,
    difference,
    smoothing,
    task_panels,
)
from coatlm.train.run_directory import Record, is_value

if TYPE_CHECKING:
    from coatlm.commands.report import ReportedRun

COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
DASHES = ("solid", "dash", "dot", "dashdot")  # of the curves of one run in one figure
SMOOTH = 20  # logged steps that the difference to the first run is averaged over
SECTIONS = {  # group of panels -> section
    "norm": "Loss and norms",
    "throughput": "Throughput and memory",
    "states": "Optimizer states",
    "activations": "FP8 tensors, worst layer",
    "tasks": "Tasks",
}
MORE = [
    Panel("norm", "learning rate", {"metrics.lr": ""}),
    Panel("throughput", "mfu", {"metrics.mfu": ""}),
    Panel("throughput", "peak memory (GiB)", {"metrics.peak_mem_gib": ""}),
    Panel(
        "throughput",
        "bytes that rank 0 sends per step",
        {f"metrics.comm_bytes_{kind}": kind for kind in ("grad", "weights", "tp", "cp")},
    ),
]
MEASURES = {  # of numerics.jsonl -> title
    "relative_error": "relative error",
    "underflow": "share stored as zero",
    "saturated": "share at the largest code",
}
Figure = dict[str, Any]
HIDDEN: Figure = {"mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}


def plotly_js() -> str:
    """The source of plotly.js."""
    return str(get_plotlyjs())


def draw(runs: Sequence[ReportedRun]) -> dict[str, list[str]]:
    """The HTML of the figures by section, without those for which no run has a finite value."""
    drawn: dict[str, list[str]] = {}
    for section, figure in figures(runs):
        if figure["data"]:
            options = {"displaylogo": False, "responsive": True}
            text = to_html(figure, config=options, full_html=False, include_plotlyjs=False)
            drawn.setdefault(section, []).append(text)
    return drawn


def figures(runs: Sequence[ReportedRun]) -> Iterator[tuple[str, Figure]]:
    """Yield (section, figure)."""
    top = SECTIONS["norm"]
    yield top, curves("loss (nats per token)", list(losses(runs)))
    if len(runs) > 1:
        named = {run.name: run.logged for run in runs}
        smooth = smoothing(named, runs[0].name, SMOOTH)
        title = f"loss, difference to {runs[0].name} (%), mean of {smooth} logged steps"
        compared = [difference(run.logged, runs[0].logged, smooth=smooth) for run in runs]
        lines = [line(i, run.name, compared[i]) for i, run in enumerate(runs)]
        yield top, curves(title, lines)
    for panel in [*PANELS, *MORE, *task_panels(run.logged for run in runs)]:
        yield SECTIONS[panel.group], curves(panel.label, list(lines_of(runs, panel)), log=panel.log)
    for run in runs:
        for measure, title in MEASURES.items():
            tables = f"{run.name}: {title}" if len(runs) > 1 else title
            yield "FP8 tensors, by layer", last_by_layer(run.numerics, measure, tables)
            yield "FP8 tensors, by layer", worst_by_layer(run.numerics, measure, tables)


def losses(runs: Sequence[ReportedRun]) -> Iterator[Figure]:
    """Yield the training and validation losses."""
    for number, run in enumerate(runs):
        yield line(number, run.name, run.logged.loss)
        validation = by_key("", run.metrics).get(".val_loss", {})
        yield line(number, f"{run.name}: validation", validation, mode="lines+markers", style=1)


def lines_of(runs: Sequence[ReportedRun], panel: Panel) -> Iterator[Figure]:
    """Yield the curves of a panel; of several runs one color each, with the worst tensor."""
    merged = len(runs) > 1
    for number, run in enumerate(runs):
        found = curves_of(run.logged, panel, merged=merged)
        for style, (label, (key, curve)) in enumerate(found.items()):
            name = ": ".join(filter(None, (run.name if merged else "", label))) or run.name
            color = number if merged else style
            yield line(color, name, curve, style=style if merged else 0)
            for fill, end in zip(("none", "tonexty"), panel.band or (), strict=False):
                bound = run.logged.curves.get(f"{key.rpartition('_')[0]}_{end}", {})
                shade = {"fill": fill, "fillcolor": f"{COLORS[color % len(COLORS)]}26"}
                yield line(color, name, bound) | HIDDEN | shade


def line(color: int, name: str, curve: Curve, *, mode: str = "", style: int = 0) -> Figure:
    """A curve of a figure; values that are not finite leave gaps."""
    return {
        "type": "scatter",
        "mode": mode or ("lines" if len(curve) > 1 else "markers"),
        "name": html.escape(name),
        "x": list(curve),
        "y": [value if math.isfinite(value) else None for value in curve.values()],
        "line": {"color": COLORS[color % len(COLORS)], "dash": DASHES[style % len(DASHES)]},
    }


def curves(title: str, lines: Sequence[Figure], *, log: bool = False) -> Figure:
    """A figure of curves by step, without empty ones."""
    drawn = [line for line in lines if any(y is not None for y in line["y"])]
    positive = any(y is not None and y > 0 for line in drawn for y in line["y"])
    axes = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"type": "log" if log and positive else "linear", "exponentformat": "power"},
        "showlegend": len(drawn) > 1,
    }
    return {"data": drawn, "layout": layout(title) | axes}


def layout(title: str) -> Figure:
    return {"title": {"text": html.escape(title)}, "height": 380, "margin": {"r": 20, "b": 50}}


def last_by_layer(records: Sequence[Record], measure: str, title: str) -> Figure:
    """The heat map of a measure by tensor and layer, at the last step that has it."""
    values = list(measured(records, measure))
    last = max((step for step, *_ in values), default=0)
    cells = {(layer, tensor): value for step, layer, tensor, value in values if step == last}
    return heat(cells, f"{title}, step {last}", x="layer", y="")


def worst_by_layer(records: Sequence[Record], measure: str, title: str) -> Figure:
    """The heat map of a measure by layer and step, of the worst tensor."""
    cells: dict[tuple[Any, Any], float] = {}
    for step, layer, _, value in measured(records, measure):
        cells[step, layer] = max(value, cells.get((step, layer), value))
    return heat(cells, f"{title}, worst tensor", x="step", y="layer")


def measured(records: Sequence[Record], measure: str) -> Iterator[tuple[int, int, str, float]]:
    """Yield (step, layer, tensor, value) of the finite values of a measure."""
    for record in records:
        layer, tensor, value = record.get("layer"), record.get("tensor"), record.get(measure)
        if type(layer) is int and isinstance(tensor, str) and value is not None and is_value(value):
            yield record["step"], layer, tensor, float(value)


def heat(cells: Mapping[tuple[Any, Any], float], title: str, *, x: str, y: str) -> Figure:
    """A heat map of cells (x, y) -> value, with gaps where there is none; the first y is on top."""
    across = sorted({i for i, _ in cells})
    down = list(dict.fromkeys(j for _, j in cells))
    trace = {
        "type": "heatmap",
        "x": across,
        "y": [html.escape(label) if isinstance(label, str) else label for label in down],
        "z": [[cells.get((i, j)) for i in across] for j in down],
        "colorscale": "Viridis",
    }
    axes = {
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}, "automargin": True, "autorange": "reversed"},
    }
    return {"data": [trace] if cells else [], "layout": layout(title) | axes}
