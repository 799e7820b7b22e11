"""Steps of one process as one CUDA graph, and as graphs of microbatches: the bits of plain steps.

Samples have 64 tokens. Backward of attention then sums the gradient of a query over one block of
keys; with several blocks, cuDNN and FlashAttention add them in any order.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed import run_ranks
from tests.train.test_step_graph import CASES, NAN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("name", CASES)
def test_steps_of_one_graph_compute_the_bits_of_plain_ones(name: str) -> None:
    """The second plain run tells what is not deterministic from what a graph changes."""
    ways = ["plain", "plain again", "replayed", "microbatches"]
    (found,) = run_ranks(1, "tests.train.test_step_graph:train", [[name], ways])
    plain, again, replayed, microbatches = (found[f"{name}, {way}"] for way in ways)
    assert again == plain
    assert replayed == plain
    assert microbatches == plain
    assert [number for number, step in enumerate(plain[0]) if "nan" in step[:2]] == [NAN]
