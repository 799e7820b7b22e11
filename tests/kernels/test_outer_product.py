"""The product of two vectors, added to a matrix: against float64, kernel against the reference."""

import pytest
import torch
from torch import Tensor

from coatlm.kernels import outer_product
from coatlm.kernels.outer_product import add_outer_, add_outer_ref
from tests.fp8.sm90 import POINTER, access_bytes, compile_sm90, run_interpreted

DTYPES = [torch.float32, torch.bfloat16]


def tensors(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix, a column in fp32 and a row in BF16."""
    torch.manual_seed(0)
    matrix = torch.randn(rows, columns).to(dtype)
    return matrix, torch.randn(rows), torch.randn(columns).bfloat16()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_is_rounded_once(dtype: torch.dtype) -> None:
    matrix, column, row = tensors(19, 40, dtype)
    expected = matrix.double() + column.double()[:, None] * row.double()
    assert add_outer_(matrix, column, row) is matrix
    eps = torch.finfo(dtype).eps
    # half a unit in the last place; in fp32 also the rounding of the product
    torch.testing.assert_close(matrix.double(), expected, rtol=0.51 * eps, atol=2**-23)


def test_what_does_not_fit_is_refused() -> None:
    matrix, column, row = tensors(19, 40, torch.float32)
    before = matrix.clone()
    for arguments in [(matrix, column[1:], row), (matrix, column, row[1:]), (matrix, row, column)]:
        with pytest.raises(ValueError, match="lengths of the vectors"):
            add_outer_(*arguments)
    with pytest.raises(ValueError, match="contiguous"):
        add_outer_(matrix[:, :20], column, row[:20])
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("columns", [16, 1024, 2500])
@pytest.mark.parametrize("rows", [1, 8, 19])
def interpreted_kernel_equals_the_reference(rows: int, columns: int) -> None:
    matrix, column, row = tensors(rows, columns, torch.float32)
    expected = add_outer_ref(matrix.clone(), column, row)
    outer_product._launch(matrix, column, row)
    torch.testing.assert_close(matrix, expected, rtol=2**-22, atol=2**-22)


def test_kernel_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_compiles_for_sm90_with_16_byte_accesses(dtype: torch.dtype) -> None:
    compiled = compile_sm90(
        outer_product._add_outer_kernel,
        {
            "into_ptr": POINTER[dtype],
            "column_ptr": "*fp32",
            "row_ptr": "*bf16",
            "M": "i32",
            "N": "i32",
        },
        {"ROWS": outer_product.ROWS, "BLOCK": outer_product.BLOCK},
        aligned=("N",),
        num_warps=outer_product.WARPS,
    )
    narrow = [size for size in access_bytes(compiled) if size < 16]
    assert len(narrow) == outer_product.ROWS  # the elements of the column
