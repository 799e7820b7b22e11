"""Add the product of two vectors to a matrix: into[M, N] += column[M] row[N].

Product and sum are fp32; an element is rounded to the dtype of the matrix as it is stored. The
matrix is read once and written once.
"""

import triton
import triton.language as tl
from torch import Tensor

ROWS, BLOCK = 4, 1024  # of a Triton program
WARPS = 4


def add_outer_ref(into_MN: Tensor, column_M: Tensor, row_N: Tensor) -> Tensor:
    """The definition, and the CPU path; returns `into`."""
    return into_MN.copy_(into_MN.float().addcmul(column_M[:, None].float(), row_N.float()))


@triton.jit
def _add_outer_kernel(into_ptr, column_ptr, row_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(N, BLOCK)
    first = (tl.program_id(0) // blocks).to(tl.int64) * ROWS
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + col, mask=col < N, other=0.0).to(tl.float32)
    for i in tl.static_range(ROWS):
        at = into_ptr + (first + i) * N + col
        mask = (col < N) & (first + i < M)
        factor = tl.load(column_ptr + first + i, mask=first + i < M, other=0.0).to(tl.float32)
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, (x + factor * row).to(into_ptr.dtype.element_ty), mask=mask)


def add_outer_(into_MN: Tensor, column_M: Tensor, row_N: Tensor) -> Tensor:
    """Add column row^T to a contiguous matrix, and return it.

    Raises ValueError for shapes that do not fit, and for a matrix that is not contiguous.
    """
    M, N = into_MN.shape
    if column_M.shape != (M,) or row_N.shape != (N,) or not into_MN.is_contiguous():
        raise ValueError(
            f"a matrix of {tuple(into_MN.shape)} with strides {into_MN.stride()}, a column of "
            f"{tuple(column_M.shape)} and a row of {tuple(row_N.shape)}: the matrix must be "
            "contiguous and have the lengths of the vectors"
        )
    if not into_MN.is_cuda:
        return add_outer_ref(into_MN, column_M, row_N)
    return _launch(into_MN, column_M.contiguous(), row_N.contiguous())


def _launch(into_MN: Tensor, column_M: Tensor, row_N: Tensor) -> Tensor:
    M, N = into_MN.shape
    grid = (triton.cdiv(M, ROWS) * triton.cdiv(N, BLOCK),)
    arguments = into_MN, column_M, row_N, M, N
    _add_outer_kernel[grid](*arguments, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS)
    return into_MN
