"""Add scaled rows of one matrix to rows of another, with an index per token.

    gathered    into[t] += factor[t] table[index[t]]          into [T, H], table [V, H]
    scattered   into[index[t]] += factor[t] rows[t]           into [V, H], rows [T, H]

A negative index adds nothing. Products and sums are fp32; an element is rounded to the dtype of
`into` once, as it is stored. Rows of `into` that no index names are neither read nor written.

Sums have the same bits in each run, without atomics. Tokens are sorted by index, those of one index
in their order, and the sorted list is cut into parts of PART tokens. A program adds the tokens of a
part. What it holds of an index that began in an earlier part goes to `heads`, and of one that goes
on in the next part to `tails`; of one that does both, to `heads`. Another kernel adds these, in
order. So an index that half of the tokens have takes T / 2 / PART additions in a row, not T / 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, BLOCK, WARPS = 4, 1024, 4  # of a program that gathers
PART = 64  # tokens of a program that scatters
PART_BLOCK, PART_WARPS = 512, 4
NONE = tl.constexpr(2**31 - 1)  # in place of a negative index: sorted behind all others


def add_gathered_ref(
    into_TH: Tensor, factor_T: Tensor, table_VH: Tensor, index_T: Tensor
) -> Tensor:
    """The definition, and the CPU path; returns `into`."""
    some = index_T >= 0
    rows = table_VH[index_T[some]].float()
    into_TH[some] = into_TH[some].float().addcmul(factor_T[some, None], rows).to(into_TH.dtype)
    return into_TH


def add_scattered_ref(
    into_VH: Tensor, factor_T: Tensor, rows_TH: Tensor, index_T: Tensor
) -> Tensor:
    """The definition, and the CPU path; returns `into`."""
    some = index_T >= 0
    named, place = index_T[some].unique(return_inverse=True)
    sums = torch.zeros(len(named), rows_TH.shape[1], device=rows_TH.device)
    sums.index_add_(0, place, factor_T[some, None] * rows_TH[some].float())
    into_VH[named] = (into_VH[named].float() + sums).to(into_VH.dtype)
    return into_VH


@triton.jit
def _gathered_kernel(
    into_ptr, factor_ptr, table_ptr, index_ptr, T, H, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    blocks = tl.cdiv(H, BLOCK)
    first = (tl.program_id(0) // blocks).to(tl.int64) * ROWS
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    for i in tl.static_range(ROWS):
        index = tl.load(index_ptr + first + i, mask=first + i < T, other=-1).to(tl.int64)
        factor = tl.load(factor_ptr + first + i, mask=first + i < T, other=0.0)
        mask = (col < H) & (index >= 0)
        at = into_ptr + (first + i) * H + col
        row = tl.load(table_ptr + index * H + col, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32) + factor * row
        tl.store(at, x.to(into_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_row(into_ptr, index, H, col, x):
    """into[index] += x, unless the index is NONE."""
    at = into_ptr + index.to(tl.int64) * H + col
    mask = (col < H) & (index != NONE)
    x += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, x.to(into_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scattered_kernel(
    into_ptr,
    factor_ptr,
    rows_ptr,
    index_ptr,  # sorted
    token_ptr,  # of each place in the sorted list
    heads_ptr,
    tails_ptr,
    T,
    H,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(H, BLOCK)
    part = tl.program_id(0) // blocks
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    of_part = part.to(tl.int64) * H + col
    first = part * PART
    end = tl.minimum(first + PART, T)
    current = tl.load(index_ptr + first)
    begun = tl.load(index_ptr + first - 1, mask=first > 0, other=-1) == current
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(first, end):
        index = tl.load(index_ptr + place)
        if index != current:
            if begun:
                tl.store(heads_ptr + of_part, total, mask=col < H)
            else:
                _add_row(into_ptr, current, H, col, total)
            begun = False
            current = index
            total = tl.zeros([BLOCK], tl.float32)
        token = tl.load(token_ptr + place).to(tl.int64)
        factor = tl.load(factor_ptr + token)
        mask = (col < H) & (index != NONE)
        row = tl.load(rows_ptr + token * H + col, mask=mask, other=0.0).to(tl.float32)
        total += tl.where(mask, factor * row, 0.0)
    if begun:
        tl.store(heads_ptr + of_part, total, mask=col < H)
    elif tl.load(index_ptr + end, mask=end < T, other=-1) == current:
        tl.store(tails_ptr + of_part, total, mask=col < H)
    else:
        _add_row(into_ptr, current, H, col, total)


@triton.jit
def _joined_kernel(
    into_ptr,
    index_ptr,
    behind_ptr,
    heads_ptr,
    tails_ptr,
    H,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the tail of a part to the heads of the parts behind it that have the same index.

    `behind` is the place behind the part's last index, [parts without the last, if incomplete].
    """
    blocks = tl.cdiv(H, BLOCK)
    part = tl.program_id(0) // blocks
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    first = part * PART
    index = tl.load(index_ptr + first + PART - 1)
    behind = tl.load(behind_ptr + part)
    begun = tl.load(index_ptr + first - 1, mask=first > 0, other=-1) == index
    if (behind > first + PART) & (index != NONE) & (not begun):
        of_part = part.to(tl.int64) * H + col
        total = tl.load(tails_ptr + of_part, mask=col < H, other=0.0)
        head = heads_ptr + of_part
        for _ in range(part + 1, tl.cdiv(behind, PART)):
            head += H
            total += tl.load(head, mask=col < H, other=0.0)
        _add_row(into_ptr, index, H, col, total)


def add_gathered_(into_TH: Tensor, factor_T: Tensor, table_VH: Tensor, index_T: Tensor) -> Tensor:
    """Add row index[t] of a table times factor[t], fp32, to row t, and return `into`.

    Raises ValueError for shapes that do not fit, and for matrices that are not contiguous.
    """
    _check(into_TH, table_VH, factor_T, index_T, tokens=len(into_TH))
    if not into_TH.is_cuda:
        return add_gathered_ref(into_TH, factor_T, table_VH, index_T)
    return _launch_gathered(into_TH, factor_T, table_VH, index_T)


def add_scattered_(into_VH: Tensor, factor_T: Tensor, rows_TH: Tensor, index_T: Tensor) -> Tensor:
    """Add row t times factor[t], fp32, to row index[t], and return `into`.

    Raises ValueError as `add_gathered_` does.
    """
    _check(into_VH, rows_TH, factor_T, index_T, tokens=len(rows_TH))
    if not into_VH.is_cuda:
        return add_scattered_ref(into_VH, factor_T, rows_TH, index_T)
    return _launch_scattered(into_VH, factor_T, rows_TH, index_T)


def _check(into: Tensor, rows: Tensor, factor_T: Tensor, index_T: Tensor, *, tokens: int) -> None:
    whole = into.is_contiguous() and rows.is_contiguous() and into.shape[1] == rows.shape[1]
    if not whole or factor_T.shape != (tokens,) or index_T.shape != (tokens,):
        raise ValueError(
            f"matrices of {tuple(into.shape)} and {tuple(rows.shape)} with strides {into.stride()} "
            f"and {rows.stride()}, factors of {tuple(factor_T.shape)} and indices of "
            f"{tuple(index_T.shape)}: matrices must be contiguous with rows of one length, and "
            "each token must have a factor and an index"
        )


def _launch_gathered(
    into_TH: Tensor, factor_T: Tensor, table_VH: Tensor, index_T: Tensor
) -> Tensor:
    T, H = into_TH.shape
    grid = (triton.cdiv(T, ROWS) * triton.cdiv(H, BLOCK),)
    arguments = into_TH, factor_T.contiguous(), table_VH, index_T.contiguous(), T, H
    _gathered_kernel[grid](*arguments, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS)
    return into_TH


def _launch_scattered(
    into_VH: Tensor, factor_T: Tensor, rows_TH: Tensor, index_T: Tensor
) -> Tensor:
    (T, H), parts = rows_TH.shape, triton.cdiv(len(rows_TH), PART)
    index, token = index_T.int().where(index_T >= 0, NONE.value).sort(stable=True)
    last = index[PART - 1 :: PART].contiguous()
    behind = torch.searchsorted(index, last, right=True, out_int32=True)
    heads, tails = rows_TH.new_empty(2, parts, H, dtype=torch.float32)
    blocks = triton.cdiv(H, PART_BLOCK)
    sizes = {"PART": PART, "BLOCK": PART_BLOCK, "num_warps": PART_WARPS}
    _scattered_kernel[parts * blocks,](
        into_VH, factor_T.contiguous(), rows_TH, index, token, heads, tails, T, H, **sizes
    )
    if len(behind):
        _joined_kernel[len(behind) * blocks,](into_VH, index, behind, heads, tails, H, **sizes)
    return into_VH
