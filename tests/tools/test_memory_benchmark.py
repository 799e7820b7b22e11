"""The rows of `tools/bench.py memory`; on a CPU they train, and only the peak is not there."""

from __future__ import annotations

from typing import get_args

import pytest

from coatlm.config import PrecisionRecipe
from coatlm.model.memory import GIB, peak_bytes
from tools.benchmarks.memory import configuration, measure, record, rows

TINY = {"model": "tiny", "seq": "32", "vocab": "256"}
ROWS = [row for row in rows({}) if set(row.split()) & set(get_args(PrecisionRecipe))]


def test_rows_cover_recipes_zero_recomputation_and_two_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = {word for row in ROWS for word in row.split()}
    assert {"bf16", "te-delayed", "zero0", "zero1", "none", "selective", "full"} <= words
    assert {"dp2", "tp2", "pp2"} <= words
    one = rows({"gpus": "1"})
    assert not {"dp2", "tp2", "pp2"} & {word for row in one for word in row.split()}
    for gpus in (1, 2, 8):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        assert (rows({}) == one) == (gpus == 1) and rows({"gpus": "2"}) != one


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_a_run_that_its_gpus_hold(row: str) -> None:
    config, ranks = configuration(row, {})
    assert config.data_parallel_size(ranks) * config.train.micro_batch <= config.train.global_batch
    assert config.precision.recipe in row and config.train.recompute in row


def test_ratio_is_estimate_over_measured() -> None:
    config, _ = configuration("bf16 zero1 none", TINY)
    estimate = peak_bytes(config, 256, 1)
    found = record("bf16 zero1 none", TINY, 2 * estimate)
    assert found["ratio"] == 0.5 and found["measured_gib"] == round(2 * estimate / GIB, 2)


def test_a_row_of_two_ranks_trains_under_torchrun() -> None:
    found = measure("tp2 bf16 zero1 full", TINY)
    assert found["estimate_gib"] > 0 and found["ratio"] is None
