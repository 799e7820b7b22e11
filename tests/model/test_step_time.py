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
from coatlm.model.layouts import ranked
from coatlm.model.memory import GIB, peak_bytes
from coatlm.model.rates import interpolated, known, load_rates
from coatlm.model.step_time import Cluster, forecast

FILE = Path(__file__).with_name("measured_steps.yaml")
ROWS = yaml.safe_load(FILE.read_text())["rows"]


def configured(row: dict[str, Any]) -> Config:
    base = read_mapping(row["config"]) if "config" in row else {"data": {"text": ["x"]}}
    words = [f"{key}={yaml.safe_dump(v).split()[0]}" for d in row["keys"] for key, v in d.items()]
    return make_config(override(base, words))


@pytest.mark.parametrize("row", [pytest.param(row, id=row["name"]) for row in ROWS])
def test_a_measured_step_is_predicted_within_10_percent_and_its_memory_within_5(
    row: dict[str, Any],
) -> None:
    config, ranks = configured(row), row["gpus"]
    assert config.model.vocab is not None
    found = forecast(config, config.model.vocab, Cluster(load_rates(row["gpu"]), ranks))
    assert found.tokens_per_s == pytest.approx(row["tokens_per_s"], rel=0.10)
    peak = peak_bytes(config, config.model.vocab, config.data_parallel_size(ranks)) / GIB
    assert peak == pytest.approx(row["gib"], rel=0.05)


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

    plain = time()
    one_byte, fp32 = time("parallel.main_grads=fp8"), time("parallel.main_grads=fp32")
    assert one_byte.update < plain.update < fp32.update
    layers = ("fp8", "fp8-gradients")
    fp8, gradients = (time(f"precision.output_layer={name}").output_layer for name in layers)
    assert fp8 < 0.8 * plain.output_layer and fp8 < gradients < plain.output_layer
    moved = 3_212_749_824 * (4 + 10 / 128) / 50.8e9  # 4.08 bytes of states per parameter
    assert time("optim.offload=states").update == pytest.approx(moved + 6e-3, rel=0.02)


def test_chunks_hide_all_but_the_last_of_a_sum_and_gathers_beside_rows_that_arrived() -> None:
    sizes = ["parallel.sequence_parallel=true", "train.global_batch=4"]
    words = [*sizes, "train.micro_batch=4", "parallel.main_grads=bf16"]
    rates = load_rates("h200")

    def tensor_parallel(*more: str, recipe: str = "coat", tp: int = 2) -> float:
        own = [f"parallel.tp={tp}", f"precision.recipe={recipe}"]
        config = load_config("llama2-7b", [*words, *own, *more])
        return forecast(config, 32000, Cluster(rates, tp)).time.tensor_parallel

    # 16,384 tokens x 4096 codes of which half are sent, at 165 GB/s, and 25 us: less than the GEMMs
    # of the first rank's rows but for the projection's; sums send two bytes, and that of down is
    # hidden by its GEMM, that of the projection not. Delayed computation leaves 0.65 of what is
    # hidden.
    codes = 16_384 * 4096 / 2 / 165e9 + 25e-6
    projection = 2 * 16_384 * 4096 * 2048 / 1171e12
    one = tensor_parallel()
    for chunks, later in ((2, 1 / 2), (4, 3 / 4)):
        sums = later * (2 * codes + projection)
        hidden = 0.65 * 32 * (3 * codes + projection / 2 + sums)
        split = tensor_parallel(f"parallel.tp_chunks={chunks}")
        assert one - split == pytest.approx(hidden, rel=1e-6)
        assert split > 0
    # without chunks all of a layer's four sums are exposed, and take the time of their bytes
    fewer = 32 * 4 * (2 - (1 + 4 / 128)) * 16_384 * 4096 / 2 / 165e9
    fp8 = "parallel.tp_comm_reduce=fp8"
    assert one - tensor_parallel(fp8) == pytest.approx(fewer, rel=1e-6)
    sums = 1 / 2 * ((1 + 4 / 128) * codes + projection)
    split = tensor_parallel(fp8, "parallel.tp_chunks=2")
    hidden = 0.65 * 32 * (3 * codes + projection / 2 + sums)
    assert tensor_parallel(fp8) - split == pytest.approx(hidden, rel=1e-6)
    rows, two = "fp8-block", "parallel.tp_chunks=2"
    scaling = "precision.scaling=current"
    fewer = tensor_parallel(scaling, recipe=rows) - tensor_parallel(scaling, two, recipe=rows)
    assert fewer == pytest.approx(0.65 * 32 * (2 * codes + codes + projection / 2), rel=1e-6)
    # four ranks: three quarters are sent, at 310 GB/s, beside the GEMMs of three of the four ranks
    codes = 16_384 * 4096 * 3 / 4 / 310e9 + 25e-6
    projection = 2 * 16_384 * 4096 * 1024 / 1117e12
    down = 2 * 16_384 * 4096 * 2752 / (1e12 * interpolated(rates.gemm["fp8"], 2752))
    hidden = 0.65 * 32 * (3 * codes + projection * 3 / 4 + (projection + down) / 2)
    fewer = tensor_parallel(tp=4) - tensor_parallel(two, tp=4)
    assert fewer == pytest.approx(hidden, rel=1e-6)


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
        assert choice.peak == peak_bytes(valid, 128256, dp) <= 0.92 * 139.8 * GIB


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
