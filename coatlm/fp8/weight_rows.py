"""Weights as the codes that the FP8 flow makes of them: rows of matrices in a flat buffer.

A linear of the flow casts a row w of its BF16 weight with a power-of-two scale (`quantize_rows`):
code = cast(w / S), 224 < max|w| / S <= 448. Here the same is done before weights travel:

    largest   bits of max|w| of what is here of each row; ranks agree on the largest, and so on S
    encode    code = cast(w / S), one byte an element
    decode    w' = code S, but 225 S where code is 224 and -225 S where it is -224

The layer that casts w' finds S and the codes again, also where a part of the row is w itself, which
its owner has. w' is a number of BF16, also below its smallest normal: w and then code S are
multiples of 2^-133. It is at most 448 S, so the scale found is no larger; and it is no smaller, as
max|w| is above 224 S and what it became is too: max|w| up to 232 S has the code 224, from which
S / 2 would follow, and with it another scale of the whole tensor in backward. That is what 225 is
for; its code is 224 again. (From 248 * 2^120 = 3.3e38 on, code S is beyond BF16.)

Row r of matrix t are `width[t]` elements from start[t] + (r - first[t]) width[t] on. Starts are
multiples of 128 and widths of 16, as the GEMMs need them; ranges of elements begin and end on
multiples of 16. A program takes what is in a range of one row, so nothing is stored but T numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatlm.fp8.formats import E4M3
from coatlm.fp8.scaling import (
    exponent_of,
    inverse_power_of_two,
    power_of_two,
    power_of_two_ref,
    scaled_codes_ref,
    top_exponent,
)

ALIGNMENT = 16  # elements
BLOCK = 4096  # elements that a program takes at a time, at most
THREAD = 16  # elements a thread


@dataclass(frozen=True, eq=False)
class Rows:
    """Where the rows of T matrices lie. Numbers of rows run through all matrices."""

    start: tuple[int, ...]  # [T], ascending
    width: tuple[int, ...]  # [T], elements a row
    first: tuple[int, ...]  # [T + 1], the number of a matrix's first row; the last one is of all
    table: Tensor  # int64 [3, T'], first, start and width for kernels; T' is a power of two

    @classmethod
    def of(cls, matrices: Sequence[tuple[int, int, int]], device: torch.device) -> Rows:
        """Matrices as (start, rows, width). Raises ValueError for what kernels cannot address."""
        first = [0]
        for start, rows, width in matrices:
            if start % ALIGNMENT or width % ALIGNMENT:
                raise ValueError(
                    f"a weight [{rows}, {width}] at element {start}: FP8 rows start and end on "
                    f"multiples of {ALIGNMENT}"
                )
            first.append(first[-1] + rows)
        starts, _, widths = zip(*matrices, strict=True)
        padding = [torch.iinfo(torch.int64).max] * (
            triton.next_power_of_2(len(starts)) - len(starts)
        )
        table = torch.tensor([[*column, *padding] for column in (first[:-1], starts, widths)])
        return cls(starts, widths, tuple(first), table.to(device))

    @property
    def count(self) -> int:
        return self.first[-1]

    def inside(self, begin: int, end: int) -> tuple[int, int]:
        """The numbers [first, stop) of rows that may have elements in [begin, end)."""
        stop, last = 0, self.count
        for t, (start, width) in enumerate(zip(self.start, self.width, strict=True)):
            rows = self.first[t + 1] - self.first[t]
            if begin < start + rows * width and last == self.count:
                last = self.first[t] + max(begin - start, 0) // width
            if end > start:
                stop = self.first[t] + min(-(-(end - start) // width), rows)
        return min(last, stop), stop


def row_numbers_ref(rows: Rows, begin: int, end: int) -> Tensor:
    """int64 [end - begin]: the row of each element; -1 between matrices."""
    number = torch.full((end - begin,), -1)
    for t, (start, width) in enumerate(zip(rows.start, rows.width, strict=True)):
        stop = start + (rows.first[t + 1] - rows.first[t]) * width
        low, high = max(start, begin), min(stop, end)
        if low < high:
            number[low - begin : high - begin] = (
                rows.first[t] + (torch.arange(low, high) - start) // width
            )
    return number


def largest_ref(weights: Tensor, rows: Rows, begin: int, end: int) -> Tensor:
    """The definition, and the CPU path."""
    number = row_numbers_ref(rows, begin, end)
    bits = weights[begin:end].float().abs().view(torch.int32)
    largest = torch.zeros(rows.count, dtype=torch.int32)
    return largest.scatter_reduce_(0, number[number >= 0], bits[number >= 0], "amax")


def encode_ref(
    weights: Tensor, codes: Tensor, amax: Tensor, rows: Rows, begin: int, end: int
) -> None:
    """The definition, and the CPU path."""
    number = row_numbers_ref(rows, begin, end)
    scale = power_of_two_ref(amax.view(torch.float32), E4M3)[number.clamp(min=0)]
    made = scaled_codes_ref(weights[begin:end].float(), scale, E4M3).view(torch.uint8)
    codes[begin:end] = torch.where(number >= 0, made, codes[begin:end])


def decode_ref(
    codes: Tensor, weights: Tensor, amax: Tensor, rows: Rows, begin: int, end: int
) -> None:
    """The definition, and the CPU path."""
    number = row_numbers_ref(rows, begin, end)
    scale = power_of_two_ref(amax.view(torch.float32), E4M3)[number.clamp(min=0)]
    code = E4M3.decode(codes[begin:end].view(E4M3.dtype))
    code = torch.where(code.abs() == 224.0, 225.0 * code.sign(), code)
    made = (code * scale).to(weights.dtype)
    weights[begin:end] = torch.where(number >= 0, made, weights[begin:end])


@triton.jit
def _span(table_ptr, row, begin, end, MATRICES: tl.constexpr):
    """The elements [from, to) of a row that are in [begin, end)."""
    first = tl.load(table_ptr + tl.arange(0, MATRICES))
    table_ptr += tl.sum((first <= row).to(tl.int32), 0) - 1
    width = tl.load(table_ptr + 2 * MATRICES)
    start = tl.load(table_ptr + MATRICES) + (row - tl.load(table_ptr)) * width
    stop = tl.minimum(start + width, end)
    start = tl.maximum(start, begin)
    return tl.multiple_of(start, 16), tl.multiple_of(stop, 16)


@triton.jit
def _largest_kernel(
    weight_ptr, amax_ptr, table_ptr, first_row, begin, end,
    MATRICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = first_row + tl.program_id(0)
    start, stop = _span(table_ptr, row, begin, end, MATRICES)
    largest = tl.zeros([BLOCK], tl.int32)
    for base in tl.range(start, stop, BLOCK):
        at = tl.multiple_of(base, 16) + tl.arange(0, BLOCK)
        x = tl.load(weight_ptr + at, mask=at < stop, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x).to(tl.int32, bitcast=True))
    tl.store(amax_ptr + row, tl.max(largest, 0))


@triton.jit
def _encode_kernel(
    weight_ptr, code_ptr, amax_ptr, table_ptr, first_row, begin, end,
    TOP: tl.constexpr, MATRICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = first_row + tl.program_id(0)
    start, stop = _span(table_ptr, row, begin, end, MATRICES)
    amax = tl.load(amax_ptr + row).to(tl.float32, bitcast=True)
    inverse = inverse_power_of_two(exponent_of(amax, TOP))
    for base in tl.range(start, stop, BLOCK):
        at = tl.multiple_of(base, 16) + tl.arange(0, BLOCK)
        x = tl.load(weight_ptr + at, mask=at < stop, other=0.0).to(tl.float32)
        tl.store(code_ptr + at, (x * inverse).to(code_ptr.dtype.element_ty), mask=at < stop)


@triton.jit
def _decode_kernel(
    code_ptr, weight_ptr, amax_ptr, table_ptr, first_row, begin, end,
    TOP: tl.constexpr, MATRICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = first_row + tl.program_id(0)
    start, stop = _span(table_ptr, row, begin, end, MATRICES)
    amax = tl.load(amax_ptr + row).to(tl.float32, bitcast=True)
    scale = power_of_two(exponent_of(amax, TOP))
    for base in tl.range(start, stop, BLOCK):
        at = tl.multiple_of(base, 16) + tl.arange(0, BLOCK)
        code = tl.load(code_ptr + at, mask=at < stop, other=0.0).to(tl.float32)
        code = tl.where(code == 224.0, 225.0, tl.where(code == -224.0, -225.0, code))
        tl.store(weight_ptr + at, (code * scale).to(weight_ptr.dtype.element_ty), mask=at < stop)


def largest(weights: Tensor, rows: Rows, begin: int, end: int) -> Tensor:
    """int32 [rows]: bits of max|w| of what is in [begin, end) of each row, 0 where nothing is."""
    if not weights.is_cuda:
        return largest_ref(weights, rows, begin, end)
    amax = torch.zeros(rows.count, dtype=torch.int32, device=weights.device)
    _launch(_largest_kernel, (weights, amax), rows, begin, end)
    return amax


def encode(weights: Tensor, codes: Tensor, amax: Tensor, rows: Rows, begin: int, end: int) -> None:
    """Fill codes[begin:end], uint8, from BF16 weights, by the agreed `amax` of the rows.

    What lies between matrices stays as it is.
    """
    if not weights.is_cuda:
        encode_ref(weights, codes, amax, rows, begin, end)
        return
    tensors = weights, codes.view(E4M3.dtype), amax
    _launch(_encode_kernel, tensors, rows, begin, end, TOP=top_exponent(E4M3))


def decode(codes: Tensor, weights: Tensor, amax: Tensor, rows: Rows, begin: int, end: int) -> None:
    """Fill weights[begin:end] from codes; the arguments are those of `encode`."""
    if not weights.is_cuda:
        decode_ref(codes, weights, amax, rows, begin, end)
        return
    tensors = codes.view(E4M3.dtype), weights, amax
    _launch(_decode_kernel, tensors, rows, begin, end, TOP=top_exponent(E4M3))


def row_tile(rows: Rows) -> dict[str, int]:
    """Launch shape, by the widest row."""
    block = min(triton.next_power_of_2(max(rows.width)), BLOCK)
    warps = max(block // (32 * THREAD), 1)
    return {"MATRICES": rows.table.shape[1], "BLOCK": block, "num_warps": warps}


def _launch(
    kernel: triton.JITFunction,
    tensors: Sequence[Tensor],
    rows: Rows,
    begin: int,
    end: int,
    **options: int,
) -> None:
    assert begin % ALIGNMENT == 0 and end % ALIGNMENT == 0
    first, stop = rows.inside(begin, end)
    if first < stop:
        kernel[(stop - first,)](
            *tensors, rows.table, first, begin, end, **options, **row_tile(rows)
        )
