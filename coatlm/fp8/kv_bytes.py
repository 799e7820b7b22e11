"""Keys and values as the bytes that context-parallel ranks send each other.

    x [..., D] -> uint8 [..., D + D / G]      E4M3 codes, then one E8M0 scale per G of them

These are the codes and scales in which attention saves x for backward (attention.py): blocks of G
elements along head_dim. So a tensor can be split into tokens or heads before or after it is
encoded. What a rank decodes is x rounded once: to encode decoded values again changes none, because
the new scale is a power of two and not larger, so that E4M3 still represents every value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coatlm.fp8.attention import dequantize_blocks, note_codes, quantize_blocks
from coatlm.fp8.formats import E4M3
from coatlm.fp8.qtensor import QTensor, block


def encode(x: Tensor, size: int) -> Tensor:
    """The bytes of x in blocks of `size` elements, which have to divide the last dimension."""
    made = quantize_blocks(x, size)
    return torch.cat([made.codes.view(torch.uint8), made.scale.view(torch.uint8)], dim=-1)


def decode(bytes_X: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """x [..., D] of width D from its bytes, exact in BF16."""
    return dequantize_blocks(_unpacked(bytes_X, width), dtype)


def decode_to_save(bytes_X: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """`decode`, and note the codes for attention, which saves them instead of casting again.

    That holds for the result and its first rows. The result is in memory until attention ends.
    """
    made = _unpacked(bytes_X, width)
    return note_codes(dequantize_blocks(made, dtype), made)


def _unpacked(bytes_X: Tensor, width: int) -> QTensor:
    scales = bytes_X.shape[-1] - width
    codes, exponents = (part.contiguous() for part in bytes_X.split([width, scales], dim=-1))
    scale, granularity = exponents.view(torch.float8_e8m0fnu), block(1, width // scales)
    return QTensor(codes.view(E4M3.dtype), scale, granularity, E4M3)
