"""Weights gathered as FP8 over NCCL, as tests/parallel/test_fp8_gather.py does over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.parallel.test_fp8_gather import (
    FLOW_CASES,
    test_matrices_of_fp8_layers_take_a_byte_per_element_and_a_scale_per_row,
)

__all__ = ["test_matrices_of_fp8_layers_take_a_byte_per_element_and_a_scale_per_row"]
GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
]
SIZES = [size for size in FLOW_CASES if size <= max(GPUS, 2)]


@pytest.fixture(scope="module")
def flow_found() -> dict[str, list[dict[str, Any]]]:
    """Every case that fits the GPUs here."""
    results: dict[str, list[dict[str, Any]]] = {}
    for size in SIZES:
        ranks = run_ranks(size, "tests.parallel.test_fp8_gather:train_flow", FLOW_CASES[size])
        results |= {name: [rank[name] for rank in ranks] for name in FLOW_CASES[size]}
    return results


@pytest.mark.parametrize("name", [name for size in SIZES for name in FLOW_CASES[size]])
def test_layers_make_the_owners_codes_of_what_arrives(flow_found: Any, name: str) -> None:
    for rank in flow_found[name]:
        assert rank["codes"] and rank["others'"]
        # gradients of the embedding and of attention are summed in any order
        losses, coded = (torch.tensor(rank[key])[:, 0] for key in ("curve", "coded curve"))
        torch.testing.assert_close(coded, losses, rtol=2e-3, atol=0)
