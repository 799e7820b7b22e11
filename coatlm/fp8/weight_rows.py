"""FP8 codes of weight rows in a flat buffer, equal to those that a layer of the FP8 flow computes.

A linear of the flow casts each row w of its BF16 weight with a power-of-two scale S
(`quantize_rows`): code = cast(w / S), 224 < max|w| / S <= 448. ZeRO gathers the same codes, so the
cast happens before the all-gather:

    row_amax       bits of max|w| over the local part of each row; an all-reduce MAX of them sets S
    encode_rows    code = cast(w / S), one byte per element
    decode_rows    w' = code S, but 225 S where code is 224 and -225 S where it is -224

The layer then casts w' and has to find the same S and the same codes, also on the rank that owns a
part of the row and has w itself there. Why it does:

- w' is a BF16 number, also below the smallest normal: w, and so code S, are multiples of 2^-133.
- The S that is found is no larger, because |w'| <= 448 S.
- It is no smaller either, because max|w'| > 224 S. Without the 225 that would fail: a max|w| of up
  to 232 S has the code 224, and 224 S leads to S / 2, which also changes the tensor-wise scale in
  backward. 225 S is cast to 224 again.

From 248 * 2^120 = 3.3e38 on, code S exceeds BF16.

Row r of matrix t is `width[t]` elements from start[t] + (r - first[t]) width[t] on. Starts are
multiples of 128 and widths multiples of 16, as GEMMs need them, and ranges of elements begin and
end on multiples of 16. A program takes the part of one row that is inside a range, so that nothing
is stored but a table of T matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from coatlm.fp8.formats import ALIGNMENT, E4M3
from coatlm.fp8.scaling import (
    exponent_of,
    inverse_power_of_two,
    power_of_two,
    power_of_two_ref,
    scaled_codes_ref,
    top_exponent,
)

BLOCK = 4096  # most elements that a program takes at a time
THREAD = 16  # elements per thread


@dataclass(frozen=True, eq=False)
class Rows:
    """Where the rows of T matrices lie. Rows are numbered through all matrices."""

    start: tuple[int, ...]  # [T], ascending
    width: tuple[int, ...]  # [T], elements per row
    first: tuple[int, ...]  # [T + 1], the number of the first row of each matrix, then of all rows
    table: Tensor  # int64 [3, T'] for kernels: first, start and width; T' is a power of two

    @classmethod
    def of(cls, matrices: Sequence[tuple[int, int, int]], device: torch.device) -> Rows:
        """Lay out matrices (start, rows, width). Raises ValueError if rows are not aligned."""
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
        """The range [first, stop) of rows that may have elements in [begin, end)."""
        stop, last = 0, self.count
        for t, (start, width) in enumerate(zip(self.start, self.width, strict=True)):
            rows = self.first[t + 1] - self.first[t]
            if begin < start + rows * width and last == self.count:
                last = self.first[t] + max(begin - start, 0) // width
            if end > start:
                stop = self.first[t] + min(-(-(end - start) // width), rows)
        return min(last, stop), stop


def row_numbers_ref(rows: Rows, begin: int, end: int) -> Tensor:
    """The row of each element, int64 [end - begin]; -1 between matrices."""
    number = torch.full((end - begin,), -1)
    for t, (start, width) in enumerate(zip(rows.start, rows.width, strict=True)):
        stop = start + (rows.first[t + 1] - rows.first[t]) * width
        low, high = max(start, begin), min(stop, end)
        if low < high:
            number[low - begin : high - begin] = (
                rows.first[t] + (torch.arange(low, high) - start) // width
            )
    return number


def row_amax_ref(weights: Tensor, rows: Rows, begin: int, end: int) -> Tensor:
    """The definition of `row_amax`, and its CPU path."""
    number = row_numbers_ref(rows, begin, end)
    bits = weights[begin:end].float().abs().view(torch.int32)
    largest = torch.zeros(rows.count, dtype=torch.int32)
    return largest.scatter_reduce_(0, number[number >= 0], bits[number >= 0], "amax")


def encode_rows_ref(
    weights: Tensor, codes: Tensor, amax: Tensor, rows: Rows, begin: int, end: int
) -> None:
    """The definition of `encode_rows`, and its CPU path."""
    number = row_numbers_ref(rows, begin, end)
    scale = power_of_two_ref(amax.view(torch.float32), E4M3)[number.clamp(min=0)]
    code = scaled_codes_ref(weights[begin:end].float(), scale, E4M3).view(torch.uint8)
    codes[begin:end] = torch.where(number >= 0, code, codes[begin:end])


def decode_rows_ref(
    codes: Tensor, weights: Tensor, amax: Tensor, rows: Rows, begin: int, end: int
) -> None:
    """The definition of `decode_rows`, and its CPU path."""
    number = row_numbers_ref(rows, begin, end)
    scale = power_of_two_ref(amax.view(torch.float32), E4M3)[number.clamp(min=0)]
    code = E4M3.decode(codes[begin:end].view(E4M3.dtype))
    code = torch.where(code.abs() == 224.0, 225.0 * code.sign(), code)
    value = (code * scale).to(weights.dtype)
    weights[begin:end] = torch.where(number >= 0, value, weights[begin:end])


@triton.jit
def _span(table_ptr, row, begin, end, MATRICES: tl.constexpr):
    """The elements [start, stop) of a row that are in [begin, end)."""
    first = tl.load(table_ptr + tl.arange(0, MATRICES))
    table_ptr += tl.sum((first <= row).to(tl.int32), 0) - 1
    width = tl.load(table_ptr + 2 * MATRICES)
    start = tl.load(table_ptr + MATRICES) + (row - tl.load(table_ptr)) * width
    stop = tl.minimum(start + width, end)
    start = tl.maximum(start, begin)
    return tl.multiple_of(start, 16), tl.multiple_of(stop, 16)


@triton.jit
def _row_amax_kernel(
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
def _encode_rows_kernel(
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
def _decode_rows_kernel(
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


def row_amax(weights: Tensor, rows: Rows, begin: int, end: int) -> Tensor:
    """The bits of max|w| over [begin, end), int32 [rows]; 0 for rows without elements there."""
    if not weights.is_cuda:
        return row_amax_ref(weights, rows, begin, end)
    amax = torch.zeros(rows.count, dtype=torch.int32, device=weights.device)
    _launch(_row_amax_kernel, (weights, amax), rows, begin, end)
    return amax


def encode_rows(
    weights: Tensor, codes: Tensor, amax: Tensor, rows: Rows, begin: int, end: int
) -> None:
    """Write codes[begin:end], uint8, from BF16 weights. `amax` [rows] is that of all ranks.

    Elements between matrices are left as they are.
    """
    if not weights.is_cuda:
        encode_rows_ref(weights, codes, amax, rows, begin, end)
        return
    tensors = weights, codes.view(E4M3.dtype), amax
    _launch(_encode_rows_kernel, tensors, rows, begin, end, TOP=top_exponent(E4M3))


def decode_rows(
    codes: Tensor, weights: Tensor, amax: Tensor, rows: Rows, begin: int, end: int
) -> None:
    """Write weights[begin:end], BF16, from codes. The arguments are those of `encode_rows`."""
    if not weights.is_cuda:
        decode_rows_ref(codes, weights, amax, rows, begin, end)
        return
    tensors = codes.view(E4M3.dtype), weights, amax
    _launch(_decode_rows_kernel, tensors, rows, begin, end, TOP=top_exponent(E4M3))


def row_tile(rows: Rows) -> dict[str, int]:
    """The launch options of kernels, by the widest row."""
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
