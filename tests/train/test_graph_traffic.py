"""Bytes that steps report whose microbatches are replayed as CUDA graphs.

A CPU has no CUDA graphs. A stand-in runs the microbatch where a GPU would capture it, and again at
each replay but the first, without counting what that sends.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coatlm.parallel.cuda_graphs import MicrobatchGraphs, MicrobatchKind
from coatlm.parallel.flat_model import FlatModel
from tests.distributed import run_ranks
from tests.graphs import train_steps

MICROBATCHES = (1, 2, 3, 6)
STEPS = 3


class CpuGraphs(MicrobatchGraphs):
    """A captured microbatch runs once during the capture; its first replay is that run."""

    def __init__(self, model: FlatModel) -> None:
        super().__init__(model)
        self.released: list[MicrobatchKind] = []

    def _eager(self, inputs: Any) -> Any:
        return self._forward_backward(inputs)

    def _capture(self, inputs: Any, kind: MicrobatchKind) -> Any:
        self.inputs = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }
        loss = self._captured_work(kind)
        replays = itertools.count()

        def replay() -> None:
            if not next(replays):
                return
            sent = self.model.traffic.sent.copy()
            loss.copy_(self._captured_work(kind))
            self.model.traffic.sent = sent

        return SimpleNamespace(replay=replay, reset=lambda: self.released.append(kind)), loss


def train(rank: int, size: int, microbatches: list[int]) -> dict[str, Any]:
    """Losses and bytes of every step, eager and replayed, for numbers of microbatches."""
    from coatlm.config import make_config
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer

    start_processes(Launch.from_environment())
    found: dict[str, Any] = {}
    for count in microbatches:
        config = make_config(
            {
                "model": {"layers": 2, "hidden": 64, "heads": 4, "ffn": 96},
                "data": {"text": ["unused"], "seq_len": 32},
                "parallel": {"tp": 2, "sequence_parallel": True, "weight_gather": "fp8"},
                "precision": {"recipe": "coat"},
                "train": {"micro_batch": 1, "global_batch": 2 * count},
            }
        )
        for name in ("eager", "replayed"):
            groups = make_groups(config.parallel)
            trainer = Trainer(config, groups, vocab=128)
            if name == "replayed":
                trainer.graphs = CpuGraphs(trainer.chunks[0])
            steps = train_steps(trainer, config, groups, STEPS)
            found[f"{count} {name}"] = [(step.curve, step.sent) for step in steps]
            kinds = list(trainer.graphs.graphs) if trainer.graphs else []
            trainer.close()
            if isinstance(trainer.graphs, CpuGraphs):
                assert trainer.graphs.released == kinds and not trainer.graphs.graphs
                found[f"{count} kinds"] = len(kinds)
            release_groups()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(4, "tests.train.test_graph_traffic:train", MICROBATCHES)


@pytest.mark.parametrize("count", MICROBATCHES)
def test_replayed_steps_report_the_bytes_of_eager_ones(found: Any, count: int) -> None:
    for rank in found:
        for eager, replayed in zip(rank[f"{count} eager"], rank[f"{count} replayed"], strict=True):
            assert replayed == [pytest.approx(eager[0], rel=1e-6), eager[1]]


def test_a_trainer_that_is_closed_has_released_its_graphs(found: Any) -> None:
    for rank in found:  # the release is asserted in `train`; kinds: first, last, between
        assert [rank[f"{count} kinds"] for count in MICROBATCHES] == [1, 2, 3, 3]


def test_tensor_parallel_bytes_grow_with_the_microbatches(found: Any) -> None:
    """A step adds a constant: sums of norms' gradients, two per layer and the last, or some."""
    for rank in found:
        once, *more = (rank[f"{n} replayed"][-1][1]["comm_bytes_tp"] for n in MICROBATCHES)
        step = 2 * once - more[0]
        assert 0 < step <= 5 * 64 * 4  # fp32; what this rank owns of five norms
        for n, sent in zip(MICROBATCHES[1:], more, strict=True):
            assert sent == n * (once - step) + step
