"""Plot the curves of one or several runs, and print their final losses as a table.

    coatlm plot runs/bf16 runs/coat --out loss.png --baseline bf16
    coatlm plot runs/coat --out coat.html --only loss states

Everything that the runs have logged is plotted, in groups of panels that --only selects:

    loss         training loss, the mean of the steps since the previous record; with several runs
                 also the difference to the baseline (the first run, or --baseline) in % of the
                 baseline's loss, at steps that both have logged, averaged over the last --smooth of
                 these (fewer if the runs have less than twice as many)
    norm         gradient norm
    throughput   tokens per second per GPU
    states       from states.jsonl: EDQ over the update, errors of the moments m and v, the exponent
                 k of dynamic range expansion, shares of codes at the largest value and at zero
    activations  from numerics.jsonl: error, saturation, underflow and amax of FP8 tensors, amax and
                 kurtosis of the residual stream, log(sum(exp(logits))), for each tensor of the
                 worst layer; with several runs of the worst tensor
    tasks        the metrics of eval.tasks

Runs are named after their directories. --attempts adds earlier attempts of the runs (`attempts/`).
--out is an image, or with *.html a page with vector graphics and the table. The table, which is
printed in Markdown, has the final loss, which is the mean over the last 5 % of a run's steps; its
difference to the baseline's; the skipped steps; and the last validation loss. Losses that are NaN
or Inf are excluded from means and leave gaps in curves.

Exit code: 0, or 2 for an error, which one line explains.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import html
import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from coatlm.commands.curves import (
    GROUPS,
    PANELS,
    Curve,
    LoggedRun,
    curves_of,
    difference,
    read_runs,
    smoothing,
    task_panels,
)
from coatlm.console import Parser, fail, local_path, output_path
from coatlm.files import check_output, whole_file
from coatlm.train.run_directory import earlier_attempts

COLORS = 10  # of matplotlib's cycle; further runs have dots
UNSHOWN = {"pgf", "raw", "rgba"}  # types that need LaTeX, or that no viewer shows
STYLES = ("-", "--", ":", "-.")  # of the curves of one run in one panel


def draw(
    runs: Mapping[str, LoggedRun], baseline: str, *, smooth: int, only: Sequence[str] = GROUPS
) -> Figure:
    """Draw the panels of the groups `only` for which a run has data. Raises ValueError."""
    smooth = smoothing(runs, baseline, smooth)
    compared = {name: difference(run, runs[baseline], smooth=smooth) for name, run in runs.items()}
    merged = len(runs) > 1
    tasks = [replace(panel, label=literal(panel.label)) for panel in task_panels(runs.values())]
    panels = [
        panel
        for panel in (*PANELS, *tasks)
        if panel.group in only and any(curves_of(r, panel, merged=merged) for r in runs.values())
    ]
    losses = (2 if merged else 1) if "loss" in only else 0
    count = losses + len(panels)
    if not count:
        raise ValueError(f"only={' '.join(only)}: the runs have logged nothing of it")
    columns = 1 if count <= 2 else 2
    rows = -(-count // columns)
    # without pyplot: no display, no globals
    figure = Figure(figsize=(9, 3.5 * rows) if columns == 1 else (13, 3.2 * rows))
    figure.set_layout_engine("constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for number, (name, run) in enumerate(runs.items()):
        if losses:
            _line(axes[0], number, name, run.loss)
        if losses > 1:
            _line(axes[1], number, name, compared[name])
        for ax, panel in zip(axes[losses:], panels, strict=False):
            for style, (label, found) in enumerate(curves_of(run, panel, merged=merged).items()):
                color = number if merged else style
                _line(ax, color, ": ".join(filter(None, (name, label))), found[1], style)
                _band(ax, color, run, found[0], panel.band)
    labels = [
        "loss (nats per token)",
        f"difference to {literal(baseline)} (%)\nmean of {smooth} logged steps",
    ]
    for ax, label in zip(axes, [*labels[:losses], *(p.label for p in panels)], strict=False):
        ax.set_ylabel(label)
        ax.set_xlabel("step")
        ax.grid(alpha=0.3)
        ax.legend(frameon=False, fontsize="small")
    for ax, panel in zip(axes[losses:], panels, strict=False):
        positive = any(y > 0 for line in ax.get_lines() for y in np.asarray(line.get_ydata()))
        if panel.log and positive:
            ax.set_yscale("log")
    for ax in axes[count:]:
        ax.set_visible(False)
    return figure


def _line(ax: Axes, color: int, label: str, curve: Curve, style: int = 0) -> None:
    ax.plot(
        list(curve),
        list(curve.values()),
        color=f"C{color % COLORS}",
        linewidth=1.0,
        linestyle=STYLES[style % len(STYLES)],
        marker="." if color >= COLORS or len(curve) == 1 else None,
        label=literal(label),
    )


def literal(text: str) -> str:
    """Escape `text` for matplotlib, where `$` begins a formula and a leading `_` hides a label."""
    escaped = text.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def _band(ax: Axes, color: int, run: LoggedRun, name: str, ends: tuple[str, str] | None) -> None:
    """Fill the area between two other curves of the same quantity."""
    if ends is None:
        return
    low, high = (run.curves.get(f"{name.rpartition('_')[0]}_{end}", {}) for end in ends)
    steps = sorted(low.keys() & high.keys())
    below, above = ([curve[step] for step in steps] for curve in (low, high))
    ax.fill_between(steps, below, above, color=f"C{color % COLORS}", alpha=0.15, linewidth=0)


def save(figure: Figure, path: Path, table: Sequence[str]) -> None:
    """Write a page for *.html, else an image of the type that the suffix names."""
    kind = path.suffix.lower().removeprefix(".")
    with whole_file(path) as file, warnings.catch_warnings():
        # characters that the font does not have are drawn as boxes
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from")
        if kind not in ("html", "htm"):
            figure.savefig(file, format=kind, dpi=130)
            return
        vectors = io.StringIO()
        figure.savefig(vectors, format="svg")
        svg = vectors.getvalue()
        file.write_text(_page(svg[svg.index("<svg") :], table), encoding="utf-8")


def check_kind(path: Path) -> None:
    """Raise ValueError unless the suffix names a page or a type of image."""
    images = set(FigureCanvasBase.get_supported_filetypes()) - UNSHOWN
    if path.suffix.lower().removeprefix(".") not in {*images, "html", "htm"}:
        raise ValueError(f"--out {path}: must end with .html, .{', .'.join(sorted(images))}")


def _page(svg: str, table: Sequence[str]) -> str:
    """A self-contained HTML page."""
    head, _, *rows = (
        [part.strip().replace("\\|", "|") for part in row.strip("| ").split(" |")] for row in table
    )
    lines = [
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
        for tag, cells in [("th", head), *(("td", row) for row in rows)]
    ]
    style = "body{font-family:sans-serif} svg{max-width:100%;height:auto} td,th{padding:0 1em}"
    return (
        f"<!doctype html>\n<meta charset='utf-8'>\n<title>runs</title>\n<style>{style}</style>\n"
        + "<table>\n"
        + "\n".join(lines)
        + f"\n</table>\n{svg}\n"
    )


def markdown(runs: Mapping[str, LoggedRun], baseline: str) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| run | final loss | difference to {cell(baseline)} | skipped steps | last val loss |"
    yield "|---|---:|---:|---:|---:|"
    for name, run in runs.items():
        percent = 100 * (run.final / (runs[baseline].final or math.nan) - 1)
        val_loss = "" if run.val_loss is None else f"{run.val_loss:.4f}"
        yield f"| {cell(name)} | {run.final:.4f} | {percent:+.3f} % | {run.skipped} | {val_loss} |"


def cell(name: str) -> str:
    """Escape a name for a Markdown table."""
    return name.replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(__doc__, "plot")
    parser.add_argument("runs", type=local_path, nargs="+", metavar="RUN_DIR")
    parser.add_argument(
        "--out", type=output_path, required=True, help="*.png, *.svg, *.pdf or *.html"
    )
    parser.add_argument(
        "--attempts", action="store_true", help="draw earlier attempts of these runs too"
    )
    parser.add_argument("--smooth", type=int, default=20, help="logged steps (default: 20)")
    parser.add_argument("--baseline", help="name of a run's directory (default: the first)")
    parser.add_argument("--only", nargs="+", default=GROUPS, choices=GROUPS, metavar="GROUP")
    options = parser.parse(arguments)
    if options.attempts:
        options.runs += [attempt for run in options.runs for attempt in earlier_attempts(run)]
    try:
        check_kind(options.out)
        check_output(options.out)
        runs = read_runs(options.runs)
        baseline = options.baseline or next(iter(runs))
        if baseline not in runs:
            raise ValueError(f"baseline={baseline}: one of {', '.join(runs)}")
        figure = draw(runs, baseline, smooth=options.smooth, only=options.only)
        table = list(markdown(runs, baseline))
        save(figure, options.out, table)
    except (ValueError, OSError) as error:
        return fail(error)
    print("\n".join(table))
    return 0


if __name__ == "__main__":
    process.run(main)
