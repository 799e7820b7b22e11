"""Delayed scales of a layer's gradients: the first step, later steps, microbatches, NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coatlm.config import ConfigError
from coatlm.fp8.delayed import MARGINS
from coatlm.fp8.formats import ALIGNMENT, E5M2, FORMATS
from coatlm.fp8.operand import format_of
from coatlm.fp8.scaling import power_of_two_ref
from coatlm.model.coat_layer import flows_of
from coatlm.model.numerics import Probe, watched
from coatlm.model.scales import GRADIENTS, DelayedScales
from tests.model.test_flow import TENSOR_WISE, build, equal, run, run_config

CPU = torch.device("cpu")


def delayed(c: Any) -> tuple[nn.Module, DelayedScales]:
    """A model and the scales of its FP8 layers."""
    model = build(c)
    fmt = format_of(c.precision.flow_recipe().dgrad.gradient)
    return model, DelayedScales(flows_of(model.decoder.layers), fmt, device=CPU)


def step(c: Any, model: nn.Module) -> dict[str, Tensor]:
    """`run`, without gradients of a step before."""
    model.zero_grad()
    return run(c, model)


@pytest.mark.parametrize("fmt", ["e5m2", "e4m3"])
@pytest.mark.parametrize("recipe", TENSOR_WISE)
def test_the_first_step_is_that_of_current_scaling_bit_for_bit(
    recipe: str, fmt: str, megatron: None
) -> None:
    c = run_config(recipe, precision={"grad_format": fmt})
    model, _ = delayed(c)
    assert equal(step(c, model), run(c))


@pytest.mark.parametrize("model_options", [{}, {"qk_norm": True}])
@pytest.mark.parametrize("fmt", ["e5m2", "e4m3"])
def test_the_next_step_is_scaled_by_the_amaxes_of_the_first_with_the_margin(
    fmt: str,
    model_options: dict[str, bool],
    megatron: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    c = run_config(precision={"grad_format": fmt}, model=model_options)
    model, scales = delayed(c)
    (flow,) = flows_of(model.decoder.layers).values()
    used: list[dict[str, Tensor]] = [{}, {}]
    amaxes: list[dict[str, Tensor]] = [{}, {}]
    record = Probe.record
    for seen, amax in zip(used, amaxes, strict=True):

        def note(probe: Probe, name: str, source: Any, x: Any, seen: Any = seen) -> None:
            seen[name] = x.scale.clone()
            record(probe, name, source, x)

        monkeypatch.setattr(Probe, "record", note)
        with watched({1: flow}) as probes:
            step(c, model)
        amax |= probes[1].amax
        scales.update_()
    room = 2.0 ** MARGINS[FORMATS[fmt]]
    for name in GRADIENTS:
        first, second = (amax[name] for amax in amaxes)
        assert used[0][name] == power_of_two_ref(first, FORMATS[fmt])
        assert used[1][name] == power_of_two_ref(first * room, FORMATS[fmt])
        at = GRADIENTS.index(name)
        torch.testing.assert_close(scales.history[0, at, :2], torch.stack([second, first]))


def test_with_room_below_delayed_scales_change_only_what_is_small(megatron: None) -> None:
    """E5M2 gradients three binades lower: other codes only where they are subnormal."""
    c = run_config()
    model, scales = delayed(c)
    first = step(c, model)
    scales.update_()
    assert not scales.calibrating
    second = step(c, model)
    assert torch.equal(first["y"], second["y"])
    worst = max(((second[k] - first[k]).norm() / first[k].norm()).item() for k in first)
    assert worst < 2.0**-9  # below the BF16 in which layers pass gradients on


def test_microbatches_of_a_step_share_its_scales_and_the_largest_amax_counts(
    megatron: None,
) -> None:
    c = run_config()
    model, scales = delayed(c)
    step(c, model)
    scales.update_()
    before = scales.scale.clone()
    for factor in (1.0, 4.0, 2.0):
        x = torch.randn(48, 2, 64).bfloat16().requires_grad_()
        layer = model.decoder.layers[0]
        y, _ = layer(hidden_states=x, attention_mask=None, rotary_pos_emb=model.cos_sin)
        y.backward(torch.full_like(y, factor))
        assert torch.equal(scales.scale, before)
    fc2 = GRADIENTS.index("fc2_grad")
    assert scales.amax[0, fc2] == 4.0
    scales.update_()
    assert scales.history[0, fc2, 0] == 4.0
    assert not scales.amax.any()


def test_evaluation_adds_nothing(megatron: None) -> None:
    c = run_config()
    model, scales = delayed(c)
    with torch.no_grad():
        model.decoder.layers[0](
            hidden_states=torch.randn(48, 2, 64).bfloat16(),
            attention_mask=None,
            rotary_pos_emb=model.cos_sin,
        )
    assert not scales.amax.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("warm", [False, True])
def test_a_step_that_is_not_finite_leaves_histories_and_scales_as_they_were(
    bad: float, warm: bool, megatron: None
) -> None:
    c = run_config()
    model, scales = delayed(c)
    if warm:
        step(c, model)
        scales.update_()
    history, scale = scales.history.clone(), scales.scale.clone()
    x = torch.randn(48, 2, 64).bfloat16().requires_grad_()
    layer = model.decoder.layers[0]
    layer.zero_grad()
    y, _ = layer(hidden_states=x, attention_mask=None, rotary_pos_emb=model.cos_sin)
    dy = torch.ones_like(y)
    dy[3, 1, 5] = bad
    y.backward(dy)
    for name, weight in layer.named_parameters():  # and so the step is skipped
        assert not weight.grad.isfinite().all(), name
    scales.update_()
    assert torch.equal(scales.history, history) and torch.equal(scales.scale, scale)
    assert scales.calibrating is not warm
    assert not scales.amax.any()


def test_saturation_and_underflow_of_delayed_codes_are_reported(megatron: None) -> None:
    c = run_config()
    model, scales = delayed(c)
    step(c, model)
    scales.update_()
    found = []
    for shift in (0, -8, 24):
        scales.scale.mul_(2.0**shift)
        flows = flows_of(model.decoder.layers)
        with watched(flows) as probes:
            step(c, model)
        scales.scale.mul_(2.0**-shift)
        sums = probes[1].sums["fc1_grad"]
        found.append(((sums[1] / sums[0]).item(), (sums[3] / sums[2]).item()))
    (saturated, underflow), small, large = found
    assert saturated == 0 and underflow < 0.05
    assert small[0] > 0.01
    assert large[1] > 0.5


def test_scales_keep_their_memory(megatron: None) -> None:
    """A recorded microbatch reads and writes there."""
    c = run_config()
    model, scales = delayed(c)
    (flow,) = flows_of(model.decoder.layers).values()
    step(c, model)
    scales.update_()
    before = flow.scales.slot("qkv_grad")
    scales.restore(scales.state())
    step(c, model)
    scales.update_()
    after = flow.scales.slot("qkv_grad")
    assert before.scale is not None and after.scale is not None
    assert before.scale.data_ptr() == after.scale.data_ptr()
    assert before.amax.data_ptr() == after.amax.data_ptr()


def test_gemms_can_read_every_scale_in_place(megatron: None) -> None:
    c = run_config(model={"layers": 3})
    model, scales = delayed(c)
    step(c, model)
    scales.update_()
    slots = [f.scales.slot(n) for f in flows_of(model.decoder.layers).values() for n in GRADIENTS]
    places = [slot.scale.data_ptr() for slot in slots if slot.scale is not None]
    assert len(set(places)) == 3 * 4
    assert all(place % ALIGNMENT == 0 for place in places)


def test_restored_histories_are_those_saved_by_number_of_the_layer(megatron: None) -> None:
    layers = {"model": {"layers": 3}, "precision": {"bf16_layers": [1, 0]}}
    _, scales = delayed(run_config(**layers))
    assert scales.numbers == [2, 3]
    torch.manual_seed(3)
    scales.amax.copy_(torch.rand(2, 4) + 1e-7)
    scales.update_()
    saved = scales.state()
    assert sorted(saved) == ["2", "3"]
    _, whole = delayed(run_config(model={"layers": 3}))
    whole.restore({**saved, "1": saved["2"], "99": saved["2"]})
    assert not whole.calibrating
    assert torch.equal(whole.history[1:], scales.history)
    assert torch.equal(whole.scale[1:], scales.scale)
    whole.restore(saved)  # the first layer is new
    assert whole.calibrating
    whole.restore({number: scales_of_zero() for number in "123"})
    assert whole.calibrating


def scales_of_zero() -> dict[str, list[float]]:
    return {name: [0.0] * 16 for name in GRADIENTS}


def test_a_stage_without_fp8_layers_has_nothing_to_do() -> None:
    scales = DelayedScales({}, E5M2, device=CPU)
    scales.update_()
    scales.restore({})
    assert scales.state() == {} and not scales.calibrating


@pytest.mark.parametrize("recipe", ["bf16", "fp32", "te-delayed"])
def test_delayed_scaling_is_refused_where_there_is_no_flow(recipe: str) -> None:
    spec = {"spec": "te"} if recipe.startswith("te") else {}
    with pytest.raises(ConfigError, match=r"precision\.scaling is for fp8-linear \| coat"):
        run_config(recipe, precision={"scaling": "delayed"}, model=spec)


def test_scaling_is_current_or_delayed() -> None:
    assert run_config().precision.scaling == "current"
    with pytest.raises(ConfigError, match=r"precision\.scaling='just in time': .*'delayed'"):
        run_config(precision={"scaling": "just in time"})


def test_only_fp8_layers_without_a_history_calibrate_again(megatron: None) -> None:
    """A layer in BF16 pushes zeros, in the end nothing else; it has no scales to find either."""
    _, scales = delayed(run_config(model={"layers": 3}))
    scales.amax.fill_(1.0)
    scales.amax[1] = 0.0
    scales.update_()
    saved = scales.state()
    scales.restore(saved)
    assert scales.calibrating
    scales.restore(saved, idle={2})
    assert not scales.calibrating
    scales.restore({}, idle={1, 2, 3})
    assert not scales.calibrating
