"""Smooth-SwiGLU in the FP8 flow: the same GEMMs in exact arithmetic, and what an outlier costs.

Rounding to E4M3 moves a normal number by at most U4 of it in the root mean square, to E5M2 by U5
(tests/model/test_flow.py). The GEMMs of forward have two E4M3 operands, those of backward E5M2
gradients at worst.
"""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from coatlm.config.recipes import RECIPES
from coatlm.fp8 import producers
from coatlm.model.flow_gemms import Flow
from coatlm.parallel.tensor import TensorParallel
from tests.tools.stressed import relative
from tools.studies.smoothing import SmoothFlow, channel_factors

U4, U5 = 2.0**-4 / math.sqrt(3), 2.0**-3 / math.sqrt(3)
TOKENS, FFN, HIDDEN = 128, 256, 128
OUTLIER = 3  # a channel
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
FAR = 2.0**26  # beyond the 2^18 between E4M3's largest and smallest number, even in a weak token


class DownGemms(NamedTuple):
    """The results of the three GEMMs of the down projection."""

    y: Tensor  # [T, H]
    da: Tensor  # [T, F]
    dw: Tensor  # [H, F], of two equal microbatches


def flow_gemms(recipe: str, a: Tensor, w: Tensor, dy: Tensor, *, smooth: bool) -> DownGemms:
    """y = a W^T and its gradients as the flow computes them, in two microbatches of a step."""
    flow = Flow(RECIPES[recipe], TensorParallel(ALONE), 1e-5)  # type: ignore[arg-type]
    flow = SmoothFlow(flow) if smooth else flow
    row, weight = flow.recipe, nn.Parameter(w.bfloat16())
    weight.main_grad = torch.full_like(weight, math.nan, dtype=torch.float32)  # type: ignore[attr-defined]
    weight.main_grad_stale = True  # type: ignore[attr-defined]
    # a recipe that saves the codes of a does not recompute it
    again = torch.zeros_like(a) if flow.saves_input("fc2") else a
    with torch.no_grad():
        for _ in range(2):
            codes, w8 = producers.as_operand(a, row.forward.activation), flow.forward_weight(weight)
            y = flow.project("fc2", codes, w8, weight, lambda: a)
            d_t, da = flow.output_gradient("fc2", dy, weight, flow.weight_scale(w8))
            if flow.saves_input("fc2"):
                plain = producers.codes_transposed(
                    codes, row.forward.activation, row.wgrad.activation
                )
            else:
                plain = producers.input_transposed(a, row.wgrad.activation, flow.input_scale(codes))
            flow.weight_gradient(weight, d_t, flow.input_transposed("fc2", plain, lambda: again))
    return DownGemms(y, da, weight.main_grad)  # type: ignore[attr-defined]


def exact_gemms(a: Tensor, w: Tensor, dy: Tensor) -> DownGemms:
    """The same in fp64."""
    return DownGemms(
        a.double() @ w.double().t(), dy.double() @ w.double(), 2 * dy.double().t() @ a.double()
    )


@pytest.fixture
def of_few_bits() -> tuple[Tensor, Tensor, Tensor]:
    """a, W and dy, which E5M2 represents, with channels of a that differ by up to 2^7."""
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(0))
    a, w, dy = (
        (1 + draw(2, shape) / 2) * (1 - 2.0 * draw(2, shape)) * 2.0 ** draw(2, shape)
        for shape in ((TOKENS, FFN), (HIDDEN, FFN), (TOKENS, HIDDEN))
    )
    channels = 2.0 ** draw(8, (FFN,))
    return (a * channels).bfloat16(), w, dy.bfloat16()


@pytest.mark.parametrize("recipe", [name for name, row in RECIPES.items() if row.exact_in_bf16])
def test_smoothing_changes_no_bit_of_what_fp8_represents(
    recipe: str, of_few_bits: tuple[Tensor, Tensor, Tensor]
) -> None:
    a, w, dy = of_few_bits
    factors = channel_factors(a)
    assert factors.max() / factors.min() >= 2**7
    got, wanted = flow_gemms(recipe, a, w, dy, smooth=True), exact_gemms(a, w, dy)
    assert torch.equal(got.y, wanted.y.bfloat16())
    assert torch.equal(got.da, wanted.da.bfloat16())
    assert torch.equal(got.dw, wanted.dw.float())


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_outlier_channel_leaves_a_smoothed_gemm_within_rounding(recipe: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, w, dy = (
        torch.randn(shape, generator=generator)
        for shape in ((TOKENS, FFN), (HIDDEN, FFN), (TOKENS, HIDDEN))
    )
    growth = torch.ones(FFN)
    growth[OUTLIER] = FAR
    a, w, dy = ((a * growth).bfloat16(), (w / growth).bfloat16(), dy.bfloat16())
    wanted = exact_gemms(a, w, dy)
    plain, smooth = (flow_gemms(recipe, a, w, dy, smooth=smooth) for smooth in (False, True))
    assert relative(smooth.y, wanted.y) < 1.1 * math.hypot(U4, U4)
    # in da * growth and dW / growth all channels count alike
    assert relative(smooth.da * growth, wanted.da * growth) < 1.1 * math.hypot(U4, U5)
    outlier = (slice(None), OUTLIER)
    assert relative(smooth.da[outlier], wanted.da[outlier]) < 1.1 * math.hypot(U4, U5)
    assert relative(smooth.dw / growth, wanted.dw / growth) < 1.1 * math.hypot(U4, U5)
    # a scale loses all channels that it covers but one: with 1 x 128 that is half of the 256
    assert relative(plain.y, wanted.y) > (0.6 if recipe == "fp8-block" else 0.9)
    lost = relative(plain.dw / growth, wanted.dw / growth)
    if RECIPES[recipe].wgrad.activation.granularity.rows == 1:  # a scale covers one channel
        assert lost < 1.1 * math.hypot(U4, U5)
    else:
        assert lost > 0.9


def test_a_factor_is_the_power_of_two_that_fits_its_channel_into_e4m3() -> None:
    amaxes = torch.tensor([448.0, 449.0, 1.0, 0.0, 0.876, 0.875])
    a = torch.stack((amaxes / 2, -amaxes))
    assert channel_factors(a).tolist() == [1.0, 2.0, 2.0**-8, 1.0, 2.0**-8, 2.0**-9]
