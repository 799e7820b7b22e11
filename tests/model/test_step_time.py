"""Predicted steps against measured ones, and the ranking of layouts."""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from coatlm.commands.plan import main
from coatlm.config import (
    Config,
    OptimRecipe,
    PrecisionRecipe,
    load_config,
    make_config,
    override,
    read_mapping,
)
from coatlm.model.fits import with_fitting
from coatlm.model.layouts import ranked, usable
from coatlm.model.memory import GIB, peak_bytes
from coatlm.model.rates import interpolated, known, load_rates
from coatlm.model.step_time import Cluster, Forecast, StepTime, forecast

FILE = Path(__file__).with_name("measured_steps.yaml")
ROWS = yaml.safe_load(FILE.read_text())["rows"]


def configured(row: dict[str, Any]) -> Config:
    base = read_mapping(row["config"]) if "config" in row else {"data": {"text": ["x"]}}
    words = [f"{key}={yaml.safe_dump(v).split()[0]}" for d in row["keys"] for key, v in d.items()]
    return make_config(override(base, words))


def measured_speed(found: Forecast, row: dict[str, Any]) -> float:
    """Tokens per second and GPU that the code of that time should have had."""
    waited = 0.0 if row.get("tp_overlap", True) else found.saved_tp
    return found.tokens / (found.time.total + waited) / found.gpus


def test_rows_of_fp8_layers_on_tensor_parallel_ranks_say_whether_these_overlapped() -> None:
    said = {row["name"] for row in ROWS if "tp_overlap" in row}
    assert said == {
        row["name"]
        for row in ROWS
        if (config := configured(row)).parallel.tp > 1 and config.precision.flow
    }
    (row,) = (row for row in ROWS if row["name"] == "7B TP2")
    found = forecast(configured(row), 32000, Cluster(load_rates("h200"), 2))
    assert 1.05 < found.tokens_per_s / measured_speed(found, row) < 1.10


@pytest.mark.parametrize("row", [pytest.param(row, id=row["name"]) for row in ROWS])
def test_a_measured_step_is_predicted_within_10_percent_and_its_memory_within_5(
    row: dict[str, Any],
) -> None:
    config, ranks = configured(row), row["gpus"]
    assert config.model.vocab is not None
    found = forecast(config, config.model.vocab, Cluster(load_rates(row["gpu"]), ranks))
    assert measured_speed(found, row) == pytest.approx(row["tokens_per_s"], rel=0.10)
    peak = peak_bytes(config, config.model.vocab, config.data_parallel_size(ranks)) / GIB
    assert peak == pytest.approx(row["gib"], rel=0.05)
    assert row["gib"] * GIB <= usable(Cluster(load_rates(row["gpu"]), ranks))  # for it has run


def test_samples_of_16384_tokens_on_two_gpus_of_80_gb_do_not_fit_as_they_did_not() -> None:
    (row,) = (row for row in ROWS if row["name"] == "7B DP2 16k")
    saved = [{"precision.output_layer": "fp8-gradients", "train.logits": "save"}]
    config = configured(row | {"keys": row["keys"] + saved})
    peak = peak_bytes(config, 32000, 2)
    assert peak / GIB == pytest.approx(71.9, abs=0.1)
    assert usable(Cluster(load_rates("h100"), 2)) < peak < usable(Cluster(load_rates("h100"), 1))


@pytest.mark.parametrize("kind", known())
def test_rates_are_those_of_recipes(kind: str) -> None:
    rates = load_rates(kind)
    assert set(rates.layer) <= {*get_args(PrecisionRecipe), "current"}
    assert set(rates.optimizer) == set(get_args(OptimRecipe))


def test_a_recipe_without_a_rate_is_taken_to_be_as_fast_as_coat() -> None:
    rates = load_rates("h100")
    words = ["train.global_batch=16", "precision.recipe=rowwise"]
    config = load_config("llama3.2-3b", words)

    def seconds(layer: dict[str, float]) -> float:
        cluster = Cluster(rates.model_copy(update={"layer": layer}), 1)
        return forecast(config, 128256, cluster).time.gemms

    others = {name: rate for name, rate in rates.layer.items() if name != "rowwise"}
    assert seconds(others) == seconds(others | {"rowwise": 1.0}) < seconds(rates.layer)


def test_rates_are_interpolated_over_the_logarithm_and_constant_outside() -> None:
    table = {1024: 100.0, 4096: 300.0}
    assert [interpolated(table, n) for n in (512, 1024, 2048, 8192)] == [100, 100, 200, 300]


def test_every_format_of_gradients_and_the_output_layer_and_offloaded_states_have_a_time() -> None:
    cluster = Cluster(load_rates("h200"), 1)
    words = ["train.micro_batch=4", "train.global_batch=16", "parallel.main_grads=bf16"]

    def time(*more: str) -> Any:
        config = load_config("llama3.2-3b", [*words, "optim.recipe=coat-lean", *more])
        return forecast(config, 128256, cluster).time

    plain = time("precision.output_layer=bf16")
    one_byte, fp32 = time("parallel.main_grads=fp8"), time("parallel.main_grads=fp32")
    assert one_byte.update < plain.update < fp32.update
    layers = ("fp8", "fp8-gradients")
    fp8, gradients = (time(f"precision.output_layer={name}").output_layer for name in layers)
    assert time("precision.output_layer=int8").output_layer == fp8  # not measured yet
    assert fp8 < 0.8 * plain.output_layer and fp8 < gradients < plain.output_layer
    moved = 3_212_749_824 * (4 + 10 / 128) / 50.8e9  # 4.08 bytes of states per parameter
    assert time("optim.offload=states").update == pytest.approx(moved + 6e-3, rel=0.02)


def test_tensor_parallel_collectives_are_exposed_but_for_the_gemms_beside_them() -> None:
    sizes = ["parallel.tp=2", "parallel.sequence_parallel=true", "train.global_batch=4"]
    words = [*sizes, "train.micro_batch=4", "precision.scaling=delayed"]

    def times(*more: str, recipe: str = "coat") -> StepTime:
        config = load_config("llama2-7b", [*words, f"precision.recipe={recipe}", *more])
        return forecast(config, 32000, Cluster(load_rates("h200"), 2)).time

    # 16,384 tokens of 4096: a byte each as codes, two as sums, of which half is sent at 165 GB/s,
    # in 25 us per tensor; scales per row are a tensor of their own. 0.65 of what overlaps is saved.
    codes, scales = 16_384 * 4096 / 2 / 165e9, 16_384 * 4 / 2 / 165e9
    late = 25e-6
    gathered, both, summed = codes + late, codes + scales + 2 * late, 2 * codes + late
    qkv = 2 * 16_384 * 4096 * 6144 / 1225e12  # wgrad, or dgrad: longer than the collectives
    projection = 2 * 16_384 * 4096 * 2048 / 1171e12
    assert projection < summed < qkv and projection / 2 < gathered < qkv / 2
    layer = 2 * (both + summed + gathered)  # forward, and the gradients
    layer += 2 * 0.35 * (gathered + summed)  # beside dgrad and wgrad
    # twice the embedding and the output layer, and the loss; beside them three numbers per token
    ends = 4 * (2 * codes) + 4 * late + 16_384 * 3 * 4 / 165e9
    whole = times()
    assert whole.tensor_parallel == pytest.approx(32 * layer + ends, rel=0.002)

    for chunks, rate in ((2, 1171e12), (4, 1117e12)):
        each = 2 * codes / chunks + late
        down = 2 * 16_384 * 4096 * 5504 / chunks / rate
        output = 2 * 16_384 * 4096 * 2048 / chunks / rate  # of the projection
        # beside the rows of the first rank
        less = 2 * 0.65 * both + 0.65 * (gathered + projection / 2)
        less += 0.65 * (chunks - 1) * (min(each, down) + min(each, output))
        less -= 2 * (chunks - 1) * late
        split = times(f"parallel.tp_chunks={chunks}")
        saved = whole.tensor_parallel - split.tensor_parallel
        assert saved == pytest.approx(32 * less, rel=0.002)
        assert split.elementwise - whole.elementwise == pytest.approx(
            32 * 2 * 4 * 16_384 / 2 * 4096 / 4.26e12, rel=1e-6
        )
    slower = 32 * 2 * 16_384 * 4096 * (2048 * (1 / 1117e12 - 1 / 1171e12))  # projection's columns
    slower += 32 * 2 * 16_384 * 4096 * 5504 * (1 / 1117e12 - 1 / 1225e12)
    assert split.gemms - whole.gemms == pytest.approx(slower, rel=1e-6)
    # sums in FP8 take the time of their bytes; those of forward are exposed, of backward beside
    fewer = (2 - (1 + 4 / 128)) * 16_384 * 4096 / 2 / 165e9
    fp8 = times("parallel.tp_comm_reduce=fp8").tensor_parallel
    assert whole.tensor_parallel - fp8 == pytest.approx(32 * 2 * 1.35 * fewer, rel=0.002)


@cache
def first(gpus: int) -> Any:
    config = load_config("llama3.1-70b")
    return list(islice(ranked(config, 128256, Cluster(load_rates("h200"), gpus)), 3))


def test_layouts_are_valid_fit_and_are_in_the_order_of_their_speed() -> None:
    choices = first(64)
    times = [choice.forecast.time.total for choice in choices]
    assert len(times) == 3 and times == sorted(times)
    for choice in choices:
        valid = make_config(choice.config.model_dump(mode="json"))
        dp = valid.data_parallel_size(64)
        decided = with_fitting(valid, 128256, dp, 139.8 * GIB)
        assert choice.peak == peak_bytes(decided, 128256, dp) <= 0.92 * 139.8 * GIB


@pytest.mark.parametrize(("zero", "gathers"), [(1, 1), (3, 16)])
def test_weights_that_travel_in_fp8_are_cast_and_decoded_in_every_all_gather(
    zero: int, gathers: int
) -> None:
    words = ["train.micro_batch=1", "train.global_batch=16", f"parallel.zero={zero}"]
    config = load_config("llama2-7b", [*words, "parallel.weight_gather=fp8"])
    rates = load_rates("h200")
    twice = rates.model_copy(update={"tb_per_s": 2 * rates.tb_per_s})
    slow, fast = (forecast(config, 32000, Cluster(one, 2)).time.weights for one in (rates, twice))
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    # a rank reads and writes 2 + 1 bytes: of its half before the all-gather, of the other after it
    casts = gathers * 3 * matrices / (1e12 * rates.tb_per_s)
    assert slow - fast == pytest.approx(casts / 2, rel=1e-6)


def test_a_group_of_two_nodes_sends_its_shard_of_sums_over_the_network() -> None:
    cluster = Cluster(load_rates("h200"), 16)
    config = load_config("llama2-7b", ["train.micro_batch=1", "train.global_batch=16"])
    sent = forecast(config, 32000, cluster).sent
    weights = 6_738_415_616
    # 1.031 bytes per gradient and 2 per weight; 7/8 inside a node, then half of an eighth
    assert sent.nvlink == pytest.approx((132 / 128 + 2) * weights * 7 / 8, rel=1e-6)
    assert sent.network == pytest.approx((132 / 128 + 2) * weights / 8 / 2, rel=1e-6)


def test_the_command_ranks_layouts_and_refuses_what_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["llama3-8b", "--gpus", "8", "--gpu", "h100", "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| ") and lines[3].startswith("| ") and not lines[4]
    assert main(["llama3.1-405b", "--gpus", "1"]) == 1
    for words, told in (
        (["--gpus", "0"], "--gpus 0: 1 to"),
        (["--gpus", "8", "--gpu", "a100"], "--gpu a100: must be one of h100, h200"),
        (["--gpus", "8", "--nodes", "3"], "--nodes 3: must divide"),
        (["--gpus", "8", "--network", "0"], "--network 0.0: GB/s"),
    ):
        assert main(["llama3-8b", *words]) == 2
        assert told in capsys.readouterr().err
