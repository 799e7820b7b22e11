"""Training under each wire format over NCCL, as tests/parallel/test_reduction.py does over gloo."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import OfSizes, run_sizes
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
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def found() -> OfSizes:
    """Every case on two GPUs, and on four where they are."""
    return run_sizes((2, 4), "tests.parallel.test_reduction:train")
