"""Curves of one or several runs in one picture or page, and their final losses in a table.

    python tools/plot_run.py runs/bf16 runs/coat --out loss.png --baseline bf16
    python tools/plot_run.py runs/coat --out coat.html --only loss states

Drawn is whatever the runs have logged, in panels that --only names by group:

    loss         training loss, the mean of the steps since the line before; with several runs also
                 its difference to the baseline (the first run, unless --baseline names another) in
                 % of the baseline's loss, at the steps that both have logged, as the mean over the
                 last --smooth of these, of fewer where the runs have less than twice as many
    norm         of the gradients
    throughput   tokens a second and GPU
    states       of states.jsonl: EDQ over the update, errors of the moments m and v, the exponent k
                 of dynamic range expansion, shares of codes at the largest value and at zero
    activations  of numerics.jsonl: error, saturation, underflow and amax of what FP8 layers keep,
                 of each tensor the worst layer; with several runs the worst tensor too

Runs are named after their directories. --attempts adds what a run directory held before its run was
begun anew (`attempts/`). --out is a picture, or with *.html a page of its own: curves
as vectors, and the table. The table, printed in Markdown: the final loss is the mean over the last
5 % of a run's steps; the difference of it to the baseline's; steps skipped for a gradient that is
not finite; the last validation loss. A loss that was not finite is left out of means and leaves a
gap in a curve.

Exit code: 0, or 2 with one line that says what is wrong.
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
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coatlm.console import Parser, fail
from coatlm.files import whole_file
from coatlm.train.run_directory import (
    ATTEMPTS,
    METRICS,
    Record,
    earlier_attempts,
    is_value,
    read_metrics,
    read_records,
)

FINAL = 0.05  # the share of the steps that the final loss is the mean of
COLORS = 10  # of matplotlib's cycle; further runs have dots
STYLES = ("-", "--", ":", "-.")  # of the curves of one run in one panel
STATES, NUMERICS = "states.jsonl", "numerics.jsonl"
ACTIVATIONS = ("relative_error", "saturated", "underflow", "amax")  # of numerics.jsonl
Curve = dict[int, float]  # value by step; NaN where it was not finite


@dataclass(frozen=True)
class Run:
    """What the .jsonl files say of a run."""

    loss: Curve
    skipped: int
    val_loss: float | None  # the last
    curves: Mapping[str, Curve] = field(default_factory=dict)  # all others, as FILE.KEY[.TENSOR]

    @property
    def final(self) -> float:
        """The mean loss of the last 5 % of the steps, of those that were logged."""
        last = max(self.loss)
        losses = [loss for step, loss in self.loss.items() if step > (1 - FINAL) * last]
        return float(np.nanmean(losses)) if np.isfinite(losses).any() else float("nan")


@dataclass(frozen=True)
class Panel:
    """Curves that belong together."""

    group: str
    label: str
    curves: Mapping[str, str]  # name of a curve, or of all those behind it -> what to call it
    log: bool = False
    band: tuple[str, str] | None = None  # endings that replace the name's last part


PANELS = [
    Panel("norm", "gradient norm", {"metrics.grad_norm": ""}, log=True),
    Panel("throughput", "tokens/s a GPU", {"metrics.tokens_per_s_per_gpu": ""}),
    Panel(
        "states",
        "EDQ / |update|",
        {"states.edq_ratio": "", "states.edq_weight_ratio": "weight alone"},
    ),
    Panel(
        "states",
        "relative error of storing",
        {"states.exp_avg_error": "m", "states.exp_avg_sq_error": "v"},
        log=True,
    ),
    Panel(
        "states",
        "k: median, 5 to 95 % of groups",
        {"states.exp_avg_k_p50": "m", "states.exp_avg_sq_k_p50": "v"},
        band=("p05", "p95"),
    ),
    Panel(
        "states",
        "share of codes at the largest",
        {"states.exp_avg_saturated": "m", "states.exp_avg_sq_saturated": "v"},
    ),
    Panel(
        "states",
        "share of values stored as zero",
        {"states.exp_avg_underflow": "m", "states.exp_avg_sq_underflow": "v"},
    ),
    Panel("activations", "relative error, worst layer", {"numerics.relative_error": ""}, log=True),
    Panel("activations", "share at the largest code", {"numerics.saturated": ""}),
    Panel("activations", "share stored as zero", {"numerics.underflow": ""}),
    Panel("activations", "largest magnitude", {"numerics.amax": ""}, log=True),
]
GROUPS = ("loss", *dict.fromkeys(panel.group for panel in PANELS))


# --- what the runs have logged -------------------------------------------------------------------


def read_run(directory: Path) -> Run:
    """Raises ValueError if the directory is not that of a run that has logged a loss."""
    records = read_metrics(directory)
    steps = [record for record in records if is_value(record.get("loss", ""))]
    if not steps:
        raise ValueError(f"{directory}: no loss in {METRICS}, or no such run directory")
    evaluations = [r["val_loss"] for r in records if is_value(r.get("val_loss", ""))]
    curves = by_key("metrics", steps) | by_key("states", read_records(directory / STATES))
    curves |= worst_layers(read_records(directory / NUMERICS))
    last_loss = curves.pop("metrics.loss")
    loss = last_loss | curves.pop("metrics.loss_mean", {})  # which earlier versions did not log
    last = evaluations[-1] if evaluations else None
    skipped = steps[-1].get("skipped")
    return Run(loss, skipped if type(skipped) is int else 0, last, curves)


def by_key(file: str, records: Sequence[Record]) -> dict[str, Curve]:
    """A curve for every key; null is a value that was not finite."""
    curves: dict[str, Curve] = {}
    for record in records:
        for key, value in record.items():
            if key != "step" and is_value(value):
                at = curves.setdefault(f"{file}.{key}", {})
                at[record["step"]] = math.nan if value is None else value
    return curves


def worst_layers(records: Sequence[Record]) -> dict[str, Curve]:
    """Of each tensor the largest value over the layers; one that is not finite is larger still."""
    curves: dict[str, Curve] = {}
    for record in records:
        for key in ACTIVATIONS:
            if not is_value(record.get(key, "")):
                continue
            value = math.nan if record[key] is None else float(record[key])
            curve = curves.setdefault(f"numerics.{key}.{record.get('tensor', 'all')}", {})
            before = curve.get(record["step"], value)
            curve[record["step"]] = float(np.maximum(before, value))
    return curves


def read_runs(directories: Sequence[Path]) -> dict[str, Run]:
    """Runs by the names of their directories. Raises ValueError, also for equal names.

    An earlier attempt of a run is named after both.
    """
    runs: dict[str, Run] = {}
    for directory in directories:
        path = directory.resolve()
        earlier = path.parent.name == ATTEMPTS
        name = shown(f"{path.parent.parent.name} {path.name}" if earlier else path.name)
        if name in runs:
            raise ValueError(f"{directory}: a second run named {name}")
        runs[name] = read_run(directory)
    return runs


def shown(name: str) -> str:
    """A directory's name on one line."""
    return "".join(c if c.isprintable() else "?" for c in name)


def smoothing(runs: Mapping[str, Run], baseline: str, smooth: int) -> int:
    """Steps in a mean of `difference`: `smooth`, but at most half of what the runs have in common,
    so that a short run has a curve too. Raises ValueError unless 1 <= smooth.
    """
    if smooth < 1:
        raise ValueError(f"smooth={smooth}: at least 1 step")
    common = [len(run.loss.keys() & runs[baseline].loss.keys()) for run in runs.values()]
    return min([smooth, *(max(count // 2, 1) for count in common)])


def difference(run: Run, baseline: Run, *, smooth: int) -> Curve:
    """In % of the baseline's loss, by step: the mean over the last `smooth` common steps.

    The first `smooth` - 1 steps have too few before them and are left out, and so are losses that
    are not finite.
    """
    both = run.loss.keys() & baseline.loss.keys()
    steps = sorted(s for s in both if math.isfinite(run.loss[s] - baseline.loss[s]))
    if len(steps) < smooth:
        return {}
    ours, theirs = (np.array([curve.loss[step] for step in steps]) for curve in (run, baseline))
    with np.errstate(divide="ignore", invalid="ignore"):
        percent = 100 * (ours - theirs) / theirs
    means = np.lib.stride_tricks.sliding_window_view(percent, smooth).mean(axis=1)
    return dict(zip(steps[smooth - 1 :], means.tolist(), strict=True))


def curves_of(run: Run, panel: Panel, *, merged: bool) -> dict[str, tuple[str, Curve]]:
    """label -> (name, curve) of what a run has for a panel.

    A name that stands for the tensors behind it gives a curve each, or `merged` the largest.
    """
    found: dict[str, tuple[str, Curve]] = {}
    for name, label in panel.curves.items():
        if name in run.curves:
            found[label] = name, run.curves[name]
        behind = {key: c for key, c in run.curves.items() if key.startswith(name + ".")}
        if merged and behind:
            steps = sorted({step for curve in behind.values() for step in curve})
            values = [[c[step] for c in behind.values() if step in c] for step in steps]
            found[label] = name, {s: float(np.max(v)) for s, v in zip(steps, values, strict=True)}
        elif behind:
            found |= {key.removeprefix(name + "."): (key, c) for key, c in behind.items()}
    return found


# --- the picture ---------------------------------------------------------------------------------


def draw(
    runs: Mapping[str, Run], baseline: str, *, smooth: int, only: Sequence[str] = GROUPS
) -> Figure:
    """Every panel of the groups `only` that a run has something for. Raises ValueError."""
    smooth = smoothing(runs, baseline, smooth)
    compared = {name: difference(run, runs[baseline], smooth=smooth) for name, run in runs.items()}
    merged = len(runs) > 1
    panels = [
        panel
        for panel in PANELS
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
        "loss (nats a token)",
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
    """`text` for matplotlib, where `$` begins a formula and a first `_` hides a label."""
    escaped = text.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def _band(ax: Axes, color: int, run: Run, name: str, ends: tuple[str, str] | None) -> None:
    """The area between two other curves of the same quantity."""
    if ends is None:
        return
    low, high = (run.curves.get(f"{name.rpartition('_')[0]}_{end}", {}) for end in ends)
    steps = sorted(low.keys() & high.keys())
    below, above = ([curve[step] for step in steps] for curve in (low, high))
    ax.fill_between(steps, below, above, color=f"C{color % COLORS}", alpha=0.15, linewidth=0)


def save(figure: Figure, path: Path, table: Sequence[str]) -> None:
    """Write a page for *.html, else a picture whose type is that of the path's suffix."""
    kind = path.suffix.lower().removeprefix(".") or "png"
    with whole_file(path) as file, warnings.catch_warnings():
        # a name may have characters that the font lacks; they are drawn as boxes
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from")
        if kind not in ("html", "htm"):
            figure.savefig(file, format=kind, dpi=130)
            return
        vectors = io.StringIO()
        figure.savefig(vectors, format="svg")
        svg = vectors.getvalue()
        file.write_text(_page(svg[svg.index("<svg") :], table), encoding="utf-8")


def _page(svg: str, table: Sequence[str]) -> str:
    """One file that needs no other."""
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


def markdown(runs: Mapping[str, Run], baseline: str) -> Iterator[str]:
    """The table's lines."""
    yield f"| run | final loss | difference to {cell(baseline)} | skipped steps | last val loss |"
    yield "|---|---:|---:|---:|---:|"
    for name, run in runs.items():
        percent = 100 * (run.final / (runs[baseline].final or math.nan) - 1)
        val_loss = "" if run.val_loss is None else f"{run.val_loss:.4f}"
        yield f"| {cell(name)} | {run.final:.4f} | {percent:+.3f} % | {run.skipped} | {val_loss} |"


def cell(name: str) -> str:
    """A name in a row of a Markdown table."""
    return name.replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, required=True, help="*.png, *.svg, *.pdf or *.html")
    parser.add_argument(
        "--attempts", action="store_true", help="draw earlier attempts of these runs too"
    )
    parser.add_argument("--smooth", type=int, default=20, help="logged steps (default: 20)")
    parser.add_argument("--baseline", help="name of a run's directory (default: the first)")
    parser.add_argument("--only", nargs="+", default=GROUPS, choices=GROUPS, metavar="GROUP")
    options = parser.parse_args(arguments)
    if options.attempts:
        options.runs += [attempt for run in options.runs for attempt in earlier_attempts(run)]
    try:
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
