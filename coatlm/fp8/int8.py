"""INT8 operands of forward's GEMMs: rows rotated by H (rotation.py), then rounded to integers.

    y = x H                            x[M, K] rounded to BF16, y in fp32
    S[i] = max_k |y[i, k]| / 127       one scale per row, in fp32, at least 2^-126
    code[i, k] = round(y[i, k] * (1 / S[i]))

An integer of 8 bits has steps of the same size everywhere, a number of E4M3 has three bits of
mantissa. Where the elements of a row are alike, as rotation makes them, integers are the better
choice: with Gaussian elements whose largest is r times their root mean square, the relative error
is r / (127 sqrt(12)), 0.007 to 0.01 for r = 3 to 4.5, that of E4M3 0.026. int8_gemm.py multiplies.

norm_quantize.py quantizes rows as they are and the output of RMSNorm, swiglu_quantize.py that of
SwiGLU.

Backward quantizes x to E4M3 without an amax of its own: a row x = y H has no element larger than
sqrt(n) 127 S, n = 64 or 16 (`e4m3_scale`). The scale is up to eight times too large, which costs
E4M3 nothing but three of the 15 binades of its normal numbers.

`quantize_ref` is the definition. On a GPU the sums of a rotation have another order, so that a
quotient half way between two integers can get the other code. In rows that are not finite, the
scale is not finite, and codes are any integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatlm.fp8.formats import E4M3, INT8, SMALLEST
from coatlm.fp8.qtensor import ROW, QTensor
from coatlm.fp8.rotation import RUN, rotate, span_of
from coatlm.fp8.scaling import scales_of

LONGEST_SUM = 2**31 // 127**2  # elements of a row whose products an int32 holds
LARGEST_BLOCK = 32 * RUN  # elements of a row that a warp holds


def quantize_ref(x: Tensor) -> QTensor:
    """The definition, and the CPU path."""
    y = rotate(x.bfloat16())
    scale = y.abs().amax(-1, keepdim=True) / torch.tensor(INT8.max)
    scale = torch.where(scale < SMALLEST, SMALLEST, scale)
    codes = INT8.encode(y * torch.where(scale.isfinite(), 1 / scale, torch.nan))
    return QTensor(codes, scale, ROW, INT8)


@triton.jit
def int8_scale(amax):
    """The scale of a row; NaN or Inf where amax is."""
    scale = tl.div_rn(amax, 127.0)
    return tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)


@triton.jit
def int8_codes(y, scale):
    """The integers next to y / scale."""
    # 1.5 * 2^23: the sum is rounded to an integer, which its low bits hold
    sums = tl.fma(y, tl.div_rn(1.0, scale), 12582912.0)
    return sums.to(tl.int32, bitcast=True).to(tl.int8)


def check_rows(k: int, size: int = 0) -> None:
    """Raise ValueError for rows of k that cannot be rotated, or saved in blocks of `size`."""
    if k % RUN or k > LONGEST_SUM:
        raise ValueError(f"rows of {k}: rotated rows are multiples of {RUN}, up to {LONGEST_SUM}")
    if size and (size % RUN or LARGEST_BLOCK % size):
        raise ValueError(
            f"block_size={size}: beside rotated rows 0, or a power of two from {RUN} to "
            f"{LARGEST_BLOCK}"
        )


def e4m3_scale(x: QTensor) -> Tensor:
    """Power-of-two scales, fp32 [M, 1], with which E4M3 holds what INT8 codes stand for."""
    largest = x.scale * (INT8.max * span_of(x.shape[1]) ** 0.5)
    return scales_of(largest, E4M3, power_of_two=True)
