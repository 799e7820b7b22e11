"""Training with CUDA graphs of microbatches, of steps, and without, for tests that compare them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tests.distributed import run_ranks
from tests.parallel.test_parity import batches

CASES_A_LAUNCH = 2
Ways = Sequence[tuple[bool, bool | None]]
BOTH = ((False, None), (True, None))  # train.cuda_graphs, whole_steps of Trainer
EVERY = ((False, None), (True, False), (True, True))  # with graphs of microbatches, and of steps


class Step(NamedTuple):
    """The results of a step, as JSON represents them."""

    curve: tuple[float, float, float]  # loss, gradient norm, loss of an evaluation before it, or 0
    sent: dict[str, int]  # Trainer.comm_bytes
    graphs: int  # captured so far


def train_steps(
    trainer: Any, config: Any, groups: Any, count: int, *, evaluate: Collection[int] = ()
) -> list[Step]:
    """The first `count` steps, with an evaluation before those in `evaluate`."""
    steps = []
    for number in range(count):
        placed = trainer.place(batches(config, groups, number))
        evaluated = float(trainer.evaluate(placed)) if number in evaluate else 0.0
        loss, norm = trainer.train_step(placed, lr=1e-3)
        steps.append(
            Step((float(loss), float(norm), evaluated), trainer.comm_bytes, graphs_of(trainer))
        )
    return steps


def graphs_of(trainer: Any) -> int:
    """The number of graphs, of microbatches or of the step, that the trainer holds."""
    microbatches = 0 if trainer.graphs is None else len(trainer.graphs.graphs)
    return microbatches + (trainer.step_graph is not None and trainer.step_graph.graph is not None)


def checksum(trainer: Any) -> str:
    """A digest of the bits of all weights and optimizer states, and the count of updates."""
    optimizer = trainer.optimizer.optimizer
    digest = hashlib.sha256(str(int(optimizer.step_count)).encode())
    for shard, states in zip(optimizer.shards, optimizer.states, strict=True):
        for tensor in (shard.weight, *(states[name] for name in sorted(states))):
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run_ways(
    ranks: int, cases: Mapping[str, tuple[int, dict[str, Any]]], ways: Ways = BOTH
) -> list[Any]:
    """What `train_ways` found on each rank, from as many launches as the cases need.

    Groups that a case has made keep their memory on the GPU as long as the process lives.
    """
    found: list[Any] = [{} for _ in range(ranks)]
    left = iter(cases.items())
    while some := dict(itertools.islice(left, CASES_A_LAUNCH)):
        launched = run_ranks(ranks, "tests.graphs:train_ways", [some, ways])
        for rank, more in zip(found, launched, strict=True):
            rank.update(more)
    return found


def train_ways(
    rank: int, size: int, asked: tuple[dict[str, tuple[int, dict[str, Any]]], Ways]
) -> dict[str, list[list[Step]]]:
    """Five steps of each case (microbatches per step, sections of the run), in each of the ways."""
    from coatlm.config import make_config
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer

    start_processes(Launch.from_environment())
    found: dict[str, Any] = {}
    for name, (count, sections) in asked[0].items():
        parallel = sections.get("parallel", {})
        ranks = size // (parallel.get("tp", 1) * parallel.get("cp", 1))
        found[name] = []
        for cuda_graphs, whole_steps in asked[1]:
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
            trainer = Trainer(config, groups, vocab=128, whole_steps=whole_steps)
            found[name].append(train_steps(trainer, config, groups, 5, evaluate=(1, 3, 4)))
            trainer.close()
            release_groups()
    return found
