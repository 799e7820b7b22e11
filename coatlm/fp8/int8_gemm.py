"""GEMMs of rotated INT8 operands (int8.py): a b^T [i, j] = Sa[i] Sb[j] sum_k a[i, k] b[j, k].

The products are summed in int32, exactly, so there is no fast accumulation, and no order of a sum
changes it. Hopper's tensor cores multiply INT8 at the rate of FP8. Sums fit as long as K <= 2^31 /
127^2. `matmul_ref` is the definition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from coatlm.fp8.qtensor import QTensor
from coatlm.kernels.norm import processors

BM, BN, BK, GROUP = 128, 256, 128, 8  # tile of a GEMM; rows of tiles that are computed together
WARPS, STAGES = 8, 3


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
