"""`tools/bench.py rates`: every measurement runs, and the file keeps what was not measured."""

from __future__ import annotations

from typing import Any

import pytest

from coatlm.config.yaml_text import parse_yaml
from coatlm.model.rates import Rates, load_rates
from tests.distributed import run_ranks
from tools.benchmarks import rates

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
    assert after.network == before.network and after.layer["fp8-block"] == 1.434
    assert after.gemm["fp8"].keys() == {64} and after.attention.keys() == {32, 64, 128}


def test_no_measurement_begins_after_the_deadline() -> None:
    found = rates.measure("memory; layers; optimizer", SMOKE | {"seconds": "0"})
    values = {record["key"]: record["value"] for record in found}
    assert values["tb_per_s"] > 0 and values["gemm"] == values["optimizer"] == {}
    text = rates.text(found, SMOKE)
    assert Rates.model_validate(parse_yaml(text)).gemm == load_rates("h200").gemm
