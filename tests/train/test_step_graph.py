"""Steps that are replayed as one CUDA graph, on a CPU; tests/gpu and tests/multigpu have the same.

Without a GPU, a stand-in runs the step where a GPU would capture it and, at each later replay, runs
what was captured again: with the static inputs, and with whatever arguments the captured call had.
What that run changes on the host, bytes sent and weights to all-gather, is undone, as no Python
runs in a replay. Results that differ from those of plain steps then show what a step takes from
elsewhere than the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.parallel.collectives import Traffic
from coatlm.parallel.cuda_graphs import Batch, MicrobatchGraphs, StepGraph
from tests.distributed import run_ranks
from tests.graphs import checksum, graphs_of

MICROBATCHES, STEPS = 3, 8
NAN, MEASURED, OBSERVED, EVALUATED = 3, 4, 5, 6  # what happens in some steps, or before
MODEL = (
    {"layers": 1, "hidden": 64, "heads": 4, "ffn": 96},
    {"layers": 2, "hidden": 256, "heads": 2, "ffn": 704},  # on a GPU
)
COAT = {"recipe": "coat", "tune_gemms": False}  # algorithms chosen by time may differ
CASES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": {"recipe": "bf16"}, "optim": {"recipe": "collage-plus"}},
    "documents": {"data": {"reset_attention_mask": True}, "optim": {"recipe": "fp8lm"}},
    "coat": {"precision": COAT | {"scaling": "delayed"}, "optim": {"recipe": "coat"}},
    "fp8 output": {"precision": COAT | {"output_layer": "fp8-gradients"}},
    "rounding": {
        "precision": COAT | {"grad_rounding": "stochastic"},
        "parallel": {"main_grads": "fp8"},
        "optim": {"recipe": "coat-lean"},
    },
    "spikes": {"train": {"spike_sigma": 0.5, "spike_window": 2}, "optim": {"clip_grad": 0.1}},
}

SMALL = {"bucket_size": 30_000}  # several buckets per layer
OF_TWO: dict[str, dict[str, Any]] = {  # on two ranks
    "zero1": {"parallel": SMALL, "precision": COAT, "optim": {"recipe": "coat-lean"}},
    "zero1, codes gathered": {
        "parallel": {"weight_gather": "fp8", **SMALL},
        "precision": COAT | {"scaling": "delayed"},
        "optim": {"recipe": "coat"},
    },
    "zero0, documents": {
        "parallel": {"zero": 0},
        "data": {"reset_attention_mask": True, "seq_len": 56},  # wider on one rank in one step
    },
    "after backward": {
        "parallel": {"overlap_grad_reduce": False, "overlap_param_gather": False},
        "train": {"spike_sigma": 0.5, "spike_window": 2},
    },
    "delayed sums": {
        "parallel": {"grad_comm": "fp8-nccl", "grad_comm_scaling": "delayed", **SMALL},
        "optim": {"recipe": "fp8lm"},
    },
    "tp2": {"parallel": {"tp": 2, "sequence_parallel": True}, "precision": COAT},
    "cp2": {"parallel": {"cp": 2}, "precision": COAT},
}
OF_SIZE = {1: CASES, 2: OF_TWO}
SAME_EVENTS = {
    "zero1, codes gathered": "coat",
    "zero0, documents": "documents",
    "delayed sums": "coat",
}

USUAL = ["eager", "capture", "replay", "replay", "eager", "eager", "replay", "replay", "reset"]
EVENTS = {
    "coat": ["eager", "eager", "capture", *USUAL[3:]],  # the first step calibrates
    # the fifth step has a sample with more documents than any before it
    "documents": [*USUAL[:4], "reset", "eager", "eager", "eager", "capture", "reset"],
}


class CpuStepGraph(StepGraph):
    """A captured step runs once during the capture; its first replay is that run."""

    def __init__(self, model: Any, control: Any) -> None:
        super().__init__(model, control)
        self.events: list[str] = []
        self.waited, self.waits = False, list[bool]()  # before the steps, for copies of weights

    def wait(self) -> None:
        self.waited = True

    def run(self, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        self.waits.append(self.waited)
        results = super().run(*arguments, **options)
        self.waited = False
        return results

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
                due, sent = self.weights.due, self.model.traffic.sent.copy()
                for static, found in zip(results, work(self.inputs), strict=True):
                    static.copy_(found)
                self.weights.due, self.model.traffic.sent = due, sent

        return SimpleNamespace(replay=replay, reset=lambda: self.events.append("reset")), results


class EagerMicrobatches(MicrobatchGraphs):
    """Runs microbatches on the CPU."""

    def _eager(self, inputs: Batch) -> Tensor:
        return self._forward_backward(inputs)


def train(rank: int, size: int, asked: tuple[list[str], list[str]]) -> dict[str, Any]:
    """Bits of every step and of the end of a run, for some of OF_SIZE[size]: plain, "replayed"
    whole, and on a GPU replayed by "microbatches".
    """
    from coatlm.config import make_config
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer

    start_processes(Launch.from_environment())
    found: dict[str, Any] = {}
    for name, way in itertools.product(*asked):
        sections, replayed = OF_SIZE[size][name], way == "replayed"
        parallel = sections.get("parallel", {})
        dp = size // (parallel.get("tp", 1) * parallel.get("cp", 1))
        captured = not way.startswith("plain") and torch.cuda.is_available()
        sizes = {"micro_batch": 2, "global_batch": 2 * MICROBATCHES * dp, "cuda_graphs": captured}
        config = make_config(
            {
                **sections,
                "model": MODEL[torch.cuda.is_available()],
                "data": {"text": ["unused"], "seq_len": 64} | sections.get("data", {}),
                "train": sizes | sections.get("train", {}),
                "precision": {"tune_attention": False} | sections.get("precision", {}),
            }
        )
        groups = make_groups(config.parallel)
        trainer = Trainer(config, groups, vocab=128, whole_steps=replayed)
        assert (trainer.step_graph is not None) == (replayed and captured)
        if replayed and not captured:
            trainer.graphs = EagerMicrobatches(trainer.chunks[0])
            trainer.step_graph = CpuStepGraph(trainer.chunks[0], groups.control)
            trainer.optimizer.before_update = trainer.step_graph.wait
        found[f"{name}, {way}"] = [*train_steps(trainer, config, groups), checksum(trainer)]
        if isinstance(trainer.step_graph, CpuStepGraph):
            trainer.change_layers(())
            found[f"{name}, events"] = trainer.step_graph.events
            found[f"{name}, waits"] = trainer.step_graph.waits
            found[f"{name}, ended"] = int(trainer.step_graph.ended)
        else:
            assert bool(graphs_of(trainer)) == captured
        trainer.close()
        release_groups()
    return found


def train_steps(trainer: Any, config: Any, groups: Any) -> tuple[list[Any], str]:
    """Loss, gradient norm and spike of every step, and what was measured between them."""
    from tests.parallel.test_parity import batches

    steps: list[Any] = []
    seen: list[Any] = []
    for number in range(STEPS):
        placed, lr = trainer.place(batches(config, groups, number)), 1e-3 / (1 + number)

        def measure(clip: Tensor, lr: float = lr) -> None:
            seen.append(trainer.measure_states(lr, clip))

        if number == NAN:
            placed[1]["loss_mask"][0, 0] = torch.nan
        if number == EVALUATED:
            seen.append(float(trainer.evaluate(placed)))
        if number == MEASURED:
            with trainer.watch_numerics() as probes:
                result = trainer.train_step(placed, lr)
            seen.append(trainer.measure_numerics(probes))
        else:
            result = trainer.train_step(placed, lr, observe=measure if number == OBSERVED else None)
        steps.append([*(float(x).hex() for x in result), bool(trainer.spike), trainer.comm_bytes])
    seen.append(float(trainer.evaluate(placed)))
    return steps, repr(seen)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    (result,) = run_ranks(1, f"{__name__}:train", [list(CASES), ["plain", "replayed"]])
    return result


@pytest.fixture(scope="module")
def of_two() -> list[dict[str, Any]]:
    return run_ranks(2, f"{__name__}:train", [list(OF_TWO), ["plain", "replayed"]])


@pytest.mark.parametrize("name", OF_TWO)
def test_ranks_replay_steps_together_and_compute_the_bits_of_plain_ones(
    of_two: list[dict[str, Any]], name: str
) -> None:
    for rank in of_two:
        assert rank[f"{name}, replayed"] == rank[f"{name}, plain"]
        assert rank[f"{name}, events"] == EVENTS.get(SAME_EVENTS.get(name, ""), USUAL)
        # all ranks of data and context parallelism have ended the last replay
        assert rank[f"{name}, ended"] == (1 if name == "tp2" else 2)
    steps = of_two[0][f"{name}, plain"][0]
    assert any(step[2] for step in steps) == (name == "after backward")  # a spike
    assert (steps[-1][3]["comm_bytes_grad"] > 0) == (name != "tp2")


@pytest.mark.parametrize("name", CASES)
def test_replayed_steps_compute_the_bits_of_plain_ones(found: dict[str, Any], name: str) -> None:
    plain, replayed = (found[f"{name}, {way}"] for way in ("plain", "replayed"))
    assert replayed == plain
    steps, _, _ = plain
    assert [number for number, step in enumerate(steps) if "nan" in step[:2]] == [NAN]
    assert any(step[2] for step in steps) == (name == "spikes")
    assert found[f"{name}, events"] == EVENTS.get(name, USUAL)


@pytest.mark.parametrize("name", CASES)
def test_steps_wait_before_a_replay_for_copies_that_a_checkpoint_makes(
    found: dict[str, Any], name: str
) -> None:
    assert found[f"{name}, waits"] == [True] * STEPS


def test_another_number_of_microbatches_is_captured_again() -> None:
    def work(batches: Sequence[Batch]) -> tuple[Tensor]:
        return (torch.stack([batch["tokens"] for batch in batches]).sum(),)

    weights = SimpleNamespace(due=False, mark_updated=lambda: None)
    alone = SimpleNamespace(size=lambda: 1)
    model = SimpleNamespace(traffic=Traffic(), weights=weights, group=alone)
    graph, kept = CpuStepGraph(model, alone), []
    for counts in ([1, 2], [3, 4], [5, 6], [7, 8, 9], [1, 1, 1]):
        batches = [{"tokens": torch.tensor(n), "document_bounds": None} for n in counts]
        kept += graph.run(work, batches, eager=False)
    assert kept == [3, 7, 11, 24, 3]  # a result stays what it was when later steps are replayed
    assert graph.events == ["eager", "capture", "replay", "reset", "eager", "capture"]
