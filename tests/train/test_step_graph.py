"""Steps that are replayed as one CUDA graph, on a CPU.

A stand-in runs the step where a GPU would capture it and, at each later replay, runs what was
captured again: with the static inputs, and with whatever arguments the captured call had. Results
that differ from those of plain steps then show what a step takes from elsewhere than the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.parallel.cuda_graphs import Batch, MicrobatchGraphs, StepGraph
from tests.distributed import run_ranks
from tests.graphs import checksum

MICROBATCHES, STEPS = 3, 8
NAN, MEASURED, OBSERVED, EVALUATED = 3, 4, 5, 6  # what happens in some steps, or before
CASES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": {"recipe": "bf16"}, "optim": {"recipe": "collage-plus"}},
    "documents": {"data": {"reset_attention_mask": True}, "optim": {"recipe": "fp8lm"}},
    "coat": {"precision": {"recipe": "coat", "scaling": "delayed"}, "optim": {"recipe": "coat"}},
    "rounding": {
        "precision": {"recipe": "coat", "grad_rounding": "stochastic"},
        "parallel": {"main_grads": "fp8"},
        "optim": {"recipe": "coat-lean"},
    },
    "spikes": {"train": {"spike_sigma": 0.5, "spike_window": 2}, "optim": {"clip_grad": 0.1}},
}


class CpuStepGraph(StepGraph):
    """A captured step runs once during the capture; its first replay is that run."""

    def __init__(self) -> None:
        super().__init__(None)
        self.events: list[str] = []

    def _eager(
        self, work: Callable[[Sequence[Batch]], tuple[Tensor, ...]], batches: Sequence[Batch]
    ) -> tuple[Tensor, ...]:
        self.events.append("eager")
        return work(batches)

    def _capture(
        self, work: Callable[[Sequence[Batch]], tuple[Tensor, ...]]
    ) -> tuple[Any, tuple[Tensor, ...]]:
        self.events.append("capture")
        results = work(self.inputs)
        replays = itertools.count()

        def replay() -> None:
            if next(replays):
                self.events.append("replay")
                for static, found in zip(results, work(self.inputs), strict=True):
                    static.copy_(found)

        return SimpleNamespace(replay=replay, reset=lambda: self.events.append("reset")), results


class EagerMicrobatches(MicrobatchGraphs):
    """Runs microbatches on the CPU."""

    def _eager(self, inputs: Batch) -> Tensor:
        return self._forward_backward(inputs)


def train(rank: int, size: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Bits of every step and of the end of a run, plain and replayed, and what was replayed."""
    from coatlm.config import make_config
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer
    from tests.parallel.test_parity import batches

    start_processes(Launch.from_environment())
    found: dict[str, Any] = {}
    for name, sections in cases.items():
        sizes = {"micro_batch": 2, "global_batch": 2 * MICROBATCHES}
        config = make_config(
            {
                "model": {"layers": 1, "hidden": 64, "heads": 4, "ffn": 96},
                "data": {"text": ["unused"], "seq_len": 32} | sections.get("data", {}),
                **{k: v for k, v in sections.items() if k not in ("data", "train")},
                "train": sizes | sections.get("train", {}),
            }
        )
        for way in ("plain", "replayed"):
            groups = make_groups(config.parallel)
            trainer = Trainer(config, groups, vocab=128)
            if way == "replayed":
                trainer.graphs = EagerMicrobatches(trainer.chunks[0])
                trainer.step_graph = CpuStepGraph()
            steps, seen = [], []
            for number in range(STEPS):
                placed = trainer.place(batches(config, groups, number))
                if number == NAN:
                    placed[1]["loss_mask"][0, 0] = torch.nan
                if number == EVALUATED:
                    seen.append(float(trainer.evaluate(placed)))
                lr, observe = 1e-3 / (1 + number), None
                if number == OBSERVED:

                    def observe(clip: Tensor, trainer: Any = trainer, lr: float = lr) -> None:
                        seen.append(trainer.measure_states(lr, clip))

                if number == MEASURED:
                    with trainer.watch_numerics() as probes:
                        result = trainer.train_step(placed, lr, observe=observe)
                    seen.append(trainer.measure_numerics(probes))
                else:
                    result = trainer.train_step(placed, lr, observe=observe)
                steps.append([*map(float.hex, map(float, result)), bool(trainer.spike)])
            found[f"{name} {way}"] = [steps, repr(seen), checksum(trainer)]
            if trainer.step_graph is not None:
                trainer.change_layers(())
                found[f"{name} events"] = trainer.step_graph.events
            trainer.close()
            release_groups()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    (result,) = run_ranks(1, f"{__name__}:train", CASES)
    return result


@pytest.mark.parametrize("name", CASES)
def test_replayed_steps_compute_the_bits_of_plain_ones(found: dict[str, Any], name: str) -> None:
    plain, replayed = (found[f"{name} {way}"] for way in ("plain", "replayed"))
    assert replayed == plain
    steps, _, _ = plain
    assert [number for number, step in enumerate(steps) if "nan" in step[:2]] == [NAN]
    assert any(step[2] for step in steps) == (name == "spikes")
    early = ["eager", "eager", "capture"] if name == "coat" else ["eager", "capture", "replay"]
    measured = ["replay", "eager", "eager", "replay", "replay"]
    assert found[f"{name} events"] == [*early, *measured, "reset"]
