"""Updates in backward on a GPU: the bits of plain steps, with less memory.

Samples have 64 tokens, for which backward of attention is deterministic (test_step_graph.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.parallel.test_parity import batches
from tests.train.test_backward_update import CASES, WAYS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
# 8 layers of 67M parameters: the arena has 3 buckets of 40M or more, and the fp32 gradients of all
# are 2.2 GB; peaks otherwise differ by temporaries
LARGE = {"layers": 8, "hidden": 2048, "heads": 16, "ffn": 8192, "tie_embeddings": False}


@pytest.mark.parametrize("name", CASES[1])
def test_steps_have_the_bits_of_plain_ones(name: str) -> None:
    (found,) = run_ranks(1, "tests.train.test_backward_update:train", [name])
    plain, backward, clipped, backward_clipped = (found[f"{name}, {way}"] for way in WAYS)
    assert backward == plain
    assert backward_clipped == clipped != plain


def peak(rank: int, size: int, update: str) -> dict[str, Any]:
    """Three steps of a large model: losses and norms, and bytes before the steps and at their
    peak.
    """
    from coatlm.config import make_config
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer

    start_processes(Launch.from_environment())
    config = make_config(
        {
            "model": LARGE,
            "data": {"text": ["unused"], "seq_len": 64},
            "precision": {"recipe": "coat", "tune_gemms": False, "tune_attention": False},
            "optim": {"recipe": "coat-lean", "clip_grad": 0.0},
            "train": {"micro_batch": 2, "global_batch": 2, "update": update},
        }
    )
    groups = make_groups(config.parallel)
    trainer = Trainer(config, groups, vocab=1024)
    held = torch.cuda.memory_allocated()
    steps = []
    for number in range(3):
        if number == 1:  # what the first step compiles and allocates once does not count
            torch.cuda.reset_peak_memory_stats()
        placed = trainer.place(batches(config, groups, number))
        steps.append([float(x).hex() for x in trainer.train_step(placed, 1e-3)])
    found = {
        "steps": steps,
        "held": held,
        "peak": torch.cuda.max_memory_allocated(),
        "grads": sum(b.grads.nbytes for b in trainer.optimizer.buckets),
        "arena": trainer.optimizer.buckets[0].grads.untyped_storage().nbytes(),
    }
    trainer.close()
    release_groups()
    return found


def test_the_peak_is_lower_by_all_gradients_but_the_arena() -> None:
    (plain,), (backward,) = (
        run_ranks(1, f"{__name__}:peak", update) for update in ("step", "backward")
    )
    assert backward["steps"] == plain["steps"]
    saved = plain["grads"] - backward["arena"]
    assert backward["arena"] < 0.4 * plain["grads"]
    slack = 2**26  # rounding of allocations, and small tensors of the update per bucket
    assert plain["held"] - backward["held"] == pytest.approx(saved, abs=slack)
    assert plain["peak"] - backward["peak"] == pytest.approx(saved, abs=slack)
