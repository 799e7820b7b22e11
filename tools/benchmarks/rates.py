"""Measure the rates of a GPU, from which steps are predicted (coatlm/model/rates.py).

    python tools/bench.py rates --out coatlm/rates/h100.yaml     # below three minutes

Measured here: attention, GEMMs, output layer, memory, optimizer, transfers to the host, the time
that the host takes to launch a layer, and recipes relative to one another; with two or more GPUs
NVLink too. Everything else, and what there is no time for, is kept from the file of this GPU, or
without one from that of `base`; the first lines of the new file name what is kept.

Kernels, but for copies and collectives, are timed on a GPU that has been busy for a while, as in
training (`clock.sustained`). layer_rates.py says how a layer is divided into its parts.

Options: base=h100 seconds=150 (no measurement begins later), and --smoke (tiny, on a CPU too).
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from coatlm.model.attention_backends import ORDER
from coatlm.model.layer_time import TERA
from coatlm.model.loss import linear_cross_entropy
from coatlm.model.memory import GIB
from coatlm.model.rates import Rates, load_rates, rates_of
from coatlm.optim.adamw import AdamW
from coatlm.optim.recipes import RECIPES
from coatlm.optim.shards import FlatShard
from coatlm.platform import device_memory
from tools.benchmarks import reduce
from tools.benchmarks.clock import DEVICE, milliseconds, release, sustained
from tools.benchmarks.layer_rates import FoundRates, RateValues, layers, recipes, rounded
from tools.benchmarks.layer_stacks import groups
from tools.benchmarks.output_layer import GEMMS, gemms_of

OPTIONS = ("base", "seconds", "smoke")
TOGETHER = "; "  # between the names of rows, which one process measures
ROWS = ("memory", "attention", "layers", "output", "optimizer", "recipes", "links")
REPS = 10
DIMS, LENGTHS, ATTENDED = (64, 128), (1024, 2048, 4096, 8192, 16384), 16384
OUTPUT_HIDDEN, VOCAB = (1024, 2048, 4096, 8192), 32768
PARAMETERS, SHARDS = 200_000_000, 4
COPIED = 1 << 30  # bytes
VALUES, FEW = 1 << 28, 1 << 14  # of an all-to-all: large, and nearly nothing


def rows(options: dict[str, str]) -> list[str]:
    """The rows in the order in which they are measured, each a few keys of `Rates`."""
    return list(ROWS)


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs that the benchmark needs; the smoke run also works on a CPU."""
    return 0 if "smoke" in options else 1


def measure(names: str, options: dict[str, str]) -> list[dict[str, Any]]:
    """One record per key of `Rates` that was measured: {row, key, value}; or why a row was not."""
    stream: Any = nullcontext()
    if DEVICE == "cuda":  # a graph is captured on the stream on which weights were first used
        stream = torch.cuda.stream(torch.cuda.Stream())
    found: FoundRates = {}
    records: list[dict[str, Any]] = []
    deadline = time.monotonic() + float(options.get("seconds", 150))
    base, _ = earlier(options)
    with stream:
        for row in names.split(TOGETHER):
            try:
                for key, value in MEASURES[row](found, base, "smoke" in options, deadline):
                    found[key] = value
                    records.append({"row": row, "key": key, "value": value})
            except Exception as error:  # measure the other rows in any case
                records.append({"row": row, "missing": f"{type(error).__name__}: {error}"[:300]})
            release()
    return records


def text(records: list[dict[str, Any]], options: dict[str, str]) -> str:
    """The file of rates: what was measured, and the rest as it was in the earlier file."""
    base, name = earlier(options)
    found = {record["key"]: with_sizes(record["value"]) for record in records if "key" in record}
    data = base.model_dump()
    kept = []
    for key, value in data.items():
        if isinstance(value, dict) and key in found:
            kept += [f"{key}.{part}" for part in value if part not in found[key]]
            data[key] = {**value, **found[key]}
        elif key in found:
            data[key] = found[key]
        else:
            kept.append(key)
    Rates.model_validate(data)
    words = f"Measured by tools/bench.py rates with torch {torch.__version__}. Kept from {name}: "
    head = textwrap.fill(f"{words}{', '.join(kept)}.", 98, break_on_hyphens=False)
    return textwrap.indent(head, "# ") + "\n" + "".join(f"{line}\n" for line in written(data))


def written(data: dict[str, Any]) -> Iterator[str]:
    """The lines of YAML of rates.

    An entry of a table (a recipe, a format, a head size) is a line; its values by size are on it.
    """
    for key, value in data.items():
        if isinstance(value, dict) and "gb_per_s" not in value:
            yield f"{key}:"
            yield from (f"  {name}: {in_one_line(part)}" for name, part in value.items())
        else:
            yield f"{key}: {in_one_line(value)}"


def in_one_line(value: Any) -> str:
    """YAML of a scalar or of a mapping."""
    text: str = yaml.safe_dump(value, sort_keys=False, default_flow_style=True, width=math.inf)
    return text.removesuffix("...\n").strip()


def earlier(options: dict[str, str]) -> tuple[Rates, str]:
    """The rates of this GPU, or else those of the option `base`, and the name of their file."""
    own = rates_of(torch.cuda.get_device_name()) if DEVICE == "cuda" else None
    name = options.get("base", "h100")
    return (load_rates(name), f"{name}.yaml") if own is None else (own, "the file before")


def with_sizes(value: Any) -> Any:
    """Sizes that became text in JSON as numbers again."""
    if not isinstance(value, dict):
        return value
    return {int(k) if k.isdecimal() else k: with_sizes(v) for k, v in value.items()}


# --- the rows: each yields (key of Rates, value) --------------------------------------------------


def memory(found: FoundRates, base: Rates, smoke: bool, deadline: float) -> RateValues:
    """The GPU's name, its memory, the bandwidth of a copy, and that to and from the host."""
    if DEVICE == "cuda":
        gpu = torch.device("cuda", torch.cuda.current_device())
        yield "gpu", torch.cuda.get_device_name()
        yield "memory_gib", round(device_memory(gpu, 1)[0] / GIB, 1)
    size = 1 << 16 if smoke else COPIED
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    yield "tb_per_s", rounded(2 * size / (1e9 * milliseconds(partial(target.copy_, source), REPS)))
    if DEVICE == "cuda":
        hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        back = torch.cuda.Stream()

        def both() -> None:
            here = torch.cuda.current_stream()
            back.wait_stream(here)
            source.copy_(hosts[0], non_blocking=True)
            with torch.cuda.stream(back):
                hosts[1].copy_(target, non_blocking=True)
            here.wait_stream(back)

        yield "host_gb_per_s", rounded(size / (1e6 * milliseconds(both, REPS)))


def attention(found: FoundRates, base: Rates, smoke: bool, deadline: float) -> RateValues:
    """TFLOP/s of causal attention, forward and backward, by head_dim and length."""
    dims, lengths, tokens = ((32,), (64,), 64) if smoke else (DIMS, LENGTHS, ATTENDED)
    width = 2048 if DEVICE == "cuda" else 64
    table: FoundRates = {}
    for dim in dims:
        for length in lengths:
            shape = (tokens // length, width // dim, length, dim)
            qkv = [torch.randn(shape, device=DEVICE).bfloat16().requires_grad_() for _ in range(3)]
            dout = torch.randn(shape, device=DEVICE).bfloat16()

            def both(qkv: list[Tensor] = qkv, dout: Tensor = dout) -> None:
                backends = sdpa_kernel(ORDER, set_priority=True)
                with backends if DEVICE == "cuda" else nullcontext():
                    out = scaled_dot_product_attention(*qkv, is_causal=True)
                torch.autograd.grad(out, qkv, dout)

            seconds = sustained(both) / 1000
            rate = 6 * length * width * tokens / (TERA * seconds)
            table.setdefault(dim, {})[length] = rounded(rate)
    yield "attention", table


def output(found: FoundRates, base: Rates, smoke: bool, deadline: float) -> RateValues:
    """TFLOP/s of the output layer with its loss and recomputed logits, by format and hidden."""
    tokens, vocab = (64, 256) if smoke else (8192, VOCAB)
    table: FoundRates = {}
    for name in GEMMS:
        gemms = gemms_of(name, DEVICE)
        for size in (64,) if smoke else OUTPUT_HIDDEN:
            hidden = torch.randn(tokens, 1, size, device=DEVICE).bfloat16().requires_grad_()
            weight = (torch.randn(vocab, size, device=DEVICE) / size**0.5).bfloat16()
            weight.requires_grad_()
            weight.main_grad = torch.zeros(weight.shape, device=DEVICE)  # type: ignore[attr-defined]
            labels = torch.randint(vocab, (tokens, 1), device=DEVICE)

            def both(args: Any = (hidden, weight, labels), gemms: Any = gemms) -> None:
                args[0].grad = None
                linear_cross_entropy(*args, gemms=gemms).sum().backward()

            seconds = sustained(both) / 1000
            table.setdefault(name, {})[size] = rounded(8 * tokens * size * vocab / seconds / TERA)
    yield "output", table


def optimizer(found: FoundRates, base: Rates, smoke: bool, deadline: float) -> RateValues:
    """Milliseconds of an update of 10^9 parameters from BF16 gradients, by recipe."""
    count = (1 << 12 if smoke else PARAMETERS // SHARDS) // 1024 * 1024
    table: FoundRates = {}
    for recipe in RECIPES:
        if time.monotonic() > deadline:
            break
        shards = []
        for _ in range(SHARDS):
            weight = (0.02 * torch.randn(count, device=DEVICE)).bfloat16()
            grad = (1e-3 * torch.randn(count, device=DEVICE)).bfloat16()
            shards.append(FlatShard(weight, grad, ((0, count),), ((0, count),)))
        adamw = AdamW(shards, recipe=recipe, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        step = partial(adamw.step, lr=1e-4, clip_coefficient=torch.ones((), device=DEVICE))
        table[recipe] = rounded(sustained(step) * 1e9 / (SHARDS * count))
        del adamw, shards, step
        release()
    yield "optimizer", table


def links(found: FoundRates, base: Rates, smoke: bool, deadline: float) -> RateValues:
    """Bytes per second that a rank sends to the others of its node, and microseconds of a call."""
    table: FoundRates = {}
    for ranks in (2, 4, 8):
        if ranks > torch.cuda.device_count() or time.monotonic() > deadline:
            break
        times = {}
        for values in (VALUES, FEW):
            sizes = {"ranks": str(ranks), "values": str(values), "reps": str(REPS)}
            (record,) = reduce.measure("wire alone", sizes)
            times[values] = record["ms"] / 1000
        sent = (VALUES - FEW) * (ranks - 1) / ranks
        rate = rounded(sent / (times[VALUES] - times[FEW]) / 1e9)
        table[ranks] = {"gb_per_s": rate, "latency_us": rounded(1e6 * times[FEW])}
    if table:
        yield "nvlink", table


MEASURES: dict[str, Callable[[FoundRates, Rates, bool, float], RateValues]] = {
    "memory": memory,
    "attention": attention,
    "layers": layers,
    "output": output,
    "optimizer": optimizer,
    "recipes": recipes,
    "links": links,
}


def prepare(row: str) -> None:
    """Import what layers need, and initialize the device, before the measurement."""
    import coatlm.model.builder  # noqa: F401

    groups()
