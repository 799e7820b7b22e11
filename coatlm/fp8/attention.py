"""Attention whose saved tensors are FP8: q, k, v and the output, in groups along the head.

Forward computes with the exact values; backward decodes what was kept. The statistics of softmax
are kept as they are, so the probabilities that backward makes from decoded q and k do not sum to
one exactly: their error is that of the logits. Scales are one-byte powers of two (scaling.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatlm.fp8.formats import E4M3
from coatlm.fp8.qtensor import QTensor, block
from coatlm.fp8.quantize import quantize
from coatlm.fp8.scaling import power_of_two

TILE, WARPS = 4096, 4  # elements a program
KEPT_DTYPES = (torch.bfloat16, torch.float16)


@triton.jit
def _dequantize_kernel(
    code_ptr, exponent_ptr, x_ptr, groups, SIZE: tl.constexpr, GROUPS: tl.constexpr
):
    g = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = g[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    code = tl.load(code_ptr + at, mask=g[:, None] < groups, other=0.0).to(tl.float32)
    exponent = tl.load(exponent_ptr + g, mask=g < groups, other=127).to(tl.int32)
    x = code * power_of_two(exponent)[:, None]
    tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=g[:, None] < groups)


def dequantize_groups(x: QTensor, dtype: torch.dtype) -> Tensor:
    """codes * scale for groups with E8M0 scales; exact in BF16."""
    if not x.codes.is_cuda:
        return x.dequantize(dtype)
    assert x.granularity.columns is not None
    size, groups = x.granularity.columns, x.scale.numel()
    out = torch.empty(x.codes.shape, dtype=dtype, device=x.codes.device)
    count = max(TILE // size, 1)
    _dequantize_kernel[(triton.cdiv(groups, count),)](
        x.codes,
        x.scale.view(torch.uint8),
        out,
        groups,
        SIZE=size,
        GROUPS=count,
        num_warps=WARPS,
    )
    return out


def memory_order(x: Tensor) -> list[int]:
    """Dimensions from the largest stride to the smallest: `x.permute` of it is contiguous."""
    return sorted(range(x.dim()), key=lambda dim: (-x.stride()[dim], dim))


class SavedInFp8:
    """A context in which autograd keeps q, k, v and the output in FP8; `kept` finds what it made.

    They are told from masks and probabilities by their rows of `head_dim` elements, which must not
    be the length of a sequence too. Their last dimension is contiguous.
    """

    def __init__(self, size: int, head_dim: int) -> None:
        self.size, self.head_dim = size, head_dim
        self.made: dict[int, tuple[Tensor, QTensor, list[int]]] = {}
        self.hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> SavedInFp8:
        self.hooks.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self.hooks.__exit__(*args)

    def kept(self, x: Tensor) -> QTensor:
        """The FP8 form of x, contiguous; what autograd keeps of it where memory has x's order.

        Attention for masks may write [B, S, N, D]: then codes are copied into the order of x.
        """
        made, order = self._quantize(x)[0], memory_order(x)
        dense = [x.shape[dim] for dim in order[:-1]]
        inverse = sorted(range(x.dim()), key=order.__getitem__)
        codes = made.codes.view(torch.uint8).view(*dense, -1).permute(inverse).contiguous()
        scale = made.scale.view(torch.uint8).view(*dense, -1).permute(inverse).contiguous()
        return QTensor(
            codes.view(made.codes.dtype), scale.view(made.scale.dtype), made.granularity, made.fmt
        )

    def forget(self) -> None:
        """Let go of the exact tensors; autograd has what it needs."""
        self.made.clear()

    def _quantize(self, x: Tensor) -> tuple[QTensor, list[int]]:
        entry = self.made.get(x.data_ptr())
        if entry is None or entry[0].shape.numel() != x.numel():
            order = memory_order(x)
            dense = x.detach().permute(order)
            made = quantize(
                dense, fmt=E4M3, granularity=block(1, self.size), scale_dtype=torch.float8_e8m0fnu
            )
            entry = (x, made, order)
            self.made[x.data_ptr()] = entry
        return entry[1], entry[2]

    def _pack(self, x: Tensor) -> Tensor | tuple[QTensor, list[int], torch.dtype]:
        heads = x.dim() == 4 and x.shape[-1] == self.head_dim and x.stride(-1) == 1
        if x.dtype not in KEPT_DTYPES or not heads:
            return x
        made, order = self._quantize(x)
        return made, order, x.dtype


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    made, order, dtype = kept
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return dequantize_groups(made, dtype).permute(inverse)


def attend_keeping_fp8(
    core: Callable[[], Tensor], size: int, head_dim: int
) -> tuple[Tensor, QTensor]:
    """Run `core`, an attention that returns [S, B, N*D]; also its output in FP8, as it is kept.

    `size`: elements a scale, a divisor of `head_dim`.
    """
    with SavedInFp8(size, head_dim) as saved:
        out = core()
        kept = saved.kept(out)
    saved.forget()
    return out, kept
