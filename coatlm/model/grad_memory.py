"""Bytes of gradients on a rank, from the configuration alone: a part of `memory`."""

from __future__ import annotations

import math

from coatlm.config import Config
from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.model.layer_memory import element_bytes
from coatlm.parallel.buckets import bucket_elements
from coatlm.parallel.grad_reduction import IN_FLIGHT

ONE_BYTE = 1 + 4 / SCALE_BLOCK  # a one-byte gradient: its code, and the fp32 scale of its block
EACH = {"fp32": (4.0, 4), "bf16": (2.0, 2), "fp8": (ONE_BYTE, 2)}  # accumulated; in transit


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
    return config.parallel.zero >= 2 and data_parallel * config.parallel.cp > 1
