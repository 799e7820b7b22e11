"""The study of outliers: what it prints and writes, its errors, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes

from tests.tools.stressed import BATCH, SEQ, make_checkpoint
from tools import study_outliers
from tools.studies.outlier_report import OutlierStudy, Point, RecipeErrors, as_json, draw
from tools.studies.recipe_models import Result
from tools.study_outliers import judge, main, mean_and_error

FAR = 2**20  # beyond the 2^18 between E4M3's largest and smallest number


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("study")
    make_checkpoint(directory)
    return directory


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_outliers, "CALIBRATION", 2 * BATCH * SEQ)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without TransformerEngine."""
    monkeypatch.setattr(study_outliers, "_has_transformer_engine", lambda: False)


def rows_of(path: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    found = json.loads((path / "outliers.json").read_text())["found"]
    return {(row["stress"], row["recipe"], row["factor"]): row for row in found}


@pytest.mark.usefixtures("short")
def test_errors_of_fp8_grow_with_the_factor_and_those_of_bf16_stay(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipes = ["bf16", "coat", "coat-paper"]
    options = ["--recipes", *recipes, "--stresses", "swiglu", "--factors", "1", str(FAR)]
    out = root / "out"
    options += ["--smooth", "--batches", "2", "--out", str(out)]
    assert main([str(root / "coatlm"), *options]) == 0
    rows = rows_of(out)
    smooth = ["coat + smoothing", "coat-paper + smoothing"]  # BF16 has nothing to smooth
    assert {recipe for _, recipe, _ in rows} == {*recipes, *smooth}
    assert len(rows) == 10
    near, far = (rows["swiglu", "coat + smoothing", f]["loss_error"] for f in (1, FAR))
    assert far == pytest.approx(near, rel=1e-3)  # factors and outliers cancel in forward
    for error in ("loss_error", "gradient_error"):
        near, far = ({r: rows["swiglu", r, f][error] for r in recipes} for f in (1, FAR))
        assert 0 < near["bf16"] < near["coat"] / 3 < 0.2  # 8 bits of mantissa against 4
        assert far["bf16"] == pytest.approx(near["bf16"], rel=1e-3)
        assert far["coat"] > 2 * near["coat"]
    assert all(row["loss_error_se"] < row["loss_error"] for row in rows.values())
    points = json.loads((out / "outliers.json").read_text())["points"]
    assert points[0]["loss"] == pytest.approx(points[1]["loss"], rel=1e-6)
    assert points[1]["ratio"] == pytest.approx(FAR * points[0]["ratio"], rel=1e-3)
    assert (out / "outliers.png").read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    assert table.startswith("swiglu: loss error, gradient error in %")
    assert f"| factor | 1 | {FAR} |" in table and "| coat-paper | " in table
    assert "| coat + smoothing | " in table


def test_a_smoothed_recipe_is_drawn_dotted_in_the_color_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines: dict[str, tuple[str, str]] = {}

    def drawn(_: Axes, *args: Any, label: str, color: str, linestyle: str, **others: Any) -> None:
        lines[label] = (color, linestyle)

    monkeypatch.setattr(Axes, "errorbar", drawn)
    monkeypatch.setattr(Axes, "legend", lambda *_, **__: None)
    names = ("bf16", "coat", "coat + smoothing")
    found = [RecipeErrors("swiglu", 1, name, 2.0, 0.1, 0.1, 0.1, 0.1, "w") for name in names]
    draw(OutlierStudy([Point("swiglu", 1, 2.0, 0.0, 3.0)], found), tmp_path / "plot.png")
    wanted = {"bf16": ("C0", "-"), "coat": ("C1", "-"), "coat + smoothing": ("C1", ":")}
    assert lines == wanted


@pytest.mark.usefixtures("short")
def test_the_change_of_the_loss_is_relative_to_the_checkpoint(root: Path) -> None:
    options = ["--recipes", "bf16", "--stresses", "swiglu", "aligned", "--factors", "1"]
    out = root / "change"
    assert main([str(root / "coatlm"), *options, "--batches", "1", "--out", str(out)]) == 0
    plain, pair = json.loads((out / "outliers.json").read_text())["points"]
    assert (plain["stress"], plain["change"]) == ("swiglu", 0.0)  # not rescaled at all
    assert pair["change"] == pytest.approx(pair["loss"] / plain["loss"] - 1, rel=1e-6)
    assert pair["change"] != 0.0  # two channels of the trained model are gone


@pytest.mark.usefixtures("short", "alone")
def test_without_recipes_all_that_run_here_are_compared_and_the_others_are_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--stresses", "norm", "--factors", "1", "--batches", "1"]
    assert main([str(root / "coatlm"), *options, "--out", str(root / "all")]) == 0
    recipes = {recipe for _, recipe, _ in rows_of(root / "all")}
    coats = {"coat", "coat-lean", "coat-int8", "coat-lean-int8", "coat-rowgrad", "coat-paper"}
    assert recipes == {"bf16", "fp8-linear", "rowwise", *coats}
    errors = capsys.readouterr().err
    assert "not compared: te-delayed: te-delayed needs TransformerEngine and a GPU" in errors
    assert "not compared: fp8-block: model.hidden=64 is not a multiple of" in errors


@pytest.mark.gpu
@pytest.mark.usefixtures("short")
def test_transformer_engine_is_compared_on_a_gpu(root: Path) -> None:
    pytest.importorskip("transformer_engine")
    recipes = ["bf16", "te-delayed", "te-current"]
    options = ["--recipes", *recipes, "--stresses", "swiglu", "--factors", "1", "16"]
    out = root / "te"
    assert main([str(root / "coatlm"), *options, "--batches", "2", "--out", str(out)]) == 0
    for (_, recipe, _), row in rows_of(out).items():
        # E5M2 gradients through twelve GEMMs; a scale that has not settled leaves zeros, error 1
        assert 0 < row["gradient_error"] < (0.05 if recipe == "bf16" else 0.5)


def results(scale: float) -> list[Result]:
    gradients = {
        "decoder.layers.0.mlp.linear_fc1.weight": torch.tensor([[3.0, 4.0]]),
        "decoder.layers.1.mlp.linear_fc1.weight": torch.tensor([[0.0, scale * 2.0]]),
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": torch.tensor([scale * 9.0]),
        "embedding.word_embeddings.weight": torch.tensor([[scale * 9.0]]),
    }
    return [Result(torch.tensor([3.0, scale * 4.0]), gradients)]


def test_errors_are_relative_norms_over_the_matrices_of_layers() -> None:
    found = judge("swiglu", 2, "coat", results(1.5), results(1.0))
    assert found.loss == pytest.approx(4.5)
    assert found.loss_error == pytest.approx(2.0 / 5.0)
    assert found.gradient_error == pytest.approx(math.sqrt((0.0 + 0.25) / 2))
    assert found.worst == "decoder.layers.1.mlp.linear_fc1.weight"
    assert math.isnan(found.loss_error_se)
    lost = judge("swiglu", 2, "coat", results(math.nan), results(1.0))
    assert math.isnan(lost.gradient_error) and lost.worst == found.worst


def test_the_standard_error_is_that_of_the_mean() -> None:
    mean, error = mean_and_error([1.0, 2.0, 6.0])
    assert mean == pytest.approx(3.0)
    assert error == pytest.approx(math.sqrt(7.0 / 3.0))  # variance 7, three values


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_error_that_is_not_finite_is_a_result(value: float) -> None:
    mean, error = mean_and_error([0.5, value])
    assert not math.isfinite(mean) and math.isnan(error)


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    found = RecipeErrors("swiglu", 1, "coat", math.nan, 0.1, math.inf, 0.2, 0.3, "w")
    written = json.loads(
        as_json(OutlierStudy([Point("swiglu", 1, 2.0, 0.0, 3.0)], [found]), {"step": 4})
    )
    assert written["found"][0] == {
        "stress": "swiglu",
        "factor": 1,
        "recipe": "coat",
        "loss": None,
        "loss_error": 0.1,
        "loss_error_se": None,
        "gradient_error": 0.2,
        "gradient_error_se": 0.3,
        "worst": "w",
    }
    assert (written["step"], written["points"][0]["ratio"]) == (4, 3.0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "code", "complaint"),
    [
        (["--factors", "10"], 2, "factor=10: a power of two from 1 to 1073741824"),
        (["--factors", "0"], 2, "factor=0"),
        (["--batches", "0"], 2, "batches=0: from 1 to 1024"),
        (["--recipes", "te-delayed"], 2, "te-delayed needs TransformerEngine and a GPU"),
        (["--recipes", "fp8-block"], 2, "model.hidden=64"),
        (["--out", "/dev/null/x"], 2, "cannot be written"),
    ],
)
def test_bad_input_ends_with_one_line(
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    code: int,
    complaint: str,
) -> None:
    capsys.readouterr()
    words = [str(root / "coatlm"), "--out", str(tmp_path / "out"), *options]
    assert main(words) == code
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_checkpoint_ends_with_exit_code_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 4
    assert "holds no checkpoint" in capsys.readouterr().err
