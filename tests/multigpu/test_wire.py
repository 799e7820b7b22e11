"""Wire formats over NCCL: the bounds, the NaN and the repetition that gloo is held to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.parallel.test_wire import (
    test_nan_and_infinity_on_one_rank_reach_the_norm_of_all,
    test_sums_are_right_and_repeat,
)

__all__ = [
    "test_nan_and_infinity_on_one_rank_reach_the_norm_of_all",
    "test_sums_are_right_and_repeat",
]
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
]


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, Any]]]:
    """Every case on two GPUs and on four."""
    return {n: run_ranks(n, "tests.parallel.test_wire:sums") for n in (2, 4)}
