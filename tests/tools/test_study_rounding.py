"""The study of rounding: its estimates against vectors of known bias and variance, and a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.tools.stressed import BATCH, SEQ, make_checkpoint
from tools import study_outliers
from tools.studies.outliers import OUTPUT
from tools.study_rounding import GROUPS, RowSums, main

KEY = "decoder.layers.0.mlp.linear_fc1.weight"


def test_estimates_are_bias_and_variance_without_bias() -> None:
    """Errors of mean 0.3 and variance 4 per element, of gradients of mean 2 and variance 1."""
    generator = torch.Generator().manual_seed(0)
    sums, size, batches = RowSums(), (200, 100), 8 * GROUPS
    for number in range(batches):
        wanted = 2 + torch.randn(size, generator=generator)
        error = 0.3 + 2 * torch.randn(size, generator=generator)
        unbiased = torch.randn(size, generator=generator)
        exact = {KEY: wanted, OUTPUT: wanted, "decoder.final_layernorm.weight": wanted[0]}
        sums.add_(number, {KEY: wanted + error, OUTPUT: wanted + unbiased}, exact)
    of_layers, of_output = (sums.result("row", of) for of in ("layers", "output"))
    assert of_layers.bias == pytest.approx(0.09 / 4, rel=0.05)
    assert of_layers.variance == pytest.approx(4 / 4, rel=0.02)
    assert of_layers.own == of_output.own == pytest.approx(1 / 4, rel=0.02)
    # with the sum of squares not subtracted it would be 1 / 64 / 4
    assert abs(of_output.bias) < 4 * of_output.bias_se < 1 / batches / 4 / 4
    assert of_layers.bias_se < of_layers.bias / 20


def test_stochastic_rounding_has_no_bias_and_more_variance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study_outliers, "CALIBRATION", BATCH * SEQ)
    path = make_checkpoint(tmp_path)
    rows = ["e5m2 nearest", "e5m2 stochastic", "e4m3 stochastic", "logits"]
    out = tmp_path / "out"
    assert main([str(path), "--rows", *rows, "--batches", "16", "--out", str(out)]) == 0
    found = json.loads((out / "rounding.json").read_text())["found"]
    by_row = {(row["row"], row["of"]): row for row in found}
    assert [row["row"] for row in found] == [*rows, "logits"] and len(by_row) == 5
    nearest, stochastic, fine = (by_row[row, "layers"]["variance"] for row in rows[:3])
    assert 1.3 * nearest < stochastic < 3 * nearest  # twice, if fractions are uniform
    assert 2 < stochastic / fine < 8  # one more bit of mantissa: four times
    assert all(row["variance"] > 0 and row["own"] > 0 for row in found)
    assert abs(by_row["e5m2 stochastic", "layers"]["bias"]) < stochastic / 16
    assert "| e5m2 nearest | layers | " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ("15", "batches=15: from 16 to 4096 microbatches"),
        ("4000", "batches=4000: the validation split has "),
    ],
)
def test_microbatches_that_are_too_few_or_too_many_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], batches: str, message: str
) -> None:
    path = make_checkpoint(tmp_path)
    assert main([str(path), "--batches", batches, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
