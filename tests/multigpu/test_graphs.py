"""Replayed microbatches and steps gather weights and reduce gradients as eager ones do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.graphs import EVERY, Step, run_ways
from tests.train.test_resume import run_config
from tests.train.test_step_graph import NAN, OF_TWO

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SMALL = {"bucket_size": 300_000}  # several buckets per layer
CASES: dict[
    str, tuple[int, int, dict[str, Any]]
] = {  # microbatches per step, their kinds, sections
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
    "delayed sums": (
        2,
        2,
        {"parallel": {"grad_comm": "fp8-nccl", "grad_comm_scaling": "delayed", **SMALL}},
    ),
    "not sharded": (2, 2, {"parallel": {"zero": 0, **SMALL}}),
    "after backward": (
        2,
        2,
        {"parallel": {"overlap_grad_reduce": False, "overlap_param_gather": False, **SMALL}},
    ),
    "tp2": (
        2,
        2,
        {"parallel": {"tp": 2, "sequence_parallel": True}, "precision": {"recipe": "coat"}},
    ),
    "tp2, split": (
        2,
        2,
        {
            "parallel": {"tp": 2, "sequence_parallel": True, "tp_chunks": 2},
            "precision": {"recipe": "coat"},
        },
    ),
    "tp2, fp8 sums": (
        2,
        2,
        {
            "parallel": {"tp": 2, "sequence_parallel": True, "tp_comm_reduce": "fp8"},
            "precision": {"recipe": "coat"},
            "model": {"hidden": 128},
        },
    ),
    "cp2 by peers": (
        2,
        2,
        {"parallel": {"cp": 2, "cp_comm": "p2p"}, "precision": {"recipe": "coat-lean"}},
    ),
    **{
        f"cp2 {way}, fp8 keys": (
            2,
            2,
            {
                "parallel": {"cp": 2, "cp_comm": way, "cp_comm_kv": "fp8"},
                "precision": {"recipe": "coat-lean"},
            },
        )
        for way in ("a2a", "p2p", "all_gather")
    },
    "cp2": (2, 2, {"parallel": {"cp": 2, "cp_comm": "a2a"}, "precision": {"recipe": "coat-lean"}}),
    "fp8 gradients and states": (
        2,
        2,
        {
            "parallel": {"grad_comm": "fp8-nccl", "main_grads": "fp8", **SMALL},
            "optim": {"recipe": "fp8lm"},
        },
    ),
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    cases = {name: (n, sections) for name, (n, _, sections) in CASES.items()}
    return run_ways(2, cases, EVERY)


@pytest.mark.parametrize("name", CASES)
def test_replayed_microbatches_and_steps_communicate_like_eager_ones(found: Any, name: str) -> None:
    for rank in found:
        eager, *replayed = ([Step(*step) for step in way] for way in rank[name])
        for way in replayed:
            # the same kernels; gradients of the embedding and of attention are summed in any order
            curves = (torch.tensor([step.curve for step in steps]) for steps in (way, eager))
            torch.testing.assert_close(*curves, rtol=2e-3, atol=0)
            assert [step.sent for step in way] == [step.sent for step in eager]
        assert [way[-1].graphs for way in (eager, *replayed)] == [0, CASES[name][1], 1]


@pytest.fixture(scope="module")
def bits() -> list[dict[str, Any]]:
    ways = ["plain", "plain again", "replayed"]
    return run_ranks(2, "tests.train.test_step_graph:train", [list(OF_TWO), ways])


@pytest.mark.parametrize("name", OF_TWO)
def test_steps_of_one_graph_compute_the_bits_of_plain_ones(bits: Any, name: str) -> None:
    """With samples of 64 tokens, whose gradients are summed in one order."""
    for rank in bits:
        plain, again, replayed = (
            rank[f"{name}, {w}"] for w in ("plain", "plain again", "replayed")
        )
        assert again == plain
        assert replayed == plain
        assert [number for number, step in enumerate(plain[0]) if "nan" in step[:2]] == [NAN]
        assert any(step[2] for step in plain[0]) == (name == "after backward")  # a spike


def find_the_slow_rank(rank: int, size: int, spin: int) -> list[Any]:
    """Six steps of one graph, in which rank 1 spins for `spin` cycles before its first layer."""
    from coatlm.config import make_config
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer
    from coatlm.train.stragglers import compare
    from tests.parallel.test_parity import batches

    start_processes(Launch.from_environment())
    config = make_config(
        {
            "model": {"layers": 2, "hidden": 256, "heads": 2, "ffn": 704},
            "data": {"text": ["unused"], "seq_len": 256},
            "train": {"micro_batch": 2, "global_batch": 16, "cuda_graphs": True},
        }
    )
    groups = make_groups(config.parallel)
    trainer = Trainer(config, groups, vocab=128, whole_steps=True)
    if rank == 1:

        def wait(*_: Any) -> None:
            torch.cuda._sleep(spin)

        trainer.chunks[0].register_forward_pre_hook(wait)
    placed = [trainer.place(batches(config, groups, n)) for n in range(6)]  # waits for copies
    for number, some in enumerate(placed):
        trainer.timer.enter("data")
        trainer.train_step(some, lr=1e-3)
        if number == 2:  # the first step has compiled its kernels, the second was captured
            torch.cuda.synchronize()
            trainer.timer.read()
    torch.cuda.synchronize()
    found = compare(trainer.timer.read(), groups.control)
    trainer.close()
    release_groups()
    return list(found)


def test_the_slow_rank_is_found_in_the_phases_of_a_graph() -> None:
    """100 million cycles are some 50 ms. Rank 1 spins in four microbatches; in the first of them
    rank 0 waits for the weights that rank 1 gathers late.
    """
    for rank, phase, ms, median_ms in run_ranks(2, f"{__name__}:find_the_slow_rank", 100_000_000):
        assert (rank, phase) == (1, "forward_backward")
        assert 180 < ms < 800 and median_ms < ms / 3


def train_to_the_end(rank: int, size: int, root: str) -> float:
    """A run of 20 steps; the seconds from its last step until its groups were destroyed."""
    from coatlm.train import start
    from coatlm.train.setup import Launch

    ended = 0.0

    class Trainer(start.Trainer):
        def close(self) -> None:
            nonlocal ended
            assert self.graphs is not None and self.graphs.graphs
            ended = time.monotonic()
            super().close()

    start.Trainer = Trainer  # type: ignore[misc]
    config = run_config(
        Path(root) / "run",
        "dp2 zero1",
        model={"layers": 2, "hidden": 256, "heads": 2, "kv_heads": 2, "ffn": 704},
        data={"seq_len": 256},
        parallel={"grad_comm": "fp8-a2a"},
        precision={"recipe": "coat"},
        optim={"recipe": "coat"},
        train={
            "steps": 20,
            "micro_batch": 2,
            "global_batch": 8,
            "eval_every": 0,
            "cuda_graphs": True,
        },
        checkpoint={"every": 10},
    )
    assert start.train(config, Launch.from_environment()) == 0
    return time.monotonic() - ended


def test_a_run_with_cuda_graphs_ends(tmp_path: Path) -> None:
    """NCCL does not destroy a communicator while a CUDA graph has captured its collectives."""
    (tmp_path / "text.txt").write_text("one two three four\n" * 20000)
    seconds = run_ranks(2, f"{__name__}:train_to_the_end", str(tmp_path), timeout=180)
    assert max(seconds) < 60
