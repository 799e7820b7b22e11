"""Operands by fused kernels and in two steps are the same operands."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coatlm.config.operands import ROW, TENSOR, Operand, block
from coatlm.config.recipes import COAT, RECIPES, DgradGemm, ForwardGemm
from coatlm.fp8 import producers
from coatlm.fp8.operand import emit, emit_direct
from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.transpose import transpose_codes
from coatlm.kernels.norm import rms_norm


def values(rows: int = 40, columns: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    return (x * torch.logspace(-3, 1, rows)[:, None]).bfloat16()


def same(a: QTensor, b: QTensor) -> bool:
    codes = (x.codes.view(torch.uint8) for x in (a, b))
    return torch.equal(*codes) and torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("granularity", [TENSOR, ROW, block(1, 16)])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_an_operand_is_that_of_emit(granularity: object, power_of_two: bool) -> None:
    wanted = Operand("e4m3", granularity, power_of_two=power_of_two)  # type: ignore[arg-type]
    assert same(producers.as_operand(values(), wanted), emit_direct(values(), wanted))


def test_ranks_that_share_a_scale_take_the_one_they_agreed_on() -> None:
    wanted = Operand("e4m3", TENSOR, power_of_two=False)
    made = producers.as_operand(values(), wanted, share=lambda scale: 4 * scale)
    alone = producers.as_operand(values(), wanted)
    assert torch.equal(made.scale, 4 * alone.scale)
    assert made.codes.float().abs().max() == 112  # 448 / 4


def test_fused_gradients_are_those_of_emit() -> None:
    dy, gradient = values(), COAT.dgrad.gradient
    fused, plain = producers.gradient(dy, COAT), emit(dy, direct=gradient, transposed=gradient)
    assert plain.direct is not None and plain.transposed is not None
    assert same(fused.direct, plain.direct) and same(fused.transposed, plain.transposed)


@pytest.mark.parametrize("name", ["coat-paper", "coat"])
def test_the_transposed_weight_has_the_codes_of_forward_under_one_scale(name: str) -> None:
    recipe, w = RECIPES[name], values()
    forward = producers.as_operand(w, recipe.forward.weight)
    made = producers.weight_transposed(w, recipe.forward, recipe.dgrad, forward.scale)
    held = producers.codes_transposed(forward, recipe.forward.weight, recipe.dgrad.weight)
    assert same(made, held)
    if name == "coat-paper":
        assert same(made, transpose_codes(forward))


def test_codes_of_forward_in_other_granularities_are_cast_again_with_the_largest_scale() -> None:
    forward = ForwardGemm(COAT.forward.activation, Operand("e4m3", block(1, 16)))
    dgrad = DgradGemm(COAT.dgrad.gradient, Operand("e4m3", TENSOR, "forward"))
    direct = producers.as_operand(values(), forward.weight)
    made = producers.weight_transposed(values(), forward, dgrad, direct.scale)
    assert torch.equal(made.scale, direct.scale.max())
    expected = (direct.dequantize() / direct.scale.max()).to(torch.float8_e4m3fn).float()
    assert torch.equal(made.codes[:, :40].float(), expected.t())


@pytest.mark.parametrize("saved", [None, Operand("e4m3", block(1, 16))])
def test_a_norm_that_is_not_fused_rounds_its_output_to_bf16_first(saved: Operand | None) -> None:
    x, weight = values(), torch.rand(64) + 0.5
    fused, plain = (
        producers.norm_output(x, weight, 1e-5, wanted=wanted, saved=saved)
        for wanted in (Operand("e4m3", ROW), Operand("e4m3", ROW, power_of_two=False))
    )
    assert torch.equal(fused.rstd, plain.rstd)
    y = emit_direct(rms_norm(x, weight, 1e-5), Operand("e4m3", ROW, power_of_two=False))
    assert same(plain.y, y)
    if saved is not None:
        assert fused.saved is not None and plain.saved is not None
        codes = (s.codes.view(torch.uint8) for s in (fused.saved, plain.saved))
        assert torch.equal(*codes)


def test_saved_blocks_with_fp32_scales_come_back_in_bf16() -> None:
    x, wanted = values(), Operand("e4m3", block(1, 16), power_of_two=False)
    saved = producers.save_blocks(x, wanted)
    assert saved is not None and saved.scale.dtype == torch.float32
    assert torch.equal(producers.decoded(saved), saved.dequantize(torch.bfloat16))
    assert not producers.powers_of_two(saved)
    eights = producers.save_blocks(x, replace(wanted, power_of_two=True))
    assert eights is not None and producers.powers_of_two(eights)
