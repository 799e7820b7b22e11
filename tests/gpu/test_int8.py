"""Rotated INT8 operands on a GPU: codes of the reference, exact sums, graphs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from coatlm.fp8 import int8_gemm
from coatlm.fp8.norm_quantize import norm_quantize, quantize_rows
from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.swiglu_quantize import swiglu_quantize
from tests.fp8.bounds import assert_rotated_codes, assert_same_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


# A number next to a tie is rounded to another BF16 before it is rotated, and moves its whole span.
FLIPPED = {"apart": 0.02, "scales": 2e-3}
quantize = partial(quantize_rows, rotated=True)


def copied(x: QTensor) -> QTensor:
    return QTensor(x.codes.cuda(), x.scale.cuda(), x.granularity, x.fmt)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("m", "k"), [(1, 48), (37, 64), (300, 896), (129, 4096), (3, 14336), (2, 65536)]
)
def test_codes_are_those_of_the_reference_but_for_ties(m: int, k: int, dtype: torch.dtype) -> None:
    x = (torch.randn(m, k) * torch.logspace(-6, 1, m)[:, None]).to(dtype)
    x[0, 3] = 50.0
    made, expected = quantize(x.cuda()), quantize(x)
    assert_rotated_codes(made, expected)


def test_rows_of_zeros_and_rows_that_are_not_finite_have_no_effect_on_others() -> None:
    x = torch.randn(6, 256).bfloat16()
    x[0], x[1, 3], x[2, 3], x[3, 200] = 0.0, torch.nan, torch.inf, -torch.inf
    made = quantize(x.cuda())
    y = int8_gemm.matmul(made, quantize(torch.randn(32, 256).bfloat16().cuda()))
    assert made.scale[0] == 2.0**-126
    assert not y[0].any()
    assert not y[1:4].isfinite().any()
    assert y[4:].isfinite().all()


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 16, 48), (129, 272, 64), (300, 528, 896), (1000, 4096, 4096), (64, 28672, 1024)],
)
@pytest.mark.parametrize("options", [(), ("add",), ("bias",), ("add", "bias")])
def test_gemms_have_the_bits_of_the_reference(
    m: int, n: int, k: int, options: tuple[str, ...]
) -> None:
    a, b = quantize(torch.randn(m, k)), quantize(torch.randn(n, k))
    given: dict[str, Tensor] = {"add": torch.randn(m, n).bfloat16(), "bias": torch.randn(n)}
    given["bias"] = given["bias"].bfloat16()
    given = {name: given[name] for name in options}
    expected = int8_gemm.matmul(a, b, **given)
    out = torch.full((m, n), torch.nan, dtype=torch.bfloat16, device="cuda")
    made = int8_gemm.matmul(
        copied(a), copied(b), out=out, **{k: v.cuda() for k, v in given.items()}
    )
    assert made is out
    difference = (made.cpu().float() - expected.float()).abs()
    # Scales and what is added may be multiplied and added in one rounding or in two.
    assert (difference <= expected.float().abs() * 2**-7 + 1e-6).all()
    assert (difference != 0).float().mean() < 0.01


def test_a_replay_of_a_graph_repeats_the_gemm() -> None:
    x, w = torch.randn(512, 1024).bfloat16().cuda(), torch.randn(768, 1024).bfloat16().cuda()

    def product() -> Tensor:
        return int8_gemm.matmul(quantize(x), quantize(w))

    expected = product()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = product()
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("size", [0, 16, 128])
@pytest.mark.parametrize(("m", "k"), [(5, 896), (300, 4096), (64, 512), (7, 16384)])
@pytest.mark.parametrize("with_add", [True, False])
def test_a_norm_has_the_results_of_the_reference(m: int, k: int, size: int, with_add: bool) -> None:
    a, weight = torch.randn(m, k).bfloat16(), torch.rand(k) + 0.5
    add = torch.randn(m, k).bfloat16() if with_add else None
    options = {"block_size": size, "rotated": True}
    on_gpu = None if add is None else add.cuda()
    made = norm_quantize(a.cuda(), weight.cuda(), 1e-5, add=on_gpu, **options)
    wanted = norm_quantize(a, weight, 1e-5, add=add, **options)
    assert_rotated_codes(made.y, wanted.y, **FLIPPED)
    assert torch.equal(made.x.cpu(), wanted.x)
    torch.testing.assert_close(made.rstd.cpu(), wanted.rstd)
    assert_same_blocks(made.saved, wanted.saved)


@pytest.mark.parametrize("size", [0, 16, 128])
@pytest.mark.parametrize(("m", "f"), [(5, 1280), (200, 11008), (3, 14336)])
def test_swiglu_has_the_results_of_the_reference(m: int, f: int, size: int) -> None:
    x = torch.randn(m, 2 * f).bfloat16()
    made = swiglu_quantize(x.cuda(), block_size=size, rotated=True)
    wanted = swiglu_quantize(x, block_size=size, rotated=True)
    assert_rotated_codes(made.a, wanted.a, **FLIPPED)
    assert_same_blocks(made.saved, wanted.saved)
