"""Equal time: when a recipe has the reference's final validation loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.studies.loss_lines import Line
from tools.studies.loss_time import draw, markdown, reached, tabulate

SLOW = [[10, 20.0, 3.0], [20, 40.0, 2.0], [30, 60.0, 1.0]]
FAST = [[10, 10.0, 3.2], [20, 20.0, 2.0], [30, 30.0, 1.2], [40, 40.0, 0.8]]


def line(recipe: str, seed: int, evaluations: list[list[float]], **other: Any) -> Line:
    found = {"recipe": recipe, "seed": seed, "state": "done", "evaluations": evaluations}
    return found | {"versions": {"gpu": "H200"}} | other


def test_time_is_interpolated_between_evaluations() -> None:
    assert reached(FAST, 1.0) == pytest.approx((35.0, 35.0))
    assert reached(SLOW, 1.25) == pytest.approx((27.5, 55.0))
    assert reached(SLOW, 0.9) is None


def test_a_loss_that_rises_again_has_not_arrived() -> None:
    again = [[1, 1.0, 3.0], [2, 2.0, 0.9], [3, 3.0, 1.2], [4, 4.0, 0.8]]
    assert reached(again, 1.0) == pytest.approx((3.5, 3.5))
    assert reached([[1, 1.0, 0.5], [2, 2.0, 0.4]], 1.0) == (1, 1.0)


def test_ratios_have_the_standard_error_of_numpy_over_pairs_that_arrived() -> None:
    shifted = [[s, 1.1 * t, x] for s, t, x in FAST]
    never = [[s, t, x + 1] for s, t, x in FAST]
    lines = [line("te", seed, SLOW) for seed in (1, 2, 3)]
    lines += [line("coat", 1, FAST), line("coat", 2, shifted), line("coat", 3, never)]
    lines += [line("coat", 4, FAST)]
    te, coat = tabulate(lines, "te")
    assert (te.pairs, te.reached, te.ratio, te.tokens, te.seconds) == (3, 3, 1.0, 1.0, 60.0)
    ratios = np.array([35 / 60, 1.1 * 35 / 60])
    assert (coat.pairs, coat.reached) == (3, 2)
    assert coat.ratio == pytest.approx(ratios.mean())
    assert coat.error == pytest.approx(ratios.std(ddof=1) / np.sqrt(2))
    assert coat.tokens == pytest.approx(35 / 30) and coat.final == pytest.approx(124 / 3)
    assert "| `coat` | 3 | 2 | 36.8 | 0.613 +- 0.029 | 1.167 | 41.3 |" in list(markdown([te, coat]))


def test_runs_of_one_evaluation_and_trunks_have_no_time() -> None:
    assert tabulate([line("te", 1, SLOW[-1:]), line("trunk", 1, SLOW)], "te") == []


def test_times_of_two_gpus_are_not_compared() -> None:
    other = line("coat", 1, FAST, versions={"gpu": "H100"})
    with pytest.raises(ValueError, match="gpu: H100 and H200: times of different GPUs"):
        tabulate([line("te", 1, SLOW), other], "te")


def test_tokens_count_from_the_trunk_as_seconds_do() -> None:
    lines = [line("te", 1, SLOW, begin=5), line("coat", 1, FAST, begin=5)]
    assert tabulate(lines, "te")[1].tokens == pytest.approx((35 - 5) / (30 - 5))


def test_the_plot_has_a_curve_per_run(tmp_path: Path) -> None:
    draw([line("te", 1, SLOW), line("coat", 1, FAST)], "te", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000
    json.dumps([vars(row) for row in tabulate([line("te", 1, SLOW)], "te")])
