"""FP8 operands on a GPU: the codes and scales of `emit_ref` on CPU copies, bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coatlm.config.operands import ROW, TENSOR, Operand, block
from coatlm.fp8.formats import E4M3
from coatlm.fp8.gemm import scales_in_order
from coatlm.fp8.norm_quantize import quantize_rows
from coatlm.fp8.operand import emit, emit_ref
from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.quantize import quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LINES, SQUARES = block(1, 128), block(128, 128)
OPERANDS = [
    Operand(fmt, granularity, power_of_two=power)
    for granularity in (TENSOR, ROW, LINES, SQUARES)
    for power in (True, False)
    for fmt in ("e4m3", "e5m2")
]
every = pytest.mark.parametrize("operand", OPERANDS, ids=str)
shapes = pytest.mark.parametrize(
    "shape", [(300, 4096), (37, 384), (1, 128), (129, 5504), (1024, 2816)]
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def matrix(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows and columns of very different sizes, and one row of zeros; CPU."""
    x = torch.randn(m, k) * 10.0 ** torch.randint(-3, 4, (m, 1)) * 2.0 ** torch.randint(-3, 4, (k,))
    x[m // 2] = 0
    return x.to(dtype)


def on_gpu(x: Tensor | QTensor) -> Tensor | QTensor:
    if isinstance(x, QTensor):
        return replace(x, codes=x.codes.cuda(), scale=x.scale.cuda())
    return x.cuda()


def same(actual: QTensor | None, expected: QTensor | None, rows: int | None = None) -> None:
    """Assert equal bits but for those of NaN, in the first `rows` columns if they are given."""
    assert (actual is None) == (expected is None)
    if actual is None or expected is None:
        return
    assert (actual.granularity, actual.fmt) == (expected.granularity, expected.fmt)
    scales = actual.scale.cpu(), expected.scale
    torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)
    bits = []
    for codes in (actual.codes.cpu()[:, :rows], expected.codes[:, :rows]):
        byte = codes.contiguous().view(torch.uint8).clone()
        byte[codes.float().isnan()] = 255
        bits.append(byte)
    assert torch.equal(*bits)


def check(
    x: Tensor | QTensor,
    direct: Operand | None,
    transposed: Operand | None,
    scale: Tensor | None = None,
    *,
    rows: int | None = None,
) -> None:
    expected = emit_ref(x, direct=direct, transposed=transposed, scale=scale)
    scale = None if scale is None else scale.cuda()
    made = emit(on_gpu(x), direct=direct, transposed=transposed, scale=scale)
    same(made.direct, expected.direct)
    same(made.transposed, expected.transposed, rows)


def fits(shape: tuple[int, int], operand: Operand) -> None:
    if operand.granularity.columns and shape[1] % operand.granularity.columns:
        pytest.skip("blocks do not divide the rows")


@every
@shapes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_operands_have_the_bits_of_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, operand: Operand
) -> None:
    fits(shape, operand)
    check(matrix(*shape, dtype), operand, operand)


@every
def test_one_operand_alone_has_the_bits_of_the_reference(operand: Operand) -> None:
    x = matrix(300, 640)
    check(x, operand, None)
    check(x, None, operand)


def test_operands_of_two_kinds_come_from_one_call() -> None:
    x = matrix(300, 640)
    for direct in OPERANDS:
        check(x, direct, OPERANDS[0])
        check(x, OPERANDS[-1], direct)


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_makes_its_block_nan(bad: float, operand: Operand) -> None:
    x = matrix(200, 512)
    x[130, 300] = bad
    check(x, operand, operand, rows=200)


@every
def test_decoded_blocks_and_rows_are_sources_too(operand: Operand) -> None:
    x = matrix(300, 640)
    for dtype in (torch.float32, torch.float8_e8m0fnu):
        for size in (16, 128):
            granularity = block(1, size)
            saved = quantize(x, fmt=E4M3, granularity=granularity, scale_dtype=dtype)
            check(saved, operand, operand)
    check(quantize_rows(x), operand, operand)


@pytest.mark.parametrize("power_of_two", [True, False])
def test_a_given_scale_and_an_amax(power_of_two: bool) -> None:
    operand = Operand("e4m3", TENSOR, power_of_two=power_of_two)
    x, amax = matrix(300, 640), torch.zeros((), device="cuda")
    check(x, operand, operand, torch.tensor(2.0**-9))
    scale = torch.tensor(2.0**-9, device="cuda")
    emit(x.cuda(), direct=operand, transposed=operand, scale=scale, amax=amax)
    assert amax == x.float().abs().amax()


@pytest.mark.parametrize("granularity", [LINES, SQUARES], ids=str)
def test_scales_of_blocks_lie_as_the_gemm_reads_them(granularity: object) -> None:
    operand = Operand("e4m3", granularity)  # type: ignore[arg-type]
    made = emit(matrix(300, 640).cuda(), direct=operand, transposed=operand)
    for x in made:
        assert x is not None
        assert scales_in_order(x).data_ptr() == x.scale.data_ptr()
        assert scales_in_order(x).stride() == x.scale.stride()


@every
def test_operands_wait_for_nothing_and_run_in_a_cuda_graph(operand: Operand) -> None:
    x = matrix(256, 512).cuda()
    expected = emit(x, direct=operand, transposed=operand)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = emit(x, direct=operand, transposed=operand)
    graph.replay()
    for actual, wanted in zip(made, expected, strict=True):
        assert actual is not None and wanted is not None
        same(
            actual, QTensor(wanted.codes.cpu(), wanted.scale.cpu(), wanted.granularity, wanted.fmt)
        )
