"""Causal attention by backend: the candidates of coatlm/model/attention_backends.py, and others.

Rows are S x B tokens, query heads, key heads and head sizes. `chosen` marks the backend that a run
of this shape would choose; `ratio` divides forward and backward by the time of cuDNN's. `flash,
atomics` is FlashAttention-2 as torch runs it by default, which is no candidate: it adds gradients
of queries in any order. `repeatable` says whether four runs gave the same bits, `peak` is the
memory beside the inputs. Options: cases=2048:8:32:32,8192:2:32:8 (S:B:heads:kv_heads),
sizes=64,96,128 (of heads).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from coatlm.model.attention_backends import (
    BACKENDS,
    SPARE,
    Attend,
    Shape,
    choose,
    measure_backends,
    random_inputs,
    torch_attention,
)
from coatlm.platform import device_memory
from tools.benchmarks.clock import milliseconds

OPTIONS = ("cases", "sizes")
CASES = "2048:8:32:32,2048:8:32:8,8192:2:32:8"
SIZES = "64,96,128"
TOGETHER = " "  # one process measures all shapes: to start one takes longer than a shape
ATOMICS: Attend = partial(torch_attention, order=[SDPBackend.FLASH_ATTENTION])
MIB, LARGEST = 1 << 20, 1 << 22


def rows(options: dict[str, str]) -> list[str]:
    """S:B:heads:kv_heads:size of each shape. Raises ValueError for one that has another form."""
    found = []
    for case in options.get("cases", CASES).split(","):
        for size in options.get("sizes", SIZES).split(","):
            row = f"{case}:{size}"
            numbers = [int(n[:8]) if n.isdecimal() else 0 for n in row.split(":")]
            if len(numbers) != 5 or not all(0 < number < LARGEST for number in numbers):
                raise ValueError(
                    f"{row}: must be S:B:heads:kv_heads:size, whole numbers from 1 to {LARGEST - 1}"
                )
            found.append(row)
    return found


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs that the benchmark needs."""
    return 1


def measure(row: str, options: dict[str, str]) -> list[dict[str, Any]]:
    """One record per shape and backend that accepts it: milliseconds, bits and memory."""
    return [record for shape in row.split(TOGETHER) for record in measure_shape(shape)]


def measure_shape(row: str) -> list[dict[str, Any]]:
    """The records of one shape, cuDNN's first where it accepts the shape."""
    tokens, samples, heads, kv_heads, size = (int(number) for number in row.split(":"))
    shape = Shape(samples, tokens, heads, kv_heads, size, None)
    gpu = torch.device("cuda", torch.cuda.current_device())
    backends = BACKENDS | {"flash, atomics": ATOMICS}
    measured = measure_backends(shape, gpu, backends=backends)
    candidates = {name: found for name, found in measured.items() if name in BACKENDS}
    if not candidates:
        return [{"shape": row, "missing": "no backend accepts it"}]
    chosen = choose(candidates, int(SPARE * device_memory(gpu, 1)[0]))
    inputs, records = random_inputs(shape, gpu), []
    for name, found in measured.items():
        forward, backward = separate_times(backends[name], inputs)
        record = {"shape": row, "backend": name, "chosen": "yes" if name == chosen else ""}
        record |= {"forward_ms": f"{forward:.3f}", "backward_ms": f"{backward:.3f}"}
        record |= {"total_ms": f"{found.ms:.3f}"}
        if "cudnn" in measured:
            record["ratio"] = f"{found.ms / measured['cudnn'].ms:.3f}"
        record |= {"repeatable": "yes" if found.repeats else "no"}
        record["peak_mib"] = str(round(found.peak / MIB))
        records.append(record)
    return records


def separate_times(attend: Attend, inputs: list[Tensor]) -> tuple[float, float]:
    """Milliseconds of forward and of backward, each alone."""
    *qkv, do_SBND = inputs
    q, k, v = qkv
    out = attend(q, k, v, None)
    backward = partial(torch.autograd.grad, out, qkv, do_SBND, retain_graph=True)
    return milliseconds(partial(attend, q, k, v, None)), milliseconds(backward)
