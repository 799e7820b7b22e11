"""Stochastic rounding on a GPU: the bits of the reference, and new numbers at each replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.config.recipes import BLOCKS_16
from coatlm.fp8.formats import E4M3, E5M2, Fp8Format
from coatlm.fp8.producers import save_blocks
from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.rope_quantize import join_quantize
from coatlm.fp8.swiglu_quantize import swiglu_backward_quantize
from coatlm.fp8.transpose import quantize_both, quantize_transposed
from coatlm.kernels.rope import rope_frequencies, rope_tables
from tests.gpu.test_flow_kernels import on
from tests.graphs import Step, run_ways

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
both = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def noise(step: int = 5) -> Tensor:
    return torch.tensor([-123456789, 17, step, 2], dtype=torch.int32)


def apart(made: Any, expected: Any) -> float:
    """The share of codes that differ, if only in the sign of a zero."""
    pairs = zip(made, expected, strict=True)
    return max((bits(a) != bits(b)).float().mean().item() for a, b in pairs)


def bits(x: QTensor) -> Tensor:
    return x.codes.cpu().view(torch.uint8)


@both
@pytest.mark.parametrize("shape", [(300, 4096), (37, 384), (1, 1408)])
def test_codes_of_a_matrix_are_those_of_the_reference(
    fmt: Fp8Format, shape: tuple[int, int]
) -> None:
    x = (torch.randn(shape) * torch.logspace(-6, 1, shape[0])[:, None]).bfloat16()
    scale = torch.tensor(2.0**-6)
    expected = quantize_both(x, scale, fmt=fmt, noise=noise())
    made = quantize_both(x.cuda(), scale.cuda(), fmt=fmt, noise=noise().cuda())
    assert apart(made, expected) == 0
    alone = quantize_transposed(x.cuda(), scale.cuda(), fmt=fmt, noise=noise().cuda())
    assert torch.equal(bits(alone), bits(expected.transposed))


@both
def test_codes_of_swiglu_and_qkv_are_those_of_the_reference(fmt: Fp8Format) -> None:
    m, f = 333, 1376
    da, x, scale = torch.randn(m, f).bfloat16(), torch.randn(m, 2 * f), torch.tensor(0.5)
    saved = save_blocks(x.bfloat16(), BLOCKS_16)
    made, expected = (
        swiglu_backward_quantize(*on(device, (da, saved, scale)), fmt=fmt, noise=noise().to(device))
        for device in ("cuda", "cpu")
    )
    assert apart(made, expected) < 1e-3  # exponentials differ in their last bits
    parts = [torch.randn(65, 2, heads, 128).bfloat16() for heads in (8, 2, 2)]
    tables = rope_tables(torch.arange(65), rope_frequencies(128, 1e4))
    made, expected = (
        join_quantize(*on(device, (*parts, *tables)), fmt=fmt, noise=noise().to(device))
        for device in ("cuda", "cpu")
    )
    assert apart(made, expected) < 1e-3  # products may be fused with sums


def test_a_replay_takes_the_numbers_of_its_step() -> None:
    x, scale, numbers = (
        torch.randn(512, 1024, device="cuda"),
        torch.ones((), device="cuda"),
        noise(),
    )
    place = numbers.cuda()
    quantize_both(x, scale, fmt=E5M2, noise=place)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = quantize_both(x, scale, fmt=E5M2, noise=place)
        place[3].add_(1)
    place.copy_(numbers)
    for microbatch in range(3):
        graph.replay()
        now = torch.tensor([*numbers[:3].tolist(), 2 + microbatch], dtype=torch.int32)
        expected = quantize_both(x.cpu(), scale.cpu(), fmt=E5M2, noise=now)
        assert apart(made, expected) == 0


def test_a_replayed_microbatch_trains_like_an_eager_one() -> None:
    precision = {"recipe": "coat", "scaling": "delayed", "grad_rounding": "stochastic"}
    (found,) = run_ways(1, {"stochastic": (3, {"precision": precision})})
    eager, replayed = ([Step(*step) for step in way] for way in found["stochastic"])
    assert [bool(step.graphs) for step in replayed] == [False, False, True, True, True]
    curves = (torch.tensor([step.curve for step in way]) for way in (replayed, eager))
    torch.testing.assert_close(*curves, rtol=2e-3, atol=0)
