"""precision.guard: which tensors FP8 hurts, and what follows from it, alike on all ranks."""

from __future__ import annotations

import math
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coatlm.config import make_config
from coatlm.config.recipes import RECIPES
from coatlm.fp8.formats import E4M3, E5M2, Fp8Format
from coatlm.fp8.stochastic import stochastic_ref
from coatlm.model.numerics import TENSORS
from coatlm.train import guard
from coatlm.train.guard import Fallen, PrecisionGuard, find, limits_of, restore_guard

# limits


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_rounding_alone_stays_below_half_of_the_limit(fmt: Fp8Format) -> None:
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * fmt.smallest_normal * 64
    error = ((fmt.encode(x).float() - x).norm() / x.norm()).item()
    assert 0.4 * fmt.eps / 2 < error < 0.5 * fmt.eps / 2


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_stochastic_rounding_alone_stays_below_a_third_of_its_limit(fmt: Fp8Format) -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    x = x * fmt.smallest_normal * 64
    rounded = stochastic_ref(x, torch.tensor([1, 2, 3, 4], dtype=torch.int32), fmt)
    error = ((rounded - x).norm() / x.norm()).item()
    assert 0.28 * fmt.eps < error < 0.33 * fmt.eps


@pytest.mark.parametrize("share", [0.02, 0.05])
def test_the_bulk_is_off_by_the_share_of_zeros_times_the_constant(share: float) -> None:
    """A Gaussian in equidistant codes, so that `share` of it becomes zero. Among 2^22 values there
    are 80,000 or more zeros, a sample whose size is uncertain by 0.4 %.
    """
    x = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).double()
    spacing = 2 * x.abs().quantile(share).item()
    codes = (x / spacing).round() * spacing
    assert (codes == 0).double().mean().item() == pytest.approx(share, rel=1e-3)
    error = (codes - x).square().mean().sqrt().item()
    assert error == pytest.approx(guard.BULK * share, rel=0.02)


@pytest.mark.parametrize("name", RECIPES)
def test_limits_follow_the_formats_of_the_recipe(name: str) -> None:
    sections = {"model": {"ffn": 1024}, "precision": {"recipe": name}}
    limits = limits_of(make_config(sections).precision)
    assert set(limits) == set(TENSORS)
    five = RECIPES[name].dgrad.gradient.fmt == "e5m2"
    for tensor, of in limits.items():
        gradient, saved = tensor.endswith("_grad"), tensor.endswith("_saved")
        # From these limits on integers lose more than E4M3 does of Gaussian numbers, 0.0264.
        integers = RECIPES[name].rotated and not (gradient or saved)
        error, zeros = (0.02625, 0.0363) if integers else (2**-4, 0.0864)
        assert of["relative_error"] == (2**-3 if gradient and five else error)
        assert of.get("underflow") == (None if gradient else pytest.approx(zeros, abs=1e-4))
        assert "saturated" not in of


def test_only_delayed_scaling_limits_saturation_and_only_of_gradients() -> None:
    precision = make_config({"precision": {"recipe": "coat", "scaling": "delayed"}}).precision
    limited = {tensor for tensor, of in limits_of(precision).items() if "saturated" in of}
    assert limited == {"qkv_grad", "proj_grad", "fc1_grad", "fc2_grad"}


def test_the_limit_of_gradients_that_are_rounded_stochastically_is_twice_as_high() -> None:
    """Such rounding errs by up to a whole spacing, nearest rounding by half of one."""
    precision = {"recipe": "coat", "grad_rounding": "stochastic"}
    nearest, found = coat(), limits_of(make_config({"precision": precision}).precision)
    for tensor, of in nearest.items():
        factor = 2 if tensor.endswith("_grad") else 1
        assert found[tensor]["relative_error"] == factor * of["relative_error"]
        assert found[tensor].get("underflow") == of.get("underflow")


# decisions


def record(layer: int = 1, tensor: str = "fc2_input", **measures: float) -> dict[str, Any]:
    usual = {"amax": 1.0, "saturated": 0.0, "underflow": 0.0, "relative_error": 0.026}
    return {"layer": layer, "tensor": tensor, **usual, **measures}


def coat() -> guard.GuardLimits:
    return limits_of(make_config({"precision": {"recipe": "coat"}}).precision)


def test_a_tensor_is_found_by_the_measure_that_exceeds_its_limit_most() -> None:
    both = record(3, relative_error=0.0626, underflow=0.5)
    records = [record(), both, {"layer": 3, "tensor": "residual", "amax": 9e9, "kurtosis": 64.0}]
    (found,) = find(records, coat())
    assert (found.layer, found.tensor, found.measure, found.value) == (
        *(3, "fc2_input", "underflow", 0.5),
    )
    assert found.limit == pytest.approx(0.0864, abs=1e-4)


def test_what_is_not_finite_and_what_is_at_the_limit_is_not_found() -> None:
    wild = [record(relative_error=math.nan), record(relative_error=math.inf)]
    assert list(find([*wild, record(relative_error=2.0**-4)], coat())) == []


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process group of this process."""
    monkeypatch.setattr(guard.dist, "broadcast_object_list", lambda *_, **__: None)
    return SimpleNamespace(rank=lambda: 0)


class Layers:
    """The last layers, and the last tensors of others, that a guard let be in BF16."""

    def __init__(self) -> None:
        self.in_bf16: set[int] = set()
        self.tensors: set[str] = set()

    def change(self, in_bf16: Collection[int], tensors: Collection[str]) -> None:
        self.in_bf16, self.tensors = set(in_bf16), set(tensors)


def make(
    mode: str, layers: Layers, most: int = 99, alone: tuple[str, ...] = TENSORS
) -> PrecisionGuard:
    """A guard whose device holds `most` layers and tensors in BF16, the latter if in `alone`."""
    return PrecisionGuard(
        mode,
        coat(),
        fits=lambda fallen, tensors: len(fallen) + len(tensors) <= most,
        change=layers.change,
        alone=alone.__contains__,
    )


HURT = record(2, underflow=0.5)


def test_a_spike_of_one_measurement_changes_nothing(alone: Any) -> None:
    layers = Layers()
    guarded = make("fallback", layers)
    for records in ([HURT], [record(2)], [HURT], [record(3, underflow=0.5)]):
        assert guarded.observe(records, alone) == []
    assert not layers.in_bf16 and guarded.fallen == Fallen()


def test_warn_names_a_tensor_once_and_leaves_its_layer(
    alone: Any, caplog: pytest.LogCaptureFixture
) -> None:
    layers = Layers()
    guarded = make("warn", layers)
    found = [guarded.observe([HURT], alone) for _ in range(4)]
    assert [len(each) for each in found] == [0, 1, 0, 0]
    assert found[1][0].action == "warned" and not layers.in_bf16
    (line,) = (r.getMessage() for r in caplog.records if r.name == guard.whole_run.name)
    expected = "FP8 hurts layer 2, fc2_input: underflow 0.5 is above 0.0864; it stays in FP8"
    assert line == expected
    assert guarded.counts() == {"guard_bf16_layers": 0, "guard_findings": 1}


def test_a_layer_falls_back_as_a_whole(alone: Any) -> None:
    layers = Layers()
    guarded = make("fallback", layers)
    records = [HURT, record(2, "fc1_input", underflow=0.3), record(3, underflow=0.2)]
    guarded.observe(records, alone)
    found = guarded.observe(records[:2], alone)
    assert [finding.action for finding in found] == ["bf16", "bf16"]
    assert layers.in_bf16 == guarded.fallen.layers == {2} and not layers.tensors


def test_a_layer_that_would_not_fit_stays_and_is_reported_once(alone: Any) -> None:
    layers = Layers()
    guarded = make("fallback", layers, most=1)
    records = [record(layer, underflow=0.5) for layer in (2, 4)]
    actions = [[f.action for f in guarded.observe(records, alone)] for _ in range(3)]
    assert actions == [[], ["bf16", "no memory"], []]
    assert layers.in_bf16 == {2}
    resumed = make("fallback", layers)  # with room for more
    resumed.restore(guarded.state())
    assert [f.action for f in resumed.observe(records, alone)] == ["bf16"]
    assert layers.in_bf16 == {2, 4}


def test_a_restored_guard_goes_on_between_two_measurements(alone: Any) -> None:
    layers = Layers()
    first = make("fallback", layers)
    for _ in range(2):
        first.observe([record(4, underflow=0.5)], alone)
    first.observe([HURT], alone)
    resumed = make("fallback", layers)
    layers.in_bf16 = set()
    resumed.restore(first.state())
    assert layers.in_bf16 == {4}
    assert [finding.layer for finding in resumed.observe([HURT], alone)] == [2]
    assert layers.in_bf16 == {2, 4}


def test_another_mode_restores_no_layer_and_reports_again(alone: Any) -> None:
    layers = Layers()
    first = make("fallback", layers)
    for _ in range(2):
        first.observe([HURT], alone)
    warning = make("warn", layers)
    warning.restore(first.state())
    assert not layers.in_bf16 and warning.fallen == Fallen()
    assert len(warning.observe([HURT], alone)) == 1
    again = make("fallback", layers)
    again.restore(warning.state())
    assert [finding.action for finding in again.observe([HURT], alone)] == ["bf16"]


SAVED = ("norm1_saved", "gate_up_saved")


def test_an_operand_falls_back_alone(alone: Any, caplog: pytest.LogCaptureFixture) -> None:
    layers = Layers()
    guarded = make("operand", layers)
    records = [HURT, record(2, "norm1_saved", underflow=0.3), record(3, underflow=0.2)]
    guarded.observe(records, alone)
    found = guarded.observe(records[:2], alone)
    assert [finding.action for finding in found] == ["operand", "operand"]
    assert not layers.in_bf16
    assert layers.tensors == guarded.fallen.tensors == {"2/fc2_input", "2/norm1_saved"}
    line = caplog.messages[0]
    assert line.startswith("FP8 hurts layer 2, fc2_input: underflow 0.5 is above 0.0864; this ")
    assert "tensor is in BF16 from the next step on" in line
    assert guarded.counts() == {
        **{"guard_bf16_layers": 0, "guard_bf16_tensors": 2, "guard_findings": 2}
    }


def test_the_layer_falls_back_for_an_operand_that_cannot_alone(
    alone: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And what had fallen back in it before, or does after it, is no tensor of its own."""
    layers = Layers()
    guarded = make("operand", layers, alone=SAVED)
    norm, gate_up = (record(2, name, underflow=0.3) for name in SAVED)
    other = record(3, "gate_up_saved", underflow=0.3)
    for _ in range(2):
        guarded.observe([norm, other], alone)
    assert layers.tensors == {"2/norm1_saved", "3/gate_up_saved"}
    guarded.observe([HURT, gate_up], alone)
    found = guarded.observe([HURT, gate_up], alone)
    assert [finding.action for finding in found] == ["layer", "bf16"]
    assert layers.in_bf16 == {2} and layers.tensors == {"3/gate_up_saved"}
    assert "cannot be in BF16 alone in this run" in caplog.messages[-2]


def test_an_operand_that_would_not_fit_stays_and_others_do_not(alone: Any) -> None:
    layers = Layers()
    guarded = make("operand", layers, most=1)
    records = [record(layer, underflow=0.5) for layer in (2, 4)]
    actions = [[f.action for f in guarded.observe(records, alone)] for _ in range(3)]
    assert actions == [[], ["operand", "no memory"], []]
    assert layers.tensors == {"2/fc2_input"}


WHOLE = "as a whole with precision.guard="
KEYS = " and parallel.cp_comm_kv=bf16"
FELL = {
    "mode": "operand",
    "in_bf16": [1],
    "tensors": ["2/fc2_input", "3/gate_up_saved"],
    "suspected": [],
    "reported": ["2/fc2_input"],
}


@pytest.mark.parametrize(
    ("mode", "can", "in_bf16", "tensors"),
    [
        ("operand", TENSORS, {1}, {"2/fc2_input", "3/gate_up_saved"}),
        ("operand", SAVED, {1, 2}, {"3/gate_up_saved"}),
        ("fallback", TENSORS, {1, 2, 3}, set()),
        ("warn", TENSORS, set(), set()),
    ],
)
def test_tensors_are_restored_alone_where_they_can_be_and_else_with_their_layers(
    mode: str, can: tuple[str, ...], in_bf16: set[int], tensors: set[str]
) -> None:
    layers = Layers()
    restored = make(mode, layers, alone=can)
    restored.restore(FELL)
    assert (layers.in_bf16, layers.tensors) == (in_bf16, tensors)
    assert restored.reported == ({"2/fc2_input"} if mode == "operand" else set())
    again = make(mode, layers, alone=can)
    again.restore(restored.state())
    assert again.fallen == restored.fallen


def test_the_joint_tensor_of_older_checkpoints_is_q_k_v_and_o() -> None:
    """Measured was the output alone; it is one finding, and all four are in BF16."""
    layers = Layers()
    restored = make("operand", layers)
    old = {"tensors": ["3/attention_saved"], "suspected": ["12/attention_saved"]}
    restored.restore(FELL | old | {"reported": ["3/attention_saved", "1/fc2_input"]})
    assert layers.tensors == {f"3/{name}_saved" for name in "qkvo"}
    assert restored.suspected == {"12/o_saved"}
    assert restored.reported == {"3/o_saved", "1/fc2_input"}


@pytest.mark.parametrize(
    ("mode", "parallel", "expected"),
    [
        ("operand", {}, []),
        ("operand", {"tp": 2}, [f"{WHOLE}operand, precision.recipe=coat, parallel.tp=2{KEYS}: 2"]),
        ("fallback", {}, [f"{WHOLE}fallback, precision.recipe=coat, parallel.tp=1{KEYS}: 2, 3"]),
        (
            "off",
            {},
            [
                "layers that had fallen back to BF16 compute in FP8 again with precision.guard="
                "off: 1",
                "tensors that had fallen back to BF16 are in FP8 again with precision.guard="
                "off: 2/fc2_input, 3/gate_up_saved",
            ],
        ),
    ],
)
def test_a_resumed_run_says_what_is_not_in_bf16_as_it_was(
    mode: str, parallel: dict[str, Any], expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    sections = {"precision": {"recipe": "coat", "guard": mode}, "parallel": parallel}
    c = make_config(sections | {"model": {"layers": 4}})
    resumed = guard.make_guard(c, 384, 1, memory=0, change=Layers().change)
    restore_guard(resumed, FELL, c)
    assert [line.endswith(end) for line, end in zip(caplog.messages, expected, strict=True)] == [
        True
    ] * len(expected)


@pytest.mark.parametrize(
    ("precision", "named"),
    [
        ({"recipe": "coat"}, "1, 2, 4"),
        ({"recipe": "coat", "bf16_layers": [1, 0]}, "2, 4"),
        ({"recipe": "coat", "bf16_layers": [1, 1]}, "2"),
        ({"recipe": "coat", "bf16_layers": [2, 1]}, None),
        ({"recipe": "bf16"}, None),
    ],
)
def test_only_layers_that_compute_in_fp8_again_are_named(
    precision: dict[str, Any], named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    saved = {"mode": "fallback", "in_bf16": [1, 2, 4], "suspected": [], "reported": []}
    restore_guard(None, saved, make_config({"precision": precision, "model": {"layers": 4}}))
    assert [line.rpartition(": ")[2] for line in caplog.messages] == ([named] if named else [])


@pytest.mark.parametrize("stage", [0, 1])
def test_layers_fit_if_the_stage_that_holds_them_does(stage: int) -> None:
    from coatlm.model.memory import fallback_bytes, rank_bytes

    sections = {"precision": {"recipe": "coat", "guard": "fallback"}, "parallel": {"pp": 2}}
    c = make_config(sections | {"model": {"layers": 4}})
    layers = [2 * stage + 1]
    grown = rank_bytes(c, 384, stage=stage, data_parallel=1).total
    grown += fallback_bytes(c, layers, stage=stage, data_parallel=1)
    other = rank_bytes(c, 384, stage=1 - stage, data_parallel=1).total
    peak = max(grown, other)
    assert guard.peak_with(c, 384, 1, layers) == peak
    fits = [guard.fits_memory(c, 384, 1, memory, layers) for memory in (peak - 1, peak, 0)]
    assert fits == [False, True, True]


def test_tensors_fit_if_the_stage_that_holds_them_does() -> None:
    from coatlm.model.fits import tensor_bytes
    from coatlm.model.memory import peak_bytes

    c = make_config({"precision": {"recipe": "coat", "guard": "operand"}, "model": {"layers": 4}})
    more = tensor_bytes(c, ["2/gate_up_saved"], stage=0, data_parallel=1)
    peak = peak_bytes(c, 384, 1) + more
    fits = [guard.fits_memory(c, 384, 1, m, (), ["2/gate_up_saved"]) for m in (peak - 1, peak, 0)]
    assert more > 0 and fits == [False, True, True]
