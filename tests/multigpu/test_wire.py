"""Wire formats over NCCL: the bounds, the NaN and the repetition that gloo is held to."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import OfSizes, run_sizes
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
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def found() -> OfSizes:
    """Every case on two GPUs, and on four where they are."""
    return run_sizes((2, 4), "tests.parallel.test_wire:sums")
