"""Rows that a program quantizes as a whole: E4M3 or rotated INT8 codes with one scale per row.

A program takes a row in chunks, of which every thread holds 16 consecutive elements (a run), and
keeps it in registers until its scale is known. The rows are computed by norm_quantize.py and
swiglu_quantize.py.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8.formats import E4M3, INT8
from coatlm.fp8.int8 import int8_codes, int8_scale
from coatlm.fp8.qtensor import ROW, QTensor
from coatlm.fp8.rotation import RUN, span_of
from coatlm.fp8.scaling import amax_of, exponent_of, inverse_power_of_two, power_of_two


@gluon.jit
def store_row(
    chunks, amax, code_ptr, scale_ptr, row, each, col, K: gl.constexpr, BLOCKS: gl.constexpr,
    SIZE: gl.constexpr, CHUNKS: gl.constexpr, TOP: gl.constexpr, SPAN: gl.constexpr,
):  # fmt: skip
    """Store the scale and the codes of a row of K from its CHUNKS tensors of BLOCKS x SIZE.

    They are rotated already where SPAN is not 0. `amax`: the largest magnitude of each block.
    """
    if SPAN:
        scale = int8_scale(amax_of(amax, 0))
    else:
        exponent = exponent_of(amax_of(amax, 0), TOP)
        scale, inverse = power_of_two(exponent), inverse_power_of_two(exponent)
    gl.store(scale_ptr + row, scale)
    for k in gl.static_range(CHUNKS):
        if SPAN:
            code = int8_codes(chunks[k], scale)
        else:
            code = (chunks[k] * inverse).to(code_ptr.dtype.element_ty)
        mask = (each < K // SIZE - k * BLOCKS)[:, None]
        gl.store(code_ptr + row * K + k * BLOCKS * SIZE + col, code, mask=mask)


def row_tile(k: int, size: int, most: int, *, rotated: bool) -> dict[str, int]:
    """How threads share a row of k elements: the fewest warps with at most `most` runs each.

    There are at most 32 warps. `size`: elements of a block that is saved with a scale of its own,
    or 16. Raises ValueError unless it divides k.
    """
    if k % size:
        raise ValueError(f"rows of {k}: on a GPU they are multiples of {size} long")
    run = min(RUN, size)
    warps = min(triton.next_power_of_2(triton.cdiv(k, run * 32 * most)), 32)
    chunk = 32 * warps // min(size // run, 32) * size
    tile = {"SIZE": size, "RUN": run, "CHUNKS": triton.cdiv(k, chunk), "WARPS": warps}
    return tile | {"SPAN": span_of(k) if rotated else 0, "num_warps": warps}


def empty_rows(m: int, k: int, device: torch.device, *, rotated: bool = False) -> QTensor:
    """Uninitialized codes [m, k] and scales [m, 1]."""
    fmt = INT8 if rotated else E4M3
    codes = torch.empty(m, k, dtype=fmt.dtype, device=device)
    return QTensor(codes, torch.empty(m, 1, dtype=torch.float32, device=device), ROW, fmt)
