"""The rates of layers: GEMMs, launches, recipes relative to one another (rates.py has the rest).

GEMMs are those of whole layers: a layer is timed from a CUDA graph, and what attention and the
bytes of elementwise kernels take (layer_time.py) is subtracted. Layers below 4096 hidden have as
many more tokens as their rows are shorter, like microbatches of small models: with few tokens,
what is subtracted would be less than what kernels of a few microseconds take, and the difference
would count as GEMMs.

The time to launch a layer is that of LAUNCHED more layers in a stack, divided by their number: a
stack of one also takes what a microbatch takes once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from coatlm.config.recipes import RECIPES as FLOW_RECIPES
from coatlm.config.recipes import TE_RECIPES
from coatlm.model.layer_time import PASSES, TERA
from coatlm.model.rates import Rates, interpolated
from tools.benchmarks import layer
from tools.benchmarks.clock import DEVICE, release, sustained
from tools.benchmarks.layer_stacks import COATLM, LayerShape, coatlm_stack

HIDDEN, SEQ, BATCH, HEAD_DIM = (256, 512, 1024, 2048, 4096, 8192), 2048, 4, 128
ELEMENTS = 4096 * SEQ * BATCH  # of the residual stream of a layer, at least
LAUNCHED = 4  # layers whose launches are timed, besides a first one
REFERENCES = {"fp8": "coatlm coat delayed", "bf16": "coatlm bf16"}  # layers whose GEMMs are timed
LEAST_SHARE = 0.1  # of a layer's time counts as GEMMs even where kernels are too short to measure
CPU_STEPS = 10
FoundRates = dict[Any, Any]
RateValues = Iterator[tuple[str, Any]]  # (key of Rates, value)


def layers(found: FoundRates, base: Rates, smoke: bool, deadline: float) -> RateValues:
    """TFLOP/s of a layer's GEMMs by format and hidden size; microseconds to launch a layer."""
    gemm: FoundRates = {}
    launch: FoundRates = {}
    for hidden in (64,) if smoke else HIDDEN:
        shape = layer_shape(hidden, smoke)
        for kind, row in REFERENCES.items():
            if time.monotonic() > deadline:
                break
            if hidden == (64 if smoke else 1024):
                launch[kind] = rounded(launch_us(row, shape))
            seconds = layer_seconds(coatlm_stack(row, shape, 1), shape)
            weights = 4 * hidden**2 + 3 * hidden * shape.ffn
            flops = 6 * shape.tokens * weights
            passes = PASSES[kind]
            each = (passes.stream + 3 * passes.qkv) * hidden + passes.mlp * shape.ffn
            moved = shape.tokens * each + passes.weights * weights
            rest = moved / (TERA * found.get("tb_per_s", base.tb_per_s)) + attended(
                found, base, shape
            )
            seconds = max(seconds - rest, LEAST_SHARE * seconds)
            gemm.setdefault(kind, {})[hidden] = rounded(flops / (TERA * seconds))
            release()
    yield "gemm", gemm
    yield "launch_us", launch


def recipes(found: FoundRates, base: Rates, smoke: bool, deadline: float) -> RateValues:
    """The time of a layer without attention by recipe, relative to coat with delayed scales.

    The time of recipes without delayed scales is divided by the factor that current scales cost,
    because step_time.py multiplies by it.
    """
    shape = layer_shape(64 if smoke else 4096, smoke)
    rest = attended(found, base, shape)

    def seconds(row: str) -> float:
        return max(layer_seconds(coatlm_stack(row, shape, 1), shape) - rest, 1e-9)

    reference = {kind: seconds(row) for kind, row in REFERENCES.items()}
    current = seconds("coatlm coat") / reference["fp8"]
    table: FoundRates = {"coat": 1.0, "bf16": 1.0, "current": rounded(current)}
    te = TE_RECIPES if find_spec("transformer_engine") else ()
    for recipe in ["rowwise"] if smoke else [*FLOW_RECIPES, *te]:
        if time.monotonic() > deadline:
            break
        delayed = f"coatlm {recipe} delayed"
        row, extra = (delayed, 1.0) if delayed in COATLM else (f"coatlm {recipe}", current)
        if recipe not in table:
            extra = 1.0 if recipe in te else extra
            table[recipe] = rounded(seconds(row) / reference["fp8"] / extra)
        release()
    yield "layer", table


def layer_shape(hidden: int, smoke: bool) -> LayerShape:
    """A layer of 4 h^2 and 9 h^2 weights, so that the smallest size of its GEMMs is h."""
    if smoke:
        return LayerShape(hidden, 3 * hidden, hidden // 32, 32, 2)
    batch = max(BATCH, ELEMENTS // (hidden * SEQ))
    return LayerShape(hidden, 3 * hidden, hidden // HEAD_DIM, SEQ, batch)


def layer_seconds(stack: Any, shape: LayerShape) -> float:
    """The time of forward and backward of a layer, on a GPU replayed from a CUDA graph."""
    if DEVICE == "cuda":
        replayed = layer.graphed(stack, shape, sustained)
        if isinstance(replayed, str):
            raise RuntimeError(replayed)
        return replayed / 1000
    return float(layer.timing(stack, shape, CPU_STEPS)["ms"]) / 1000


def launch_us(row: str, shape: LayerShape) -> float:
    """Microseconds in which the host launches forward and backward of one more layer.

    A small microbatch: the device is done before the host, and no launch waits for it.
    """
    small = shape._replace(batch=1)
    first, more = (
        float(layer.timing(coatlm_stack(row, small, layers), small, 1)["launch_ms"])
        for layers in (1, 1 + LAUNCHED)
    )
    return max(1000 * (more - first) / LAUNCHED, 1.0)


def attended(found: FoundRates, base: Rates, shape: LayerShape) -> float:
    """Seconds of attention of a layer, forward and backward, by the rates measured before."""
    table = found.get("attention", base.attention)
    sizes = table[min(table, key=lambda dim: abs(dim - shape.head_dim))]
    flops = 6 * shape.seq * shape.hidden * shape.tokens
    return flops / (TERA * interpolated(sizes, shape.seq))


def rounded(value: float) -> float:
    """`value`, rounded to four significant digits."""
    return float(f"{value:.4g}")
