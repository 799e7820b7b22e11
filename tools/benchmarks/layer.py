"""One Llama layer: coatlm's recipes and their peers, in time, memory and accuracy.

A record is one row at one shape. `ms` is the median of forward and backward, from CUDA events;
coatlm and TransformerEngine add weight gradients to fp32 buffers (--first: coatlm overwrites them,
as in the first microbatch of a step). `launch_ms` is the time until the last kernel of a step is
queued on an idle device; `graph_ms` the time of the step replayed from one CUDA graph.

The memory of a stack of 4 layers between forward and backward is read from the allocator at two
batch sizes. Per layer, `act_b_per_token` is the part that grows with the tokens, including scales
and all side data (`act_u` in COAT's units of 2 * hidden bytes); `weight_copies_mib` is the rest,
including what a step leaves for the next; `held_b_per_token` is the sum, the only value for
compiled peers.

`err_*` is ||x - x_ref|| / ||x_ref|| against fp32 with the same weights and inputs, for the output,
the gradient of the input (`_branch`: both without the residual stream), and each weight gradient.

Options: shapes=hidden:seq,... batch=4 steps=30 grads=bf16 (TransformerEngine's weight gradients)
also=ROW,... and dotted options for coatlm's rows, such as precision.scaling=delayed. Flags:
--graph, --first, --profile (where the time goes, kernel by kernel, and the roofline), --smoke
(tiny, on a CPU too).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from coatlm.config.recipes import RECIPES
from tools.benchmarks import layer_peers, layer_profile
from tools.benchmarks.clock import DEVICE, elapsed, mark, milliseconds, release, synchronize
from tools.benchmarks.layer_memory import held, held_by_compiled, peak_mib
from tools.benchmarks.layer_stacks import (
    COATLM,
    LayerShape,
    Stack,
    coatlm_stack,
    groups,
    reference_gradients,
)

OPTIONS = (
    "shapes",
    "batch",
    "steps",
    "grads",
    "also",
    "graph",
    "first",
    "profile",
    "smoke",
    "SECTION.KEY",
)
SHAPES = "4096:4096,4096:2048,2048:4096,2048:2048"  # hidden:seq
FFN = {4096: 11008, 2048: 5504, 64: 176}
HEAD_DIM, SMOKE_HEAD_DIM = 128, 32
DELAYED = ("coat", "coat-int8", "coat-lean", "coat-lean-int8")  # also with delayed scales
FLOWS = (*(f"coatlm {x}" for x in RECIPES), *(f"coatlm {x} delayed" for x in DELAYED))
FP8_PEERS = ("te delayed", "te current", "te block", "torchao tensorwise")
OTHERS = (
    *("coatlm bf16", "te bf16", "coatlm te-delayed", "coatlm te bf16", "torch.compile bf16"),
    *("coatlm te-current", "coatlm te-blockwise"),
)
IN_TURN = zip_longest(FLOWS, FP8_PEERS)  # so that a drift of the machine affects both
ROWS = ("roofline", *(row for pair in IN_TURN for row in pair if row is not None), *OTHERS)
SMOKE_ROWS = ("roofline", "coatlm fp32", "coatlm bf16", "torch eager")
WARMUP, LAUNCHES = 5, 5  # steps
LayerRecord = dict[str, Any]
Build = Callable[[int], Stack]  # layers -> stack


def rows(options: dict[str, str]) -> list[str]:
    """The rows in the order in which they run; `also` adds rows that are not run by default."""
    shapes(options)  # raises ValueError for those that no row could measure
    also = [name for name in options.get("also", "").split(",") if name]
    return [*(SMOKE_ROWS if "smoke" in options else ROWS), *also]


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs that the benchmark needs; the smoke run also works on a CPU."""
    return 0 if "smoke" in options else 1


def prepare(row: str) -> None:
    """Import what the row needs, and initialize the device, before its measurement."""
    torch.zeros((), device=DEVICE)
    if row in COATLM:
        import coatlm.model.builder  # noqa: F401

        groups()
    elif row != "roofline":
        layer_peers.prepare(row)


def shapes(options: dict[str, str]) -> list[LayerShape]:
    """The requested shapes. Raises ValueError for a hidden size without a known ffn size."""
    smoke = "smoke" in options
    batch, head_dim = int(options.get("batch", 4)), SMOKE_HEAD_DIM if smoke else HEAD_DIM
    found = []
    for item in options.get("shapes", "64:32" if smoke else SHAPES).split(","):
        sizes = item.split(":")
        if len(sizes) != 2 or not all(s.isdecimal() and len(s) < 9 for s in sizes):
            raise ValueError(f"shapes={item}: hidden:seq, two whole numbers")
        hidden, seq = map(int, sizes)
        if hidden not in FFN:
            raise ValueError(f"shapes={item}: hidden is one of {', '.join(map(str, FFN))}")
        found.append(LayerShape(hidden, FFN[hidden], hidden // head_dim, seq, batch))
    return found


def measure(row: str, options: dict[str, str]) -> Iterator[LayerRecord]:
    """Yield one record per shape, and those of the profile. A failed shape's gives the reason."""
    if DEVICE == "cpu":
        yield from _measure(row, options)
        return
    # autograd remembers the stream on which a weight was first used; a capture on another fails
    with torch.cuda.stream(torch.cuda.Stream()):
        yield from _measure(row, options)


def _measure(row: str, options: dict[str, str]) -> Iterator[LayerRecord]:
    for shape in shapes(options):
        named = {"row": row, "hidden": shape.hidden, "seq": shape.seq}
        try:
            if row == "roofline":
                yield named | layer_profile.roofline(shape)
            else:
                for record in records(row, shape, options):
                    yield named | record
        except Exception as error:  # measure the other shapes in any case
            reason = str(error).strip().splitlines() or [""]
            yield named | {"missing": f"{type(error).__name__}: {reason[-1]}"[:300]}
        release()


def summary(found: list[LayerRecord]) -> list[LayerRecord]:
    """Tables of rows by shapes: `ms`, `graph_ms` if requested, bytes per token; then ratios."""
    table: dict[str, LayerRecord] = {}
    times: dict[str, dict[str, float]] = {}
    for record in found:
        if "table" in record or ("ms" not in record and "roofline_ms" not in record):
            continue
        row, shape = record["row"], f"{record['hidden']}:{record['seq']}"
        line = table.setdefault(row, {"table": "ms; from a graph; bytes per token", "row": row})
        held_bytes = record.get("act_b_per_token", record.get("held_b_per_token"))
        parts = (record.get("ms", record.get("roofline_ms")), record.get("graph_ms"), held_bytes)
        line[shape] = "; ".join(str(part) for part in parts if part is not None)
        if "ms" in record:
            times.setdefault(shape, {})[row] = record["ms"]
    for ours in FLOWS:
        ratios = {}
        for shape, ms in times.items():
            peers = [ms[peer] for peer in FP8_PEERS if peer in ms]
            if ours in ms and peers:
                ratios[shape] = round(min(peers) / ms[ours], 3)
        if ratios:
            name = f"fastest FP8 peer / {ours}"
            table[name] = {"table": "ms; from a graph; bytes per token", "row": name, **ratios}
    return list(table.values())


def records(row: str, shape: LayerShape, options: dict[str, str]) -> Iterator[LayerRecord]:
    """The measurements of a row at a shape; with `profile`, also one record per kernel."""
    steps = int(options.get("steps", 3 if "smoke" in options else 30))
    extras = ("graph" in options, "profile" in options)
    if row in COATLM:
        overrides = [f"{name}={value}" for name, value in options.items() if "." in name]

        def build(layers: int) -> Stack:
            return coatlm_stack(row, shape, layers, overrides, first="first" in options)

        yield from _of_stack(row, build, shape, steps, *extras)
    else:
        grads = options.get("grads", "fp32")
        if grads not in ("fp32", "bf16"):
            raise ValueError(f"grads={grads}: fp32 or bf16")
        yield from peer(row, shape, steps, grads == "fp32", *extras)


@cache
def peer(
    row: str,
    shape: LayerShape,
    steps: int = 30,
    fp32_grads: bool = True,
    graph: bool = False,
    profile: bool = False,
) -> tuple[LayerRecord, ...]:
    """The records of a peer, measured once per process. Raises ImportError without its package."""

    def build(layers: int) -> Stack:
        return layer_peers.peer_stack(row, shape, layers, fp32_grads=fp32_grads)

    return tuple(_of_stack(row, build, shape, steps, graph, profile))


def _of_stack(
    row: str, build: Build, shape: LayerShape, steps: int, graph: bool, profile: bool
) -> Iterator[LayerRecord]:
    stack = build(1)
    record = timing(stack, shape, steps)
    if stack.weights is not None:
        record |= errors(stack, shape)
    if DEVICE == "cuda":
        record["peak_mib"] = peak_mib(stack, shape)
    kernels = layer_profile.profile(row, stack, shape) if profile else []
    if kernels:
        record |= layer_profile.split(kernels)
    record |= held_by_compiled(stack, shape) if stack.compiled else held(build, shape)
    if graph:
        record["graph_ms"] = graphed(stack, shape, partial(milliseconds, reps=steps))
    yield record
    yield from layer_profile.shown(kernels)


def timing(stack: Stack, shape: LayerShape, steps: int) -> LayerRecord:
    """Median milliseconds of forward, of the whole step, and of launching it."""
    x, dy = stack.inputs(shape.batch)
    for _ in range(WARMUP):
        stack.step(x, dy)
    launches = []
    for _ in range(LAUNCHES):
        synchronize()
        start = time.perf_counter()
        stack.step(x, dy)
        launches.append(1000 * (time.perf_counter() - start))
    synchronize()
    laps = []
    for _ in range(steps):
        stack.clear(x)
        marks = [mark()]
        stack.new_weights()
        y = stack.forward(x)
        marks.append(mark())
        y.backward(dy)
        marks.append(mark())
        laps.append(marks)
    synchronize()
    forward = statistics.median(elapsed(first, second) for first, second, _ in laps)
    whole = [elapsed(first, last) for first, _, last in laps]
    return {
        "ms": round(statistics.median(whole), 3),
        "forward_ms": round(forward, 3),
        "spread": round((max(whole) - min(whole)) / statistics.median(whole), 3),
        "launch_ms": round(statistics.median(launches), 3),
    }


def graphed(
    stack: Stack, shape: LayerShape, measure: Callable[[Callable[[], object]], float]
) -> float | str:
    """What `measure` says of replaying a step's CUDA graph, or why it cannot be captured."""
    if DEVICE == "cpu":
        return "needs a GPU"
    x, dy = stack.inputs(shape.batch)
    for _ in range(2):
        stack.step(x, dy)
    stack.clear(x)
    release()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(
            graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            stack.step(x, dy)
    except Exception as error:  # whatever a peer does that cannot be captured
        return f"not captured: {(str(error).strip().splitlines() or [''])[0][:120]}"
    return round(measure(graph.replay), 3)


def errors(stack: Stack, shape: LayerShape) -> LayerRecord:
    """Errors relative to fp32 on one sample; for y and dx also without the residual stream."""
    assert stack.weights is not None
    weights = stack.weights()
    one = shape._replace(batch=1)
    x, dy = stack.inputs(1)
    for weight in weights.values():
        weight.main_grad.zero_()  # type: ignore[attr-defined]
    y = stack.step(x, dy)
    assert x.grad is not None
    grads = {name: weight.main_grad for name, weight in weights.items()}  # type: ignore[attr-defined]
    found = {"y": y.detach(), "dx": x.grad, **grads}
    wanted = reference_gradients({k: w.detach() for k, w in weights.items()}, one, x, dy)
    record = {f"err_{name}": relative(found[name], wanted[name]) for name in wanted}
    for name, residual in (("y", x.detach()), ("dx", dy)):
        branch = (tensors[name].float() - residual.float() for tensors in (found, wanted))
        record[f"err_{name}_branch"] = relative(*branch)
    return record


def relative(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||, to three digits."""
    difference = torch.linalg.vector_norm(found.double() - wanted.double())
    return float(f"{float(difference / torch.linalg.vector_norm(wanted.double())):.3g}")
