"""BF16 on CPUs that have no instructions for it, computed in fp32 and rounded once.

Without AVX-512 torch computes BF16 GEMMs and the backward pass of attention element by element. On
one core of an AMD EPYC with AVX2, [512, 704] x [704, 256] takes 155 ms, and 2.4 ms in fp32. GEMMs
that write into a given tensor (`out=`, `addmm_`), such as the output layer's and those of compiled
code, are not replaced.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten
# operator of torch -> shape of the result
SHAPES: dict[str, Callable[..., tuple[int, ...]]] = {
    "mm": lambda a, b: (a.shape[0], b.shape[1]),
    "addmm": lambda x, a, b: (a.shape[0], b.shape[1]),
    "bmm": lambda a, b: (*a.shape[:2], b.shape[2]),
    "baddbmm": lambda x, a, b: (*a.shape[:2], b.shape[2]),
}


@cache
def multiplies_bf16() -> bool:
    """Whether torch multiplies BF16 matrices with instructions of BF16 or AVX-512 here.

    Not if ATEN_CPU_CAPABILITY, torch's variable, asks for what an older CPU computes.
    """
    older = os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2")
    mkldnn = torch.backends.mkldnn.is_available()
    return mkldnn and not older and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def slow_in_bf16(x: Tensor) -> bool:
    """Whether x is BF16 on a CPU that has no instructions for it."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not multiplies_bf16()


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in fp32 if all are BF16, on a CPU without instructions for it; else unchanged."""
    return tuple(x.float() for x in tensors) if all(map(slow_in_bf16, tensors)) else tensors


@cache
def widen_bf16_gemms() -> tuple[torch.library.Library, ...]:
    """If this CPU has no instructions for BF16, replace torch's GEMMs until the process ends.

    Returns what keeps the replacements alive; empty if the CPU needs none.
    """
    if multiplies_bf16():
        return ()
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its kernels are replaced
        for name in SHAPES:
            library.impl(name, _widened(name), "CPU")
    return (library,)


def _widened(name: str) -> Callable[..., Tensor]:
    """The operator `name` in fp32 if all of its tensors are BF16, else torch's own."""
    compute, shape = getattr(aten, name).out, SHAPES[name]  # `out` is an operator of its own

    def gemm(*tensors: Tensor, **factors: Any) -> Tensor:
        dtype = tensors[-1].dtype
        if all(x.dtype == torch.bfloat16 for x in tensors):
            tensors = tuple(x.float() for x in tensors)
        out = tensors[-1].new_empty(shape(*tensors))
        compute(*tensors, **factors, out=out)
        return out.to(dtype)

    return gemm
