"""Whole steps of several layouts on the GPUs of one machine, the most important ones first.

`end-to-end` measures each row, and its columns mean the same here. Rows of coatlm also have what
`coatlm plan` predicts for this GPU: `predicted_tokens_per_s`, `predicted_gib`, and `speed_ratio`
and `memory_ratio`, which are predicted / measured. The layout called "planned" is the one that the
planner ranks first. Rows of weak scaling use the number of GPUs in their name. layout_rows.py has
the rows; the last ones run the benchmark of reductions and the tests of several GPUs.

With gpus=1 the rows are models of 0.5B to 14B parameters, with the output layer in BF16 and with
its gradients in FP8, and the first ones of weak scaling. Rows called "parts" run without CUDA
graphs and divide a step into output layer, GEMMs, attention, other kernels and update; `alone_ms`
is the time that the planner predicts for each of them without overlap, in this order.

Options: gpus=2 (1 to 8 GPUs of this machine) steps=5 (for rows that do not say how many) gpu=h200
(whose rates --list uses where there is no GPU).
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coatlm.config import LAYOUT, Config
from coatlm.model.decide import Gpu, cluster_of
from coatlm.model.layouts import TP_CHUNKS, describe, predicted, ranked
from coatlm.model.memory import GIB
from coatlm.model.rates import known, load_rates
from coatlm.model.step_time import Cluster
from tools.benchmarks import end_to_end
from tools.benchmarks.layout_rows import (
    FP8,
    FP32_SUMS,
    FSDP,
    LEAST,
    MOST,
    OURS,
    TE,
    TE_LAYERS,
    LayoutRow,
    runs,
)
from tools.benchmarks.overlap import traced_steps
from tools.benchmarks.ranks import ROOT

OPTIONS = ("gpus", "steps", "gpu")
STEPS, GPU = "5", "h200"  # defaults of steps= and gpu=
PARTS = ("output_layer", "gemms", "attention", "elementwise", "update")  # of StepTime
START_S = {False: 30.0, True: 50.0}  # until the first step, on one GPU and on several
COMPILE_S = 60.0  # FSDP2's layers
TRACE_S = {False: 25.0, True: 10.0}  # the evaluation of a trace, without and with CUDA graphs
# peers as rows of coatlm whose memory and time theirs resemble
SIMILAR = {TE: (TE_LAYERS, {}), FSDP: ("coatlm local bf16", {"parallel.zero": "3"})}


def rows(options: dict[str, str]) -> list[str]:
    """The names of the rows that this number of GPUs can run, with those of four or more first.

    Raises ValueError for another number.
    """
    count = gpus(options)
    found = [run for run in runs() if run.least <= count <= run.most]
    first = [run for run in found if run.gpus is None and run.least >= 4]
    return [run.name for run in [*first, *(run for run in found if run not in first)]]


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs that the benchmark needs. Raises ValueError outside of 1 to 8."""
    count = int(options.get("gpus", LEAST))
    if not 1 <= count <= MOST:
        raise ValueError(f"gpus={count}: 1 to {MOST} GPUs of one machine")
    return count


def run_of(row: str) -> LayoutRow:
    """The row of this name."""
    (run,) = (run for run in runs() if run.name == row)
    return run


def cluster_here(options: Mapping[str, str], count: int) -> Cluster | None:
    """`count` GPUs of this machine, None without rates of them; without GPUs those of gpu=."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return cluster_of(Gpu(device.name, device.total_memory), count, count)
    name = options.get("gpu", GPU)
    if name not in known():
        raise ValueError(f"gpu={name}: one of {', '.join(known())}")
    return Cluster(load_rates(name), count, count)


def seconds(row: str, options: dict[str, str]) -> float:
    """What the row is predicted to take: its start, and its steps by the planner.

    A row that will be refused takes the start alone.
    """
    run = run_of(row)
    if run.command:
        return run.seconds
    count = run.gpus or gpus(options)
    cluster = cluster_here(options, count) or Cluster(load_rates(GPU), count, count)
    found = START_S[count > 1] + COMPILE_S * (run.row == FSDP)
    try:
        asked = end_to_end_options(run, count, cluster) | {"steps": steps_of(run, options)}
        time_of_step = predicted(*similar_config(run, asked), cluster).forecast.time.total
    except ValueError:
        return found
    steps = end_to_end.warmup(asked) + int(asked["steps"])
    if "trace" in asked:
        steps += traced_steps(time_of_step)
        found += TRACE_S[end_to_end.captures(run.row, asked)]
    return found + steps * time_of_step


def similar_config(run: LayoutRow, options: Mapping[str, str]) -> tuple[Config, int]:
    """The configuration of the row and its vocabulary; for a peer of a row that resembles it."""
    row, changes = SIMILAR.get(run.row, (run.row, {}))
    return end_to_end.run_config(row, {**options, **changes})


def steps_of(run: LayoutRow, options: Mapping[str, str]) -> str:
    """The number of steps that are measured."""
    return run.options.get("steps", options.get("steps", STEPS))


def ready(row: str, options: dict[str, str]) -> Callable[[], Any]:
    """What measures the row; with several GPUs processes that start here, unless the planner has to
    look at the GPUs first.
    """
    run = run_of(row)
    if run.command:
        return partial(done, run)
    return partial(measure, row, options) if run.planned else _started(run, options, None)


def measure(row: str, options: dict[str, str]) -> dict[str, Any] | list[dict[str, Any]]:
    """The record of `end-to-end`, with the layout and its prediction in rows of coatlm."""
    run = run_of(row)
    if run.command:
        return done(run)
    cluster = cluster_here(options, run.gpus or gpus(options))
    return _started(run, options, cluster)()


def _started(
    run: LayoutRow, options: dict[str, str], cluster: Cluster | None
) -> Callable[[], dict[str, Any]]:
    """Start the processes of a row; the result measures. `cluster`: for rows that are planned."""
    count = run.gpus or gpus(options)
    asked = end_to_end_options(run, count, cluster) | {"steps": steps_of(run, options)}
    started = end_to_end.ready(run.row, asked)

    def record() -> dict[str, Any]:
        found = {"gpus": count, **started()}
        if run.row not in (*OURS, TE_LAYERS):
            return found
        here = cluster_here(options, count)
        config, vocab = end_to_end.run_config(run.row, asked)
        found["layout"] = describe(config, count)
        return found if here is None else found | compared(found, config, vocab, here)

    return record


def done(run: LayoutRow) -> list[dict[str, Any]]:
    """Run the row's command: its seconds and last line, and the records of a benchmark.

    Raises RuntimeError with the last line of a command that fails.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "records.json"
        extra = ["--out", str(out)] if "tools/bench.py" in run.command else []
        ended = subprocess.run([*run.command, *extra], cwd=ROOT, capture_output=True, text=True)
        last = [line for line in ended.stdout.splitlines() if line.strip()][-1:]
        if ended.returncode:
            last += [line for line in ended.stderr.splitlines() if line.strip()][-1:]
            raise RuntimeError(f"exit code {ended.returncode}: {' | '.join(last)}")
        tables = json.loads(out.read_text()) if out.exists() else {}
    spent = round(time.monotonic() - start, 1)
    found: list[dict[str, Any]] = [{"row": run.name, "seconds": spent}]
    if not tables:
        found[0]["said"] = last[0] if last else ""
    for name in tables.keys() - {"options"}:
        found += [{"table": name, **record} for record in tables[name]]
    return found


def end_to_end_options(run: LayoutRow, count: int, cluster: Cluster | None) -> dict[str, str]:
    """The options of `end-to-end` for a row. Raises ValueError if a layout is to be planned and the
    planner has no rates of the GPU, or if no layout fits.
    """
    formats = FP8 if run.row in OURS else FP32_SUMS if run.row == TE_LAYERS else {}
    options = {**formats, **run.options, "gpus": str(count)}
    if not run.planned:
        return options
    if cluster is None:
        raise ValueError(f"{run.name}: the planner has no rates of this GPU")
    config, vocab = end_to_end.run_config(run.row, options)
    choice = next(ranked(config, vocab, cluster), None)
    if choice is None:
        raise ValueError(f"{run.name}: no layout fits {count} x {cluster.rates.gpu}")
    chosen = choice.config.model_dump(mode="json")
    layout = {f"{a}.{b}": str(chosen[a][b]).lower() for a, b in (*LAYOUT, TP_CHUNKS)}
    size, samples = choice.config.train.micro_batch, choice.config.train.global_batch
    assert isinstance(size, int)
    if samples % (count * size):
        raise ValueError(f"{run.name}: {samples} samples are no whole microbatches of {size}")
    microbatches = samples // (count * size)
    return options | layout | {"mbs": str(size), "microbatches": str(microbatches)}


def compared(
    found: Mapping[str, Any], config: Config, vocab: int, cluster: Cluster
) -> dict[str, Any]:
    """What the planner predicts of a step, and the ratios of that to what was measured."""
    choice = predicted(config, vocab, cluster)
    speed, gib = choice.forecast.tokens_per_s, choice.peak / GIB
    time = choice.forecast.time
    alone = {}
    if "output_layer_ms" in found:
        alone["alone_ms"] = " ".join(f"{1000 * getattr(time, part):.1f}" for part in PARTS)
    return alone | {
        "predicted_tokens_per_s": round(speed),
        "speed_ratio": round(speed / found["tokens_per_s"], 3),
        "predicted_gib": round(gib, 1),
        "memory_ratio": round(gib / found["peak_gib"], 3),
    }
