"""train.cuda_graphs replays what the eager step computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.graphs import Step, run_both_ways

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CASES: dict[str, tuple[int, dict[str, Any]]] = {  # microbatches per step, sections
    "bf16": (3, {"precision": {"recipe": "bf16"}}),
    "coat": (3, {"precision": {"recipe": "coat"}}),
    "coat-lean": (3, {"precision": {"recipe": "coat-lean"}}),
    "coat delayed": (3, {"precision": {"recipe": "coat", "scaling": "delayed"}}),
}


def test_a_replayed_microbatch_trains_like_an_eager_one() -> None:
    (found,) = run_both_ways(1, CASES)
    for name in CASES:
        eager, replayed = ([Step(*step) for step in way] for way in found[name])
        first = name != "coat delayed"  # a step that calibrates is not captured
        assert [bool(step.graphs) for step in replayed] == [first, True, True, True, True]
        assert not any(step.graphs for step in eager)
        # the same kernels; gradients of the embedding and of attention are summed in any order
        curves = (torch.tensor([step.curve for step in way]) for way in (replayed, eager))
        torch.testing.assert_close(*curves, rtol=2e-3, atol=0)
