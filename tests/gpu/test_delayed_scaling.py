"""Kernels by a scale that is given, and the amax that they leave, against references on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.fp8.formats import E5M2, Fp8Format
from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.rope_quantize import join_quantize
from coatlm.fp8.scaling import current_scale
from coatlm.fp8.swiglu_quantize import swiglu_backward_quantize, swiglu_quantize
from coatlm.fp8.transpose import quantize_both, quantize_direct
from coatlm.model.scales import DelayedScales
from tests.gpu.test_flow_kernels import (
    FLIPS,
    both,
    dtypes,
    fits,
    gate_up,
    head_gradients,
    mixed,
    on,
    same,
    shapes,
    sizes,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
# of the current scale: most codes saturate, the margin of E5M2, most codes are zero
factors = pytest.mark.parametrize("factor", [2.0**-6, 8.0, 2.0**20])
Made = tuple[QTensor | None, ...]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def both_ways(function: Callable[..., Made], scale: Tensor, **options: Any) -> tuple[Made, Made]:
    """What `function` makes on the CPU and on the GPU by a scale; amaxes are a few 2^-23 apart."""
    found: list[Made] = []
    amaxes = []
    for device in ("cpu", "cuda"):
        amax = torch.zeros((), device=device)
        found.append(function(device, scale=scale.to(device), amax=amax, **options))
        amaxes.append(amax.cpu())
    torch.testing.assert_close(amaxes[1], amaxes[0], rtol=2**-19, atol=0)
    return found[0], found[1]


@both
@dtypes
@factors
@pytest.mark.parametrize("shape", [(300, 4096), (37, 48), (1, 16), (129, 5504), (1024, 2752)])
def test_matrices_by_a_given_scale_have_the_codes_and_the_amax_of_the_reference(
    shape: tuple[int, int], factor: float, dtype: torch.dtype, fmt: Fp8Format
) -> None:
    x = mixed(*shape, dtype)
    scale = current_scale(x, fmt, power_of_two=True) * factor
    expected = quantize_both(x, scale, fmt=fmt)
    amaxes = torch.zeros(2, device="cuda")
    made = quantize_both(x.cuda(), scale.cuda(), fmt=fmt, amax=amaxes[0])
    direct = quantize_direct(x.cuda(), scale.cuda(), fmt=fmt, amax=amaxes[1])
    same(made.direct, expected.direct)
    same(made.transposed, expected.transposed)
    same(direct, expected.direct)
    assert amaxes.tolist() == [x.float().abs().amax().item()] * 2


@both
@sizes
@shapes
@factors
@pytest.mark.parametrize("with_a", [True, False])
def test_gradients_of_gate_and_up_by_a_given_scale_have_the_codes_and_amax_of_the_reference(
    shape: tuple[int, int], size: int, factor: float, fmt: Fp8Format, with_a: bool
) -> None:
    fits(size, shape[1])
    x, da = gate_up(*shape, torch.bfloat16), torch.randn(shape).bfloat16()
    forward = swiglu_quantize(x, block_size=size)
    seen, one = x if forward.saved is None else forward.saved, forward.a.scale.amax()

    def make(device: str, **options: Any) -> Made:
        inputs = on(device, (da, seen, one))
        return swiglu_backward_quantize(*inputs, fmt=fmt, with_a=with_a, **options)

    current = make("cuda", scale=None)
    assert current[0] is not None
    expected, actual = both_ways(make, current[0].scale * factor)
    for got, want in zip(actual, expected, strict=True):
        same(got, want, flips=FLIPS)
    given = make("cuda", scale=current[0].scale.clone(), amax=torch.zeros((), device="cuda"))
    for got, want in zip(given, current, strict=True):
        same(got, None if want is None else on("cpu", want))


@both
@factors
@pytest.mark.parametrize("d", [64, 80, 128])
@pytest.mark.parametrize(("s", "b", "kv_heads", "queries"), [(257, 3, 8, 4), (37, 1, 2, 1)])
def test_rotary_gradients_by_a_given_scale_have_the_codes_and_amax_of_the_reference(
    s: int, b: int, kv_heads: int, queries: int, d: int, factor: float, fmt: Fp8Format
) -> None:
    parts = head_gradients(s, b, kv_heads, queries, d)

    def make(device: str, **options: Any) -> Made:
        return join_quantize(*on(device, parts), fmt=fmt, **options)

    current = make("cpu", scale=None)[0]
    assert current is not None
    expected, actual = both_ways(make, current.scale * factor)
    for got, want in zip(actual, expected, strict=True):
        same(got, want, flips=FLIPS)


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["matrix", "gate and up", "heads"])
def test_what_is_not_finite_is_nan_under_a_finite_scale_where_the_reference_has_it(
    kind: str, bad: float, fmt: Fp8Format
) -> None:
    x, da = gate_up(37, 384, torch.bfloat16), torch.randn(37, 384).bfloat16()
    dq, *others = head_gradients(37, 1, 2, 2, 64)
    for tensor in (da, dq.flatten(1)):
        tensor[7, 100] = bad

    def make(device: str, **options: Any) -> Made:
        if kind == "matrix":
            made = quantize_both(da.to(device), fmt=fmt, **options)
            return made.direct, made.transposed
        if kind == "gate and up":
            inputs = on(device, (da, x, torch.ones(())))
            return swiglu_backward_quantize(*inputs, fmt=fmt, with_a=False, **options)[:2]
        return join_quantize(*on(device, (dq, *others)), fmt=fmt, **options)

    found = []
    for device in ("cpu", "cuda"):
        amax = torch.zeros((), device=device)
        made = make(device, scale=torch.ones((), device=device), amax=amax)
        assert not amax.isfinite()
        found.append([part.codes.cpu().float().isnan() for part in made if part is not None])
    for expected, actual in zip(*found, strict=True):
        assert expected.any() and not expected.all()
        assert torch.equal(actual, expected)


def test_an_amax_on_the_gpu_is_raised_and_never_lowered() -> None:
    x, scale = torch.randn(64, 64, device="cuda").bfloat16(), torch.ones((), device="cuda")
    amax = torch.tensor(1e6, device="cuda")
    quantize_both(x, scale, fmt=E5M2, amax=amax)
    assert amax == 1e6
    quantize_both(1e7 * x, scale, fmt=E5M2, amax=amax)
    assert amax == (1e7 * x).float().abs().amax()


class Layer:
    """What has scales."""

    scales: Any = None


def test_scales_of_a_stage_are_updated_without_waiting_for_the_gpu() -> None:
    """The host waits only after a step that calibrates, and the scales are those of the CPU."""
    stages = [
        DelayedScales({n: Layer() for n in range(1, 5)}, E5M2, device=torch.device(device))
        for device in ("cpu", "cuda")
    ]
    for step in range(20):
        amax = torch.randn(4, 4).abs() * 10.0 ** torch.randint(-12, 3, (4, 4))
        if step == 7:
            amax[2, 1] = math.nan
        for stage in stages:
            stage.amax.copy_(amax)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            for stage in stages:
                stage.update_()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        cpu, gpu = stages
        assert torch.equal(gpu.scale.cpu(), cpu.scale)
        assert torch.equal(gpu.history.cpu(), cpu.history)
