"""Rows added by index: against float64, and kernels against the references."""

import pytest
import torch
from torch import Tensor

from coatlm.kernels import indexed_rows
from coatlm.kernels.indexed_rows import (
    add_gathered_,
    add_gathered_ref,
    add_scattered_,
    add_scattered_ref,
)
from tests.fp8.sm90 import POINTER, access_bytes, compile_sm90, run_interpreted

DTYPES = [torch.float32, torch.bfloat16]
PART = indexed_rows.PART


def tensors(
    tokens: int, entries: int, columns: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """[T, H] and [V, H], factors, and indices: a third negative, half of the others one entry."""
    generator = torch.Generator().manual_seed(tokens)
    of_tokens, of_entries = (
        torch.randn(rows, columns, generator=generator).to(dtype) for rows in (tokens, entries)
    )
    index = torch.randint(entries, (tokens,), generator=generator)
    index[torch.rand(tokens, generator=generator) < 0.5] = entries // 2
    index[torch.rand(tokens, generator=generator) < 0.3] = -1
    return of_tokens, of_entries, torch.randn(tokens, generator=generator), index, index >= 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_added_and_rounded_once(dtype: torch.dtype) -> None:
    of_tokens, of_entries, factor, index, some = tensors(70, 9, 40, dtype)
    terms = factor.double()[:, None] * of_entries.double()[index]
    gathered = of_tokens.double() + terms.where(some[:, None], 0.0)
    scattered = of_entries.double().index_add(
        0, index[some], (factor.double()[:, None] * of_tokens.double())[some]
    )
    eps = torch.finfo(dtype).eps
    # half a unit in the last place; in fp32 also the roundings of products and sums
    close = {"rtol": 0.51 * eps, "atol": 2.0**-18}
    into = of_tokens.clone()
    assert add_gathered_(into, factor, of_entries, index) is into
    torch.testing.assert_close(into.double(), gathered, **close)
    assert torch.equal(into[~some], of_tokens[~some])
    into = of_entries.clone()
    assert add_scattered_(into, factor, of_tokens, index) is into
    torch.testing.assert_close(into.double(), scattered, **close)


def test_what_does_not_fit_is_refused() -> None:
    of_tokens, of_entries, factor, index, _ = tensors(19, 7, 40, torch.float32)
    before = of_tokens.clone()
    wrong = [
        (of_tokens, factor[1:], of_entries, index),
        (of_tokens, factor, of_entries, index[1:]),
        (of_tokens, factor, of_entries[:, 1:].contiguous(), index),
        (of_tokens[:, ::2], factor, of_entries[:, :20].contiguous(), index),
        (of_tokens[:, :20].contiguous(), factor, of_entries[:, :20], index),
    ]
    for into, factors, rows, indices in wrong:
        with pytest.raises(ValueError, match="must be contiguous with rows of one length"):
            add_gathered_(into, factors, rows, indices)
        with pytest.raises(ValueError, match="each token must have a factor and an index"):
            add_scattered_(rows, factors, into, indices)
    assert torch.equal(of_tokens, before)


@pytest.mark.parametrize("columns", [16, 1040])
@pytest.mark.parametrize("tokens", [1, PART - 1, PART, PART + 1, 5 * PART, 300])
@pytest.mark.parametrize("entries", [1, 2, 1000])
def interpreted_kernels_equal_the_references(tokens: int, columns: int, entries: int) -> None:
    of_tokens, of_entries, factor, index, _ = tensors(tokens, entries, columns, torch.float32)
    expected = add_gathered_ref(of_tokens.clone(), factor, of_entries, index)
    into = indexed_rows._launch_gathered(of_tokens.clone(), factor, of_entries, index)
    torch.testing.assert_close(into, expected, rtol=2**-22, atol=2**-22)
    expected = add_scattered_ref(of_entries.clone(), factor, of_tokens, index)
    into = indexed_rows._launch_scattered(of_entries.clone(), factor, of_tokens, index)
    torch.testing.assert_close(into, expected, rtol=2**-18, atol=2**-16)


def interpreted_kernels_leave_rows_without_an_index() -> None:
    of_tokens, of_entries, factor, index, _ = tensors(70, 9, 40, torch.float32)
    index.fill_(-1)
    into = indexed_rows._launch_gathered(of_tokens.clone(), factor, of_entries, index)
    assert torch.equal(into, of_tokens)
    into = indexed_rows._launch_scattered(of_entries.clone(), factor, of_tokens, index)
    assert torch.equal(into, of_entries)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_compile_for_sm90_with_16_byte_accesses_of_rows(dtype: torch.dtype) -> None:
    gathered = compile_sm90(
        indexed_rows._gathered_kernel,
        {
            "into_ptr": "*fp32",
            "factor_ptr": "*fp32",
            "table_ptr": POINTER[dtype],
            "index_ptr": "*i64",
            "T": "i32",
            "H": "i32",
        },
        {"ROWS": indexed_rows.ROWS, "BLOCK": indexed_rows.BLOCK},
        aligned=("H",),
        num_warps=indexed_rows.WARPS,
    )
    assert access_bytes(gathered).count(16) >= 4 * indexed_rows.ROWS
    sizes = {"PART": PART, "BLOCK": indexed_rows.PART_BLOCK}
    common = {"into_ptr": POINTER[dtype], "index_ptr": "*i32", "H": "i32"}
    common |= {"heads_ptr": "*fp32", "tails_ptr": "*fp32"}
    tokens = {"factor_ptr": "*fp32", "rows_ptr": "*bf16", "token_ptr": "*i64", "T": "i32"}
    for kernel, signature in (
        (indexed_rows._scattered_kernel, common | tokens),
        (indexed_rows._joined_kernel, common | {"behind_ptr": "*i32"}),
    ):
        compiled = compile_sm90(
            kernel, signature, sizes, aligned=("H",), num_warps=indexed_rows.PART_WARPS
        )
        assert max(access_bytes(compiled)) == 16
