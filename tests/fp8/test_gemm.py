"""FP8 GEMMs on the CPU against GEMMs in fp64; what cannot be done is refused."""

import pytest
import torch
from torch import Tensor

from coatlm.fp8.formats import E4M3, E5M2, Fp8Format
from coatlm.fp8.gemm import PAIRS, ROW_BLOCK, SQUARE_BLOCK, matmul, scales_in_order
from coatlm.fp8.qtensor import ROW, TENSOR, Granularity, QTensor, block

M, N, K = 19, 32, 48
FP32 = 2.0**-20  # of the sum of magnitudes: 48 terms, each addition within 2^-24
BF16 = 2.0**-8  # half a spacing, as a part of the value


def operand(
    rows: int, granularity: Granularity, fmt: Fp8Format = E4M3, seed: int = 0, k: int = K
) -> QTensor:
    generator = torch.Generator().manual_seed(seed + rows)
    x = torch.randn(rows, k, generator=generator)
    shape = granularity.scale_shape(x.shape)
    scale = 2.0 ** torch.randint(-6, 6, shape, generator=generator).float()
    return QTensor(fmt.encode(x), scale, granularity, fmt)


def exact(a: QTensor, b: QTensor) -> tuple[Tensor, Tensor]:
    """The GEMM in fp64, and that of magnitudes, by which an fp32 sum's error is measured."""
    a64, b64 = (x.codes.double() * x.granularity.spread(x.scale.double(), x.shape) for x in (a, b))
    return a64 @ b64.t(), a64.abs() @ b64.abs().t()


def assert_bf16(actual: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    assert actual.dtype == torch.bfloat16
    allowed = BF16 * expected.abs() + FP32 * magnitude
    assert ((actual.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("granularity", [TENSOR, ROW])
@pytest.mark.parametrize(("a_fmt", "b_fmt"), [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_gemm_is_rounded_once_to_bf16(
    granularity: Granularity, a_fmt: Fp8Format, b_fmt: Fp8Format
) -> None:
    a, b = operand(M, granularity, a_fmt), operand(N, granularity, b_fmt)
    assert_bf16(matmul(a, b), *exact(a, b))


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_every_pair_of_granularities_multiplies_what_it_stands_for(
    first: Granularity, second: Granularity
) -> None:
    a, b = operand(M, first, k=384), operand(N, second, k=384)
    assert_bf16(matmul(a, b), *exact(a, b))


def test_scales_of_blocks_lie_as_cublaslt_reads_them() -> None:
    rows = operand(M, ROW_BLOCK, k=384)
    assert torch.equal(scales_in_order(rows), rows.scale)
    assert scales_in_order(rows).stride() == (1, M)
    square = operand(200, SQUARE_BLOCK, k=384)
    padded = scales_in_order(square)
    assert torch.equal(padded[:, :3], square.scale)
    assert (padded.shape, padded.stride()) == ((2, 4), (4, 1))


def test_scales_that_are_in_order_are_not_copied() -> None:
    rows, square = operand(M, ROW_BLOCK, k=512), operand(200, SQUARE_BLOCK, k=512)
    for x in (QTensor(rows.codes, scales_in_order(rows), ROW_BLOCK, E4M3), square):
        assert scales_in_order(x).data_ptr() == x.scale.data_ptr()


def test_bias_and_a_matrix_are_added_before_the_rounding() -> None:
    a, b = operand(M, ROW), operand(N, ROW)
    product, magnitude = exact(a, b)
    bias, add = torch.randn(N).bfloat16(), 100 * torch.randn(M, N).bfloat16()
    assert_bf16(matmul(a, b, bias=bias), product + bias.double(), magnitude + bias.double().abs())
    assert_bf16(matmul(a, b, add=add), product + add.double(), magnitude + add.double().abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_is_added_to_in_place_and_returned(dtype: torch.dtype) -> None:
    a, b = operand(M, TENSOR, E5M2), operand(N, TENSOR)
    product, magnitude = exact(a, b)
    before = torch.randn(M, N).to(dtype)
    out = before.clone()
    assert matmul(a, b, out=out) is out
    expected = before.double() + product
    allowed = FP32 * (magnitude + before.double().abs())
    if dtype == torch.bfloat16:
        allowed += BF16 * expected.abs()
    assert ((out.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_is_overwritten_whatever_it_held(dtype: torch.dtype) -> None:
    a, b = operand(M, TENSOR, E5M2), operand(N, TENSOR)
    out = torch.full((M, N), torch.nan, dtype=dtype)
    assert matmul(a, b, out=out, accumulate=False) is out
    assert torch.equal(out, matmul(a, b, out=torch.zeros(M, N, dtype=dtype)))


@pytest.mark.parametrize("fast", [True, False])
def test_accumulation_on_the_cpu_is_fp32_either_way(fast: bool) -> None:
    a, b = operand(M, ROW), operand(N, ROW)
    assert torch.equal(matmul(a, b, fast=fast), matmul(a, b))


def test_a_code_that_is_no_number_makes_its_row_nan() -> None:
    a, b = operand(M, ROW), operand(N, ROW)
    a.codes.view(torch.uint8)[3, 5] = 0x7F
    assert matmul(a, b).isnan().all(1).nonzero().flatten().tolist() == [3]


def test_shapes_that_do_not_fit_are_refused() -> None:
    a, b = operand(M, TENSOR), operand(N, TENSOR)
    short = QTensor(b.codes[:, :16].contiguous(), b.scale, TENSOR, E4M3)
    with pytest.raises(ValueError, match=r"shapes \[19, 48\] and \[32, 16\]"):
        matmul(a, short)
    with pytest.raises(ValueError, match=r"shapes \[1, 19, 48\]"):
        matmul(QTensor(a.codes[None], a.scale, TENSOR, E4M3), b)


@pytest.mark.parametrize(
    ("first", "second"),
    [(ROW, ROW_BLOCK), (block(1, 16), block(1, 16)), (SQUARE_BLOCK, SQUARE_BLOCK)],
)
def test_scales_that_the_tensor_cores_do_not_take_are_refused(
    first: Granularity, second: Granularity
) -> None:
    with pytest.raises(ValueError, match=r"must be TENSOR and TENSOR, ROW and ROW, ROW and TENSOR"):
        matmul(operand(M, first, k=128), operand(N, second, k=128))


def test_a_gemm_is_added_to_one_matrix_only() -> None:
    matrix = torch.zeros(M, N).bfloat16()
    with pytest.raises(ValueError, match="add"):
        matmul(operand(M, TENSOR), operand(N, TENSOR), out=matrix, add=matrix)
