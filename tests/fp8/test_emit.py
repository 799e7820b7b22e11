"""The epilogue's kernels, simulated on the CPU: the bits of the references, tails, NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coatlm.config.operands import ROW, TENSOR, Operand, block
from coatlm.fp8 import (
    amax,
    emit,
    launch,
    loaders,
    quantize,
    rope_quantize,
    scaling,
    swiglu_quantize,
    swiglu_tiles,
    tiles,
    transpose,
)
from coatlm.fp8.formats import E4M3, E5M2, Fp8Format
from coatlm.fp8.gemm import padded_rows
from coatlm.fp8.launch import Matrix, Placed, emit_operands
from coatlm.fp8.norm_quantize import quantize_rows
from coatlm.fp8.operand import emit_ref, padded
from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.saved_blocks import parts_of
from coatlm.fp8.swiglu_quantize import swiglu_backward_quantize_ref
from coatlm.kernels.rope import rope_frequencies, rope_tables
from tests.fp8.gluon_on_cpu import simulated

CODE = (amax, emit, loaders, quantize, rope_quantize, scaling, swiglu_tiles, tiles)
PER_TENSOR, PER_ROW = Operand("e4m3", TENSOR), Operand("e4m3", ROW)
LINES, SQUARES = Operand("e4m3", block(1, 128)), Operand("e4m3", block(128, 128))
OPERANDS = {
    "tensor": PER_TENSOR,
    "tensor, fp32": replace(PER_TENSOR, power_of_two=False),
    "tensor, e5m2": replace(PER_TENSOR, fmt="e5m2"),
    "rows": PER_ROW,
    "rows, e5m2": replace(PER_ROW, fmt="e5m2"),
    "rows, fp32": replace(PER_ROW, power_of_two=False),
    "1 x 128": LINES,
    "1 x 128, fp32, e5m2": replace(LINES, fmt="e5m2", power_of_two=False),
    "128 x 128": SQUARES,
    "128 x 128, fp32": replace(SQUARES, power_of_two=False),
}
every = pytest.mark.parametrize("operand", OPERANDS.values(), ids=OPERANDS)
shapes = pytest.mark.parametrize("shape", [(37, 128), (131, 256)])


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    torch.manual_seed(0)
    with simulated(*CODE):
        yield


def matrix(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows and columns of very different sizes, and one row of zeros."""
    x = torch.randn(m, k) * 10.0 ** torch.randint(-3, 4, (m, 1)) * 2.0 ** torch.randint(-3, 4, (k,))
    x[m // 2] = 0
    return x.to(dtype)


def same(actual: QTensor | None, expected: QTensor | None) -> None:
    """Assert equal bits, but for those of NaN."""
    assert (actual is None) == (expected is None)
    if actual is None or expected is None:
        return
    assert (actual.granularity, actual.fmt) == (expected.granularity, expected.fmt)
    assert actual.scale.shape == expected.scale.shape
    torch.testing.assert_close(actual.scale, expected.scale, rtol=0, atol=0, equal_nan=True)
    one, other = (x.codes.view(torch.uint8).clone() for x in (actual, expected))
    for bits, x in ((one, actual), (other, expected)):
        bits[x.codes.float().isnan()] = 255
    assert torch.equal(one, other)


def check(
    x: Tensor | QTensor,
    direct: Operand | None,
    transposed: Operand | None,
    scale: Tensor | None = None,
) -> None:
    """Codes, scales and the amax are those of the reference."""
    amaxes = [torch.tensor(0.0) for _ in range(2)]
    m = x.shape[0]
    length = m if transposed is None else padded(m, transposed.granularity)
    made = emit_operands(x, direct, transposed, scale, amaxes[0], length)
    expected = emit_ref(x, direct=direct, transposed=transposed, scale=scale, amax=amaxes[1])
    same(made[0], expected.direct)
    same(made[1], expected.transposed)
    finite = [amax.where(amax.isfinite(), torch.nan) for amax in amaxes]
    torch.testing.assert_close(*finite, rtol=0, atol=0, equal_nan=True)


@every
@shapes
def test_both_operands_have_the_bits_of_the_reference(
    shape: tuple[int, int], operand: Operand
) -> None:
    check(matrix(*shape), operand, operand)


@every
def test_one_operand_alone_has_the_bits_of_the_reference(operand: Operand) -> None:
    x = matrix(40, 128, torch.float32)
    check(x, operand, None)
    check(x, None, operand)


@pytest.mark.parametrize("transposed", [PER_TENSOR, LINES, replace(SQUARES, fmt="e5m2")])
def test_operands_of_two_kinds_come_from_one_call(transposed: Operand) -> None:
    for direct in (PER_ROW, LINES, SQUARES):
        check(matrix(140, 128), direct, transposed)


@pytest.mark.parametrize("power_of_two", [True, False])
def test_a_given_scale_saturates_and_the_amax_is_that_of_the_matrix(power_of_two: bool) -> None:
    operand = replace(PER_TENSOR, power_of_two=power_of_two)
    check(matrix(37, 64), operand, operand, torch.tensor(2.0**-9))


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_makes_its_block_nan(bad: float, operand: Operand) -> None:
    x = matrix(48, 128)
    x[3, 5] = bad
    check(x, operand, operand)


@every
def test_decoded_blocks_and_rows_are_sources_too(operand: Operand) -> None:
    x = matrix(37, 128)
    for dtype in (torch.float32, torch.float8_e8m0fnu):
        saved = quantize.quantize(x, fmt=E4M3, granularity=block(1, 16), scale_dtype=dtype)
        check(saved, operand, operand)
    check(quantize_rows(x), operand, operand)


@pytest.mark.parametrize("size", [0, 16, 128])
def test_a_recomputed_norm_has_the_bits_of_the_reference(size: int) -> None:
    x, row, weight = matrix(37, 128), torch.rand(37) + 0.5, torch.rand(128).bfloat16()
    source: Tensor | QTensor = x
    if size:
        source = quantize.quantize(
            x, fmt=E4M3, granularity=block(1, size), scale_dtype=torch.float8_e8m0fnu
        )
    scale = torch.tensor(2.0**4)
    options = {"row": row, "column": weight}
    expected = transpose.quantize_ref(source, scale, fmt=E4M3, **options)
    codes, codes_t = transpose._quantize(
        source, scale, E4M3, direct=True, transposed=True, **options
    )
    assert torch.equal(codes.view(torch.uint8), expected.direct.codes.view(torch.uint8))
    assert torch.equal(codes_t.view(torch.uint8), expected.transposed.codes.view(torch.uint8))


def test_weights_cast_twice_and_moved_codes_are_those_of_the_reference() -> None:
    w = matrix(48, 64)
    rows = quantize_rows(w)
    expected = transpose.quantize_rows_transposed(w, rows.scale)
    source, tile = (w, rows.scale), launch.WIDE_TILE
    load = loaders.load_forward_codes
    _, made = transpose._launch(load, source, expected.scale, E4M3, tile, transposed=True)
    assert torch.equal(made.view(torch.uint8), expected.codes.view(torch.uint8))
    moved = (rows.codes.view(torch.uint8),)
    _, made = transpose._launch(
        loaders.load_codes, moved, expected.scale, E4M3, launch.CODES_TILE, transposed=True
    )
    assert torch.equal(made.view(torch.uint8), transpose.padded_t(rows.codes).view(torch.uint8))


@pytest.mark.parametrize("poisoned", [False, True])
def test_sums_over_the_rows_of_a_tile_are_of_values_that_are_not_rounded(poisoned: bool) -> None:
    m, k, scale = 300, 160, torch.tensor(0.25)
    x = matrix(m, k).float()
    if poisoned:
        x[130, 7] = math.nan
    source, size, tile = launch.matrix_source(x)
    made = Matrix(*empty_codes(m, k, E5M2), scale)
    sums = torch.full((3, k), 5.0)
    launch.launch_emit(
        *(loaders.load_matrix, source, (made,), (Placed(0, E5M2),), (m, padded_rows(m), k), tile),
        options=size,
        sums=sums,
    )
    parts = (x / scale).split(tile.rows)
    wanted, size = (torch.stack([y.sum(0) for y in z]) for z in (parts, [p.abs() for p in parts]))
    assert (sums.isnan() == wanted.isnan()).all()
    assert not ((sums - wanted).abs() > 1e-6 * size).any()
    assert wanted.isnan().sum() == poisoned


def empty_codes(m: int, k: int, fmt: Fp8Format) -> tuple[Tensor, Tensor]:
    length = padded_rows(m)
    return torch.empty(m, k, dtype=fmt.dtype), torch.empty(k, length, dtype=fmt.dtype)


def steps_apart(actual: Tensor, expected: Tensor) -> Tensor:
    return (actual.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()


@pytest.mark.parametrize("size", [0, 16, 64])
def test_the_gradient_of_swiglu_has_the_codes_of_the_reference(size: int) -> None:
    m, f = 37, 128
    x, da, one = matrix(m, 2 * f).clamp(-20, 20), matrix(m, f), torch.tensor(0.5)
    seen: Tensor | QTensor = x
    if size:
        e8m0 = {"granularity": block(1, size), "scale_dtype": torch.float8_e8m0fnu}
        seen = quantize.quantize(x, fmt=E4M3, **e8m0)
    amaxes = [torch.tensor(0.0) for _ in range(2)]
    wanted = swiglu_backward_quantize_ref(da, seen, one, E5M2, True, None, amaxes[0])
    elements, exponents, size = parts_of(seen)
    tile = swiglu_quantize.TILE._replace(inner=16)
    gradient = Matrix(*empty_codes(m, 2 * f, E5M2), wanted.dx.scale)
    a = Matrix(None, empty_codes(m, f, E4M3)[1], one)
    launch.launch_emit(
        swiglu_tiles.load_gradient,
        (da, elements, exponents),
        (gradient, a),
        (Placed(0, E5M2, 2, 0), Placed(0, E5M2, 2, 1), Placed(1, E4M3)),
        (m, padded_rows(m), f),
        tile,
        options=(size, True),
        amax=amaxes[1],
    )
    pairs = (gradient.codes, wanted.dx), (gradient.codes_t, wanted.dx_t), (a.codes_t, wanted.a_t)
    for actual, expected in pairs:
        apart = steps_apart(actual, expected.codes)  # exponentials differ in their last bits
        assert apart.max() <= 1 and apart.count_nonzero() <= 1e-3 * apart.numel()
    torch.testing.assert_close(*amaxes, rtol=1e-6, atol=0)
    load, few = swiglu_tiles.load_largest, swiglu_quantize.AMAX_TILE
    found = launch.launch_amax(load, (da, elements, exponents), m, f, few, options=size)
    torch.testing.assert_close(found.amax(), amaxes[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("half", [16, 40])
def test_the_gradient_of_qkv_has_the_bits_of_the_reference(half: int) -> None:
    s, b, kv_heads, queries = 19, 2, 2, 3
    parts = [
        torch.randn(s, b, n, 2 * half).bfloat16() for n in (kv_heads * queries, kv_heads, kv_heads)
    ]
    parts[0] = parts[0].permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    tables = rope_tables(torch.arange(s), rope_frequencies(2 * half, 100.0))
    amaxes = [torch.tensor(0.0) for _ in range(2)]
    wanted = rope_quantize.join_quantize_ref(*parts, *tables, E5M2, None, amaxes[0])
    strides = (x.stride()[:3] for x in parts)
    source, tile = (*parts, *tables, b, *strides), rope_quantize.tile_of(half)
    width, options = kv_heads * (queries + 2) * 2 * half, (queries + 2, half)
    made = Matrix(*empty_codes(s * b, width, E5M2), wanted.direct.scale)
    launch.launch_emit(
        rope_quantize.load_joined,
        source,
        (made,),
        (Placed(0, E5M2), Placed(0, E5M2, further=half)),
        (s * b, padded_rows(s * b), width),
        tile,
        options=options,
        amax=amaxes[1],
    )
    assert not steps_apart(made.codes, wanted.direct.codes).any()
    assert not steps_apart(made.codes_t, wanted.transposed.codes).any()
    few = tile._replace(rows=rope_quantize.AMAX_ROWS)
    found = launch.launch_amax(
        rope_quantize.load_joined, source, s * b, width, few, options=options
    )
    assert amaxes[0] == amaxes[1] == found.amax()
