"""train.cuda_graphs replays what the eager step computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.parallel.test_parity import batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PRECISIONS = ["bf16", "coat", "coat-lean", "coat delayed"]


def train_both_ways(rank: int, size: int, precisions: list[str]) -> dict[str, Any]:
    """Losses and gradient norms, eager and recorded, and which steps ended with a recording."""
    from coatlm.config import make_config
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer

    start_processes(Launch.from_environment())
    found: dict[str, Any] = {}
    for precision in precisions:
        recipe, _, scaling = precision.partition(" ")
        for cuda_graphs in (False, True):
            train = {"micro_batch": 2, "global_batch": 6, "cuda_graphs": cuda_graphs}
            config = make_config(
                {
                    "model": {"layers": 2, "hidden": 256, "heads": 2, "ffn": 704},
                    "data": {"text": ["unused"], "seq_len": 256},
                    "precision": {"recipe": recipe} | ({"scaling": scaling} if scaling else {}),
                    "train": train,
                }
            )
            groups = make_groups(config.parallel)
            trainer = Trainer(config, groups, vocab=128)
            curve, recorded = [], []
            for step in range(4):
                placed = trainer.place(batches(config, groups, step))
                loss, norm = trainer.train_step(placed, lr=1e-3)
                curve.append((float(loss), float(norm)))
                recorded.append(trainer.graph is not None and bool(trainer.graph.recordings))
            found[f"{precision}/{cuda_graphs}"] = (curve, recorded)
            release_groups()
    return found


def test_a_recorded_microbatch_trains_like_an_eager_one() -> None:
    (found,) = run_ranks(1, "tests.gpu.test_graphs:train_both_ways", PRECISIONS)
    for precision in PRECISIONS:
        eager, recorded = found[f"{precision}/False"], found[f"{precision}/True"]
        first = precision != "coat delayed"  # a step that calibrates is not recorded
        assert recorded[1] == [first, True, True, True] and not any(eager[1])
        # the same kernels; gradients of the embedding and of attention are summed in any order
        torch.testing.assert_close(
            torch.tensor(recorded[0]), torch.tensor(eager[0]), rtol=2e-3, atol=0
        )
