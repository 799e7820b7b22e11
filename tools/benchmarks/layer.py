"""One Llama layer: coatlm's recipes and their peers, in time, memory and accuracy.

A record is a row at a shape. `ms` is forward and backward by CUDA events (median), weight gradients
added to fp32 buffers by coatlm and TransformerEngine; `launch_ms` is the time until a step's last
kernel is queued on an idle device; `graph_ms` the step replayed from one CUDA graph.

What a stack of 4 layers holds between forward and backward is read off the allocator at two batch
sizes. A layer: `act_b_per_token` is what grows with the tokens, scales and all side data in
(`act_u` in COAT's units of 2 * hidden bytes); `weight_copies_mib` is what does not, with whatever
a step leaves behind for the next; `held_b_per_token` is both, and all that a compiled peer tells.

`err_*` is ||x - x_ref|| / ||x_ref|| to fp32 with the same weights and inputs: of the output, of the
input's gradient (`_branch`: both without the residual stream), and of each weight's.

Options: shapes=hidden:seq,... batch=4 steps=30 grads=bf16 (TransformerEngine's weight gradients)
also=ROW,... and dotted options for coatlm's rows, such as precision.group=32. Flags: --graph,
--profile (where the time goes, kernel by kernel, and the roofline), --smoke (tiny, on a CPU too).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tools.benchmarks import layer_peers, layer_profile
from tools.benchmarks.layer_stacks import (
    COATLM,
    DEVICE,
    Shape,
    Stack,
    coatlm_stack,
    groups,
    reference_gradients,
)

SHAPES = "4096:4096,4096:2048,2048:4096,2048:2048"  # hidden:seq
FFN = {4096: 11008, 2048: 5504, 64: 176}
HEAD_DIM, SMOKE_HEAD_DIM = 128, 32
ROWS = (  # peers and coatlm in turn, so that a drift of the machine meets both
    "roofline",
    "coatlm coat",
    "te delayed",
    "coatlm coat-lean",
    "te current",
    "coatlm fp8-linear",
    "te block",
    "coatlm bf16",
    "te bf16",
    "coatlm te-delayed",
    "torchao tensorwise",
    "coatlm te bf16",
    "torch.compile bf16",
    "coatlm te-current",
    "coatlm te-blockwise",
)
SMOKE_ROWS = ("coatlm fp32", "coatlm bf16", "torch eager")
LAYERS = 4  # in the stack whose memory is read
WARMUP, LAUNCHES = 5, 5  # steps
Record = dict[str, Any]
Build = Callable[[int], Stack]  # layers -> stack


def rows(options: dict[str, str]) -> list[str]:
    """The rows in the order in which they run; `also` adds rows that are not in it."""
    also = [name for name in options.get("also", "").split(",") if name]
    return [*(SMOKE_ROWS if "smoke" in options else ROWS), *also]


def prepare(row: str) -> None:
    """Import what the row needs, and start on the device, while it waits for its turn."""
    torch.zeros((), device=DEVICE)
    if row in COATLM:
        import coatlm.model.builder  # noqa: F401

        groups()
    elif row != "roofline":
        layer_peers.prepare(row)


def shapes(options: dict[str, str]) -> list[Shape]:
    """The shapes asked for. Raises ValueError for a hidden size whose ffn is not known."""
    smoke = "smoke" in options
    batch, head_dim = int(options.get("batch", 4)), SMOKE_HEAD_DIM if smoke else HEAD_DIM
    found = []
    for item in options.get("shapes", "64:32" if smoke else SHAPES).split(","):
        hidden, seq = (int(size) for size in item.split(":"))
        if hidden not in FFN:
            raise ValueError(f"shapes={item}: hidden is one of {', '.join(map(str, FFN))}")
        found.append(Shape(hidden, FFN[hidden], hidden // head_dim, seq, batch))
    return found


def measure(row: str, options: dict[str, str]) -> Iterator[Record]:
    """A record a shape, and those of the profile; a shape that fails says why."""
    if DEVICE == "cpu":
        yield from _measure(row, options)
        return
    # autograd remembers the stream on which a weight was first used, and a graph takes no other
    with torch.cuda.stream(torch.cuda.Stream()):
        yield from _measure(row, options)


def _measure(row: str, options: dict[str, str]) -> Iterator[Record]:
    for shape in shapes(options):
        named = {"row": row, "hidden": shape.hidden, "seq": shape.seq}
        try:
            if row == "roofline":
                yield named | layer_profile.roofline(shape)
            else:
                for record in records(row, shape, options):
                    yield named | record
        except Exception as error:  # the other shapes are still worth having
            reason = str(error).strip().splitlines() or [""]
            yield named | {"missing": f"{type(error).__name__}: {reason[-1]}"[:300]}
        _release()


def records(row: str, shape: Shape, options: dict[str, str]) -> Iterator[Record]:
    """The measurements of a row at a shape; with `profile` one more record a kernel."""
    steps = int(options.get("steps", 3 if "smoke" in options else 30))
    extras = ("graph" in options, "profile" in options)
    if row in COATLM:
        overrides = [f"{name}={value}" for name, value in options.items() if "." in name]

        def build(layers: int) -> Stack:
            return coatlm_stack(row, shape, layers, overrides)

        steps = int(options.get("steps", 3 if "smoke" in options else 30))
        yield from _of_stack(row, build, shape, steps, *extras)
    else:
        grads = options.get("grads", "fp32")
        if grads not in ("fp32", "bf16"):
            raise ValueError(f"grads={grads}: fp32 or bf16")
        yield from peer(row, *shape, steps, grads == "fp32", *extras)


@cache
def peer(
    row: str,
    hidden: int,
    ffn: int,
    heads: int,
    seq: int,
    batch: int,
    steps: int = 30,
    fp32_grads: bool = True,
    graph: bool = False,
    profile: bool = False,
) -> tuple[Record, ...]:
    """The records of a peer, measured once a process. Raises ImportError without its package."""
    shape = Shape(hidden, ffn, heads, seq, batch)

    def build(layers: int) -> Stack:
        return layer_peers.peer_stack(row, shape, layers, fp32_grads=fp32_grads)

    return tuple(_of_stack(row, build, shape, steps, graph, profile))


def _of_stack(
    row: str, build: Build, shape: Shape, steps: int, graph: bool, profile: bool
) -> Iterator[Record]:
    stack = build(1)
    record = timing(stack, shape, steps)
    if stack.weights is not None:
        record |= errors(stack, shape)
    if DEVICE == "cuda":
        record["peak_mib"] = peak_mib(stack, shape)
    kernels = layer_profile.profile(row, stack, shape) if profile and DEVICE == "cuda" else []
    if kernels:
        record |= layer_profile.split(kernels)
    record |= held(stack.repeated(LAYERS) if stack.compiled else build, shape)
    if graph:
        record["graph_ms"] = graphed(stack, shape, steps)
    yield record
    yield from layer_profile.shown(kernels)


def timing(stack: Stack, shape: Shape, steps: int) -> Record:
    """Median milliseconds of forward, of the whole step, and of queueing it."""
    x, dy = stack.inputs(shape.batch)
    for _ in range(WARMUP):
        stack.step(x, dy)
    launches = []
    for _ in range(LAUNCHES):
        _synchronize()
        start = time.perf_counter()
        stack.step(x, dy)
        launches.append(1000 * (time.perf_counter() - start))
    _synchronize()
    laps = []
    for _ in range(steps):
        stack.clear(x)
        marks = [_mark()]
        stack.new_weights()
        y = stack.forward(x)
        marks.append(_mark())
        y.backward(dy)
        marks.append(_mark())
        laps.append(marks)
    _synchronize()
    forward = statistics.median(_ms(first, second) for first, second, _ in laps)
    whole = [_ms(first, last) for first, _, last in laps]
    return {
        "ms": round(statistics.median(whole), 3),
        "forward_ms": round(forward, 3),
        "spread": round((max(whole) - min(whole)) / statistics.median(whole), 3),
        "launch_ms": round(statistics.median(launches), 3),
    }


def graphed(stack: Stack, shape: Shape, steps: int) -> float | str:
    """Median milliseconds of a step replayed from a CUDA graph, or why it cannot be captured."""
    if DEVICE == "cpu":
        return "needs a GPU"
    x, dy = stack.inputs(shape.batch)
    for _ in range(2):
        stack.step(x, dy)
    stack.clear(x)
    _release()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(
            graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            stack.step(x, dy)
    except Exception as error:  # whatever a peer does that a graph cannot hold
        return f"not captured: {(str(error).strip().splitlines() or [''])[0][:120]}"
    laps = []
    for number in range(WARMUP + steps):
        marks = (_mark(), graph.replay(), _mark())
        if number >= WARMUP:
            laps.append(marks)
    _synchronize()
    return round(statistics.median(_ms(first, last) for first, _, last in laps), 3)


def held(build: Build | Stack, shape: Shape) -> Record:
    """Bytes that a stack holds between forward and backward, a token and layer."""
    if isinstance(build, Stack):
        return {"held_b_per_token": round(held_bytes(build, shape.batch) / LAYERS / shape.tokens)}
    _release()
    stack = build(LAYERS)
    x, dy = stack.inputs(shape.batch)
    before = _allocated()
    stack.step(x, dy)
    stack.clear(x)
    _release()
    kept = _allocated() - before  # weights in FP8 that serve the next microbatch too
    whole = held_bytes(stack, shape.batch) / LAYERS
    record = {"held_b_per_token": round((whole + kept / LAYERS) / shape.tokens)}
    if shape.batch % 2 == 0:
        half = held_bytes(stack, shape.batch // 2) / LAYERS
        a_token = (whole - half) / (shape.tokens / 2)
        copies = whole - a_token * shape.tokens + kept / LAYERS
        record["act_b_per_token"] = round(a_token)
        record["act_u"] = round(a_token / (2 * shape.hidden), 2)
        record["weight_copies_mib"] = round(copies / 2**20, 1)
    return record


def held_bytes(stack: Stack, batch: int) -> int:
    """Bytes between forward and backward, the input in and the output out.

    On a GPU what the allocator counts; on a CPU the storages that autograd has saved.
    """
    x, _ = stack.inputs(batch)
    _release()
    if DEVICE == "cpu":
        return _saved_bytes(stack, x)
    before = torch.cuda.memory_allocated()
    stack.new_weights()
    y = stack.forward(x * 1.0)  # the layer before would hand over such a tensor, and keep none
    after = torch.cuda.memory_allocated()
    return after - before - y.numel() * y.element_size()


def _saved_bytes(stack: Stack, x: Tensor) -> int:
    storages: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        y = stack.forward(x * 1.0)
    for tensor in (y, *stack.parameters):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def peak_mib(stack: Stack, shape: Shape) -> float:
    """The most that a step of one layer allocates on top of weights, gradients, x and dy."""
    x, dy = stack.inputs(shape.batch)
    _release()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    stack.step(x, dy)
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def errors(stack: Stack, shape: Shape) -> Record:
    """Relative errors to fp32 on one sample; of y and dx also without the residual stream."""
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


def _mark() -> Any:
    if DEVICE == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms(start: Any, end: Any) -> float:
    return 1000 * (end - start) if DEVICE == "cpu" else start.elapsed_time(end)


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _allocated() -> int:
    return torch.cuda.memory_allocated() if DEVICE == "cuda" else 0


def _release() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
