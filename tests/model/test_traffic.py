"""The closed form of tensor- and context-parallel traffic against the collectives that are issued.

A dispatch mode sees every call of torch.distributed with its tensors, whoever makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import bias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from coatlm.config.recipes import PRECISION_RECIPES, RECIPES
from coatlm.fp8.qtensor import Granularity
from coatlm.model import traffic as closed
from coatlm.parallel.collectives import Traffic
from coatlm.parallel.finalize_grads import TensorParallelSums
from tests.distributed import run_ranks
from tests.model.shapes import config

pytestmark = pytest.mark.slow

SENT: dict[str, Callable[[int, int], float]] = {  # c10d's operator -> by bytes of all and R
    "allreduce_": lambda n, r: 2 * n * (r - 1) / r,
    "_reduce_scatter_base_": lambda n, r: n * (r - 1) / r,
    "_allgather_base_": lambda n, r: n * (r - 1) / r,
    "alltoall_base_": lambda n, r: n * (r - 1) / r,
    "allgather_": lambda n, r: n * (r - 1),
    "reduce_scatter_": lambda n, r: n * (r - 1) / r,
    "broadcast_": lambda n, r: n,
    "send": lambda n, r: n,
    "reduce_": lambda n, r: n,
}
SP = {"tp": 2, "sequence_parallel": True}
COAT = {"precision": {"recipe": "coat"}}
CASES: dict[int, dict[str, dict[str, Any]]] = {  # ranks -> name -> sections of the run
    2: {
        "tp2 bf16": {"parallel": {"tp": 2}},
        "tp2 bf16 full": {"parallel": {"tp": 2}, "train": {"recompute": "full"}},
        "tp2 coat": {"parallel": {"tp": 2}, **COAT},
        "sp2 fp32": {"parallel": SP, "precision": {"recipe": "fp32"}},
        "sp2 bf16": {"parallel": SP},
        "sp2 bf16 full": {"parallel": SP, "train": {"recompute": "full"}},
        "sp2 bf16 selective": {"parallel": SP, "train": {"recompute": "selective"}},
        "sp2 fp8-linear": {"parallel": SP, "precision": {"recipe": "fp8-linear"}},
        "sp2 coat": {"parallel": SP, **COAT},
        "sp2 coat, split": {"parallel": {**SP, "tp_chunks": 4}, **COAT},
        "sp2 coat delayed": {"parallel": SP, "precision": {"recipe": "coat", "scaling": "delayed"}},
        "sp2 coat full": {"parallel": SP, **COAT, "train": {"recompute": "full"}},
        "sp2 coat-paper": {"parallel": SP, "precision": {"recipe": "coat-paper"}},
        "sp2 coat-paper delayed": {
            "parallel": SP,
            "precision": {"recipe": "coat-paper", "scaling": "delayed"},
        },
        "sp2 coat-rowgrad": {"parallel": SP, "precision": {"recipe": "coat-rowgrad"}},
        "sp2 rowwise": {"parallel": SP, "precision": {"recipe": "rowwise"}},
        "sp2 rowwise, saved": {
            "parallel": SP,
            "precision": {"recipe": "rowwise", "keep_linear_inputs": True},
        },
        "sp2 fp8-block": {
            "parallel": SP,
            "precision": {"recipe": "fp8-block"},
            "model": {"hidden": 128, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn": 256},
        },
        "sp2 coat, fp8 sums": {
            "parallel": {**SP, "tp_comm_reduce": "fp8"},
            "precision": {"recipe": "coat", "bf16_layers": [1, 0]},
            "train": {"recompute": "full"},
            "model": {"hidden": 128, "heads": 4},
        },
        "sp2 coat, fp8 sums, split": {
            "parallel": {**SP, "tp_comm_reduce": "fp8", "tp_chunks": 2},
            "precision": {"recipe": "coat"},
            "model": {"hidden": 256, "heads": 8, "head_dim": 32},
        },
        "sp2 coat-lean but one": {
            "parallel": {**SP, "main_grads": "bf16"},
            "precision": {"recipe": "coat-lean", "bf16_layers": [0, 1]},
        },
        "sp2 coat, the second layer falls back": {
            "parallel": SP,
            "precision": {"recipe": "coat", "guard": "fallback"},
        },
        "sp2 coat qk_norm": {"parallel": SP, **COAT, "model": {"qk_norm": True}},
        "cp2 fp32": {"parallel": {"cp": 2}, "precision": {"recipe": "fp32"}},
        "cp2 coat": {"parallel": {"cp": 2}, **COAT},
        "cp2 coat gathered": {"parallel": {"cp": 2, "cp_comm": "all_gather"}, **COAT},
        "cp2 bf16 by peers": {"parallel": {"cp": 2, "cp_comm": "p2p"}},
        "cp2 coat-lean by peers selective": {
            "parallel": {"cp": 2, "cp_comm": "p2p"},
            "precision": {"recipe": "coat-lean"},
            "train": {"recompute": "selective"},
        },
        "cp2 coat-lean, fp8 keys": {
            "parallel": {"cp": 2, "cp_comm_kv": "fp8"},
            "precision": {"recipe": "coat-lean"},
            "train": {"recompute": "full"},
        },
        "cp2 coat-lean gathered, fp8 keys but in one layer": {
            "parallel": {"cp": 2, "cp_comm": "all_gather", "cp_comm_kv": "fp8"},
            "precision": {"recipe": "coat-lean", "bf16_layers": [0, 1]},
        },
        "cp2 coat-lean by peers, fp8 keys, the second layer falls back": {
            "parallel": {"cp": 2, "cp_comm": "p2p", "cp_comm_kv": "fp8"},
            "precision": {"recipe": "coat-lean", "guard": "fallback"},
            "train": {"recompute": "selective"},
        },
        "cp2 bf16 selective": {"parallel": {"cp": 2}, "train": {"recompute": "selective"}},
        "cp2 coat full": {"parallel": {"cp": 2}, **COAT, "train": {"recompute": "full"}},
    },
    4: {
        "sp2 dp2 bf16": {"parallel": SP},
        "sp2 dp2 fp8-nccl": {
            "parallel": {**SP, "grad_comm": "fp8-nccl", "grad_comm_scaling": "delayed"},
            **COAT,
        },
        "sp2 cp2 coat": {"parallel": {**SP, "cp": 2}, **COAT},
        "sp2 cp2 coat-lean, fp8 keys": {
            "parallel": {**SP, "cp": 2, "cp_comm_kv": "fp8"},
            "precision": {"recipe": "coat-lean"},
        },
        "sp4 coat, split": {
            "parallel": {"tp": 4, "sequence_parallel": True, "tp_chunks": 2},
            "precision": {"recipe": "coat"},
            "model": {"kv_heads": 4, "ffn": 128},
        },
        "cp4 coat by peers": {"parallel": {"cp": 4}, **COAT},
        "cp4 bf16 by peers full": {"parallel": {"cp": 4}, "train": {"recompute": "full"}},
        "sp2 pp2 coat": {
            "parallel": {**SP, "pp": 2},
            "precision": {"recipe": "coat", "bf16_layers": [1, 0]},
        },
        "sp2 pp2 vpp2 bf16": {"parallel": {**SP, "pp": 2, "vpp": 2}, "model": {"layers": 4}},
    },
}


class Counting(TorchDispatchMode):
    """While on, counts the collectives of the process groups by what they are called."""

    def __init__(self, groups: dict[str, dist.ProcessGroup], traffic: Traffic) -> None:
        super().__init__()
        self.groups = {group.group_name: what for what, group in groups.items()}
        self.traffic = traffic
        self.order: list[str] = []  # operator and dtype of each collective, over "tp"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d" and func._opname in SENT:
            group = next(dist.ProcessGroup.unbox(a) for a in args if is_group(a))
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            if group.group_name in self.groups:
                largest = max(tensors, key=lambda tensor: tensor.nbytes)
                sent = SENT[func._opname](largest.nbytes, group.size())
                splits = args[4] if func._opname == "alltoall_base_" else []
                if splits:  # rows of what is sent, args[1], to each rank
                    rows = sum(splits) - splits[group.rank()]
                    sent = args[1][:rows].nbytes
                self.traffic.add(self.groups[group.group_name], largest.dtype, sent)
                if self.groups[group.group_name] == "tp":
                    self.order.append(f"{func._opname} {largest.dtype}".replace("torch.", ""))
        return func(*args, **(kwargs or {}))


def is_group(argument: Any) -> bool:
    """Operators get process groups boxed."""
    return isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())


def train(rank: int, size: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """For two steps of each case: bytes by format as counted, and as the trainer reports them."""
    from coatlm.config import make_config
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer
    from tests.parallel.test_parity import batches

    lower_right = bias.causal_lower_right

    def outside_modes(*sizes: int) -> Any:
        with _disable_current_modes():  # torch cannot make this mask inside one
            return lower_right(*sizes)

    bias.causal_lower_right = outside_modes  # type: ignore[assignment]
    start_processes(Launch.from_environment())
    found: dict[str, Any] = {}
    for name, sections in cases.items():
        model = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96}
        c = make_config(
            {
                **sections,
                "model": model | sections.get("model", {}),
                "data": {"text": ["unused"], "seq_len": 32},
                "train": {"micro_batch": 2, "global_batch": 8, **sections.get("train", {})},
            }
        )
        groups = make_groups(c.parallel)
        trainer = Trainer(c, groups, vocab=128)
        found[name] = []
        for step in range(2):
            counted = Traffic()
            if trainer.guard is not None and step == 1:
                trainer.guard.restore({"in_bf16": [2]})
            with Counting({"tp": groups.tp, "cp": groups.cp}, counted) as counting:
                trainer.train_step(trainer.place(batches(c, groups, step)), lr=1e-3)
            reported = {k: v for k, v in trainer.comm_bytes.items() if "_tp" in k or "_cp" in k}
            counted_bytes = {k: v for k, v in counted.summary().items() if "_tp" in k or "_cp" in k}
            found[name].append((counted_bytes, reported, counting.order))
        trainer.close()
        release_groups()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    launched = {size: run_ranks(size, f"{__name__}:train", cases) for size, cases in CASES.items()}
    return {
        name: [rank[name] for rank in ranks]
        for size, ranks in launched.items()
        for name in CASES[size]
    }


@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_the_bytes_reported_are_those_of_the_collectives_that_were_issued(
    found: dict[str, list[Any]], name: str
) -> None:
    for rank in found[name]:
        for counted, reported, _ in rank:
            assert reported == counted and max(counted.values()) > 0


@pytest.mark.parametrize(
    ("name", "sums", "peers"),
    [("sp2 coat", 1, 0), ("sp2 coat, split", 4, 1), ("sp4 coat, split", 2, 3)],
)
def test_no_gather_of_a_layer_waits_behind_a_sum_that_wgrad_hides(
    found: dict[str, list[Any]], name: str, sums: int, peers: int
) -> None:
    """A process group runs collectives as they are issued; here those of a layer, in order.

    `peers`: the ranks to which the rows of an input are sent one by one; 0: they are all-gathered.
    """
    summed, codes, amax = "_reduce_scatter_base_ bfloat16", "_allgather_base_ uint8", "allreduce_"
    passed = "alltoall_base_"
    inputs = [f"{passed} uint8", f"{passed} float32"] * peers or [codes, "_allgather_base_ float32"]
    inputs += [summed] * sums
    gradients = [f"{amax} int32", *([f"{passed} uint8"] * peers or [codes]), codes, summed]
    layers = 2
    for rank in found[name]:
        for _, _, order in rank:
            text = " > ".join(order)
            for once in (inputs * 2 * layers, gradients * 2 * layers):
                assert text.count(" > ".join(once)) == 4  # microbatches


def test_the_last_rank_sends_the_most_keys_and_is_the_one_that_is_planned_for() -> None:
    c = config({"ffn": 64}, parallel={"cp": 4, "cp_comm": "p2p"})
    once = TensorParallelSums(0, 0)
    sent = [
        closed.step_traffic(c, stage=0, microbatches=1, cp_rank=rank, once=once).sent["cp", "bf16"]
        for rank in (*range(4), None)
    ]
    keys = 2 * 4 * (64 // 4) * 32 * c.model.layers  # bytes of a rank's: 4 samples of 64 tokens
    # keys and values, sent twice: of each other rank half or all; gradients: all or half
    assert sent[0] == keys * (2 * (3 * 1) + 3 * 2) and sent[3] == keys * (2 * (3 * 2) + 3 * 1)
    assert sent == [*sorted(set(sent)), sent[3]]


def test_keys_in_fp8_take_17_bytes_for_16_elements_in_forward_alone() -> None:
    fp8, bf16 = (
        closed.step_traffic(
            config(
                {"ffn": 64},
                parallel={"cp": 2, "cp_comm": "all_gather", "cp_comm_kv": kind},
                precision={"recipe": "coat-lean"},
            ),
            stage=0,
            microbatches=1,
            once=TensorParallelSums(0, 0),
        ).sent
        for kind in ("fp8", "bf16")
    )
    keys = 4 * 2 * 4 * (64 // 2) * 32  # of 4 layers: k and v of 4 samples, 2 heads of 16
    assert fp8 == {("cp", "fp8"): keys * 17 // 16, ("cp", "bf16"): 2 * keys}
    assert bf16 == {("cp", "bf16"): 2 * 2 * keys}


def test_every_precision_of_the_configuration_says_what_its_layers_gather() -> None:
    assert {*closed.GATHERS, *RECIPES} == set(PRECISION_RECIPES)
    assert not set(closed.GATHERS) & set(RECIPES)  # the table of recipes has the others


def test_microbatches_repeat_all_but_the_sums_of_a_step() -> None:
    c = config({"ffn": 64}, parallel=SP, precision={"recipe": "coat"})
    one, two, three = (
        closed.step_traffic(c, stage=0, microbatches=n, once=TensorParallelSums(640, 0)).sent
        for n in (1, 2, 3)
    )
    step = 640 * 4  # fp32, all-reduced by two ranks
    assert {k: three[k] - two[k] for k in three} == {k: two[k] - one[k] for k in two}
    assert one["tp", "fp32"] - (two["tp", "fp32"] - one["tp", "fp32"]) == step
    assert all(2 * one[key] == two[key] for key in one if key != ("tp", "fp32"))


def test_a_gathered_operand_costs_its_codes_scales_and_amaxes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recipe of one row: 1 x 8 blocks in forward, BF16 gathers in backward."""
    c = config({"ffn": 64}, parallel=SP, precision={"recipe": "coat"})
    before = closed.step_traffic(c, stage=0, microbatches=1, once=TensorParallelSums(0, 0)).sent
    forward = closed.OperandGather(torch.uint8, Granularity(1, 8))
    plain = closed.OperandGather(None)
    row = closed.LayerGathers(forward, plain, plain)
    monkeypatch.setattr(closed, "layer_gathers", lambda config, current: row)
    after = closed.step_traffic(c, stage=0, microbatches=1, once=TensorParallelSums(0, 0)).sent
    gathered = 4 * c.model.layers * 4 * 64 * 32 // 2  # elements of four operands per layer, sent
    assert before["tp", "fp8"] - after["tp", "fp8"] == gathered
    assert after["tp", "bf16"] - before["tp", "bf16"] == 2 * gathered
    scales = 2 * c.model.layers * 4 * 64 * 4 // 2  # bytes sent of one per row of two operands
    assert after["tp", "fp32"] - before["tp", "fp32"] == scales * (32 // 8 - 1)
    assert after["tp", "amax"] == 0
