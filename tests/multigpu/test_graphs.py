"""Recorded microbatches gather weights and reduce gradients as eager ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.recordings import Step, run_both_ways

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SMALL = {"bucket_size": 300_000}  # several buckets a layer
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {  # microbatches a step, their kinds, sections
    "one microbatch": (1, 1, {"precision": {"recipe": "coat"}}),
    "delayed, codes gathered": (
        3,
        3,
        {
            "precision": {"recipe": "coat", "scaling": "delayed"},
            "parallel": {"weight_gather": "fp8", **SMALL},
            "optim": {"recipe": "coat-lean"},
        },
    ),
    "bf16, library's sum": (4, 3, {"parallel": {"grad_comm": "bf16", **SMALL}}),
    "not sharded": (2, 2, {"parallel": {"zero": 0, **SMALL}}),
    "after backward": (
        2,
        2,
        {"parallel": {"overlap_grad_reduce": False, "overlap_param_gather": False, **SMALL}},
    ),
    "tp2": (
        2,
        2,
        {"parallel": {"tp": 2, "sequence_parallel": True}, "precision": {"recipe": "coat"}},
    ),
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_both_ways(2, {name: (n, sections) for name, (n, _, sections) in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_recorded_microbatches_communicate_like_eager_ones(found: Any, name: str) -> None:
    kinds = CASES[name][1]
    for rank in found:
        eager, recorded = ([Step(*step) for step in way] for way in rank[name])
        # the same kernels; gradients of the embedding and of attention are summed in any order
        curves = (torch.tensor([step.curve for step in way]) for way in (recorded, eager))
        torch.testing.assert_close(*curves, rtol=2e-3, atol=0)
        assert [step.sent for step in recorded] == [step.sent for step in eager]
        assert (eager[-1].recordings, recorded[-1].recordings) == (0, kinds)
