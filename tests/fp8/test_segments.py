"""Largest magnitudes and codes at +-MAX, by tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coatlm.fp8 import segments
from coatlm.fp8.formats import E4M3, E5M2, SCALE_BLOCK, Fp8Format
from coatlm.fp8.segments import (
    ROWS,
    count_saturated,
    count_saturated_ref,
    largest_magnitudes,
    largest_magnitudes_ref,
)
from tests.fp8.sm90 import POINTER, access_bytes, compile_sm90, run_interpreted

SIZES = (3, 1, 2 * ROWS, 20, 0, 7)  # blocks of each tensor: many in a program, one in several
COUNT = len(SIZES)


def owners() -> Tensor:
    return torch.arange(COUNT, dtype=torch.int32).repeat_interleave(torch.tensor(SIZES))


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    """Tensors of other sizes; a NaN in the second, an infinity in the last, zeros in the first."""
    torch.manual_seed(0)
    x = torch.randn(len(owners()), SCALE_BLOCK) * torch.exp2(-owners())[:, None]
    x[:3] = 0.0
    x[1, 5] = -0.0
    x[3, 100], x[3, 3] = -torch.nan, torch.inf
    x[-1, 127] = -torch.inf
    return x.to(dtype).view(-1)


def some_codes(fmt: Fp8Format) -> Tensor:
    """Every code, +-MAX more often than the others."""
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (len(owners()) * SCALE_BLOCK,), dtype=torch.uint8)
    top = torch.tensor([fmt.max, -fmt.max]).to(fmt.dtype).view(torch.uint8)
    codes[::3] = top[torch.randint(0, 2, codes[::3].shape)]
    return codes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_tensor_gets_its_own_largest_magnitude(dtype: torch.dtype) -> None:
    x = values(dtype)
    found = largest_magnitudes(x, owners(), COUNT).view(torch.float32)
    for tensor, part in enumerate(x.float().split([SCALE_BLOCK * size for size in SIZES])):
        expected = part.abs().amax() if len(part) else torch.tensor(0.0)
        torch.testing.assert_close(found[tensor], expected, rtol=0, atol=0, equal_nan=True)
    assert not largest_magnitudes(x[:0], owners()[:0], COUNT).any()


def test_bits_of_magnitudes_order_as_values_do_with_nan_above_infinity() -> None:
    x = torch.tensor([0.0, 2.0**-149, 1.0, 3e38, torch.inf, torch.nan])
    bits = [int(largest_magnitudes(v.repeat(SCALE_BLOCK), owners()[:1], 1)) for v in x]
    assert bits == sorted(set(bits))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_codes_at_the_largest_value_are_counted_for_their_tensor(fmt: Fp8Format) -> None:
    codes = some_codes(fmt)
    counts = torch.arange(COUNT)
    count_saturated(codes, owners(), counts, fmt)
    full = (codes.view(fmt.dtype).float().abs() == fmt.max).split([SCALE_BLOCK * n for n in SIZES])
    assert counts.tolist() == [start + int(part.sum()) for start, part in enumerate(full)]


def test_owners_must_fit() -> None:
    with pytest.raises(ValueError, match=r"values \[256\] for 3 owners: must be \[384\]"):
        largest_magnitudes(torch.ones(256), owners()[:3], COUNT)
    with pytest.raises(ValueError, match=r"values \[2, 128\] for 2 owners: must be \[256\]"):
        count_saturated(torch.ones(2, 128).byte(), owners()[:2], torch.zeros(3).long(), E4M3)


def interpreted_kernels_equal_the_reference() -> None:
    owner = owners()
    grid = (-(-len(owner) // ROWS),)
    largest = torch.zeros(COUNT, dtype=torch.int32)
    segments._largest_kernel[grid](values(), owner, largest, len(owner), ROWS)
    assert torch.equal(
        largest.view(torch.float32).nan_to_num(-1.0),
        largest_magnitudes_ref(values(), owner, COUNT).view(torch.float32).nan_to_num(-1.0),
    )
    for fmt in (E4M3, E5M2):
        counts, expected = torch.arange(COUNT), torch.arange(COUNT)
        codes = some_codes(fmt)
        segments._saturated_kernel[grid](codes, owner, counts, len(owner), segments._top(fmt), ROWS)
        count_saturated_ref(codes, owner, expected, fmt)
        assert torch.equal(counts, expected)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_largest_magnitudes_compile_for_sm90(dtype: torch.dtype) -> None:
    compiled = compile_sm90(
        segments._largest_kernel,
        {"x_ptr": POINTER[dtype], "owner_ptr": "*i32", "largest_ptr": "*i32", "blocks": "i32"},
        {"ROWS": ROWS},
        num_warps=segments.WARPS,
    )
    assert 16 in access_bytes(compiled)
    assert "max.s32" in compiled.asm["ptx"]


def test_counts_compile_for_sm90() -> None:
    compiled = compile_sm90(
        segments._saturated_kernel,
        {"code_ptr": "*u8", "owner_ptr": "*i32", "count_ptr": "*i64", "blocks": "i32"},
        {"TOP": 0x7E, "ROWS": ROWS},
        num_warps=segments.WARPS,
    )
    assert 16 in access_bytes(compiled)
