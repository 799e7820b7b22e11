"""Loss curves of several runs in one picture, and their final losses in a table.

    python tools/plot_run.py runs/bf16 runs/coat --out loss.png --baseline bf16

Upper panel: every run's training loss. Lower panel: its difference to the baseline (the first run,
unless --baseline names another) in % of the baseline's loss, at the steps that both have logged, as
the mean over the last --smooth of these. Runs are named after their directories.

The table, in Markdown: the final loss is the mean over the last 5 % of a run's steps; the
difference of it to the baseline's; steps skipped for a gradient that is not finite; the last
validation loss. A loss that was not finite is left out of means and leaves a gap in a curve.

Exit code: 0, or 2 with one line that says what is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from coatlm.train.run_directory import METRICS, read_metrics

FINAL = 0.05  # the share of the steps that the final loss is the mean of
Curve = dict[int, float]  # loss by step
COLORS = 10  # of matplotlib's cycle; further runs are dashed


@dataclass(frozen=True)
class Run:
    """What metrics.jsonl says of a run."""

    loss: Curve
    skipped: int
    val_loss: float | None  # the last

    @property
    def final(self) -> float:
        """The mean loss of the last 5 % of the steps, of those that were logged."""
        last = max(self.loss)
        losses = [loss for step, loss in self.loss.items() if step > (1 - FINAL) * last]
        return float(np.nanmean(losses)) if np.isfinite(losses).any() else float("nan")


def read_run(directory: Path) -> Run:
    """Raises ValueError if the directory is not that of a run that has logged a loss."""
    records = read_metrics(directory)
    steps = [record for record in records if "loss" in record]
    if not steps:
        raise ValueError(f"{directory}: no loss in {METRICS}, or no such run directory")
    evaluations = [record["val_loss"] for record in records if "val_loss" in record]
    loss = {r["step"]: float("nan") if r["loss"] is None else r["loss"] for r in steps}
    return Run(loss, steps[-1].get("skipped", 0), evaluations[-1] if evaluations else None)


def read_runs(directories: Sequence[Path]) -> dict[str, Run]:
    """Runs by the names of their directories. Raises ValueError, also for equal names."""
    runs: dict[str, Run] = {}
    for directory in directories:
        name = directory.resolve().name
        if name in runs:
            raise ValueError(f"{directory}: a second run named {name}")
        runs[name] = read_run(directory)
    return runs


def difference(run: Run, baseline: Run, *, smooth: int) -> Curve:
    """In % of the baseline's loss, by step: the mean over the last `smooth` common steps.

    The first `smooth` - 1 steps have too few before them and are left out. Raises ValueError
    unless 1 <= smooth.
    """
    if smooth < 1:
        raise ValueError(f"smooth={smooth}: at least 1 step")
    steps = sorted(run.loss.keys() & baseline.loss.keys())
    if len(steps) < smooth:
        return {}
    ours, theirs = (np.array([curve.loss[step] for step in steps]) for curve in (run, baseline))
    percent = 100 * (ours - theirs) / theirs
    means = np.lib.stride_tricks.sliding_window_view(percent, smooth).mean(axis=1)
    return dict(zip(steps[smooth - 1 :], means.tolist(), strict=True))


def draw(runs: Mapping[str, Run], baseline: str, path: Path, *, smooth: int) -> None:
    """Write the picture; its type is that of the path's suffix."""
    figure = Figure(figsize=(9, 7), layout="constrained")  # without pyplot: no display, no globals
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for number, (name, run) in enumerate(runs.items()):
        line = {"linewidth": 1.0, "label": name, "linestyle": "-" if number < COLORS else "--"}
        upper.plot(list(run.loss), list(run.loss.values()), **line)
        curve = difference(run, runs[baseline], smooth=smooth)
        lower.plot(list(curve), list(curve.values()), **line)
    upper.set_ylabel("loss (nats a token)")
    upper.legend(frameon=False)
    lower.set_ylabel(f"difference to {baseline} (%)\nmean of {smooth} logged steps")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def markdown(runs: Mapping[str, Run], baseline: str) -> Iterator[str]:
    """The table's lines."""
    yield f"| run | final loss | difference to {baseline} | skipped steps | last val loss |"
    yield "|---|---:|---:|---:|---:|"
    for name, run in runs.items():
        percent = 100 * (run.final / runs[baseline].final - 1)
        val_loss = "" if run.val_loss is None else f"{run.val_loss:.4f}"
        yield f"| {name} | {run.final:.4f} | {percent:+.3f} % | {run.skipped} | {val_loss} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, required=True, help="picture to write, *.png")
    parser.add_argument("--smooth", type=int, default=20, help="logged steps (default: 20)")
    parser.add_argument("--baseline", help="name of a run's directory (default: the first)")
    options = parser.parse_args(arguments)
    try:
        runs = read_runs(options.runs)
        baseline = options.baseline or next(iter(runs))
        if baseline not in runs:
            raise ValueError(f"baseline={baseline}: one of {', '.join(runs)}")
        draw(runs, baseline, options.out, smooth=options.smooth)
    except (ValueError, OSError) as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 2
    print("\n".join(markdown(runs, baseline)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
