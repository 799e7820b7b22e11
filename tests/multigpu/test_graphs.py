"""Recorded microbatches gather weights and reduce gradients as eager ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.parallel.test_parity import batches

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
        1,
        {"parallel": {"tp": 2, "sequence_parallel": True}, "precision": {"recipe": "coat"}},
    ),
}
STEPS = 5


def train_both_ways(rank: int, size: int, cases: dict[str, Any]) -> dict[str, Any]:
    """Losses, gradient norms and bytes of steps, eager and recorded; an evaluation before some."""
    from coatlm.config import make_config
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer

    start_processes(Launch.from_environment())
    found: dict[str, Any] = {}
    for name, (count, _, sections) in cases.items():
        ranks = size // sections.get("parallel", {}).get("tp", 1)
        for cuda_graphs in (False, True):
            train = {"micro_batch": 2, "global_batch": 2 * ranks * count}
            config = make_config(
                {
                    "model": {"layers": 2, "hidden": 256, "heads": 2, "ffn": 704},
                    "data": {"text": ["unused"], "seq_len": 256},
                    "train": train | {"cuda_graphs": cuda_graphs},
                    **sections,
                }
            )
            groups = make_groups(config.parallel)
            trainer = Trainer(config, groups, vocab=128)
            curve, sent = [], []
            for step in range(STEPS):
                placed = trainer.place(batches(config, groups, step))
                evaluated = trainer.evaluate(placed) if step in (1, 4) else torch.zeros(())
                loss, norm = trainer.train_step(placed, lr=1e-3)
                curve.append((float(loss), float(norm), float(evaluated)))
                sent.append(trainer.comm_bytes)
            recordings = len(trainer.graph.recordings) if trainer.graph is not None else 0
            found[f"{name}/{cuda_graphs}"] = (curve, sent, recordings)
            release_groups()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(2, "tests.multigpu.test_graphs:train_both_ways", CASES)


@pytest.mark.parametrize("name", CASES)
def test_recorded_microbatches_communicate_like_eager_ones(found: Any, name: str) -> None:
    kinds = CASES[name][1]
    for rank in found:
        eager, recorded = rank[f"{name}/False"], rank[f"{name}/True"]
        # the same kernels; gradients of the embedding and of attention are summed in any order
        torch.testing.assert_close(
            torch.tensor(recorded[0]), torch.tensor(eager[0]), rtol=2e-3, atol=0
        )
        assert recorded[1] == eager[1]
        assert (eager[2], recorded[2]) == (0, kinds)
