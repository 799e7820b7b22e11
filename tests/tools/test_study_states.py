"""COAT's tables on moments that are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.config import make_config
from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.train.checkpoint import Checkpointer
from tests.train.layouts import pieces_of
from tools.study_states import (
    M_FORMATS,
    M_KEY,
    V_FORMATS,
    V_KEY,
    best,
    gain,
    main,
    read_moments,
    study,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

UPDATES, BETAS, EPS = 7, (0.9, 0.95), 1e-8
SHAPES = {"a.weight": (16, 256), "b.weight": (30, 100), "norm.weight": (256,)}
BLOCKS = 16 * 256 // SCALE_BLOCK + 30 * 100 // SCALE_BLOCK  # in matrices


def moments_of(seed: int) -> dict[str, Tensor]:
    """Log-normal: v over a decade or so of each block, m over more, as in the paper's figure 2."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in SHAPES.items():
        normal, sign, wide = (torch.randn(shape, generator=generator) for _ in range(3))
        made[V_KEY + name] = 1e-6 * torch.exp(0.5 * normal)
        made[M_KEY + name] = 1e-4 * torch.exp(wide).copysign(sign)
    return made


def saved(directory: Path, tensors: dict[str, Tensor], recipe: str = "adamw-fp32") -> Path:
    optim = {"recipe": recipe, "betas": BETAS, "eps": EPS}
    config = make_config({"optim": optim})
    state: dict[str, Any] = {
        "step": 7,
        "updates": UPDATES,
        "skipped": 0,
        "tokenizer": "",
        "tokens": 0,
        "config": config.model_dump(mode="json"),
    }
    pieces = pieces_of(tensors, "copies")
    Checkpointer(directory, keep=1, async_save=False).save(7, pieces, state)
    return directory / "step_00000007"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return saved(tmp_path / "run", moments_of(0))


def test_all_whole_blocks_of_matrices_are_taken(checkpoint: Path) -> None:
    moments, stored = read_moments(checkpoint), moments_of(0)
    for got, key in ((moments.m, M_KEY), (moments.v, V_KEY)):
        b = stored[key + "b.weight"].flatten()
        whole = [stored[key + "a.weight"].flatten(), b[: len(b) // SCALE_BLOCK * SCALE_BLOCK]]
        assert torch.equal(got, torch.cat(whole))
    assert (moments.updates, moments.betas, moments.eps) == (UPDATES, BETAS, EPS)


def test_a_sample_is_whole_blocks_of_every_matrix(checkpoint: Path) -> None:
    moments = read_moments(checkpoint, elements=BLOCKS * SCALE_BLOCK // 2)
    everything = read_moments(checkpoint)
    for sample, whole in ((moments.m, everything.m), (moments.v, everything.v)):
        rows = [
            whole.view(-1, SCALE_BLOCK).eq(row).all(1).nonzero()
            for row in sample.view(-1, SCALE_BLOCK)
        ]
        found = torch.cat(rows).flatten()
        assert len(found) == len(sample) // SCALE_BLOCK == 16 + 11  # half of 32 and of 23
        assert (found.diff() > 0).all()
        assert found[-1] >= BLOCKS - 3  # spread, so not the first half


def test_plain_e4m3_equals_a_direct_computation(checkpoint: Path) -> None:
    moments = read_moments(checkpoint)

    def stored(x: Tensor) -> Tensor:
        x_GE = x.double().view(-1, SCALE_BLOCK)
        scale = x_GE.abs().amax(1, keepdim=True) / 448
        return ((x_GE / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten()

    def update(m: Tensor, v: Tensor) -> Tensor:
        return m / (1 - 0.9**UPDATES) / ((v / (1 - 0.95**UPDATES)).sqrt() + EPS)

    u = update(moments.m.double(), moments.v.double())
    squares = (update(stored(moments.m), stored(moments.v)) - u).square()
    result = study(moments)
    # An element at the boundary of two codes may go either way: 1 of 7,000, some 1e-4 of the sum.
    assert result.mse["E4M3"]["E4M3"] == pytest.approx(float(squares.mean()), rel=2e-3)
    error = float((squares.sum() / u.square().sum()).sqrt())
    assert result.error["E4M3"]["E4M3"] == pytest.approx(error, rel=1e-3)


def test_expansion_is_better_on_log_normal_blocks(checkpoint: Path) -> None:
    result = study(read_moments(checkpoint))
    assert best(result.mse)[0] == "E4M3 + Expand"
    assert gain(result.mse) > 1.2  # of the MSE; 1.63 in the paper
    for fmt in ("E4M3", "E5M2", "DE8"):
        assert result.mse[f"{fmt} + Expand"]["E4M3"] < result.mse[fmt]["E4M3"]


def test_v_that_becomes_zero_is_counted_and_left_out_of_nonzero(tmp_path: Path) -> None:
    tensors = {key: x for key, x in moments_of(0).items() if "a.weight" in key}
    v = tensors[V_KEY + "a.weight"].view(-1, SCALE_BLOCK)
    v[:, 0], v[:, 1:9] = 1.0, 1e-8  # 1e-8 is far below 2^-9 / 448 of the largest
    v[:, 9:] = 0.5
    result = study(read_moments(saved(tmp_path, tensors)))
    assert result.zeroed["E4M3"] == 8 / SCALE_BLOCK
    assert result.zeroed["E4M3 + Expand"] == result.zeroed["E5M2 + Expand"] == 0
    assert result.nonzero == result.elements * (SCALE_BLOCK - 8) // SCALE_BLOCK
    assert result.error["E4M3"]["E4M3"] > 1 > result.error_nonzero["E4M3"]["E4M3"]


def test_tables_json_and_picture_are_written(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(checkpoint), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "Table 1" in printed and "Table 8" in printed
    written = json.loads((tmp_path / "out/states.json").read_text())
    assert written["mse"].keys() == M_FORMATS.keys()
    assert written["mse"]["E4M3"].keys() == written["zeroed"].keys() == V_FORMATS.keys()
    assert (tmp_path / "out/states.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("recipe", "options", "complaint"),
    [
        ("coat", [], "optim.recipe=coat; only adamw-fp32"),
        (None, [], "no such directory"),
        ("adamw-fp32", ["--elements", "5"], "elements=5: at least 128"),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recipe: str | None,
    options: list[str],
    complaint: str,
) -> None:
    path = saved(tmp_path, moments_of(0), recipe) if recipe else tmp_path / "missing"
    capsys.readouterr()
    assert main([str(path), "--out", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
