"""The benchmark of context-parallel attention: its rows, and a case on this CPU."""

from __future__ import annotations

import pytest

from tools.benchmarks.context import CASES, measure, rows


def test_rows_are_the_cases() -> None:
    assert rows({}) == CASES.split(",")
    assert rows({"cases": "64:1:4:2:16:2"}) == ["64:1:4:2:16:2"]


@pytest.mark.parametrize("case", ["64:1:4:2:16", "64:1:4:2:16:0", "64:1:4:2:16:1", "66:1:4:2:16:2"])
def test_other_cases_are_refused(case: str) -> None:
    with pytest.raises(ValueError, match=f"cases={case}"):
        rows({"cases": f"64:1:4:2:16:2,{case}"})


def test_both_ways_attend_alike_and_the_first_and_the_last_rank_are_timed() -> None:
    ideal, *others = measure("96:2:4:2:16:3", {})
    assert ideal["way"] == "whole / ranks"
    ways = [(record["way"], record["rank"]) for record in others]
    assert ways == [(way, rank) for rank in ("0", "2") for way in ("prefixes", "pieces, cpu")]
    assert all(float(record["total_ms"]) > 0 and float(record["ratio"]) > 0 for record in others)
    errors = [float(record["error"]) for record in others if "error" in record]
    assert len(errors) == 2 and max(errors) <= 2**-7  # BF16, rounded once more per piece
