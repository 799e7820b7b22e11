"""Stochastic rounding of a layer's gradients: what its noise depends on, and what it does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from coatlm.config import ConfigError
from coatlm.config.operands import Rounding
from coatlm.config.recipes import RECIPES, ROWS
from coatlm.model import flow_gemms
from coatlm.model.coat_layer import flows_of
from coatlm.model.output_gemms import output_gemms
from coatlm.model.rounding import GradientNoise
from coatlm.model.scales import GRADIENTS
from coatlm.train.chunks import delayed_scales, gradient_noise
from tests.model.test_flow import build, equal, run, run_config

CPU = torch.device("cpu")
STOCHASTIC = {"grad_rounding": "stochastic"}
POWERS = [name for name, recipe in RECIPES.items() if recipe.fused_gradients]


def noisy(c: Any, *, seed: int = 1, rank: int = 0) -> tuple[nn.Module, GradientNoise]:
    """A model and the noise of its layers."""
    model = build(c)
    return model, GradientNoise(flows_of(model.decoder.layers), seed=seed, rank=rank, device=CPU)


def step(
    c: Any, model: nn.Module, noise: GradientNoise, microbatches: int = 1
) -> dict[str, Tensor]:
    """The results of a step's last microbatch."""
    noise.begin_()
    for _ in range(microbatches):
        model.zero_grad()
        result = run(c, model)
    return result


@pytest.mark.parametrize("recipe", POWERS)
@pytest.mark.parametrize("options", [{}, {"model": {"qk_norm": True}}])
def test_a_step_is_a_function_of_seed_rank_step_and_microbatch(
    recipe: str, options: dict[str, Any], megatron: None
) -> None:
    c = run_config(recipe, precision=STOCHASTIC, **options)
    model, noise = noisy(c)
    first = step(c, model, noise)
    noise.step = 0
    assert equal(step(c, model, noise), first)
    others = [step(c, model, noise)]  # the next step
    noise.step = 0
    others.append(step(c, model, noise, microbatches=2))
    for changed in ({"seed": 2}, {"rank": 1}):
        others.append(step(c, *noisy(c, **changed)))
    others.append(run(run_config(recipe, **options)))  # to the nearest
    for i, one in enumerate(others):
        assert torch.equal(one["y"], first["y"])
        for two in (first, *others[:i]):
            different = [name for name in first if not torch.equal(one[name], two[name])]
            assert set(first) - set(different) == {"y"}


def test_every_gradient_of_every_layer_has_noise_of_its_own(megatron: None) -> None:
    _, noise = noisy(run_config(model={"layers": 3}, precision=STOCHASTIC))
    noise.step = 7
    noise.begin_()
    keys = noise.noise.view(-1, 4)
    assert len(keys[:, :2].unique(dim=0)) == 3 * len(GRADIENTS)
    assert (keys[:, 2:] == torch.tensor([7, 0])).all()
    one, other = (GradientNoise({}, seed=seed, rank=0, device=CPU) for seed in (1, 2))
    assert (one.step, other.step, noise.step) == (0, 0, 8)


def test_an_fp8_output_layer_has_noise_even_where_layers_round_to_the_nearest(
    megatron: None,
) -> None:
    last = SimpleNamespace(post_process=True, decoder=SimpleNamespace(layers=[]))
    first = SimpleNamespace(post_process=False, decoder=last.decoder)
    groups: Any = SimpleNamespace(world=SimpleNamespace(rank=lambda: 0))
    for output, modules, found in (
        ("fp8-gradients", [first, last], True),
        ("fp8", [last], True),
        ("int8", [last], True),
        ("fp8", [first], False),
        ("bf16", [last], False),
    ):
        c = run_config("coat", model={"layers": 3}, precision={"output_layer": output})
        first.gemms = last.gemms = output_gemms(c.precision)
        noise = gradient_noise(c, cast(Any, modules), groups)
        assert (noise is not None) == found
        if noise is not None:
            behind = [4 * len(GRADIENTS) + i for i in range(len(GRADIENTS))]
            assert noise.noise[:, :, 1].tolist() == [behind]
            assert last.gemms.noise.noise.data_ptr() == noise.noise.data_ptr()


def test_both_gemms_of_a_gradient_take_the_same_codes(
    megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise dx and dW would be gradients of two losses."""
    c = run_config("coat", precision=STOCHASTIC)
    model, noise = noisy(c)
    operands: list[Any] = []
    matmul = flow_gemms.matmul
    monkeypatch.setattr(
        flow_gemms, "matmul", lambda a, b, **more: operands.append(a) or matmul(a, b, **more)
    )
    step(c, model, noise)
    codes = [x.codes.view(torch.uint8) for x in operands[4:]]  # dgrad, wgrad of each linear
    for direct, transposed in zip(codes[::2], codes[1::2], strict=True):
        assert torch.equal(direct.t(), transposed)


def test_the_mean_over_steps_is_the_gradient_that_is_not_rounded(megatron: None) -> None:
    """The gradient is dW of fc2: backward rounds only dy for it, and nearest rounds alike."""
    fc2, steps = "mlp.linear_fc2.weight", 64
    c = run_config("coat", precision=STOCHASTIC)
    model, noise = noisy(c)
    exact = run(run_config("coat", precision={"bf16_operands": ["wgrad.gradient"]}))[fc2]
    nearest = run(run_config("coat"))[fc2]
    total = sum((step(c, model, noise)[fc2] for _ in range(steps)), torch.zeros_like(exact))
    one = step(c, model, noise)[fc2]
    off = {
        name: ((value - exact).norm() / exact.norm()).item()
        for name, value in (("mean", total / steps), ("one", one), ("nearest", nearest))
    }
    assert off["one"] == pytest.approx(2**0.5 * off["nearest"], rel=0.1)
    assert off["mean"] < off["one"] / steps**0.5 * 1.1


def test_stochastic_rounding_goes_with_delayed_scales_and_bf16_operands(megatron: None) -> None:
    precision = STOCHASTIC | {"scaling": "delayed", "bf16_operands": ["dgrad.gradient"]}
    recipe = run_config("coat-paper", precision=STOCHASTIC | {"scaling": "delayed"}).precision
    assert recipe.flow_recipe().stochastic
    c = run_config("coat", precision=precision)
    plain = run(run_config("coat", precision=precision | {"grad_rounding": "nearest"}))
    found = step(c, *noisy(c))
    assert torch.equal(found["dx"], plain["dx"])  # dgrad has no codes
    assert not torch.equal(found["mlp.linear_fc2.weight"], plain["mlp.linear_fc2.weight"])


@pytest.mark.parametrize("recipe", ["coat-paper", "coat-rowgrad", "rowwise", "fp8-block"])
def test_gradients_without_one_power_of_two_cannot_be_rounded_at_random(recipe: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"grad_rounding=stochastic .* precision\.recipe={recipe}"
    ):
        run_config(recipe, precision=STOCHASTIC)


def test_operands_that_are_not_gradients_are_rounded_to_the_nearest() -> None:
    stochastic: Rounding = "stochastic"
    with pytest.raises(ValueError, match="one power-of-two scale per tensor"):
        replace(ROWS, rounding=stochastic)
    coat = RECIPES["coat"]
    weight = replace(coat.dgrad.weight, rounding=stochastic)
    with pytest.raises(ValueError, match="for gradients alone"):
        replace(coat, dgrad=replace(coat.dgrad, weight=weight))


def test_a_run_gives_its_layers_the_margin_seed_and_rank_of_its_configuration(
    megatron: None,
) -> None:
    delayed = {"scaling": "delayed", "delayed_margin": 4}
    c = run_config("coat", precision=STOCHASTIC | delayed, run={"seed": 11})
    groups: Any = SimpleNamespace(stage=None, world=SimpleNamespace(rank=lambda: 3))
    model: Any = build(c)
    scales, noise = delayed_scales(c, [model], groups), gradient_noise(c, [model], groups)
    assert scales is not None and scales.rule.margin == 4
    assert noise is not None
    expected = GradientNoise(flows_of(model.decoder.layers), seed=11, rank=3, device=CPU)
    assert torch.equal(noise.noise, expected.noise)
    assert gradient_noise(run_config("coat"), [model], groups) is None
