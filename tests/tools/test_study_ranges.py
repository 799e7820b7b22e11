"""The study of the range of v: its arithmetic is coatlm's, and its tables."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coatlm.fp8.expand import (
    M_E4M3,
    V_E4M3,
    Expansion,
    expand_dequantize_ref,
    expand_quantize_ref,
)
from tools.study_ranges import ENDS, KERNEL, KINDS, RULES, Range, gradients, main, simulate, v_to


def blocks(spread: float, *, signed: bool) -> Tensor:
    """64 log-normal blocks of 128, with a few zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.exp(spread * torch.randn(64, 128, generator=generator) - 8)
    x[::3, ::7] = 0
    return x * torch.randn(64, 128, generator=generator).sign() if signed else x


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("how", [M_E4M3, V_E4M3], ids=["m", "v"])
def test_coatlms_rule_stores_what_the_optimizer_stores(how: Expansion, spread: float) -> None:
    x = blocks(spread, signed=how.signed)
    rule = RULES["coatlm"]
    stored = (rule.m if how.signed else rule.v).stored(x)
    assert torch.equal(stored, expand_dequantize_ref(expand_quantize_ref(x, how), how))


def test_the_published_kernel_rounds_k_down_and_has_no_lower_bound_of_one() -> None:
    x = torch.exp2(torch.linspace(0, -23, 128))[None]  # 16 k = 16 * 16.61 / 23 = 11.6
    smallest = float(KERNEL.stored(x)[0, -1].log2())  # with k = 11 / 16 its code is 2^-7
    assert smallest == pytest.approx((-7 - math.log2(448)) * 16 / 11, rel=1e-5)
    bounded = Range(KERNEL.end, down=True).stored(x)
    assert bounded[0, -1] == 0  # with k = 1: 2^-23 of the largest is below E4M3's range


def test_the_best_of_four_ranges_has_no_larger_error_than_any_of_them() -> None:
    x = blocks(1.5, signed=False)

    def errors(stored: Tensor) -> Tensor:
        return ((stored - x) / x).nan_to_num().square().sum(1)

    best = errors(Range(-6.0, ends=ENDS, k16_min=8).stored(x))
    each = torch.stack([errors(v_to(end).stored(x)) for end in ENDS])
    assert torch.equal(best, each.amin(0)) and len(each.argmin(0).unique()) > 1


def test_a_wide_block_has_another_range_than_a_narrow_one() -> None:
    x = torch.exp2(torch.stack([torch.linspace(0, -8, 128), torch.linspace(0, -12, 128)]))
    stored = RULES["by span"].v.stored(x)
    assert torch.equal(stored[0], v_to(-7.0).stored(x)[0])
    assert torch.equal(stored[1], v_to(-9.0).stored(x)[1])


def test_codes_of_m_and_v_are_equal_after_the_first_step_if_both_have_one_range() -> None:
    """v is proportional to m^2, and k of m twice that of v: the errors cancel."""
    table = simulate("normal", beta2=0.95, steps=3, blocks=32)
    assert table["by age"][1] < 1e-4 < 1 < table["coatlm"][1]
    assert set(table["by age"]) == {1, 2, 3}


def test_an_age_of_two_steps_is_young() -> None:
    rule = RULES["by age"]
    assert rule.at(1) == rule.at(2) == rule.early
    assert rule.at(3) == (rule.m, rule.v)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_drawn_anew(kind: str) -> None:
    draw = gradients(kind, 4)
    first, second = draw(), draw()
    assert first.shape == (4, 128) and not torch.equal(first, second)
    assert torch.equal(first, gradients(kind, 4)())


def test_tables_and_json_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--steps", "2", "--blocks", "4", "--beta2", "0.95", "--gradients", "sparse"]
    assert main(["--out", str(tmp_path), *words]) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "ranges.json").read_text())["sparse, 0.95"]
    assert found.keys() == RULES.keys() and found["coatlm"].keys() == {"1", "2"}
    assert f"| coatlm | {found['coatlm']['1']:.2f} | {found['coatlm']['2']:.2f} |" in printed


@pytest.mark.parametrize("words", [["--steps", "0"], ["--beta2", "1"], ["--blocks", "0"]])
def test_numbers_out_of_range_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["--out", str(tmp_path / "out"), *words]) == 2
    assert words[0] in capsys.readouterr().err and not (tmp_path / "out").exists()
