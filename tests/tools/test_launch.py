"""make train: as many processes as the GPUs and the batch allow."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.launch import PRETRAIN, command, processes

CONFIG = "train: {micro_batch: 2, global_batch: 16}\n"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return str(path)


@pytest.mark.parametrize(("gpus", "count"), [(0, 1), (1, 1), (2, 2), (3, 2), (7, 4), (8, 8)])
def test_the_largest_number_that_divides_the_batch_is_started(
    config: str, gpus: int, count: int
) -> None:
    assert processes([config], gpus) == count


def test_overrides_count(config: str) -> None:
    assert processes([config, "train.global_batch=12"], 8) == 6
    assert processes([config, "parallel.tp=4"], 7) == 4


def test_the_model_parallel_ranks_are_multiples(config: str) -> None:
    assert processes([config, "parallel.pp=2", "parallel.cp=2"], 7) == 4


def test_where_nothing_fits_every_gpu_is_started_and_pretrain_reports(config: str) -> None:
    assert processes([config, "parallel.tp=8"], 4) == 4


@pytest.mark.parametrize("extra", ["--dry-run", "--help", "train.stesp=3"])
def test_one_process_reports_and_plans(config: str, extra: str) -> None:
    assert processes([config, extra], 8) == 1


def test_one_process_needs_no_torchrun() -> None:
    assert command(["run.yaml"], 1) == [sys.executable, str(PRETRAIN), "run.yaml"]
    assert "torch.distributed.run" in command(["run.yaml"], 2)
    assert PRETRAIN.is_file()
