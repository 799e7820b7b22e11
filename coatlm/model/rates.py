"""Measured rates of a GPU and its links, from which `step_time` predicts the time of a step.

A file coatlm/rates/NAME.yaml holds the rates of one kind of GPU, as its first lines say where they
come from. A rate that depends on a size is given at some sizes, interpolated over the logarithm of
the size, and constant beyond the first and the last.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from coatlm.config import ConfigError
from coatlm.config.fields import Section
from coatlm.config.yaml_text import parse_yaml

RATES = Path(__file__).resolve().parents[1] / "rates"
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Sizes = Annotated[dict[int, Positive], Field(min_length=1)]  # size -> rate


class Link(Section):
    """A link over which the ranks of a process group exchange bytes."""

    gb_per_s: Positive
    """10^9 bytes per second that a rank sends in a large collective."""

    latency_us: Annotated[float, Field(ge=0)]
    """Microseconds of a collective that sends nearly nothing."""

    def seconds(self, sent: float, collectives: float = 1) -> float:
        """The time of `collectives` in which a rank sends `sent` bytes in total."""
        return sent / (1e9 * self.gb_per_s) + 1e-6 * self.latency_us * collectives


class Rates(Section):
    """What one GPU computes and moves per second, as a training step does it."""

    gpu: str
    """The GPU's name, as torch.cuda.get_device_name returns it."""

    memory_gib: Positive
    """The GPU's memory."""

    gemm: dict[str, Sizes]
    """TFLOP/s of the GEMMs of a layer by format (fp8, bf16) and by the smallest of M, N and K."""

    attention: dict[int, Sizes]
    """TFLOP/s of causal attention, forward and backward (counted as twice forward), by head_dim and
    by the tokens of a sample."""

    context_parallel: Positive
    """The time of attention on context-parallel ranks that all-gather keys and values, copies and
    kernels of prefixes included, relative to one rank with the same FLOPs."""

    output: dict[str, Sizes]
    """TFLOP/s of the output layer with its loss, recomputed GEMM included, by format and hidden;
    those of fp8 for formats without an entry."""

    tb_per_s: Positive
    """10^12 bytes per second that elementwise kernels read and write."""

    layer: dict[str, Positive]
    """The time of GEMMs and elementwise kernels of a layer by precision.recipe, relative to coat
    with delayed scales for FP8 layers and to bf16 for the others; 1 for recipes without an entry.
    `current` is that of current scales relative to delayed ones."""

    launch_us: dict[str, Positive]
    """Microseconds in which the host launches forward and backward of a layer, by format."""

    optimizer: dict[str, Positive]
    """Milliseconds of an update of 10^9 parameters by optim.recipe, from BF16 gradients."""

    host_gb_per_s: Positive
    """10^9 bytes per second between GPU and host memory, in each direction while both are busy."""

    update_ms: Positive
    """Milliseconds of a step besides layers, output layer, the update of parameters and exposed
    communication."""

    contention: Annotated[float, Field(ge=0, le=1)]
    """The share of the time of overlapped NVLink communication by which computation is delayed."""

    nvlink: dict[int, Link]
    """The links between the GPUs of a node by the number of ranks of the process group."""

    network: Link
    """The link of each GPU to other nodes."""


def interpolated(table: Mapping[int, float], size: float) -> float:
    """The rate at `size`, linear in log(size) between the table's sizes, constant beyond them."""
    sizes = sorted(table)
    if not sizes[0] < size < sizes[-1]:
        return table[sizes[0] if size <= sizes[0] else sizes[-1]]
    at = bisect(sizes, size)
    low, high = sizes[at - 1], sizes[at]
    share = math.log(size / low) / math.log(high / low)
    return table[low] * (1 - share) + table[high] * share


def nearest(table: Mapping[int, Link], ranks: int) -> Link:
    """The link of the smallest measured group of at least `ranks`, else of the largest."""
    return table[min((n for n in table if n >= ranks), default=max(table))]


@cache
def load_rates(name: str) -> Rates:
    """The rates of the kind of GPU `name`, such as h100. Raises ConfigError for an unknown one."""
    path = RATES / f"{name}.yaml"
    if name not in known():
        raise ConfigError(f"--gpu {name}: must be one of {', '.join(known())}")
    return Rates.model_validate(parse_yaml(path.read_text(encoding="utf-8")))


def rates_of(gpu: str) -> Rates | None:
    """The rates of the GPU that has this name; None if they are not known."""
    return next((rates for rates in map(load_rates, known()) if rates.gpu == gpu), None)


def known() -> list[str]:
    """The kinds of GPUs that have rates."""
    return sorted(path.stem for path in RATES.glob("*.yaml"))
