"""INT8 operands of forward's GEMMs: rows rotated by H (rotation.py), then rounded to integers.

    y = x H                            x[M, K] in BF16 or fp32, y in fp32
    S[i] = max_k |y[i, k]| / 127       one scale per row, in fp32, at least 2^-126
    code[i, k] = round(y[i, k] / S[i])

    a b^T [i, j] = Sa[i] Sb[j] sum_k code_a[i, k] code_b[j, k]

An integer of 8 bits has steps of the same size everywhere, a number of E4M3 has three bits of
mantissa. Where the elements of a row are alike, as rotation makes them, integers are the better
choice: with Gaussian elements whose largest is r times their root mean square, the relative error
is r / (127 sqrt(12)), 0.007 to 0.01 for r = 3 to 4.5, that of E4M3 0.026. The products are summed
in int32, exactly, so there is no fast accumulation, and no order of a sum changes it. Hopper's
tensor cores multiply INT8 at the rate of FP8. Sums fit as long as K <= 2^31 / 127^2.

Backward quantizes x to E4M3 without an amax of its own: a row x = y H has no element larger than
sqrt(n) 127 S, n = 64 or 16 (`e4m3_scale`). The scale is up to eight times too large, which costs
E4M3 nothing but three of the 15 binades of its normal numbers.

`quantize_ref` and `matmul_ref` are the definitions. On a GPU the sums of a rotation have another
order, so that a quotient half way between two integers can get the other code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from coatlm.fp8.formats import E4M3, INT8, SMALLEST
from coatlm.fp8.qtensor import ROW, QTensor
from coatlm.fp8.quantize import LONGEST_ROW, quotient
from coatlm.fp8.rotation import rotate, span_of
from coatlm.fp8.scaling import amax_of, scales_of
from coatlm.kernels.norm import processors

TILE = 8192  # elements that a program of the quantization holds, if a row is not longer
THREAD = 64  # of these per thread
LONGEST_SUM = 2**31 // 127**2  # elements of a row whose products an int32 holds
BM, BN, BK, GROUP = 128, 256, 128, 8  # tile of a GEMM; rows of tiles that are computed together
WARPS, STAGES = 8, 3


def quantize_ref(x: Tensor) -> QTensor:
    """The definition, and the CPU path."""
    y = rotate(x)
    scale = y.abs().amax(-1, keepdim=True) / torch.tensor(INT8.max)
    scale = torch.where(scale < SMALLEST, SMALLEST, scale)
    codes = INT8.encode(y / torch.where(scale.isfinite(), scale, torch.nan))
    return QTensor(codes, scale, ROW, INT8)


@triton.jit
def _hadamard(SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """H; its elements, +-1/4 or +-1/8, are exact in BF16."""
    i = tl.arange(0, SIZE)
    common = i[:, None] & i[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    size: tl.constexpr = 0.125 if SIZE == 64 else 0.25
    return tl.where((common & 1) == 0, size, -size).to(DTYPE)


@triton.jit
def _quantize_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    M,
    K,
    ROWS: tl.constexpr,
    SPANS: tl.constexpr,  # of a row, rounded up to a power of two
    SIZE: tl.constexpr,  # of a span
    TOP: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS * SPANS) // SPANS
    span = tl.arange(0, ROWS * SPANS) % SPANS
    at = (row.to(tl.int64) * K + span * SIZE)[:, None] + tl.arange(0, SIZE)[None, :]
    some = ((row < M) & (span * SIZE < K))[:, None]
    x = tl.load(x_ptr + at, mask=some, other=0.0)
    y = tl.dot(x, _hadamard(SIZE, x_ptr.dtype.element_ty), input_precision="ieee")
    rows = tl.reshape(y, [ROWS, SPANS * SIZE])
    scale = tl.div_rn(amax_of(rows, 1), TOP)
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    q = quotient(rows, scale[:, None])
    q = tl.where(q == q, q, 0.0)
    # 1.5 * 2^23: the sum is rounded to an integer, which its low bits hold
    code = (q + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    tl.store(code_ptr + at, tl.reshape(code, [ROWS * SPANS, SIZE]), mask=some)
    each = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(scale_ptr + each, scale, mask=each < M)


def quantize(x: Tensor) -> QTensor:
    """x[M, K] as INT8 codes of rotated rows, with a scale per row, fp32 [M, 1].

    Raises ValueError for K that is no multiple of 16 or too long for int32 sums, and on a GPU for
    what is neither BF16 nor fp32, or has rows of more than 65536 elements.
    """
    if x.ndim != 2 or x.shape[1] % 16 or x.shape[1] > LONGEST_SUM:
        raise ValueError(
            f"shape={list(x.shape)}: [M, K] with a multiple of 16 up to {LONGEST_SUM} for K"
        )
    if not x.is_cuda:
        return quantize_ref(x)
    if x.dtype not in (torch.bfloat16, torch.float32) or x.shape[1] > LONGEST_ROW:
        raise ValueError(
            f"x is {x.dtype}{list(x.shape)}: on a GPU torch.bfloat16 or torch.float32, with rows "
            f"of at most {LONGEST_ROW}"
        )
    return _quantize(x.contiguous())


def _quantize(x: Tensor) -> QTensor:
    m, k = x.shape
    codes = torch.empty(m, k, dtype=INT8.dtype, device=x.device)
    scale = torch.empty(m, 1, dtype=torch.float32, device=x.device)
    tile = _tile(k)
    if m:
        _quantize_kernel[(triton.cdiv(m, tile["ROWS"]),)](
            x, codes, scale, m, k, TOP=INT8.max, **tile
        )
    return QTensor(codes, scale, ROW, INT8)


def e4m3_scale(x: QTensor) -> Tensor:
    """Power-of-two scales, fp32 [M, 1], with which E4M3 holds what INT8 codes stand for."""
    largest = x.scale * (INT8.max * span_of(x.shape[1]) ** 0.5)
    return scales_of(largest, E4M3, power_of_two=True)


def _tile(k: int) -> dict[str, int]:
    """Rows and spans that a program of the quantization holds, and its warps."""
    size = span_of(k)
    spans = triton.next_power_of_2(k // size)
    rows = max(TILE // (spans * size), 1)
    warps = min(max(rows * spans * size // (32 * THREAD), 4), 32)
    return {"ROWS": rows, "SPANS": spans, "SIZE": size, "num_warps": warps}


def matmul_ref(
    a: QTensor, b: QTensor, *, add: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """The definition, and the CPU path: BF16 [M, N]. fp64 holds the sums of products exactly."""
    sums = a.codes.double() @ b.codes.double().t()
    result = sums.float() * a.scale * b.scale.t()
    for term in (bias, add):
        if term is not None:
            result += term.float()
    return result.bfloat16()


@triton.jit
def _store(sums, out_desc, add_desc, a_scale_ptr, b_scale_ptr, bias_ptr, i, j, M, N):
    """Scale the sums from row i and column j on, add what is added, and store them in BF16."""
    row, column = i + tl.arange(0, sums.shape[0]), j + tl.arange(0, sums.shape[1])
    a_scale = tl.load(a_scale_ptr + row, mask=row < M, other=0.0)
    b_scale = tl.load(b_scale_ptr + column, mask=column < N, other=0.0)
    out = sums.to(tl.float32) * a_scale[:, None] * b_scale[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column < N, other=0.0)
        out += bias.to(tl.float32)[None, :]
    if add_desc is not None:
        out += add_desc.load([i, j]).to(tl.float32)
    out_desc.store([i, j], out.to(tl.bfloat16))


@triton.jit
def _matmul_kernel(
    a_desc,
    b_desc,
    out_desc,
    add_desc,  # BF16 [M, N], or None
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,  # BF16 [N], or None
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        first = tile // (GROUP * across) * GROUP
        height = min(down - first, GROUP)
        i = (first + tile % (GROUP * across) % height) * BM
        j = tile % (GROUP * across) // height * BN
        sums = tl.zeros((BM, BN), tl.int32)
        for k in range(0, K, BK):
            a, b = a_desc.load([i, k]), b_desc.load([j, k])
            sums = tl.dot(a, b.T, sums, out_dtype=tl.int32)
        # Half of the columns at a time: a whole tile would not fit beside the operands' stages.
        left, right = tl.split(tl.permute(tl.reshape(sums, (BM, 2, BN // 2)), (0, 2, 1)))
        _store(left, out_desc, add_desc, a_scale_ptr, b_scale_ptr, bias_ptr, i, j, M, N)
        j += BN // 2
        _store(right, out_desc, add_desc, a_scale_ptr, b_scale_ptr, bias_ptr, i, j, M, N)


def matmul(
    a: QTensor,
    b: QTensor,
    *,
    out: Tensor | None = None,
    add: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """a[M, K], b[N, K], both INT8 with scales per row -> a b^T in BF16 [M, N], in `out` if given.

    `add`: BF16 [M, N], `bias`: BF16 [N], added before the one rounding. Sums are exact.
    """
    if not a.codes.is_cuda:
        result = matmul_ref(a, b, add=add, bias=bias)
        return result if out is None else out.copy_(result)
    shape = a.codes.shape[0], b.codes.shape[0]
    into = torch.empty(shape, dtype=torch.bfloat16, device=a.codes.device) if out is None else out
    if into.numel():
        _multiply(a, b, into, add, bias)
    return into


def _multiply(
    a: QTensor, b: QTensor, into: Tensor, add: Tensor | None, bias: Tensor | None
) -> None:
    (m, k), n = a.codes.shape, b.codes.shape[0]
    tiles = triton.cdiv(m, BM) * triton.cdiv(n, BN)
    _matmul_kernel[(min(tiles, processors(into.device)),)](
        TensorDescriptor.from_tensor(a.codes, [BM, BK]),
        TensorDescriptor.from_tensor(b.codes, [BN, BK]),
        TensorDescriptor.from_tensor(into, [BM, BN // 2]),
        None if add is None else TensorDescriptor.from_tensor(add, [BM, BN // 2]),
        a.scale,
        b.scale,
        bias,
        m,
        n,
        k,
        BM=BM,
        BN=BN,
        BK=BK,
        GROUP=GROUP,
        num_warps=WARPS,
        num_stages=STAGES,
    )
