"""Every layout trains the same model: a few steps give the same losses and gradient norms."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from coatlm.config import Config, make_config
from coatlm.config.recipes import RECIPES
from coatlm.data.batches import document_bounds
from coatlm.platform import device
from tests.distributed import gloo_threads, release, run_ranks
from tests.parallel.fp8_cases import FLOW_LAYOUTS, FLOW_VARIANTS, FOUR_SAMPLES

# Steps and learning rates. The loss of the second step depends on the first update, and that of the
# evaluation on the second, which reads the moments of the first. Plain layouts reuse their buckets
# in a third step, and delayed scaling, which the first step calibrates, replaces its scales after
# the second. Other variants in fp32 have ten times the learning rate, so that two steps show a
# wrong update.
SCHEDULE, OF_VARIANTS = (3, 1e-3), (2, 1e-2)
RELATIVE = 1e-5  # fp32 sums in another order: some ulp (6e-8), amplified by Adam's steps
MODEL = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "tie_embeddings": False}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"single": {}, "single, zero 0": {"zero": 0}},
    2: {
        "tp2": {"tp": 2},
        "tp2 sp": {"tp": 2, "sequence_parallel": True},
        "pp2": {"pp": 2},
        "pp2 vpp2": {"pp": 2, "vpp": 2},
        "dp2": {"zero": 0},
        "dp2 zero1": {"zero": 1},
        "dp2 zero1, no overlap": {"overlap_grad_reduce": False, "overlap_param_gather": False},
        "dp2 zero3": {"zero": 3},
        "cp2": {"cp": 2},
        "cp2 gathered": {"cp": 2, "cp_comm": "all_gather"},
        "cp2 by peers": {"cp": 2, "cp_comm": "p2p"},
    },
    4: {
        "tp2 pp2": {"tp": 2, "pp": 2, "sequence_parallel": True},
        "tp2 dp2 zero1": {"tp": 2},
        "tp2 cp2": {"tp": 2, "cp": 2, "sequence_parallel": True},
        "cp4": {"cp": 4},
        "pp2 dp2": {"pp": 2, "zero": 0},
        "pp2 vpp2 dp2 zero1": {"pp": 2, "vpp": 2},
        "tp2 cp2 zero3": {"tp": 2, "cp": 2, "zero": 3},
    },
}
STAGED: dict[str, dict[str, Any]] = {  # of variants in OTHERS only
    "pp2 dp2 zero2": {"pp": 2, "zero": 2},
    "pp2 dp2 zero3": {"pp": 2, "zero": 3},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"model": {"tie_embeddings": True}},
    "qwen": {"model": {"qkv_bias": True, "qk_norm": True}},
    "documents": {"data": {"reset_attention_mask": True}},
    "positions": {"data": {"reset_attention_mask": True, "reset_position_ids": True}},
    "recompute": {"train": {"recompute": "full"}},
    "tied, recompute": {"model": {"tie_embeddings": True}, "train": {"recompute": "full"}},
    "window": {"model": {"window": {"size": 9, "period": 2}, "attention_softcap": 2.0}},
    "mha": {"model": {"kv_heads": 4}, "train": {"recompute": "selective"}},
}
MATRIX = ("plain", "tied", "qwen", "documents", "recompute")  # variants of every layout
OTHERS: dict[int, dict[str, list[str]]] = {  # and layouts of the other variants
    1: {variant: ["single"] for variant in ("positions", "window", "mha", "tied, recompute")},
    2: {
        # with "cp2 gathered" ranks hold other tokens than with "cp2"
        "positions": ["tp2 sp", "pp2", "cp2", "cp2 gathered"],
        "window": ["cp2", "cp2 gathered"],
        "mha": ["cp2", "cp2 gathered", "cp2 by peers"],  # heads are exchanged in two parts
    },
    4: {
        "positions": ["tp2 pp2"],
        "window": ["cp4"],
        "mha": ["cp4"],
        "tied, recompute": [*STAGED],  # the first stage's module has no output of its own
    },
}
REFUSED = {("cp2 by peers", "documents")}  # coatlm/config/obstacles.py
IN_BF16 = {2: [("cp2 by peers", "plain", "bf16")], 4: [("pp2 vpp2 dp2 zero1", "plain", "bf16")]}


def samples_of(size: int, layout: str) -> int:
    """Samples of a microbatch, 4 or 8: a rank has two microbatches, in a pipeline without
    data parallelism four.

    The time of a case is mostly that of launching small operators, so larger microbatches are
    faster. Two are enough to add gradients and to reduce them with the last one; a pipeline of two
    stages alternates with four.
    """
    if layout == FOUR_SAMPLES:
        return 4
    parallel = (LAYOUTS[size] | STAGED | FLOW_LAYOUTS)[layout]
    return 8 if size == parallel.get("tp", 1) * parallel.get("cp", 1) else 4


def case(size: int, layout: str, variant: str, precision: str, samples: int = 4) -> Config:
    """A small run; buckets so small that there are several."""
    parallel = (LAYOUTS[size] | STAGED | FLOW_LAYOUTS)[layout]
    extra: dict[str, Any] = (VARIANTS | FLOW_VARIANTS)[variant]
    layers = {"layers": 2} if precision in RECIPES else {}
    return make_config(
        {
            "model": MODEL | layers | extra.get("model", {}),
            "data": {"text": ["unused"], "seq_len": 32} | extra.get("data", {}),
            "parallel": {"bucket_size": 20000, "grad_comm": "fp32"} | parallel,
            "precision": {"recipe": precision} | extra.get("precision", {}),
            "optim": {"recipe": "adamw-fp32", "lr": 1e-3},
            "train": {"micro_batch": samples, "global_batch": 16} | extra.get("train", {}),
        }
    )


def batches(config: Config, groups: Any, step: int) -> list[dict[str, Any]]:
    """This rank's microbatches of random tokens with some masked: a pure function of the step."""
    t, length = config.train, config.data.seq_len
    generator = torch.Generator("cpu").manual_seed(100 + step)
    size = (t.global_batch, length + 1)
    tokens = torch.randint(0, 128, size, generator=generator, device="cpu").to(device())
    mask = torch.rand(size, generator=generator, device="cpu")[:, 1:].gt(0.1).float().to(device())
    ids = (tokens[:, :-1] < 8).int().cumsum(1) if config.data.reset_attention_mask else None
    result = []
    for k in range(t.global_batch // (t.micro_batch * groups.dp.size())):
        first = (k * groups.dp.size() + groups.dp.rank()) * t.micro_batch
        rows = slice(first, first + t.micro_batch)
        result.append(
            {
                "tokens": tokens[rows, :-1],
                "labels": tokens[rows, 1:],
                "loss_mask": mask[rows],
                "document_bounds": (
                    None if ids is None else document_bounds(ids[rows].cpu()).to(device())
                ),
            }
        )
    return result


def schedule_of(variant: str, precision: str) -> tuple[int, float]:
    return OF_VARIANTS if variant != "plain" and precision == "fp32" else SCHEDULE


def curve_of(config: Config, steps: int, lr: float) -> list[tuple[float, float]]:
    """Losses and gradient norms of the steps, and the loss of an evaluation."""
    from coatlm.parallel.groups import make_groups
    from coatlm.train.step import Trainer

    groups = make_groups(config.parallel)
    trainer = Trainer(config, groups, vocab=128)
    curve = []
    for step in range(steps):
        placed = trainer.place(batches(config, groups, step))
        loss, norm = trainer.train_step(placed, lr=lr)
        curve.append((float(loss), float(norm)))
    held_out = trainer.place(batches(config, groups, 99))
    curve.append((float(trainer.evaluate(held_out)), 0.0))
    return curve


def train_cases(rank: int, size: int, cases: list[tuple[Any, ...]]) -> dict[str, Any]:
    """The curve of each (layout, variant, precision[, samples per microbatch])."""
    from coatlm.train.setup import Launch, start_processes

    start_processes(Launch.from_environment())
    results = {}
    for layout, variant, precision, *samples in cases:
        config = case(size, layout, variant, precision, *samples)
        curve = curve_of(config, *schedule_of(variant, precision))
        results[f"{layout}/{variant}/{precision}"] = curve
        release()
        assert gloo_threads() < 20  # a case starts about fifty, which `release` ends
    return results


def train_in_groups(cases: Mapping[int, Sequence[tuple[str, str, str]]]) -> dict[str, Any]:
    """The curves of `cases` by size, from one process group per size; all ranks report the same."""
    found: dict[str, Any] = {}
    for size in cases:
        complete = [(*case, samples_of(size, case[0])) for case in cases[size]]
        per_rank = run_ranks(size, "tests.parallel.test_parity:train_cases", complete)
        assert all(result == per_rank[0] for result in per_rank)
        found |= per_rank[0]
    return found


def cases_of(size: int) -> list[tuple[str, str]]:
    """All layouts in all variants of the matrix; the other variants where they add something."""
    cases = [case for case in itertools.product(LAYOUTS[size], MATRIX) if case not in REFUSED]
    return cases + [(layout, v) for v, layouts in OTHERS[size].items() for layout in layouts]


@pytest.fixture(scope="module")
def curves() -> dict[str, Any]:
    """The losses and norms of every case, by `layout/variant/precision`."""
    in_fp32 = {size: [(*case, "fp32") for case in cases_of(size)] for size in LAYOUTS}
    return train_in_groups({size: in_fp32[size] + IN_BF16.get(size, []) for size in LAYOUTS})


@pytest.mark.parametrize(("layout", "variant"), [c for n in LAYOUTS for c in cases_of(n)])
def test_layout_trains_like_one_process(curves: Any, layout: str, variant: str) -> None:
    expected = torch.tensor(curves[f"single/{variant}/fp32"])
    actual = torch.tensor(curves[f"{layout}/{variant}/fp32"])
    torch.testing.assert_close(actual, expected, rtol=RELATIVE, atol=0.0)


@pytest.mark.parametrize("case", [case for cases in IN_BF16.values() for case in cases])
def test_layout_trains_in_bf16(curves: Any, case: tuple[str, str, str]) -> None:
    exact = curves["/".join((*case[:2], "fp32"))]
    for rounded, expected in zip(curves["/".join(case)], exact, strict=True):
        assert rounded == pytest.approx(expected, rel=0.03)  # BF16: 2^-9 an operation


def test_random_tokens_cost_their_entropy(curves: Any) -> None:
    for loss, _ in curves["single/plain/fp32"]:
        assert loss == pytest.approx(4.852, rel=0.05)  # ln 128
