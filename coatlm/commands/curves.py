"""Read the curves that runs have logged, for the commands that draw them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from coatlm.train.run_directory import (
    ATTEMPTS,
    METRICS,
    NUMERICS,
    STATES,
    Record,
    is_value,
    read_metrics,
    read_records,
    task_scores,
)

FINAL = 0.05  # share of the last steps over which the final loss is the mean
ACTIVATIONS = (
    "relative_error",
    "saturated",
    "underflow",
    "amax",
    "kurtosis",
    "mean",
)  # keys of numerics.jsonl
Curve = dict[int, float]  # step -> value; NaN for a value that was not finite


@dataclass(frozen=True)
class LoggedRun:
    """The values in the .jsonl files of a run."""

    loss: Curve
    skipped: int
    val_loss: float | None  # the last one logged
    curves: Mapping[str, Curve] = field(default_factory=dict)  # others, named FILE.KEY[.TENSOR]

    @property
    def final(self) -> float:
        """The mean logged loss over the last 5 % of the steps."""
        last = max(self.loss)
        losses = [loss for step, loss in self.loss.items() if step > (1 - FINAL) * last]
        return float(np.nanmean(losses)) if np.isfinite(losses).any() else float("nan")


@dataclass(frozen=True)
class Panel:
    """Curves that share an axis."""

    group: str
    label: str
    curves: Mapping[str, str]  # name of a curve, or prefix of several -> label
    log: bool = False
    band: tuple[str, str] | None = None  # name endings of the curves that bound a filled area


PANELS = [
    Panel("norm", "gradient norm", {"metrics.grad_norm": ""}, log=True),
    Panel("throughput", "tokens/s per GPU", {"metrics.tokens_per_s_per_gpu": ""}),
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
        "k: median, 5 to 95 % of blocks",
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
    Panel("activations", "kurtosis, worst layer", {"numerics.kurtosis": ""}, log=True),
    Panel("activations", "log(sum(exp(logits)))", {"numerics.mean": ""}),
]
TASKS = "tasks"  # a group with a panel per metric that a run has logged
GROUPS = ("loss", *dict.fromkeys(panel.group for panel in PANELS), TASKS)


def task_panels(runs: Iterable[LoggedRun]) -> list[Panel]:
    """A panel per metric of eval.tasks that a run has logged."""
    names = dict.fromkeys(name for run in runs for name in run.curves)
    metrics = [name for name in names if name.startswith(f"{TASKS}.")]
    return [Panel(TASKS, name.removeprefix(f"{TASKS}."), {name: ""}) for name in metrics]


def read_run(directory: Path) -> LoggedRun:
    """Read a run directory. Raises ValueError if it has no logged loss."""
    records = read_metrics(directory)
    steps = [record for record in records if is_value(record.get("loss", ""))]
    if not steps:
        raise ValueError(f"{directory}: no loss in {METRICS}, or no such run directory")
    evaluations = [r["val_loss"] for r in records if is_value(r.get("val_loss", ""))]
    curves = by_key("metrics", steps) | by_key("states", read_records(directory / STATES))
    curves |= worst_layers(read_records(directory / NUMERICS))
    curves |= by_key("tasks", [{"step": r["step"], **task_scores(r)} for r in records])
    last_loss = curves.pop("metrics.loss")
    loss = last_loss | curves.pop("metrics.loss_mean", {})  # which earlier versions did not log
    last = evaluations[-1] if evaluations else None
    skipped = steps[-1].get("skipped")
    return LoggedRun(loss, skipped if type(skipped) is int else 0, last, curves)


def by_key(file: str, records: Sequence[Record]) -> dict[str, Curve]:
    """One curve per key; null stands for a value that was not finite."""
    curves: dict[str, Curve] = {}
    for record in records:
        for key, value in record.items():
            if key != "step" and is_value(value):
                at = curves.setdefault(f"{file}.{key}", {})
                at[record["step"]] = math.nan if value is None else value
    return curves


def worst_layers(records: Sequence[Record]) -> dict[str, Curve]:
    """For each tensor, the largest value over the layers; NaN if one was not finite."""
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


def read_runs(directories: Sequence[Path]) -> dict[str, LoggedRun]:
    """Read runs, named after their directories. Raises ValueError, also for equal names.

    An earlier attempt is named after the run and the attempt.
    """
    runs: dict[str, LoggedRun] = {}
    for directory in directories:
        path = directory.resolve()
        earlier = path.parent.name == ATTEMPTS
        name = shown(f"{path.parent.parent.name} {path.name}" if earlier else path.name)
        if name in runs:
            raise ValueError(f"{directory}: a second run named {name}")
        runs[name] = read_run(directory)
    return runs


def shown(name: str) -> str:
    """A directory's name without unprintable characters."""
    return "".join(c if c.isprintable() else "?" for c in name)


def smoothing(runs: Mapping[str, LoggedRun], baseline: str, smooth: int) -> int:
    """The steps to average in `difference`: `smooth`, but at most half of the common steps.

    So short runs have a curve too. Raises ValueError unless 1 <= smooth.
    """
    if smooth < 1:
        raise ValueError(f"smooth={smooth}: at least 1 step")
    common = [len(run.loss.keys() & runs[baseline].loss.keys()) for run in runs.values()]
    return min([smooth, *(max(count // 2, 1) for count in common)])


def difference(run: LoggedRun, baseline: LoggedRun, *, smooth: int) -> Curve:
    """The difference in % of the baseline's loss, by step, averaged over `smooth` common steps.

    The first `smooth` - 1 steps, which have too few predecessors, and losses that are not finite
    are omitted.
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


def curves_of(run: LoggedRun, panel: Panel, *, merged: bool) -> dict[str, tuple[str, Curve]]:
    """label -> (name, curve) of a run's curves for a panel.

    A name that is a prefix of several tensors gives one curve per tensor, or with `merged` their
    maximum.
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
