"""FP8 quantization: codes = cast(x / S), S = amax / MAX of each granule (COAT section 3).

x [..., K] is read as a matrix [M, K]; scaling.py has the rules of a scale. Rounding happens in three
places: S, the fp32 quotient x / S, and the FP8 code. A granule with a NaN or an infinity has a scale
that is not finite and nothing but NaN codes; a quotient too large for fp32 is NaN too.

The quotient is the correctly rounded one, so that a kernel's codes are those of the reference bit for
bit. All elements of a granule share the divisor, which allows Markstein's division (IBM Journal of
Research and Development 34, 1990): with r = 1 / S rounded to nearest, two steps q - r (q S - x) from
q = x r give x / S rounded to nearest. Five instructions instead of the twenty and a branch of div.rn.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatlm.fp8.formats import Fp8Format, cast
from coatlm.fp8.qtensor import BLOCK, ROW, TENSOR, Granularity, QTensor
from coatlm.fp8.scaling import amax_of, current_scale, group_amax_ref, scale_of, scale_ref

TILE = 4096  # elements a program
THREAD = 32  # elements a thread: four 16-byte loads of BF16 in flight
TRANSPOSE_TILE = (128, 64)  # rows x columns: 128 bytes of codes in each direction or more
LONGEST_ROW = 65536  # elements that one program can hold


def quantize_ref(
    x: Tensor,
    *,
    fmt: Fp8Format,
    granularity: Granularity,
    scale: Tensor | None = None,
    transpose: bool = False,
    scale_dtype: torch.dtype = torch.float32,
) -> QTensor:
    """The definition, and the CPU path."""
    if scale is None:
        scale = scale_ref(_amax_ref(x, granularity), fmt, dtype=scale_dtype)
    divisor = granularity.spread(scale.float(), x.shape)
    quotient = torch.where(divisor.isfinite(), x.float() / divisor, torch.nan)
    codes = cast(quotient, fmt)
    codes_t = codes.reshape(-1, codes.shape[-1]).t().contiguous() if transpose else None
    return QTensor(codes, scale, granularity, fmt, codes_t)


def _amax_ref(x: Tensor, granularity: Granularity) -> Tensor:
    """fp32, the largest |x| of each granule, in the shape of the scales."""
    if granularity == TENSOR:
        return x.float().abs().amax()
    if granularity == ROW:
        return x.float().abs().amax(-1, keepdim=True)
    assert granularity.columns is not None
    amax = group_amax_ref(x, granularity.columns)
    if granularity.rows == 1:
        return amax
    assert granularity.rows is not None
    padded = torch.nn.functional.pad(amax, (0, 0, 0, -x.shape[0] % granularity.rows))
    return padded.unflatten(0, (-1, granularity.rows)).amax(1)


@triton.jit
def quotient(x, scale):
    """x / scale in fp32, rounded to nearest, for scale >= 0; NaN where a bare division gives Inf.

    Both are first brought to where no step under- or overflows, by the same power of two.
    """
    shift = tl.where(scale < 2.0**-62, 2.0**64, tl.where(scale > 2.0**62, 2.0**-64, 1.0))
    divisor = scale * shift
    r = tl.div_rn(1.0, divisor)
    x = x * shift
    q = x * r
    q = tl.fma(-tl.fma(q, divisor, -x), r, q)  # in this order -0 stays -0
    return tl.fma(-tl.fma(q, divisor, -x), r, q)


@triton.jit
def _quantize_kernel(
    x_ptr,
    code_ptr,
    code_t_ptr,  # [K, M], or None
    scale_ptr,
    M,
    K,
    GIVEN: tl.constexpr,  # one scale for all, to be read
    WHOLE: tl.constexpr,  # one scale for the tile, else one a row
    TOP: tl.constexpr,
    E8M0: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(K, COLUMNS)
    row = program // tiles * ROWS + tl.arange(0, ROWS)
    column = program % tiles * COLUMNS + tl.arange(0, COLUMNS)
    at = row[:, None] * K + column[None, :]
    mask = (row[:, None] < M) & (column[None, :] < K)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if GIVEN:
        q = quotient(x, tl.load(scale_ptr))
    else:
        amax = amax_of(x, 1)
        if WHOLE:
            scale = scale_of(amax_of(amax, 0), TOP, E8M0)
            q = quotient(x, scale)
            scale_at, some = scale_ptr + program, True
        else:
            scale = scale_of(amax, TOP, E8M0)
            q = quotient(x, scale[:, None])
            scale_at, some = scale_ptr + row, row < M
        if E8M0:
            scale = (scale.to(tl.uint32, bitcast=True) >> 23).to(tl.uint8)
        tl.store(scale_at, scale, mask=some)
    code = q.to(code_ptr.dtype.element_ty)
    tl.store(code_ptr + at, code, mask=mask)
    if code_t_ptr is not None:
        at_t = column[:, None] * M + row[None, :]
        tl.store(code_t_ptr + at_t, tl.trans(code), mask=tl.trans(mask))
