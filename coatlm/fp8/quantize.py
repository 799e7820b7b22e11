"""FP8 quantization: codes = cast(x / S), S = amax / MAX of each block (COAT section 3).

A block is the elements that share a scale: all, a row, or a rectangle.

x [..., K] is read as a matrix [M, K]; scaling.py has the rules of a scale. Three roundings: S, the
fp32 quotient x / S, and the code. A block with a NaN or an infinity has a scale that is not
finite and nothing but NaN codes; a quotient too large for fp32 is NaN too.

The quotient is rounded correctly, so that kernels give the bits of the reference. One divisor for
a block allows Markstein's division (IBM Journal of Research and Development 34, 1990): with r =
1 / S rounded to nearest, two steps q <- q - r (q S - x) from q = x r give x / S rounded to
nearest, in five instructions per element; div.rn takes some twenty and a branch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from coatlm.fp8.formats import SOURCES, Fp8Format, cast
from coatlm.fp8.qtensor import ROW, TENSOR, Granularity, QTensor, block
from coatlm.fp8.scaling import amax_of, block_amax_ref, current_scale, scale_of, scale_ref

TILE = 4096  # elements per program
THREAD = 32  # elements per thread: four 16-byte loads of BF16 in flight
ROW_BLOCK_RUN = 16  # 1 x G blocks: elements per thread at once
ROW_BLOCK_WARPS = 2  # warps per program
LONGEST_ROW = 65536  # elements that one program can hold


def quantize_ref(
    x: Tensor,
    *,
    fmt: Fp8Format,
    granularity: Granularity,
    scale: Tensor | None = None,
    scale_dtype: torch.dtype = torch.float32,
) -> QTensor:
    """The definition, and the CPU path."""
    if scale is None:
        scale = scale_ref(amax_ref(x, granularity), fmt, dtype=scale_dtype)
    divisor = granularity.spread(scale.float(), x.shape)
    quotient = torch.where(divisor.isfinite(), x.float() / divisor, torch.nan)
    codes = cast(quotient, fmt)
    return QTensor(codes, scale, granularity, fmt)


def amax_ref(x: Tensor, granularity: Granularity) -> Tensor:
    """fp32, the largest |x| of each block, in the shape of the scales."""
    if granularity == TENSOR:
        return x.float().abs().amax()
    if granularity == ROW:
        return x.float().abs().amax(-1, keepdim=True)
    assert granularity.columns is not None
    amax = block_amax_ref(x, granularity.columns)
    if granularity.rows == 1:
        return amax
    assert granularity.rows is not None
    padded = torch.nn.functional.pad(amax, (0, 0, 0, -x.shape[0] % granularity.rows))
    return padded.unflatten(0, (-1, granularity.rows)).amax(1)


@triton.jit
def quotient(x, scale):
    """x / scale in fp32, rounded to nearest, for scale >= 0; NaN where a bare division gives Inf.

    Both are first multiplied by the same power of two, so that no step under- or overflows. If that
    makes x overflow, the quotient overflows too.
    """
    shift = tl.where(scale <= 2.0**-64, 2.0**64, tl.where(scale > 2.0**62, 2.0**-64, 1.0))
    divisor = scale * shift
    minus_r = tl.div_rn(-1.0, divisor)
    minus_x = x * -shift  # signs are chosen so that -0 stays -0
    q = minus_x * minus_r
    q = tl.fma(tl.fma(q, divisor, minus_x), minus_r, q)
    return tl.fma(tl.fma(q, divisor, minus_x), minus_r, q)


@triton.jit
def _quantize_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    M,
    K,
    GIVEN: tl.constexpr,  # one scale for all, which is read
    WHOLE: tl.constexpr,  # one scale for the tile, else one per row
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
    tl.store(code_ptr + at, q.to(code_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _quantize_row_blocks_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    blocks,
    SIZE: gl.constexpr,
    RUN: gl.constexpr,
    BLOCKS: gl.constexpr,
    TOP: gl.constexpr,
    E8M0: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Quantize 1 x SIZE blocks, RUN elements per thread, so that stores of codes have 16 bytes.

    The layout is explicit: Triton would choose that of the loads, with half as many elements.
    """
    WIDE: gl.constexpr = SIZE // RUN if SIZE // RUN < 32 else 32  # threads of a block
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, RUN], [32 // WIDE, WIDE], [WARPS, 1], [1, 0])
    first = gl.program_id(0).to(gl.int64) * BLOCKS
    each = gl.arange(0, BLOCKS, gl.SliceLayout(1, LAYOUT))
    at = each[:, None] * SIZE + gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))[None, :]
    some = each < blocks - first
    x = gl.load(x_ptr + first * SIZE + at, mask=some[:, None], other=0.0).to(gl.float32)
    scale = scale_of(amax_of(x, 1), TOP, E8M0)
    code = quotient(x, scale[:, None]).to(code_ptr.dtype.element_ty)
    if E8M0:
        scale = (scale.to(gl.uint32, bitcast=True) >> 23).to(gl.uint8)
    gl.store(scale_ptr + first + each, scale, mask=some)
    gl.store(code_ptr + first * SIZE + at, code, mask=some[:, None])


def quantize(
    x: Tensor,
    *,
    fmt: Fp8Format,
    granularity: Granularity,
    scale_dtype: torch.dtype = torch.float32,
) -> QTensor:
    """x [..., K] in FP8, with the bits of `quantize_ref` on every device.

    TENSOR reads x twice, first for its amax.
    `scale_dtype`: float32, or float8_e8m0fnu for one-byte powers of two; not for TENSOR.

    Raises ValueError for what is not fp32, BF16 or FP16, for shapes that have no scales (see
    Granularity), for ROW on a GPU with K > 65536, and for the combinations excluded above.
    """
    _check(x, granularity, scale_dtype)
    shape = granularity.scale_shape(x.shape)
    if not x.numel():
        scale = torch.ones(shape, device=x.device).to(scale_dtype)
        return QTensor(cast(x, fmt), scale, granularity, fmt)
    if not x.is_cuda:
        return quantize_ref(x, fmt=fmt, granularity=granularity, scale_dtype=scale_dtype)
    x = x.contiguous()
    if granularity == TENSOR:
        scale = current_scale(x, fmt)
    else:
        scale = torch.empty(shape, dtype=scale_dtype, device=x.device)
    return QTensor(_launch(x, scale, fmt, granularity), scale, granularity, fmt)


def _check(x: Tensor, granularity: Granularity, scale_dtype: torch.dtype) -> None:
    """Raise ValueError for what `quantize` cannot do."""
    if x.dtype not in SOURCES:
        raise ValueError(f"x.dtype={x.dtype}: FP8 is quantized from {SOURCES}")
    if scale_dtype not in (torch.float32, torch.float8_e8m0fnu):
        raise ValueError(f"scale_dtype={scale_dtype}: torch.float32 or torch.float8_e8m0fnu")
    if granularity == TENSOR and scale_dtype != torch.float32:
        raise ValueError(f"scale_dtype={scale_dtype}: the scale of a whole tensor is torch.float32")
    if granularity == ROW and x.is_cuda and x.shape[-1] > LONGEST_ROW:
        raise ValueError(f"rows of {x.shape[-1]}: at most {LONGEST_ROW} on a GPU")


def _launch(x: Tensor, scale: Tensor, fmt: Fp8Format, granularity: Granularity) -> Tensor:
    """Codes of a contiguous x, not empty; fills `scale` unless TENSOR."""
    if granularity.rows == 1 and granularity.columns is not None:
        return _launch_row_blocks(x, scale, fmt, granularity.columns)
    columns = x.shape[-1] if x.ndim else 1
    tile = _tile(x.numel() // columns, columns, granularity)
    codes = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    e8m0 = scale.dtype != torch.float32
    grid = (triton.cdiv(tile["M"], tile["ROWS"]) * triton.cdiv(tile["K"], tile["COLUMNS"]),)
    _quantize_kernel[grid](
        x,
        codes,
        scale.view(torch.uint8) if e8m0 else scale,
        GIVEN=granularity == TENSOR,
        WHOLE=granularity == block(128, 128),
        TOP=fmt.max,
        E8M0=e8m0,
        **tile,
    )
    return codes


def _launch_row_blocks(x: Tensor, scale: Tensor, fmt: Fp8Format, size: int) -> Tensor:
    codes = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    e8m0, blocks = scale.dtype != torch.float32, scale.numel()
    tile = _row_block_tile(size)
    _quantize_row_blocks_kernel[(triton.cdiv(blocks, tile["BLOCKS"]),)](
        x,
        codes,
        scale.view(torch.uint8) if e8m0 else scale,
        blocks,
        TOP=fmt.max,
        E8M0=e8m0,
        **tile,
        num_warps=tile["WARPS"],
    )
    return codes


def _row_block_tile(size: int) -> dict[str, int]:
    """Launch shape for 1 x G blocks: a thread takes two runs, both in flight at once."""
    run = min(ROW_BLOCK_RUN, size)
    at_once = 32 * ROW_BLOCK_WARPS // min(size // run, 32)
    return {"SIZE": size, "RUN": run, "BLOCKS": 2 * at_once, "WARPS": ROW_BLOCK_WARPS}


def _tile(m: int, k: int, granularity: Granularity) -> dict[str, int]:
    """How the kernel sees [m, k]: M rows of K in tiles of ROWS x COLUMNS, and warps per tile."""
    rows = 1
    if granularity == TENSOR:
        m, k, columns = 1, m * k, TILE  # one long row
    elif granularity == block(128, 128):
        rows, columns = 128, 128
    else:
        columns = triton.next_power_of_2(k)
        rows = max(TILE // columns, 1)
    warps = min(max(rows * columns // (32 * THREAD), 4), 32)
    return {"M": m, "K": k, "ROWS": rows, "COLUMNS": columns, "num_warps": warps}
