"""Tensors that a layer saves for backward in E4M3, as its kernels write and read them.

One power-of-two scale per 1 x `block_size` elements, of which memory holds the exponent, one byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatlm.fp8.formats import E4M3
from coatlm.fp8.qtensor import QTensor, block
from coatlm.fp8.quantize import quantize_ref
from coatlm.fp8.scaling import amax_of, exponent_of, inverse_power_of_two

UNSCALED = 16  # the block size that kernels use where no scale is block-wise


def save_ref(x: Tensor, block_size: int) -> QTensor | None:
    """The definition: x[R, K] in blocks; None for a `block_size` of 0."""
    if not block_size:
        return None
    granularity = block(1, block_size)
    return quantize_ref(x, fmt=E4M3, granularity=granularity, scale_dtype=torch.float8_e8m0fnu)


@triton.jit
def store_block_codes(x, at, exponent_at, mask, some, TOP: tl.constexpr):
    """Store codes and scale exponents of the blocks x[., SIZE]."""
    exponent = exponent_of(amax_of(x, 1), TOP)
    code = x * inverse_power_of_two(exponent)[:, None]
    tl.store(at, code.to(at.dtype.element_ty), mask=mask)
    tl.store(exponent_at, exponent.to(tl.uint8), mask=some)


def empty_saved(x: Tensor, block_size: int) -> QTensor | None:
    """Uninitialized blocks of x[R, K] with one-byte scales; None for a `block_size` of 0."""
    if not block_size:
        return None
    shape = x.shape[0], x.shape[1] // block_size
    powers = torch.empty(shape, dtype=torch.float8_e8m0fnu, device=x.device)
    codes = torch.empty(x.shape, dtype=E4M3.dtype, device=x.device)
    return QTensor(codes, powers, block(1, block_size), E4M3)


def arguments(saved: QTensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(codes, scale exponents) for kernels that write them; None where nothing is saved."""
    return (None, None) if saved is None else parts_of(saved)[:2]


def parts_of(x: Tensor | QTensor) -> tuple[Tensor, Tensor | None, int]:
    """(elements, scale exponents or None, block size) of a saved tensor, as kernels take it."""
    if not isinstance(x, QTensor):
        return x, None, UNSCALED
    assert x.granularity.columns is not None
    return x.codes, x.scale.view(torch.uint8), x.granularity.columns
