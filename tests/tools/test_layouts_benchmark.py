"""`tools/bench.py layouts`: its rows are runs that are valid and fit, and compared as they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coatlm.model.accounting import parameters
from coatlm.model.layouts import describe, predicted, ranked
from coatlm.model.memory import GIB
from coatlm.model.rates import load_rates
from coatlm.model.step_time import Cluster
from tests.tools.test_command_lines import run
from tools import bench
from tools.benchmarks import end_to_end, fsdp_peer, layout_rows, layouts, megatron_peer
from tools.benchmarks.layer_stacks import LayerShape

H200 = load_rates("h200")

LAYERS = ("bf16", "fp8-gradients")  # the formats of the output layer that rows name


def cluster(gpus: int) -> Cluster:
    return Cluster(H200, gpus, gpus)


def runs_on(gpus: int) -> Iterator[layout_rows.LayoutRow]:
    names = layouts.rows({"gpus": str(gpus)})
    assert len(names) == len(set(names))
    return (found for found in layout_rows.runs() if found.name in names)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_every_row_is_a_valid_run_that_fits(gpus: int) -> None:
    """Peers are judged by the row of coatlm that resembles them."""
    for found in (one for one in runs_on(gpus) if not one.command):
        count = found.gpus or gpus
        options = layouts.end_to_end_options(found, count, cluster(count))
        assert set(options) <= {*end_to_end.OPTIONS, *(key for key in options if "." in key)}
        config, vocab = layouts.similar_config(found, options)
        if found.row in layout_rows.OURS:
            assert config.parallel.main_grads == "bf16" and config.precision.scaling == "delayed"
            assert config.optim.recipe == (
                "coat-24" if "coat-24" in options.values() else "coat-lean"
            )
        else:
            assert config.optim.recipe == "adamw-fp32" and config.parallel.main_grads == "fp32"
        assert predicted(config, vocab, cluster(count)).peak < 0.95 * H200.memory_gib * GIB
        samples = count * int(options["mbs"]) * int(options["microbatches"])
        assert config.train.global_batch == samples
        assert samples % (config.data_parallel_size(count) * config.train.micro_batch) == 0
        for value in (options.get("steps", "5"), options.get("warmup", "3")):
            assert int(value) >= 1
        assert end_to_end.captures(found.row, options) == (config.train.cuda_graphs is True)
        assert not (config.train.cuda_graphs is True and "warmup" in options)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_every_command_names_a_file_and_comes_last(gpus: int) -> None:
    found = {one.name: one for one in runs_on(gpus)}
    names = layouts.rows({"gpus": str(gpus)})
    commands = [name for name in names if found[name].command]
    assert commands == (names[-len(commands) :] if gpus > 1 else [])
    for name in commands:
        words = found[name].command
        assert (bench.ROOT / words[-1]).exists() or words[-1] in bench.BENCHMARKS
        assert found[name].seconds >= 60
    files = {path.name for path in (bench.ROOT / "tests/multigpu").glob("test_*.py")}
    assert gpus == 1 or {Path(name).name for name in commands} == {*files, "bench reduce"}


def test_rows_need_the_gpus_that_they_use() -> None:
    def names(gpus: int) -> set[str]:
        return set(layouts.rows({"gpus": str(gpus)}))

    assert layouts.gpus({}) == 2
    for feature in ("tp_chunks 4", "131072", "all_gather", "bf16 weights", "delayed scales"):
        assert any(feature.split()[0] in name for name in names(2)), feature
    for name in ("7B, TP2", "7B, PP2", "7B of 16384 tokens, CP2"):
        for gpus in (2, 4, 8):
            both = [row for row in layouts.rows({"gpus": str(gpus)}) if row.startswith(name)]
            assert "traced" in both[0] and both[-1] == f"{name}, te-delayed"
    assert layouts.rows({"gpus": "4"})[0] == "8B of 8192 tokens, planned"
    assert {name for name in names(8) - names(4) if "scaling" not in name} == {
        "34B, ZeRO-3",
        "34B, planned",
    }
    assert all(found.gpus == 1 for found in runs_on(1))
    assert not any("parts" in name for name in names(2))
    for gpus in ("0", "9"):
        with pytest.raises(ValueError, match=f"gpus={gpus}: 1 to 8 GPUs"):
            layouts.rows({"gpus": gpus})


def test_the_seconds_of_a_row_are_its_start_and_its_steps() -> None:
    config, vocab = end_to_end.run_config(
        layout_rows.COAT,
        dict(layout_rows.LLAMA_2_7B | layout_rows.FP8 | layout_rows.TP2, gpus="2"),
    )
    step = predicted(config, vocab, cluster(2)).forecast.time.total
    name = "7B, TP2, tp_chunks 1, traced"
    # 3 to warm up, 5 to measure, 1 to trace
    assert step > 0.5
    assert layouts.seconds(name, {"gpus": "2"}) == pytest.approx(50 + 10 + 9 * step)
    assert layouts.seconds(name, {"gpus": "2", "steps": "9"}) == pytest.approx(60 + 13 * step)
    h100 = layouts.seconds(name, {"gpus": "2", "gpu": "h100"})
    assert h100 > layouts.seconds(name, {"gpus": "2"})
    with pytest.raises(ValueError, match="gpu=a100: one of h100, h200"):
        layouts.seconds(name, {"gpus": "2", "gpu": "a100"})
    long = "7B of 131072 tokens, CP2"
    assert layouts.seconds(long, {"gpus": "2", "steps": "9"}) < 300  # its own steps


@pytest.mark.parametrize("gpus", ["2", "4"])
def test_list_prints_rows_with_seconds_and_measures_nothing(
    gpus: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(bench, "RowProcess")
    assert run(monkeypatch, "bench", "layouts", f"gpus={gpus}", "--list") == 0
    lines = capsys.readouterr().out.split("\n")[3:-1]
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    assert [row[0] for row in cells] == layouts.rows({"gpus": gpus})
    until = 0.0
    for _, seconds, end, limit in cells:
        until += int(seconds)
        assert int(end) == pytest.approx(until, abs=len(cells) / 2)
        assert 30 <= int(seconds) < 300 and int(limit) == pytest.approx(
            2 * int(seconds) + 60, abs=2
        )


def test_rows_of_one_gpu_are_valid_and_fit_80_gb() -> None:
    h100 = load_rates("h100")
    on_h100, tokens = Cluster(h100, 1, 1), {}
    for found in (one for one in runs_on(1) if "weak scaling" not in one.name):
        options = layouts.end_to_end_options(found, 1, on_h100)
        config, vocab = end_to_end.run_config(found.row, options)
        model, _, what = found.name.rpartition(", ")
        layer = what.removeprefix("output layer ")
        assert config.precision.output_layer == (layer if layer in LAYERS else "fp8-gradients")
        assert vocab == (128256 if model.startswith("8B") else 151936)
        assert predicted(config, vocab, on_h100).peak < h100.memory_gib * GIB
        assert end_to_end.captures(found.row, options) == (config.train.cuda_graphs is True)
        if what == "parts":
            assert config.train.cuda_graphs is False and options["trace"] == "1"
        elif "exact" in found.name:
            assert config.optim.recipe == "coat-lean"  # BF16 weights and the 16 bits below them
        elif what not in ("one microbatch", "updated in backward"):
            tokens.setdefault(model, set()).add(config.train.global_batch * config.data.seq_len)
    assert len(tokens) == 7 and all(len(each) == 1 for each in tokens.values())
    of_8b = {"8B of 2048 tokens": {16384}, "8B of 8192 tokens": {65536}}
    rest = {size: {524288} for size in ("0.5B", "1.5B", "3B", "7B", "14B")}
    assert tokens == rest | of_8b


def test_updates_in_backward_are_compared_with_the_same_step() -> None:
    options = [
        layouts.end_to_end_options(layouts.run_of(f"8B of 2048 tokens, {how}"), 1, None)
        for how in ("one microbatch", "updated in backward")
    ]
    assert options[1] == options[0] | {"train.update": "backward"}
    config, _ = end_to_end.run_config(layout_rows.COAT, options[1])
    assert config.train.update == "backward" and config.train.microbatches(1) == 1


def test_planned_is_the_planners_first_choice_for_the_same_samples() -> None:
    (found,) = (r for r in layout_rows.runs() if r.name == "8B of 8192 tokens, planned")
    given = layouts.end_to_end_options(found, 8, cluster(8))
    config, vocab = end_to_end.run_config(found.row, given)
    assert config.train.global_batch == 128  # 8 GPUs with 16 microbatches of one sample
    first = next(ranked(config, vocab, cluster(8)))
    assert describe(config, 8) == describe(first.config, 8)
    with pytest.raises(ValueError, match="no rates of this GPU"):
        layouts.end_to_end_options(found, 8, None)


@pytest.mark.parametrize(
    "row", ["7B, TP2, tp_chunks 1, traced", "8B of 8192 tokens, megatron+te delayed"]
)
def test_rows_of_coatlm_are_compared_with_predictions(
    row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def ready(name: str, options: dict[str, str]) -> Callable[[], dict[str, Any]]:
        asked.update(options, row=name)
        return lambda: {"tokens_per_s": 20000, "peak_gib": 40.0}

    memory = round(H200.memory_gib * GIB)
    device = SimpleNamespace(name=H200.gpu, total_memory=memory)
    monkeypatch.setattr(end_to_end, "ready", ready)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    begun = layouts.ready(row, {"gpus": "4", "steps": "7"})
    early = dict(asked)
    asked.clear()
    found = begun()
    assert not asked  # measured by what was started
    assert found == layouts.measure(row, {"gpus": "4", "steps": "7"}) and asked == early
    assert (asked["gpus"], asked["steps"]) == ("4", "7") and found["gpus"] == 4
    if row.startswith("8B"):
        assert asked["row"] == "megatron+te delayed" and "speed_ratio" not in found
        return
    assert found["layout"].startswith("tp 2 x dp 2, zero 1")
    assert found["speed_ratio"] == round(found["predicted_tokens_per_s"] / 20000, 3)
    assert 0.6 < found["speed_ratio"] < 1.2 and 20 < found["predicted_gib"] < 40
    assert found["memory_ratio"] == pytest.approx(found["predicted_gib"] / 40, abs=0.002)
    assert "alone_ms" not in found


def test_rows_that_need_the_planner_or_run_a_command_start_nothing_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ready(name: str, options: dict[str, str]) -> Callable[[], dict[str, Any]]:
        raise AssertionError(name)

    monkeypatch.setattr(end_to_end, "ready", ready)
    for row in ("13B, planned", "bench reduce"):
        assert callable(layouts.ready(row, {"gpus": "2"}))


def test_parts_of_a_step_stand_beside_what_their_kernels_take_alone() -> None:
    config, vocab = end_to_end.run_config(layout_rows.COAT, {"model": "7b", "mbs": "4"})
    measured = {"tokens_per_s": 20000, "peak_gib": 40.0, "output_layer_ms": 20.0}
    alone = layouts.compared(measured, config, vocab, cluster(1))["alone_ms"].split(" ")
    time = predicted(config, vocab, cluster(1)).forecast.time
    assert [float(ms) for ms in alone] == pytest.approx(
        [1e3 * getattr(time, name) for name in layouts.PARTS], abs=0.06
    )


@pytest.mark.parametrize("row", ["fsdp2 bf16", "megatron+te delayed"])
def test_peers_share_key_heads_as_the_model_does(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(row: str, shape: LayerShape, *rest: Any) -> tuple[Any, Any]:
        return shape, rest

    monkeypatch.setattr(fsdp_peer, "fsdp_step", made)
    monkeypatch.setattr(megatron_peer, "megatron_step", made)
    monkeypatch.setattr("coatlm.train.setup.start_processes", lambda _: None)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr(end_to_end, "random_tokens", lambda *_: "tokens")
    options = dict(layout_rows.LLAMA_3_8B)
    found: tuple[Any, Any] = end_to_end.peer_step(row, options)
    shape, rest = found
    assert shape == LayerShape(4096, 14336, 32, 8192, 1, shared=4) and shape.kv_heads == 8
    assert rest == (32, 128256, "tokens", 1)
    with pytest.raises(ValueError, match=r"model\.kv_heads=7: must divide model\.heads=32"):
        end_to_end.peer_step(row, options | {"model.kv_heads": "7"})
    for key in ("data.reset_attention_mask", "model.tie_embeddings", "train.recompute"):
        with pytest.raises(ValueError, match=rf"{key}=true: peers are measured without it"):
            end_to_end.peer_step(row, options | {key: "true"})


def test_the_fsdp_peer_of_llama_3_has_its_parameters() -> None:
    options = layout_rows.LLAMA_3_8B | {"layers": "2"}
    config, vocab = end_to_end.run_config("coatlm local bf16", options)
    shape = LayerShape(hidden=4096, ffn=14336, heads=32, seq=16, batch=1, shared=4)
    with torch.device("meta"):
        model = fsdp_peer.PlainLlama(shape, 2, vocab)
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == parameters(config.model, vocab)
