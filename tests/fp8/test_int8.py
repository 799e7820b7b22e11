"""Rotated INT8 operands: their errors, special values, exact sums, and the kernels on a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.config.operands import ROW, TENSOR, Operand
from coatlm.config.recipes import ROWS
from coatlm.fp8 import (
    gemm,
    int8,
    int8_gemm,
    norm_quantize,
    rotation,
    row_codes,
    saved_blocks,
    scaling,
    swiglu_quantize,
)
from coatlm.fp8.formats import E4M3, INT8
from coatlm.fp8.norm_quantize import Normed
from coatlm.fp8.operand import emit_direct
from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.rotation import hadamard, rotate, span_of
from coatlm.fp8.scaling import power_of_two_ref
from tests.fp8.bounds import assert_rotated_codes, assert_same_blocks
from tests.fp8.gluon_on_cpu import simulated
from tests.fp8.sm90 import access_bytes, launches_compiled, spilled_bytes

LENGTHS = pytest.mark.parametrize("k", [64, 192, 48, 1024])


quantize = partial(norm_quantize.quantize_rows, rotated=True)


def normed(a: Tensor, weight: Tensor, **options: Any) -> Normed:
    return norm_quantize.norm_quantize(a, weight, 1e-5, rotated=True, **options)


def gaussian(m: int, k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, k, generator=generator).bfloat16()


def relative(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


@LENGTHS
def test_a_rotation_is_its_own_inverse_and_preserves_products(k: int) -> None:
    x, w = gaussian(5, k).double(), gaussian(7, k, 1).double()
    assert relative(rotate(rotate(x)), x) < 1e-6
    assert relative(rotate(x).double() @ rotate(w).double().t(), x @ w.t()) < 1e-6
    n = span_of(k)
    assert n == (16 if k == 48 else 64)
    one = torch.zeros(1, k)
    one[0, n - 1] = 1.0  # the last column of H, whose signs are the parities of bits
    signs = torch.tensor([(-1.0) ** i.bit_count() for i in range(n)]) / n**0.5
    assert torch.equal(rotate(one)[0, :n], signs)
    assert not rotate(one)[0, n:].any()
    assert torch.equal(hadamard(n, x.device), hadamard(n, x.device).t())


@pytest.mark.parametrize("k", [8, 40])
def test_rows_that_no_matrix_divides_are_refused(k: int) -> None:
    with pytest.raises(ValueError, match=rf"rows of {k}: .* multiples of 16"):
        quantize(torch.zeros(2, k))


@pytest.mark.parametrize("k", [1024, 48])
def test_gaussian_rows_lose_less_than_a_third_of_what_e4m3_loses(k: int) -> None:
    x = gaussian(64, k)
    found = relative(quantize(x).dequantize(), x)
    crest = (rotate(x).abs().amax(-1) / x.float().pow(2).mean(-1).sqrt()).pow(2).mean().sqrt()
    assert found == pytest.approx(crest.item() / (127 * 12**0.5), rel=0.05)
    assert found < relative(emit_direct(x, ROWS).dequantize(), x) / 3


def test_an_outlier_is_spread_over_its_span() -> None:
    """Without a rotation the other elements of the row would lose 8 times as much."""
    x = gaussian(64, 1024)
    x[:, 77] = 60.0
    rotated = quantize(x).dequantize()
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    plain = (x.float() / scale).round() * scale
    others = torch.arange(1024) // 64 != 77 // 64
    errors = [relative(y[:, others], x[:, others]) for y in (plain, rotated)]
    assert 5 < errors[0] / errors[1] < 8.5
    assert errors[1] < 0.03


@pytest.mark.parametrize("factor", [16, 64, 256, 1024, 8192])
def test_outlier_channels_hurt_where_weights_make_up_for_them(factor: int) -> None:
    """An outlier of activations alone is a part of the product that E4M3 rounds more."""
    x, w = gaussian(128, 2048), gaussian(64, 2048, 1)
    x[:, 77] *= factor
    alone, matched = w, w.clone()
    matched[:, 77] /= factor
    errors = {}
    for name, weight in (("alone", alone), ("matched", matched)):
        exact = x.double() @ weight.double().t()
        integers = gemm.matmul(quantize(x), quantize(weight))
        e4m3 = emit_direct(x, ROWS).dequantize() @ emit_direct(weight, ROWS).dequantize().t()
        errors[name] = relative(integers, exact) / relative(e4m3, exact)
    assert errors["alone"] < 0.6
    assert (errors["matched"] > 1) is (factor > 64)


def test_codes_are_integers_of_which_the_largest_of_a_row_is_127() -> None:
    made = quantize(gaussian(9, 320))
    assert made.codes.dtype == torch.int8
    assert (made.fmt, made.granularity, made.scale.shape) == (INT8, ROW, (9, 1))
    assert made.codes.int().abs().amax(-1).eq(127).all()
    y = rotate(gaussian(9, 320))
    assert (made.codes.float() * made.scale - y).abs().le(made.scale * 0.5001).all()


def test_rows_of_zeros_and_rows_that_are_not_finite_have_no_effect_on_others() -> None:
    x = gaussian(5, 128)
    x[0], x[1, 3], x[2, 3] = 0.0, torch.nan, torch.inf
    made = quantize(x)
    assert made.scale[0] == 2.0**-126
    assert not made.codes[:3].any()
    y = gemm.matmul(made, quantize(gaussian(16, 128, 1)))
    assert not y[0].any()
    assert not y[1:3].isfinite().any()
    assert y[3:].isfinite().all()


@pytest.mark.parametrize("k", [320, 48])
def test_e4m3_holds_each_row_with_the_scale_that_follows_from_its_codes(k: int) -> None:
    x = gaussian(20, k) * torch.logspace(-4, 3, 20)[:, None]
    x[3], x[4] = 0.0, 0.0
    x[4, 7] = 5.0  # rotated, its elements are sqrt(n) smaller
    scale = int8.e4m3_scale(quantize(x))
    needed = power_of_two_ref(x.float().abs().amax(-1, keepdim=True), E4M3)
    assert scale.log2().frac().eq(0).all()
    assert scale[3] < 2.0**-100
    others = torch.arange(20) != 3
    assert needed[others].le(scale[others]).all()
    assert scale[others].le(16 * needed[others]).all()
    assert scale[4] == needed[4]


def test_sums_are_exact_in_any_order() -> None:
    a, b = (QTensor(codes(n, 4096, n), torch.ones(n, 1), ROW, INT8) for n in (3, 16))
    order = torch.randperm(4096)
    a2, b2 = (QTensor(x.codes[:, order].contiguous(), x.scale, ROW, INT8) for x in (a, b))
    exact = (a.codes.long() @ b.codes.long().t()).float().bfloat16()
    assert torch.equal(gemm.matmul(a, b), exact)
    assert torch.equal(gemm.matmul(a2, b2), exact)


def codes(m: int, k: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, (m, k), generator=generator, dtype=torch.int8)


@pytest.mark.parametrize("options", [(), ("add",), ("bias",), ("add", "bias")])
def test_a_gemm_is_that_of_the_dequantized_operands(options: tuple[str, ...]) -> None:
    x, w = gaussian(33, 192), gaussian(48, 192, 1)
    a, b = quantize(x), quantize(w)
    given = {"add": gaussian(33, 48, 2), "bias": gaussian(1, 48, 3)[0]}
    given = {name: given[name] for name in options}
    exact = a.dequantize().double() @ b.dequantize().double().t()
    exact = sum((t.double() for t in given.values()), exact)
    found = gemm.matmul(a, b, **given)
    assert relative(found, exact) < 2**-9
    assert relative(found, x.double() @ w.double().t()) < (0.012 if not options else 1)


def test_a_gemm_overwrites_its_output_or_adds_to_it() -> None:
    a, b = quantize(gaussian(8, 64)), quantize(gaussian(16, 64, 1))
    plain, out = gemm.matmul(a, b), gaussian(8, 16, 2)
    before = out.clone()
    assert gemm.matmul(a, b, out=out, accumulate=False) is out
    assert torch.equal(out, plain)
    gemm.matmul(a, b, out=out.copy_(before))
    assert relative(out, before.double() + plain.double()) < 2**-7


def test_operands_of_two_kinds_and_other_outputs_are_refused() -> None:
    a, w = quantize(gaussian(8, 64)), gaussian(16, 64, 1)
    with pytest.raises(ValueError, match="operands are int8 and e4m3: INT8 takes two INT8"):
        gemm.matmul(a, emit_direct(w, ROWS))
    with pytest.raises(ValueError, match=r"torch\.bfloat16 for `out`"):
        gemm.matmul(a, quantize(w), out=torch.zeros(8, 16))
    too_long = torch.zeros(1, 133_152, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match=r"rows of 133152: .* up to 133144"):
        quantize(too_long)
    with pytest.raises(ValueError, match=r"rows of 133152: .* up to 133144"):
        swiglu_quantize.swiglu_quantize(torch.zeros(1, 2 * 133152), rotated=True)
    with pytest.raises(ValueError, match="fmt=int8: scales are amax / 127 per row"):
        Operand("int8", TENSOR)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [48, 896, 4096, 14336, 65536])
def test_the_quantization_compiles_for_sm90(k: int, dtype: torch.dtype) -> None:
    x = torch.empty(1024, k, dtype=dtype, device="meta")
    with launches_compiled(norm_quantize) as made:
        norm_quantize._quantize_rows(x, rotated=True)
    (kernel,) = made
    assert ("mma.sync" in kernel.asm["ptx"]) is (k != 48)  # without it, a thread holds a span
    assert max(access_bytes(kernel)) == 16


MODULES = (int8, norm_quantize, row_codes, rotation, saved_blocks, scaling, swiglu_quantize)


@pytest.mark.parametrize(("m", "k"), [(5, 192), (3, 48), (2, 4096), (2, 896)])
def test_simulated_kernels_have_the_codes_of_the_reference(m: int, k: int) -> None:
    x = gaussian(m, k)
    x[1] = 0.0
    with simulated(*MODULES):
        made = norm_quantize._quantize_rows(x, rotated=True)
    assert_rotated_codes(made, int8.quantize_ref(x))


@pytest.mark.parametrize("size", [0, 16, 64])
@pytest.mark.parametrize("with_add", [True, False])
def test_the_simulated_norm_has_the_results_of_the_reference(size: int, with_add: bool) -> None:
    a, weight = gaussian(4, 1088).float(), gaussian(1, 1088, 1)[0].float()
    add = gaussian(4, 1088, 2).float() if with_add else None
    with simulated(*MODULES):
        made = norm_quantize._norm_quantize(a, weight, 1e-5, add, size, rotated=True)
    wanted = normed(a, weight, add=add, block_size=size)
    assert_rotated_codes(made.y, wanted.y)
    assert torch.equal(made.x, wanted.x)
    torch.testing.assert_close(made.rstd, wanted.rstd)
    assert_same_blocks(made.saved, wanted.saved)


@pytest.mark.parametrize(("f", "size"), [(640, 0), (640, 16), (1024, 128), (48, 16)])
def test_simulated_swiglu_has_the_results_of_the_reference(f: int, size: int) -> None:
    x = gaussian(3, 2 * f)
    with simulated(*MODULES):
        made = swiglu_quantize._swiglu_quantize(x, size, rotated=True)
    wanted = swiglu_quantize.swiglu_quantize(x, block_size=size, rotated=True)
    assert_rotated_codes(made.a, wanted.a)
    assert_same_blocks(made.saved, wanted.saved)


def test_blocks_that_kernels_do_not_have_are_refused() -> None:
    x, weight = gaussian(4, 192), torch.ones(192)
    with pytest.raises(ValueError, match="block_size=48: beside rotated rows 0, or a power of two"):
        normed(x, weight, block_size=48)
    with pytest.raises(ValueError, match="block_size=1024: beside rotated rows"):
        normed(gaussian(4, 1024), torch.ones(1024), block_size=1024)
    with pytest.raises(ValueError, match="block_size=8: beside rotated rows"):
        swiglu_quantize.swiglu_quantize(x, block_size=8, rotated=True)


def test_tensors_that_the_gemm_would_read_in_another_way_are_refused() -> None:
    a, b = quantize(gaussian(32, 64)), quantize(gaussian(32, 64, 1))
    for name in ("add", "out"):
        for x in (gaussian(32, 32).t(), gaussian(1, 32), gaussian(31, 32)):
            with pytest.raises(ValueError, match=rf"{name} is .*: must be \[32, 32\] with columns"):
                int8_gemm.matmul(a, b, **{name: x})
    for bias in (gaussian(1, 64)[0, ::2], gaussian(1, 16)[0]):
        with pytest.raises(ValueError, match=r"bias is .*: must be \[32\], contiguous"):
            int8_gemm.matmul(a, b, bias=bias)
    whole = QTensor(b.codes, torch.ones(()), TENSOR, INT8)
    with pytest.raises(ValueError, match="INT8 has one per row"):
        int8_gemm.matmul(a, whole)
    long = QTensor(codes(1, 133152, 0), torch.ones(1, 1), ROW, INT8)
    with pytest.raises(ValueError, match="rows of 133152: an int32 holds sums of 133144 products"):
        int8_gemm.matmul(long, long)


@pytest.mark.parametrize("with_terms", [False, True])
def test_the_gemm_compiles_to_integer_tensor_cores_without_spills(with_terms: bool) -> None:
    a, b = quantize(gaussian(256, 512)), quantize(gaussian(512, 512, 1))
    out, bias = torch.empty(256, 512, dtype=torch.bfloat16), gaussian(1, 512)[0]
    with launches_compiled(int8_gemm) as made:
        int8_gemm._multiply(a, b, out, *((out, bias) if with_terms else (None, None)), 132)
    (kernel,) = made
    tiles = int8_gemm.BM // 64 * (int8_gemm.BK // 32)
    wgmma = "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8"
    assert kernel.asm["ptx"].count(wgmma) == 2 * tiles  # of each consumer
    assert kernel.metadata.shared <= 227 * 1024
    assert spilled_bytes(kernel) == 0
    # what a consumer has written is seen by TMA: once for the barriers, and for each part it stores
    parts = int8_gemm.BN // int8_gemm.PART
    assert kernel.asm["ptx"].count("fence.proxy.async") == 1 + 2 * parts


@pytest.mark.parametrize(
    ("m", "n", "k", "programs"),
    [
        (1, 16, 48, 4),  # a tile of one step; programs without a tile
        (300, 528, 896, 2),  # 15 tiles of more steps than there are stages
        (130, 272, 2064, 3),  # two tiles for each program, the last step in part
        (700, 264, 128, 5),
    ],
)
@pytest.mark.parametrize("with_terms", [False, True])
def test_the_simulated_gemm_has_the_bits_of_the_reference(
    m: int, n: int, k: int, programs: int, with_terms: bool
) -> None:
    a, b = quantize(gaussian(m, k)), quantize(gaussian(n, k, 1))
    add, bias = (gaussian(m, n, 2), gaussian(1, n, 3)[0]) if with_terms else (None, None)
    wider = torch.full((m, n + 16), torch.nan).bfloat16()  # of which the result is a part
    out = wider[:, :n] if add is None else wider[:, :n].copy_(add)
    with simulated(int8_gemm):
        int8_gemm._multiply(a, b, out, None if add is None else out, bias, programs)
    assert torch.equal(out, int8_gemm.matmul_ref(a, b, add=add, bias=bias))
    assert wider[:, n:].isnan().all()
