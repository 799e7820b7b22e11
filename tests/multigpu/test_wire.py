"""Wire formats over NCCL: the bounds, the NaN and the repetition that gloo is held to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.parallel.test_wire import (
    SIZED,
    test_nan_and_infinity_on_one_rank_reach_the_norm_of_all,
    test_sums_are_right_and_repeat,
)

__all__ = [
    "test_nan_and_infinity_on_one_rank_reach_the_norm_of_all",
    "test_sums_are_right_and_repeat",
]
GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, Any]]]:
    """What fits the GPUs here."""
    sizes = [n for n in (2, 4) if n <= GPUS]
    if max(size for size, *_ in SIZED) > GPUS:
        pytest.skip("needs four GPUs")
    return {n: run_ranks(n, "tests.parallel.test_wire:sums") for n in sizes}
