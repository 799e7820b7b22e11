"""The measures of a tensor and its codes, and the sources that no memory holds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from coatlm.config.operands import ROW, TENSOR, Granularity, Operand, block
from coatlm.config.recipes import RECIPES
from coatlm.fp8.formats import E5M2
from coatlm.fp8.norm_quantize import norm_quantize, quantize_rows
from coatlm.fp8.operand import emit_direct
from coatlm.fp8.qtensor import QTensor
from coatlm.fp8.rope_quantize import join_quantize
from coatlm.fp8.swiglu_quantize import swiglu_backward_quantize, swiglu_quantize
from coatlm.kernels.rope import rope_tables
from coatlm.model import numerics
from coatlm.model.coat_layer import flows_of
from coatlm.model.numerics import (
    LSE,
    REPORTED,
    SUMS,
    TENSORS,
    LogitsWatch,
    Probe,
    RowSource,
    report,
    watched,
)
from tests.model.test_flow import build, run, run_config


def measures(source: Tensor | RowSource, quantized: QTensor) -> dict[str, float]:
    probe = Probe()
    probe.record("fc1_input", source, quantized)
    at = 0, numerics.REPORTED.index("fc1_input")
    amax = torch.zeros(1, len(numerics.REPORTED))
    sums = torch.zeros(1, len(numerics.REPORTED), len(SUMS), dtype=torch.float64)
    amax[at], sums[at] = probe.amax["fc1_input"], probe.sums["fc1_input"]
    (line,) = numerics.report(amax, sums)
    return {key: float(value) for key, value in line.items() if key not in ("layer", "tensor")}


def test_measures_of_six_known_values() -> None:
    """Scale 1: 448 is the largest code, 17 becomes 16, 2^-10 ties to the even 0, 2^-9 is a code."""
    x = torch.tensor([[448.0, -17.0, 2.0**-10, 2.0**-9, 0.0, 1.0]])
    found = measures(x, quantize_rows(x))
    assert found["amax"] == 448
    assert found["saturated"] == 1 / 6
    assert found["underflow"] == 1 / 5
    error = (1 + 2.0**-20) ** 0.5 / float(x.double().norm())
    assert found["relative_error"] == pytest.approx(error, rel=1e-12)


def test_a_value_that_is_not_finite_is_the_amax() -> None:
    x = torch.tensor([[1.0, float("nan"), float("inf")]])
    assert math.isnan(measures(x, quantize_rows(x))["amax"])
    assert math.isinf(measures(x[:, ::2], quantize_rows(x[:, ::2]))["amax"])


def test_nothing_lost_of_zeros() -> None:
    x = torch.zeros(2, 16)
    expected = {"amax": 0.0, "saturated": 0.0, "underflow": 0.0, "relative_error": 0.0}
    assert measures(x, quantize_rows(x)) == expected


def test_underflow_grows_with_an_outlier_in_a_row() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    usual = measures(x, quantize_rows(x))
    x[7, 3] = 1e6
    outlier = measures(x, quantize_rows(x))
    assert usual["underflow"] < 1e-3
    assert outlier["underflow"] == pytest.approx(usual["underflow"] + 127 / (64 * 128), rel=0.02)


def test_pieces_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(37, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = norm_quantize(x, torch.ones(64), 1e-5, block_size=16)
    assert made.saved is not None
    sources = (x, made.saved), (numerics.norm_rows(x, torch.ones(64), 1e-5), made.y)
    whole = [measures(*source) for source in sources]
    monkeypatch.setattr(numerics, "PIECE", 5 * 64)
    for source, expected in zip(sources, whole, strict=True):
        assert measures(*source) == pytest.approx(expected, rel=1e-12)


def test_only_what_comes_first_counts() -> None:
    probe, x = Probe(), torch.ones(2, 16)
    probe.record("qkv_input", x, quantize_rows(x))
    probe.record("qkv_input", 5 * x, quantize_rows(5 * x))
    assert probe.amax["qkv_input"] == 1
    assert probe.sums["qkv_input"][SUMS.index("elements")] == 32


def test_recomputed_sources_are_those_of_the_codes() -> None:
    """Encoding the source by the scale gives the codes, bit by bit; pieces cut through a batch."""
    torch.manual_seed(0)
    x, da = torch.randn(21, 128).bfloat16(), torch.randn(21, 64).bfloat16()
    active = swiglu_quantize(x, block_size=16)
    assert active.saved is not None
    gradient = swiglu_backward_quantize(da, active.saved, torch.ones(()), fmt=E5M2, with_a=False)
    dq, dk, dv = (torch.randn(7, 3, heads, 16).bfloat16() for heads in (4, 2, 2))
    cos, sin = rope_tables(torch.arange(7), torch.rand(8))
    joined = join_quantize(dq, dk, dv, cos, sin, fmt=E5M2).direct
    weight = torch.rand(128) + 0.5
    sources: list[tuple[RowSource, QTensor]] = [
        (numerics.norm_rows(x, weight, 1e-5), norm_quantize(x, weight, 1e-5).y),
        (numerics.swiglu_rows(x), active.a),
        (numerics.swiglu_gradient_rows(da, active.saved), gradient.dx),
        (numerics.qkv_gradient_rows(dq, dk, dv, cos, sin), joined),
    ]
    for rows, codes in sources:
        parts = [rows(start, min(start + 5, 21)) for start in range(0, 21, 5)]
        assert torch.equal(
            codes.fmt.encode(torch.cat(parts) / codes.scale).float(), codes.codes.float()
        )


@pytest.mark.parametrize("granularity", [TENSOR, ROW, block(1, 128), block(128, 128)])
def test_pieces_of_every_granularity_add_up(
    granularity: Granularity, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(300, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = emit_direct(x, Operand("e4m3", granularity))
    whole = measures(x, made)
    exact = (made.dequantize() - x.float()).norm() / x.float().norm()
    assert whole["relative_error"] == pytest.approx(exact.item(), rel=1e-5)
    monkeypatch.setattr(numerics, "PIECE", 5 * 256)
    assert measures(x, made) == pytest.approx(whole, rel=1e-12)


def moments(x: Tensor) -> dict[str, float]:
    probe = Probe()
    probe.record_residual(x)
    amax = torch.zeros(1, len(numerics.REPORTED))
    sums = torch.zeros(1, len(numerics.REPORTED), len(SUMS), dtype=torch.float64)
    amax[0, 0], sums[0, 0, :2] = probe.amax["residual"], probe.sums["residual"]
    (line,) = numerics.report(amax, sums)
    assert line.pop("layer") == 1 and line.pop("tensor") == "residual"
    return {key: float(value) for key, value in line.items()}


def test_kurtosis_is_one_of_equal_channels_and_their_number_if_one_has_everything() -> None:
    equal, single = torch.full((3, 2, 64), -7.0), torch.zeros(3, 2, 64)
    single[..., 5] = 1e-30
    assert moments(equal) == {"amax": 7.0, "kurtosis": 1.0}
    assert moments(single) == pytest.approx({"amax": 1e-30, "kurtosis": 64.0}, rel=1e-6)


def test_kurtosis_is_the_mean_over_tokens_whatever_their_size() -> None:
    """Gaussian channels have 3; 2^20 of them leave an error of sqrt(96 / 2^20) = 0.01."""
    x = torch.randn(1 << 10, 1 << 10, generator=torch.Generator().manual_seed(0))
    assert moments(x)["kurtosis"] == pytest.approx(3, abs=0.03)
    x[::2] *= 1e12
    assert moments(x)["kurtosis"] == pytest.approx(3, abs=0.03)
    x[:, 3] *= 1000
    assert moments(x)["kurtosis"] > 0.9 * len(x)


def test_logits_are_those_of_the_tokens_with_a_loss_and_are_recorded_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    probe = Probe()
    probe.record_logits(torch.tensor([70.0, 1e9, -74.0]), torch.tensor([True, False, True]))
    probe.record_logits(torch.zeros(2), torch.ones(2, dtype=torch.bool))
    amax, sums = torch.zeros(1, len(REPORTED)), torch.zeros(1, len(REPORTED), len(SUMS)).double()
    at = REPORTED.index(LSE)
    amax[0, at], sums[0, at, :2] = probe.amax[LSE], probe.sums[LSE]
    (line,) = report(amax, sums)
    assert line == {"layer": 1, "tensor": LSE, "amax": 74.0, "mean": -2.0}
    watch = LogitsWatch()
    for mean, warned in (
        *((-2.0, None), (31.9, None), (32.0, "0.25 apart"), (60.0, None)),
        *((-70.0, "0.5 apart"), (100.0, None), (600.0, "4 apart"), (1000.0, None)),
    ):
        caplog.clear()
        records = [{"layer": 1, "tensor": "residual", "amax": 1e3}, line | {"mean": mean}]
        assert watch.observe(records) is records
        assert [warned in message for message in caplog.messages] == [True] * (warned is not None)


def test_tokens_of_zeros_have_no_kurtosis_and_a_nan_is_reported() -> None:
    x = torch.zeros(4, 16)
    x[1] = 1
    assert moments(x)["kurtosis"] == 1
    x[2, 3] = torch.nan
    assert all(math.isnan(value) for value in moments(x).values())


def test_pieces_of_the_residual_stream_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(37, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = moments(x)
    monkeypatch.setattr(numerics, "PIECE", 5 * 64)
    assert moments(x) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("granularity", [TENSOR, ROW, block(1, 128), block(128, 128)])
def test_a_sample_is_two_runs_of_rows_with_their_own_scales(granularity: Granularity) -> None:
    x = torch.randn(5000, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    made = emit_direct(x, Operand("e4m3", granularity))
    probe = Probe(sampled=True)
    probe.record("fc1_input", x, made)
    height = granularity.rows or 1
    starts = [0, 2500 // height * height]
    rows = torch.cat([torch.arange(start, start + 512) for start in starts])
    exact, coded = x.double()[rows], made.dequantize().double()[rows]
    sums = probe.sums["fc1_input"]
    assert sums[SUMS.index("elements")] == 1024 * 256
    assert sums[SUMS.index("error")].item() == pytest.approx((coded - exact).square().sum().item())
    assert probe.amax["fc1_input"] == exact.abs().max()


def test_a_tensor_no_longer_than_the_sample_is_measured_whole() -> None:
    x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
    found = [Probe(sampled=sampled) for sampled in (False, True)]
    for probe in found:
        probe.record("fc1_input", x, quantize_rows(x))
    assert torch.equal(found[0].sums["fc1_input"], found[1].sums["fc1_input"])


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_layers_of_every_recipe_show_their_tensors(name: str, megatron: None) -> None:
    c = run_config(name)
    model = build(c)
    with watched(flows_of(model.decoder.layers)) as probes:
        run(c, model)
    saved = RECIPES[name].saved
    missing = set() if saved.norm_input else {"norm1_saved", "norm2_saved", "gate_up_saved"}
    missing |= set() if saved.attention else {f"{name}_saved" for name in "qkvo"}
    (probe,) = probes.values()
    assert set(probe.sums) == set(TENSORS) - missing
    for tensor, sums in probe.sums.items():
        error, size = (float(sums[SUMS.index(k)]) for k in ("error", "size"))
        # 2^-3 for E5M2, 2^-4 for E4M3, in the root mean square of a spacing at its worst
        limit = 2.0**-3 if tensor.endswith("_grad") else 2.0**-4
        assert 0 < (error / size) ** 0.5 <= limit / 3**0.5
