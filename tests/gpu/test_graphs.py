"""train.cuda_graphs replays what the eager step computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.graphs import Step, graphs_of, run_ways

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
# microbatches have 17 to 32 documents per sample, and up to 16 in the second step
DOCUMENTS = {"text": ["unused"], "seq_len": 256, "reset_attention_mask": True}
CASES: dict[str, tuple[int, dict[str, Any]]] = {  # microbatches per step, sections
    "bf16": (3, {"precision": {"recipe": "bf16"}}),
    "bf16 documents": (3, {"precision": {"recipe": "bf16"}, "data": DOCUMENTS}),
    "restarting positions": (
        3,
        {"precision": {"recipe": "coat-lean"}, "data": DOCUMENTS | {"reset_position_ids": True}},
    ),
    "coat": (3, {"precision": {"recipe": "coat"}}),
    "coat-lean": (3, {"precision": {"recipe": "coat-lean"}}),
    "fp8 output layer": (3, {"precision": {"recipe": "bf16", "output_layer": "fp8"}}),
    "coat delayed": (3, {"precision": {"recipe": "coat", "scaling": "delayed"}}),
    "offloaded states": (3, {"optim": {"offload": "states"}}),  # graphs of microbatches
}


def test_a_replayed_microbatch_trains_like_an_eager_one() -> None:
    (found,) = run_ways(1, CASES)
    for name in CASES:
        eager, replayed = ([Step(*step) for step in way] for way in found[name])
        first = 1  # the step that is captured
        if name == "offloaded states":  # a microbatch of the first step is
            first = 0
        elif name == "coat delayed":  # the first step calibrates
            first = 2
        assert [bool(step.graphs) for step in replayed] == [n >= first for n in range(5)]
        assert not any(step.graphs for step in eager)
        # the same kernels; gradients of the embedding and of attention are summed in any order
        curves = (torch.tensor([step.curve for step in way]) for way in (replayed, eager))
        torch.testing.assert_close(*curves, rtol=2e-3, atol=0)


GUARDED = {"recipe": "coat", "guard_every": 1}
SEEN, FALLEN = 3, 5  # the steps that are measured, and from which on layer 2 is in BF16
FELL: dict[str, dict[str, list[Any]]] = {
    "fallback": {"in_bf16": [2]},
    "operand": {"tensors": ["2/fc2_input", "2/qkv_grad", "2/proj_weight", "2/gate_up_saved"]},
}


def fall_back_both_ways(rank: int, size: int, ways: dict[str, str]) -> list[list[Any]]:
    """Eight steps, eager and replayed: loss, norm, graphs captured, and what is in BF16.

    `ways`: values of precision.guard and precision.scaling.
    """
    from coatlm.config import make_config
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer
    from tests.parallel.test_parity import batches

    start_processes(Launch.from_environment())
    both = []
    for cuda_graphs in (False, True):
        config = make_config(
            {
                "model": {"layers": 2, "hidden": 256, "heads": 2, "ffn": 704},
                "data": {"text": ["unused"], "seq_len": 256},
                "train": {"micro_batch": 2, "global_batch": 6, "cuda_graphs": cuda_graphs},
                "precision": GUARDED | ways,
            }
        )
        groups = make_groups(config.parallel)
        trainer = Trainer(config, groups, vocab=128)
        layers, steps = trainer.chunks[0].module.decoder.layers, []
        for number in range(8):
            placed = trainer.place(batches(config, groups, number))
            if number == SEEN:
                with trainer.watch_numerics(sampled=True) as probes:
                    loss, norm = trainer.train_step(placed, lr=1e-3)
                assert {r["layer"] for r in trainer.measure_numerics(probes)} == {1, 2, 3}
            else:
                loss, norm = trainer.train_step(placed, lr=1e-3)
            if number == FALLEN - 1:
                trainer.guard.restore(FELL[ways["guard"]])
            in_bf16 = [x.in_bf16 or bool(x.flow.bf16_tensors) for x in layers]
            steps.append([float(loss), float(norm), graphs_of(trainer), in_bf16])
        both.append(steps)
        trainer.close()
        release_groups()
    return both


@pytest.mark.parametrize("guard", list(FELL))
@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_a_layer_that_falls_back_is_captured_again_once(scaling: str, guard: str) -> None:
    ways = {"guard": guard, "scaling": scaling}
    ((eager, replayed),) = run_ranks(1, f"{__name__}:fall_back_both_ways", ways)
    curves = (torch.tensor([step[:2] for step in way]) for way in (replayed, eager))
    torch.testing.assert_close(*curves, rtol=2e-3, atol=0)  # as in the test above
    # the second step that does not calibrate is captured
    first = [0, 1] if scaling == "current" else [0, 0]
    assert [step[2] for step in replayed] == [*first, 1, 1, 0, 0, 1, 1]
    assert [step[3] for step in eager] == [[False, number >= FALLEN - 1] for number in range(8)]
