"""numerics.jsonl: what FP8 loses in layers, on every layout alike, at no cost to the training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from coatlm.commands.curves import read_run
from coatlm.config import Config, make_config
from coatlm.fp8.formats import E4M3, E5M2
from coatlm.model.numerics import LSE, RESIDUAL, TENSORS
from coatlm.train.guard import find, limits_of
from tests.distributed import run_ranks
from tests.train.test_resume import MODEL, metrics_of, run_config, start_jobs

SIZES = MODEL | {"hidden": 128, "heads": 8, "ffn": 128}
LAYOUTS = ("tp2", "tp2 sp", "cp2", "pp2", "pp2 vpp2", "dp2")
ATTENDED = ("q_saved", "k_saved", "v_saved", "o_saved")
KEPT = ("norm1_saved", "norm2_saved", "gate_up_saved", *ATTENDED)
MEASURES = ("amax", "saturated", "underflow", "relative_error")
Line = dict[str, Any]


def numerics_config(
    directory: Path, layout: str, recipe: str = "coat", every: int = 2, **changes: Any
) -> Config:
    sections: dict[str, Any] = {
        "model": SIZES,
        "precision": {"recipe": recipe},
        "optim": {"recipe": "adamw-bf16-fp32state"},
        "train": {"steps": 4, "eval_every": 2},
        "checkpoint": {"every": 0},
        "log": {"every": 1, "numerics_every": every},
    }
    sections |= {name: sections.get(name, {}) | values for name, values in changes.items()}
    return run_config(directory, layout, **sections)


def numerics_of(directory: Path) -> list[Line]:
    return [json.loads(line) for line in (directory / "numerics.jsonl").read_text().splitlines()]


def by_tensor(directory: Path, step: int) -> dict[tuple[int, str], Line]:
    lines = [line for line in numerics_of(directory) if line["step"] == step]
    found = {(line["layer"], line["tensor"]): line for line in lines}
    assert len(found) == len(lines)  # none twice
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of eight microbatches, asked and not asked, and one step on two ranks."""
    root = tmp_path_factory.mktemp("numerics")
    (root / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(6000)))
    full = {"recompute": "full"}
    jobs = [
        numerics_config(root / "asked", "single"),
        numerics_config(root / "not asked", "single", every=0),
        numerics_config(root / "recomputed", "single", train=full),
        numerics_config(root / "coat-lean", "single", "coat-lean"),
        numerics_config(root / "fp8-linear", "single", "fp8-linear"),
        numerics_config(
            root / "ends in bf16", "single", precision={"recipe": "coat", "bf16_layers": [1, 2]}
        ),
        numerics_config(
            root / "output layer",
            "single",
            precision={"recipe": "bf16", "output_layer": "fp8-gradients"},
        ),
        numerics_config(root / "bf16", "single", "bf16"),
        numerics_config(root / "first", "single", every=1, train={"steps": 1}),
    ]
    start_jobs(1, jobs)
    one = {"every": 1, "train": {"steps": 1}}
    jobs = [numerics_config(root / name, name, **one) for name in LAYOUTS]
    coded = {"parallel": {"weight_gather": "fp8", "zero": 1}, "train": {"steps": 2}}
    jobs.append(numerics_config(root / "weights as codes", "dp2", every=1, **coded))
    start_jobs(2, jobs)
    return root


def test_weights_that_were_gathered_as_codes_are_not_measured(runs: Path) -> None:
    for step in (1, 2):
        measured = {tensor for _, tensor in by_tensor(runs / "weights as codes", step)}
        assert {"qkv_input", "fc2_grad"} <= measured
        assert not [tensor for tensor in measured if tensor.endswith("_weight")]
    assert (1, "qkv_weight") in by_tensor(runs / "dp2", 1)


def test_asking_changes_no_bit_of_the_training(runs: Path) -> None:
    losses = [line["loss"] for line in metrics_of(runs / "asked") if "loss" in line]
    assert len(losses) == 4
    assert metrics_of(runs / "asked") == metrics_of(runs / "not asked")
    assert not (runs / "not asked" / "numerics.jsonl").exists()


def test_lines_come_on_the_steps_asked_for_once_a_layer_and_tensor(runs: Path) -> None:
    lines = [(line["step"], line["layer"], line["tensor"]) for line in numerics_of(runs / "asked")]
    tensors = [RESIDUAL, *(name for name in TENSORS if name not in ATTENDED)]
    expected: list[tuple[int, int, str]] = []
    for s in (2, 4):
        expected += [(s, layer, name) for layer in (1, 2, 3, 4) for name in tensors]
        expected.append((s, 5, LSE))
    assert lines == expected


def test_a_tensor_is_looked_at_where_its_recipe_keeps_it(runs: Path) -> None:
    seen = {
        recipe: {tensor for _, tensor in by_tensor(runs / recipe, 2)}
        for recipe in ("fp8-linear", "coat-lean")
    }
    assert seen["coat-lean"] == {RESIDUAL, *TENSORS, LSE}
    assert seen["fp8-linear"] == {RESIDUAL, *TENSORS, LSE} - set(KEPT)


def test_layers_in_bf16_have_the_residual_stream_alone_and_others_their_own_numbers(
    runs: Path,
) -> None:
    lines = by_tensor(runs / "ends in bf16", 2)
    assert {layer for layer, tensor in lines if tensor not in (RESIDUAL, LSE)} == {2}
    assert {layer for layer, tensor in lines if tensor == RESIDUAL} == {1, 2, 3, 4}


def test_the_residual_stream_of_the_first_layer_is_the_embedding(runs: Path) -> None:
    """Normal(0, 0.02) numbers in BF16: kurtosis 3, less what 128 channels per token leave of it."""
    line = by_tensor(runs / "first", 1)[1, RESIDUAL]
    assert line["kurtosis"] == pytest.approx(3 * 128 / 130, rel=0.02)
    assert 3 * 0.02 < line["amax"] < 6 * 0.02


def test_lse_of_the_first_step_is_that_of_logits_near_zero(runs: Path) -> None:
    """Initial weights give logits near 0, and exp(0) for each of the 384 entries."""
    line = by_tensor(runs / "first", 1)[5, LSE]
    assert line.keys() == {"step", "layer", "tensor", "amax", "mean"}
    assert line["mean"] == pytest.approx(math.log(384), rel=0.02)
    assert line["mean"] < line["amax"] < 1.05 * line["mean"]


@pytest.mark.parametrize("name", ["output layer", "bf16"])
def test_without_fp8_layers_the_residual_stream_and_logits_are_measured(
    runs: Path, name: str
) -> None:
    lines = by_tensor(runs / name, 2)
    assert set(lines) == {(5, LSE), *((layer, RESIDUAL) for layer in (1, 2, 3, 4))}


def test_recomputation_counts_nothing_twice(runs: Path) -> None:
    assert numerics_of(runs / "recomputed") == numerics_of(runs / "asked")


@pytest.mark.parametrize("recipe", ["asked", "coat-lean", "fp8-linear"])
def test_errors_are_those_of_rounding(runs: Path, recipe: str) -> None:
    """A code is off by at most eps / 2 of its value, on average by about half of that: a source
    that is not what the kernel quantized would be off by the whole.
    """
    for (_, tensor), line in by_tensor(runs / recipe, 4).items():
        if tensor in (RESIDUAL, LSE):
            continue
        fmt = E5M2 if tensor.endswith("_grad") else E4M3
        assert fmt.eps / 8 < line["relative_error"] < fmt.eps / 2, line
        assert line["amax"] > 0 and 0 <= line["underflow"] < 0.05 and line["saturated"] < 0.2, line


@pytest.mark.parametrize("recipe", ["coat", "coat-lean", "fp8-linear"])
def test_the_guard_finds_nothing_in_usual_tensors(runs: Path, recipe: str) -> None:
    lines = numerics_of(runs / ("asked" if recipe == "coat" else recipe))
    sections = {"precision": {"recipe": recipe}}
    assert not list(find(lines, limits_of(make_config(sections).precision)))


def same_sums(line: Line) -> Line:
    """A line whose numbers equal those that differ only in the order of fp64 sums."""
    names = [name for name in (*MEASURES, "kurtosis", "mean") if name in line]
    return line | {name: pytest.approx(line[name], rel=1e-9) for name in names}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_report_of_the_whole_tensor_what_one_does(runs: Path, layout: str) -> None:
    """Exactly where both have the same numbers: all over the pipeline and over dp, else before the
    first sum over ranks, and in weights that are not cut through rows.
    """
    one, two = by_tensor(runs / "first", 1), by_tensor(runs / layout, 1)
    assert one.keys() == two.keys()
    for key, expected in one.items():
        (layer, tensor), actual = key, two[key]
        first = layer == 1 and tensor in (RESIDUAL, "norm1_saved", "qkv_input")
        if layout.startswith("pp") or first or tensor in ("qkv_weight", "fc1_weight"):
            assert actual == same_sums(expected)
        if tensor.endswith("_weight"):
            assert actual["amax"] == expected["amax"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_lose_what_one_does(runs: Path, layout: str) -> None:
    """Sums over ranks round differently, and a rank's part of a row or of tokens has its own scale,
    so codes differ. Of gradients a few values make most of the norm: their errors and the largest
    of them move most (7 % have been seen; the gradients that they are computed of have codes in
    E5M2, 2^-3 apart at most from their values). The first query's gradient is 0 but for rounding,
    and that underflows.
    """
    one, two = by_tensor(runs / "first", 1), by_tensor(runs / layout, 1)
    for key, expected in one.items():
        actual, backward = two[key], key[1].endswith("_grad")
        if key[1] == RESIDUAL:  # BF16 sums in another order
            assert actual["kurtosis"] == pytest.approx(expected["kurtosis"], rel=1e-3), key
            assert actual["amax"] == pytest.approx(expected["amax"], rel=0.02), key
            continue
        if key[1] == LSE:
            assert actual["mean"] == pytest.approx(expected["mean"], rel=1e-3)
            assert actual["amax"] == pytest.approx(expected["amax"], rel=1e-2)
            continue
        error = pytest.approx(expected["relative_error"], rel=0.2 if backward else 0.06)
        assert actual["relative_error"] == error, key
        amax = pytest.approx(expected["amax"], rel=0.2 if backward else 0.1)
        assert actual["amax"] == amax, key
        for name in ("saturated", "underflow"):
            assert actual[name] == pytest.approx(expected[name], rel=0.1, abs=1e-2), (key, name)


def outlier_lines(rank: int, size: int, job: Line) -> list[list[Line]]:
    """A step as it is, and one with a weight of layer 2 a million times its size."""
    import torch

    from coatlm.config import make_config
    from coatlm.data.batches import microbatches
    from coatlm.data.dataset import open_datasets
    from coatlm.data.tokenizer import make_tokenizer
    from coatlm.parallel.groups import make_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer

    start_processes(Launch.from_environment())
    config = make_config(job)
    data = open_datasets(config.data, make_tokenizer(config.data.tokenizer), seed=1).train
    trainer = Trainer(config, make_groups(config.parallel), vocab=384)
    share = {"global_batch": 4, "micro_batch": 2, "dp_rank": 0, "dp_size": 1}
    batches = trainer.place(list(microbatches(data, 0, **share, device=torch.device("cpu"))))
    found: list[list[Line]] = []
    for factor in (1.0, 1e6):
        weight = trainer.chunks[0].module.decoder.layers[1].mlp.linear_fc1.weight
        weight.data[3, 5] *= factor
        with trainer.watch_numerics() as probes:
            trainer.train_step(batches, 0.0)
        found.append(trainer.measure_numerics(probes))
    return found


def test_an_outlier_in_a_weight_shows_as_underflow_of_that_weight(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(600)))
    job = numerics_config(tmp_path / "outlier", "single").model_dump(mode="json")
    ((before, after),) = run_ranks(1, "tests.train.test_numerics_log:outlier_lines", job)
    for line, other in zip(before, after, strict=True):
        if not line["tensor"].endswith("_weight"):
            continue
        if (line["layer"], line["tensor"]) == (2, "fc1_weight"):
            row = 1 / (2 * SIZES["ffn"])  # it has a scale of its own, and all of it but one is lost
            assert other["amax"] > 1000 * line["amax"]
            assert line["underflow"] < row / 4 and 0.9 * row < other["underflow"] < 1.5 * row
        else:
            assert other == line


def test_plot_run_draws_a_curve_for_each_tensor(runs: Path) -> None:
    curves = read_run(runs / "asked").curves
    for measure in MEASURES:
        for tensor in TENSORS:
            if tensor in ATTENDED:
                continue
            curve = curves[f"numerics.{measure}.{tensor}"]
            worst = [
                max(
                    by_tensor(runs / "asked", step)[layer, tensor][measure] for layer in range(1, 5)
                )
                for step in (2, 4)
            ]
            assert curve == dict(zip((2, 4), worst, strict=True))
    steps = {step: by_tensor(runs / "asked", step) for step in (2, 4)}
    worst_of = {
        s: max(lines[n, RESIDUAL]["kurtosis"] for n in (1, 2, 3, 4)) for s, lines in steps.items()
    }
    assert curves["numerics.kurtosis.residual"] == worst_of
