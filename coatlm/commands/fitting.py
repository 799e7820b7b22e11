"""What fits which GPUs: estimated peaks of large models with fewer and fewer bytes per parameter.

`coatlm estimate --fits` prints the table, docs/results/memory.md has it. Each row keeps the changes
of the rows above it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from coatlm.hf.run_config import load_run_config
from coatlm.model.layouts import usable
from coatlm.model.memory import GIB, peak_bytes
from coatlm.model.rates import load_rates
from coatlm.model.step_time import Cluster

GPUS = {"80": "h100", "141": "h200"}  # GB in the name of a GPU -> its rates
SEQ_LEN = 4096


class FitColumn(NamedTuple):
    """A column of the table: a shipped configuration on some GPUs, with a layout for them."""

    name: str
    config: str
    gpus: int
    layout: tuple[str, ...]


ONE = ("parallel.tp=1", "parallel.sequence_parallel=false")
CASES = (
    FitColumn("Llama 3.1 8B", "llama3.1-8b", 1, ONE),
    FitColumn("Qwen3 14B", "qwen3-14b", 1, ONE),
    FitColumn("Qwen3 32B", "qwen3-32b", 1, ONE),
    FitColumn("Llama 3.1 70B", "llama3.1-70b", 8, ("parallel.tp=8", "parallel.pp=1")),
)
ROWS = (
    ("preset=bf16",),
    ("preset=fp8",),
    ("parallel.main_grads=bf16",),
    ("precision.recipe=coat-lean", "train.recompute=full"),
    ("parallel.main_grads=fp8",),
    ("optim.recipe=coat-24",),
    ("optim.offload=states",),
    ("train.update=backward", "parallel.main_grads=bf16"),
)


def table(reserve_gib: float | None) -> Iterator[str]:
    """The table in Markdown. `reserve_gib` of each GPU stays free; None: as for the planner."""
    heads = (f"{case.name}, {case.gpus} GPU{'s' * (case.gpus > 1)}" for case in CASES)
    yield "| " + " | ".join(("and in addition", *heads)) + " |"
    yield "|---|" + "---:|" * len(CASES)
    for row, changes in zip(ROWS, accumulate(ROWS), strict=True):
        cells = (cell(peak(case, changes) / GIB, case.gpus, reserve_gib) for case in CASES)
        yield f"| {' '.join(f'`{change}`' for change in row)} | " + " | ".join(cells) + " |"


def cell(gib: float, gpus: int, reserve_gib: float | None) -> str:
    """A peak, and the smallest GPU that it fits."""
    fits = (name for name, kind in GPUS.items() if gib <= _room(kind, gpus, reserve_gib))
    return f"{gib:.1f} ({next(fits, 'no')})"


def _room(kind: str, gpus: int, reserve_gib: float | None) -> float:
    """The GiB that a peak may have on each of `gpus` GPUs."""
    rates = load_rates(kind)
    if reserve_gib is None:
        return usable(Cluster(rates, gpus)) / GIB
    return rates.memory_gib - reserve_gib


def peak(case: FitColumn, changes: tuple[str, ...]) -> int:
    """The estimated peak in bytes of a rank that trains one sample per step."""
    batch = (f"data.seq_len={SEQ_LEN}", "train.micro_batch=1", "train.global_batch=1")
    config = load_run_config(case.config, [*changes, *case.layout, *batch])
    vocab = config.model.vocab
    assert vocab is not None  # of a shipped configuration
    return peak_bytes(config, vocab, config.data_parallel_size(case.gpus))
