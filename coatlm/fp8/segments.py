"""Statistics of each tensor of a flat buffer: its largest |value|, and how many codes are +-MAX.

    largest_magnitudes    values [n] -> int32 [T], the bits of fp32 amaxes
    count_saturated       codes [n] -> int64 [T], added to earlier counts

`owner` int32 [n / 128] is the tensor, one of T, that each block of 128 elements belongs to. Tensors
lie one after the other and start at multiples of 128. A program reads 32 blocks, which seldom
belong to more than one tensor, and does one atomic operation per tensor in them. With one atomic
per block the few words of the result would be contended, and take longer than reading the buffer.
Both results are integers, so they do not depend on the order of the atomics. The bits of fp32
magnitudes order as the values do, with NaN > Inf > numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatlm.fp8.formats import BLOCK_ELEMENTS, SCALE_BLOCK, Fp8Format
from coatlm.fp8.scaling import amax_of, block_amax_ref

ROWS = 32  # blocks per program
WARPS = 4


def largest_magnitudes_ref(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """The definition of `largest_magnitudes`, and its CPU path."""
    largest = torch.zeros(count, dtype=torch.int32)
    if not len(values):
        return largest
    raise_largest_ref(largest, values, owner)
    return largest


def raise_largest_ref(largest: Tensor, values: Tensor, owner: Tensor) -> None:
    """The definition of `raise_largest`: `values` [..., n], `owner` [..., n / 128]."""
    bits = block_amax_ref(values, SCALE_BLOCK).view(torch.int32)
    largest.scatter_reduce_(0, owner.long().flatten(), bits.flatten(), "amax")


def count_saturated_ref(codes: Tensor, owner: Tensor, counts: Tensor, fmt: Fp8Format) -> None:
    """The definition of `count_saturated`, and its CPU path."""
    full = ((codes & 0x7F) == _top(fmt)).view(-1, SCALE_BLOCK).sum(1)
    counts.index_add_(0, owner, full)


@triton.jit
def _owners(owner_ptr, blocks, ROWS: tl.constexpr):
    """A program's blocks and their owners, -1 beyond the last block."""
    g = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return g, tl.load(owner_ptr + g, mask=g < blocks, other=-1)


@triton.jit
def _first_and_last(owner):
    """The smallest and the largest owner of a tile, -1 not counted; 0 and -1 if all are -1."""
    last = tl.max(owner, 0)
    first = tl.min(tl.where(owner < 0, last, owner), 0)
    return tl.maximum(first, 0), last


@triton.jit
def raise_largest(largest_ptr, amax, owner):
    """Raise the bits of each owner's largest magnitude by the amaxes of the blocks of a tile."""
    bits = amax.to(tl.int32, bitcast=True)
    first, last = _first_and_last(owner)
    for tensor in tl.range(first, last + 1):
        largest = tl.max(tl.where(owner == tensor, bits, 0), 0)
        tl.atomic_max(largest_ptr + tensor, largest, sem="relaxed")


@triton.jit
def _largest_kernel(x_ptr, owner_ptr, largest_ptr, blocks, ROWS: tl.constexpr):
    g, owner = _owners(owner_ptr, blocks, ROWS)
    at = g[:, None] * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)[None, :]
    x = tl.load(x_ptr + at, mask=(g < blocks)[:, None], other=0.0).to(tl.float32)
    raise_largest(largest_ptr, amax_of(x, 1), owner)


@triton.jit
def _saturated_kernel(
    code_ptr, owner_ptr, count_ptr, blocks, TOP: tl.constexpr, ROWS: tl.constexpr
):
    g, owner = _owners(owner_ptr, blocks, ROWS)
    at = g[:, None] * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)[None, :]
    code = tl.load(code_ptr + at, mask=(g < blocks)[:, None], other=0)
    full = tl.sum(((code & 0x7F) == TOP).to(tl.int32), 1)
    first, last = _first_and_last(owner)
    for tensor in tl.range(first, last + 1):
        count = tl.sum(tl.where(owner == tensor, full, 0), 0)
        tl.atomic_add(count_ptr + tensor, count.to(tl.int64), sem="relaxed")


def largest_magnitudes(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """The bits of the largest |value| of each tensor, int32 [count]; 0 for tensors without values.

    `values` [n] is fp32 or BF16, `owner` int32 [n / 128], and both are contiguous. Raises
    ValueError unless n = 128 len(owner).
    """
    blocks = _blocks(values, owner)
    if not values.is_cuda:
        return largest_magnitudes_ref(values, owner, count)
    largest = torch.zeros(count, dtype=torch.int32, device=values.device)
    if blocks:
        grid = (triton.cdiv(blocks, ROWS),)
        _largest_kernel[grid](values, owner, largest, blocks, ROWS, num_warps=WARPS)
    return largest


def count_saturated(codes: Tensor, owner: Tensor, counts: Tensor, fmt: Fp8Format) -> None:
    """Add the number of codes +-MAX of each tensor to `counts` int64 [T]; codes are uint8 [n]."""
    blocks = _blocks(codes, owner)
    if not codes.is_cuda:
        count_saturated_ref(codes, owner, counts, fmt)
    elif blocks:
        grid = (triton.cdiv(blocks, ROWS),)
        _saturated_kernel[grid](codes, owner, counts, blocks, _top(fmt), ROWS, num_warps=WARPS)


def _top(fmt: Fp8Format) -> int:
    """The code of MAX, which is that of -MAX without its sign."""
    return int(torch.tensor(fmt.max).to(fmt.dtype).view(torch.uint8))


def _blocks(values: Tensor, owner: Tensor) -> int:
    """The number of blocks of 128 elements. Raises ValueError unless every block has an owner."""
    if values.ndim != 1 or len(values) != SCALE_BLOCK * len(owner):
        wanted = [SCALE_BLOCK * len(owner)]
        raise ValueError(f"values {list(values.shape)} for {len(owner)} owners: must be {wanted}")
    return len(owner)
