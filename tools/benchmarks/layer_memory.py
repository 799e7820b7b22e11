"""The memory of a stack of layers between forward and backward, read from the allocator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tools.benchmarks.clock import DEVICE, release
from tools.benchmarks.layer_stacks import LayerShape, Stack

LAYERS = 4


def held(build: Callable[[int], Stack], shape: LayerShape) -> dict[str, float]:
    """Bytes per token and layer that a stack holds between forward and backward."""
    stack = build(LAYERS)
    x, dy = stack.inputs(shape.batch)
    release()
    before = _allocated()
    stack.step(x, dy)
    stack.clear(x)
    release()
    kept = (_allocated() - before) / LAYERS  # left by the step: FP8 weights for later microbatches
    whole = held_bytes(stack, shape.batch) / LAYERS
    record: dict[str, float] = {"held_b_per_token": round((whole + kept) / shape.tokens)}
    if shape.batch % 2 == 0:
        half = held_bytes(stack, shape.batch // 2) / LAYERS
        a_token = (whole - half) / (shape.tokens / 2)
        copies = whole - a_token * shape.tokens + kept
        record["act_b_per_token"] = round(a_token)
        record["act_u"] = round(a_token / (2 * shape.hidden), 2)
        record["weight_copies_mib"] = round(copies / 2**20, 1)
    return record


def held_by_compiled(stack: Stack, shape: LayerShape) -> dict[str, float]:
    """Bytes per token and layer of a compiled layer, called LAYERS times in place of a stack.

    A second batch size, to separate what grows with the tokens, would compile it again.
    """
    whole = held_bytes(stack.repeated(LAYERS), shape.batch) / LAYERS
    return {"held_b_per_token": round(whole / shape.tokens)}


def held_bytes(stack: Stack, batch: int) -> int:
    """Bytes held between forward and backward, including the input and excluding the output.

    On a GPU the allocator counts them; on a CPU they are the storages that autograd has saved.
    """
    x, _ = stack.inputs(batch)
    release()
    if DEVICE == "cpu":
        return _saved_bytes(stack, x)
    before = torch.cuda.memory_allocated()
    stack.new_weights()
    y = stack.forward(x * 1.0)  # as from a previous layer, which does not save its output
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


def peak_mib(stack: Stack, shape: LayerShape) -> float:
    """The most that a step of one layer allocates on top of weights, gradients, x and dy."""
    x, dy = stack.inputs(shape.batch)
    release()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    stack.step(x, dy)
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def _allocated() -> int:
    return torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
