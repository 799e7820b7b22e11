"""Bytes of gradients on a rank, from the configuration alone: a part of `memory`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from coatlm.config import Config
from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.model.accounting import key_size, layer_biases, layer_norms, query_size
from coatlm.model.layer_memory import element_bytes
from coatlm.parallel.arena import Lifetime
from coatlm.parallel.buckets import Cut, arena_layout, bucket_elements, plan_buckets
from coatlm.parallel.grad_reduction import IN_FLIGHT

ONE_BYTE = 1 + 4 / SCALE_BLOCK  # a one-byte gradient: its code, and the fp32 scale of its block
EACH = {"fp32": (4.0, 4), "bf16": (2.0, 2), "fp8": (ONE_BYTE, 2)}  # accumulated; in transit


def grad_buffer_bytes(config: Config, count: int, vocab: int, data_parallel: int) -> int:
    """Bytes of the buffers of `count` gradients: an arena with train.update=backward."""
    if config.train.update == "backward":
        return arena_bytes(config, vocab, data_parallel)
    return main_grad_bytes(config, count, data_parallel)


def main_grad_bytes(config: Config, count: int, data_parallel: int) -> int:
    """Bytes of the buffers in which `count` gradients are accumulated and reduced.

    Every rank has all gradients; from zero=2 on a shard, the bucket that fills, those in flight.
    """
    p = config.parallel
    each, moving = EACH[p.main_grads]
    if not _transient_grads(config, data_parallel):
        return math.ceil(count * each)
    elements = min((IN_FLIGHT + 1) * bucket_elements(p.bucket_size, count), count)
    return math.ceil(math.ceil(count / (data_parallel * p.cp)) * each) + elements * moving


def returned_grad_bytes(config: Config, elements: int, data_parallel: int) -> int:
    """Bytes of weight gradients of `elements` values that autograd returns in the weights' dtype.

    One-byte gradients are added by a kernel of their own; wgrad GEMMs add to all others in place.
    """
    if config.parallel.main_grads != "fp8" or _transient_grads(config, data_parallel):
        return 0
    return elements * element_bytes(config)


def _transient_grads(config: Config, data_parallel: int) -> bool:
    """Whether buckets of gradients exist only while they fill and are reduced."""
    step = config.train.update == "step"
    return step and config.parallel.zero >= 2 and data_parallel * config.parallel.cp > 1


# --- train.update=backward ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Arena:
    """What the buckets of a rank depend on. Sizes are in elements, in the order of forward."""

    layer: tuple[int, ...]  # sizes of the parameters of a layer
    matrices: tuple[int, ...]  # which of these are matrices
    layers: int
    table: int  # size of the embedding and, unless `tied`, of the output layer
    norm: int  # size of the final norm
    tied: bool
    bucket_size: int
    ranks: int
    zero: int
    gathers_fp8: bool


def arena_bytes(config: Config, vocab: int, data_parallel: int) -> int:
    """Bytes of the arena of all gradients with train.update=backward."""
    m, p = config.model, config.parallel
    q, k, h = query_size(m), key_size(m), m.hidden
    proj, qkv, fc1, fc2 = (size * h // p.tp for size in (q, q + 2 * k, 2 * m.ffn, m.ffn))
    vectors = layer_norms(m) - h + layer_biases(m) // p.tp  # all but the first norm, as one
    arena = _Arena(
        layer=(h, proj, qkv, vectors, fc1, fc2),
        matrices=(1, 2, 4, 5),
        layers=m.layers,
        table=vocab * h // p.tp,
        norm=h,
        tied=m.tie_embeddings,
        bucket_size=p.bucket_size,
        ranks=data_parallel * p.cp,
        zero=p.zero,
        gathers_fp8=p.weight_gather == "fp8",
    )
    _, moving = EACH[p.main_grads]
    return moving * _arena_elements(arena)


@cache
def _arena_elements(arena: _Arena) -> int:
    """The elements that `buckets.make_buckets` allocates for the gradients of such a model."""
    first, last = (arena.table,), (arena.norm,) if arena.tied else (arena.norm, arena.table)
    units = [_weights(sizes) for sizes in (first, *[arena.layer] * arena.layers, last)]
    events = len(units) - 1
    reached: dict[nn.Parameter, Lifetime] = {}
    for number, unit in enumerate(units):
        reached |= dict.fromkeys(unit, (events - number, events - number))
    if arena.tied:
        reached |= dict.fromkeys(units[0], (0, events))
    numbers = {param: n for n, unit in enumerate(units) for param in unit}
    matrices = frozenset(unit[i] for unit in units[1:-1] for i in arena.matrices)
    cut = Cut(
        rank=0,
        ranks=arena.ranks,
        zero=arena.zero,
        grad_dtype=torch.float32,
        bucket_size=arena.bucket_size,
        fp8_weights=matrices if arena.gathers_fp8 else frozenset(),
        unit=numbers if arena.zero == 3 else {},
        reached=reached,
    )
    _, size = arena_layout(plan_buckets([p for unit in units for p in unit], cut), cut)
    return size


def _weights(sizes: tuple[int, ...]) -> list[nn.Parameter]:
    """Parameters of these sizes, without memory."""
    return [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
