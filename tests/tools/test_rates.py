"""`tools/bench.py rates`: every measurement runs, and the file keeps what was not measured."""

from __future__ import annotations

from typing import Any

import pytest

from coatlm.config.yaml_text import parse_yaml
from coatlm.model.rates import Rates, load_rates
from tests.distributed import run_ranks
from tools.benchmarks import clock, layer_rates, rates

SMOKE = {"smoke": "1", "base": "h200"}


def measured(rank: int, size: int, rows: str) -> list[dict[str, Any]]:
    return list(rates.measure(rows, SMOKE))


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    """The records of a tiny run in a process of its own, which becomes a run of one rank."""
    (found,) = run_ranks(1, f"{__name__}:measured", "; ".join(rates.ROWS))
    return list(found)


def test_every_row_measures_its_keys(records: list[dict[str, Any]]) -> None:
    assert not [record for record in records if "missing" in record]
    values = {record["key"]: record["value"] for record in records}
    keys = {"tb_per_s", "attention", "gemm", "launch_us", "output", "optimizer", "layer"}
    assert values.keys() == keys
    assert set(values["gemm"]) == set(values["launch_us"]) == {"fp8", "bf16"}
    assert set(values["optimizer"]) == set(load_rates("h200").optimizer)
    assert values["layer"]["coat"] == 1.0 and values["layer"]["rowwise"] > 0


def test_the_file_has_what_was_measured_and_names_what_it_keeps(
    records: list[dict[str, Any]],
) -> None:
    text = rates.text(records, SMOKE)
    head = [line for line in text.splitlines() if line.startswith("# ")]
    said = " ".join(line.removeprefix("# ") for line in head)
    before, after = load_rates("h200"), Rates.model_validate(parse_yaml(text))
    assert max(map(len, head)) <= 100 and "Kept from h200.yaml: gpu, memory_gib, " in said
    assert "layer.fp8-block" in said and "layer.rowwise" not in said and "gemm" not in said
    assert after.network == before.network and after.layer["fp8-block"] == 1.38
    assert after.gemm["fp8"].keys() == {64} and after.attention.keys() == {32, 64, 128}


def test_no_measurement_begins_after_the_deadline() -> None:
    found = rates.measure("memory; layers; optimizer", SMOKE | {"seconds": "0"})
    values = {record["key"]: record["value"] for record in found}
    assert values["tb_per_s"] > 0 and values["gemm"] == values["optimizer"] == {}
    text = rates.text(found, SMOKE)
    assert Rates.model_validate(parse_yaml(text)).gemm == load_rates("h200").gemm


def test_a_gpu_is_measured_after_it_has_been_busy_for_half_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def two_milliseconds(launch: Any, reps: int) -> float:
        calls.append(reps)
        return 2.0

    monkeypatch.setattr(clock, "DEVICE", "cuda")
    monkeypatch.setattr(clock, "milliseconds", two_milliseconds)
    assert clock.sustained(lambda: None) == 2.0
    assert calls == [1, 250, 200]  # 0.5 s of settling, 0.4 s of measurement


def test_the_time_to_launch_a_layer_leaves_out_what_a_stack_takes_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def timing(layers: int, shape: Any, steps: int) -> dict[str, float]:
        assert shape.tokens == 2048
        return {"launch_ms": 1.5 + 0.75 * layers}

    monkeypatch.setattr(layer_rates, "coatlm_stack", lambda row, shape, layers: layers)
    monkeypatch.setattr(layer_rates.layer, "timing", timing)
    assert layer_rates.launch_us("coatlm coat", layer_rates.layer_shape(1024, False)) == 750


def test_layers_of_small_hidden_sizes_have_as_many_elements_as_those_of_4096() -> None:
    shapes = [layer_rates.layer_shape(hidden, smoke=False) for hidden in layer_rates.HIDDEN]
    assert [shape.batch for shape in shapes] == [64, 32, 16, 8, 4, 4]
    assert all(shape.heads == shape.hidden // 128 for shape in shapes)
