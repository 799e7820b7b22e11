"""Training under each wire format over NCCL, as tests/parallel/test_reduction.py does over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.parallel.test_reduction import (
    test_a_nan_on_one_rank_skips_the_step_on_all,
    test_all_ranks_report_the_same,
    test_fp8_sends_at_most_1_04_bytes_per_element_and_reduction,
    test_stage_2_frees_every_gradient_buffer,
    test_tensor_parallel_bytes_are_what_megatron_sends,
    test_training_stays_near_fp32,
)

__all__ = [
    "test_a_nan_on_one_rank_skips_the_step_on_all",
    "test_all_ranks_report_the_same",
    "test_fp8_sends_at_most_1_04_bytes_per_element_and_reduction",
    "test_stage_2_frees_every_gradient_buffer",
    "test_tensor_parallel_bytes_are_what_megatron_sends",
    "test_training_stays_near_fp32",
]
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
]


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, Any]]]:
    """Every case on two GPUs and on four."""
    return {n: run_ranks(n, "tests.parallel.test_reduction:train") for n in (2, 4)}
