"""`tools/bench.py layouts`: its rows are runs that are valid and fit, and compared as they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coatlm.model.layouts import describe, predicted, ranked
from coatlm.model.memory import GIB
from coatlm.model.rates import load_rates
from coatlm.model.step_time import Cluster
from tests.tools.test_command_lines import run
from tools import bench
from tools.benchmarks import end_to_end, layouts

H200 = load_rates("h200")


def cluster(gpus: int) -> Cluster:
    return Cluster(H200, gpus, gpus)


def runs_on(gpus: int) -> Iterator[layouts.LayoutRow]:
    names = layouts.rows({"gpus": str(gpus)})
    assert len(names) == len(set(names))
    return (found for found in layouts.runs() if found.name in names)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_every_row_of_coatlm_is_valid_and_fits(gpus: int) -> None:
    for found in runs_on(gpus):
        count = found.gpus or gpus
        options = layouts.end_to_end_options(found, count, cluster(count))
        assert set(options) <= {*end_to_end.OPTIONS, *(key for key in options if "." in key)}
        if found.row != layouts.COAT:
            continue
        config, vocab = end_to_end.run_config(found.row, options)
        assert config.optim.recipe == "coat-lean" and config.parallel.main_grads == "bf16"
        assert predicted(config, vocab, cluster(count)).peak < 0.95 * H200.memory_gib * GIB
        samples = count * int(options["mbs"]) * int(options["microbatches"])
        assert config.train.global_batch == samples


def test_rows_need_the_gpus_that_they_use() -> None:
    def number(gpus: int) -> int:
        return len(list(runs_on(gpus)))

    assert layouts.gpus({}) == 2
    assert number(4) == number(2) + 2 and number(8) == number(4) + 4  # weak scaling, 34B
    assert not any(found.name.startswith("34B") for found in runs_on(4))
    assert all(found.gpus == 1 for found in runs_on(1))
    assert not any("parts" in found.name for found in runs_on(2))
    for gpus in ("0", "9"):
        with pytest.raises(ValueError, match=f"gpus={gpus}: 1 to 8 GPUs"):
            layouts.rows({"gpus": gpus})


def test_rows_of_one_gpu_are_valid_and_fit_80_gb() -> None:
    h100 = load_rates("h100")
    on_h100, tokens = Cluster(h100, 1, 1), {}
    for found in (one for one in runs_on(1) if "weak scaling" not in one.name):
        options = layouts.end_to_end_options(found, 1, on_h100)
        config, vocab = end_to_end.run_config(found.row, options)
        model, _, what = found.name.rpartition(", ")
        layer = what.removeprefix("output layer ") if what != "parts" else "fp8-gradients"
        assert config.precision.output_layer == layer
        assert vocab == (128256 if model.startswith("8B") else 151936)
        assert predicted(config, vocab, on_h100).peak < h100.memory_gib * GIB
        assert end_to_end.captures(found.row, options) == (config.train.cuda_graphs is True)
        if what == "parts":
            assert config.train.cuda_graphs is False and options["trace"] == "1"
        else:
            tokens.setdefault(model, set()).add(config.train.global_batch * config.data.seq_len)
    assert len(tokens) == 7 and all(len(each) == 1 for each in tokens.values())


def test_planned_is_the_planners_first_choice_for_the_same_samples() -> None:
    (found,) = (r for r in layouts.runs() if r.name == "8B of 8192 tokens, planned")
    given = layouts.end_to_end_options(found, 8, cluster(8))
    config, vocab = end_to_end.run_config(found.row, given)
    assert config.train.global_batch == 128  # 8 GPUs with 16 microbatches of one sample
    first = next(ranked(config, vocab, cluster(8)))
    assert describe(config, 8) == describe(first.config, 8)
    with pytest.raises(ValueError, match="no rates of this GPU"):
        layouts.end_to_end_options(found, 8, None)


@pytest.mark.parametrize("row", ["7B, TP2", "8B of 8192 tokens, megatron+te delayed"])
def test_rows_of_coatlm_are_compared_with_predictions(
    row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def measure(name: str, options: dict[str, str]) -> dict[str, Any]:
        asked.update(options, row=name)
        return {"tokens_per_s": 20000, "peak_gib": 40.0}

    memory = round(H200.memory_gib * GIB)
    device = SimpleNamespace(name=H200.gpu, total_memory=memory)
    monkeypatch.setattr(end_to_end, "measure", measure)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    found = layouts.measure(row, {"gpus": "4", "steps": "7"})
    assert (asked["gpus"], asked["steps"]) == ("4", "7") and found["gpus"] == 4
    if row != "7B, TP2":
        assert asked["row"] == "megatron+te delayed" and "speed_ratio" not in found
        return
    assert found["layout"].startswith("tp 2 x dp 2, zero 1")
    assert found["speed_ratio"] == round(found["predicted_tokens_per_s"] / 20000, 3)
    assert 0.6 < found["speed_ratio"] < 1.2 and 20 < found["predicted_gib"] < 40
    assert found["memory_ratio"] == pytest.approx(found["predicted_gib"] / 40, abs=0.002)
    assert "alone_ms" not in found


def test_parts_of_a_step_stand_beside_what_their_kernels_take_alone() -> None:
    config, vocab = end_to_end.run_config(layouts.COAT, {"model": "7b", "mbs": "4"})
    measured = {"tokens_per_s": 20000, "peak_gib": 40.0, "output_layer_ms": 20.0}
    alone = layouts.compared(measured, config, vocab, cluster(1))["alone_ms"].split(" ")
    time = predicted(config, vocab, cluster(1)).forecast.time
    assert [float(ms) for ms in alone] == pytest.approx(
        [1e3 * getattr(time, name) for name in layouts.PARTS], abs=0.06
    )


def test_a_peer_without_fewer_key_heads_says_so() -> None:
    with pytest.raises(ValueError, match=r"model\.kv_heads=8: must be 32 with the row fsdp2 bf16"):
        end_to_end.peer_step("fsdp2 bf16", {"model": "7b", "model.kv_heads": "8"})


def test_records_are_written_after_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "found.json"

    class RowProcess:
        """Stands for the process of a row; the last one is interrupted."""

        def __init__(self, benchmark: str, row: str, options: list[str]) -> None:
            self.row = row

        def measure(self) -> list[dict[str, Any]]:
            if self.row.startswith("coatlm local"):
                raise KeyboardInterrupt
            return [{"row": self.row, "ms": 1}]

    monkeypatch.setattr(bench, "RowProcess", RowProcess)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, "bench", "end-to-end", "--out", str(out))
    written = [record["row"] for record in json.loads(out.read_text())["end-to-end"]]
    assert written == ["megatron+te bf16", "coatlm te bf16"]
