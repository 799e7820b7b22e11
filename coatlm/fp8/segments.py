"""What is known of each tensor of a flat buffer: its largest |value|, its codes at +-MAX.

    largest_magnitudes    values [n] -> int32 [T], the bits of fp32 amaxes
    count_saturated       codes [n] -> int64 [T], added to what was counted

`owner` int32 [n / 128] says which of T tensors a group of 128 elements belongs to: tensors lie one
behind the other, from multiples of 128 on. A program reads 32 groups, which are seldom of more than
one tensor, and does one atomic operation for each tensor it met: one for each group would stand in
line for the few words [T], far longer than the buffer takes to be read. Both results are integers,
so they do not depend on the order. Bits of fp32 magnitudes order as the values do, with
NaN > Inf > numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatlm.fp8.formats import SCALE_BLOCK, Fp8Format
from coatlm.fp8.scaling import amax_of, group_amax_ref

ROWS = 32  # groups a program
WARPS = 4


def largest_magnitudes_ref(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """The definition, and the CPU path."""
    largest = torch.zeros(count, dtype=torch.int32)
    if not len(values):
        return largest
    bits = group_amax_ref(values, SCALE_BLOCK).view(torch.int32)
    return largest.scatter_reduce_(0, owner.long(), bits, "amax")


def count_saturated_ref(codes: Tensor, owner: Tensor, counts: Tensor, fmt: Fp8Format) -> None:
    """The definition, and the CPU path."""
    full = ((codes & 0x7F) == _top(fmt)).view(-1, SCALE_BLOCK).sum(1)
    counts.index_add_(0, owner, full)


@triton.jit
def _owners(owner_ptr, groups, ROWS: tl.constexpr):
    """The program's groups, whose they are (-1: beyond the last), and the first and last owner."""
    g = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    owner = tl.load(owner_ptr + g, mask=g < groups, other=-1)
    last = tl.max(owner, 0)
    first = tl.min(tl.where(owner < 0, last, owner), 0)
    return g, owner, first, last


@triton.jit
def _largest_kernel(x_ptr, owner_ptr, largest_ptr, groups, ROWS: tl.constexpr):
    g, owner, first, last = _owners(owner_ptr, groups, ROWS)
    at = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + at, mask=(g < groups)[:, None], other=0.0).to(tl.float32)
    bits = amax_of(x, 1).to(tl.int32, bitcast=True)
    for tensor in tl.range(first, last + 1):
        largest = tl.max(tl.where(owner == tensor, bits, 0), 0)
        tl.atomic_max(largest_ptr + tensor, largest, sem="relaxed")


@triton.jit
def _saturated_kernel(
    code_ptr, owner_ptr, count_ptr, groups, TOP: tl.constexpr, ROWS: tl.constexpr
):
    g, owner, first, last = _owners(owner_ptr, groups, ROWS)
    at = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    code = tl.load(code_ptr + at, mask=(g < groups)[:, None], other=0)
    full = tl.sum(((code & 0x7F) == TOP).to(tl.int32), 1)
    for tensor in tl.range(first, last + 1):
        count = tl.sum(tl.where(owner == tensor, full, 0), 0)
        tl.atomic_add(count_ptr + tensor, count.to(tl.int64), sem="relaxed")


def largest_magnitudes(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """int32 [count]: the bits of the largest |value| of each tensor; 0 for those not here.

    `values` [n] is fp32 or BF16, `owner` int32 [n / 128], both contiguous. Raises ValueError where
    n is not 128 for each owner.
    """
    groups = _groups(values, owner)
    if not values.is_cuda:
        return largest_magnitudes_ref(values, owner, count)
    largest = torch.zeros(count, dtype=torch.int32, device=values.device)
    if groups:
        grid = (triton.cdiv(groups, ROWS),)
        _largest_kernel[grid](values, owner, largest, groups, ROWS, num_warps=WARPS)
    return largest


def count_saturated(codes: Tensor, owner: Tensor, counts: Tensor, fmt: Fp8Format) -> None:
    """Add to `counts` int64 [T] the codes +-MAX of each tensor; codes uint8 [n], owner as above."""
    groups = _groups(codes, owner)
    if not codes.is_cuda:
        count_saturated_ref(codes, owner, counts, fmt)
    elif groups:
        grid = (triton.cdiv(groups, ROWS),)
        _saturated_kernel[grid](codes, owner, counts, groups, _top(fmt), ROWS, num_warps=WARPS)


def _top(fmt: Fp8Format) -> int:
    """The code of MAX."""
    return int(torch.tensor(fmt.max).to(fmt.dtype).view(torch.uint8))


def _groups(values: Tensor, owner: Tensor) -> int:
    if values.ndim != 1 or len(values) != SCALE_BLOCK * len(owner):
        raise ValueError(
            f"values {list(values.shape)} of {len(owner)} owners: [{SCALE_BLOCK * len(owner)}]"
        )
    return len(owner)
