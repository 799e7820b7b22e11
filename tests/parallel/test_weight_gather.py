"""All-gathered weights arrive in time, and are what the owners have or FP8 makes of that.

BF16 models here all-gather FP8 codes with tensor-wise scales, as TransformerEngine's layers, which
need a GPU, would.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.fp8.formats import E4M3
from coatlm.fp8.qtensor import TENSOR
from coatlm.fp8.quantize import quantize
from coatlm.optim.weight_formats import nearest_bf16
from tests.distributed import run_ranks


def train(rank: int, size: int, case: dict[str, Any]) -> dict[str, Any]:
    """Two steps of a BF16 model with weights gathered as FP8, compared with what is gathered."""
    from coatlm.config import make_config
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer
    from tests.parallel.test_parity import MODEL, batches

    start_processes(Launch.from_environment())
    found: dict[str, Any] = {}
    for name, parallel in case.items():
        config = make_config(
            {
                "model": MODEL | {"layers": 2},
                "data": {"text": ["unused"], "seq_len": 16},
                "parallel": {"bucket_size": 20000, "grad_comm": "fp32"} | parallel,
                "optim": {"recipe": "adamw-fp32", "lr": 1e-3},
                "train": {"micro_batch": 1, "global_batch": 8},
            }
        )
        # the recipes whose GEMMs cast per tensor need a GPU, so that the check is passed by here
        coded = config.parallel.model_copy(update={"weight_gather": "fp8"})
        config = config.model_copy(update={"parallel": coded})
        groups = make_groups(config.parallel)
        trainer = Trainer(config, groups, vocab=128)
        for step in range(2):
            placed = trainer.place(batches(config, groups, step))
            trainer.train_step(placed, lr=1e-3)
        chunk = trainer.chunks[0]
        before = parts_before_the_count(trainer, placed)
        pending = gathers_in_flight(chunk, placed[0])
        chunk.weights.in_forward = chunk.weights.overlap  # as where microbatches are CUDA graphs
        with mock.patch("coatlm.parallel.weight_gather.AHEAD", 1):
            trainer.train_step(placed, lr=1e-3)
            ahead = gathers_in_flight(chunk, placed[0])
        found[name] = judge(trainer, groups)
        found[name] |= {"pending": pending, "ahead": ahead, "before": before}
        model = weakref.ref(chunk)
        del chunk, trainer, groups, placed
        release_groups()
        gc.collect()
        threads = len(list(Path("/proc/self/task").iterdir()))
        found[name] |= {"freed": model() is None, "threads": threads}
    return found


def gathers_in_flight(chunk: Any, batch: Any) -> list[int]:
    """The buckets still in flight after the embedding, after each layer and after the last norm."""
    pending: list[int] = []

    def count() -> None:
        pending.append(sum(bucket.gather is not None for bucket in chunk.buckets))

    with torch.no_grad(), after_each_part(chunk, count):
        chunk(batch["tokens"], batch["labels"], None)
    return pending


@contextmanager
def after_each_part(chunk: Any, call: Callable[[], None]) -> Iterator[None]:
    """Call it after forward of the embedding, of each layer and of the last norm."""
    decoder = chunk.module.decoder
    units = [chunk.module.embedding, *decoder.layers, decoder.final_layernorm]
    hooks = [unit.register_forward_hook(lambda *_: call()) for unit in units]
    yield
    for hook in hooks:
        hook.remove()


def parts_before_the_count(trainer: Any, placed: list[Any]) -> int:
    """How many parts of the model a step runs before it waits for the number of its tokens.

    On a GPU that number comes after the weights that the same group all-gathers.
    """
    parts: list[None] = []
    waits: list[int] = []
    all_reduce = dist.all_reduce

    def watched(x: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        work = all_reduce(x, *args, async_op=async_op, **kwargs)
        if not async_op:
            if kwargs.get("group") is trainer.groups.dp_cp:
                waits.append(len(parts))
            return work

        def wait() -> None:
            waits.append(len(parts))
            work.wait()

        return mock.Mock(wait=wait)

    with (
        mock.patch("torch.distributed.all_reduce", watched),
        after_each_part(trainer.chunks[0], lambda: parts.append(None)),
    ):
        trainer.train_step(placed, lr=1e-3)
    return waits[0]


def judge(trainer: Any, groups: Any) -> dict[str, Any]:
    """Whether every weight here is the exact one of its owner, or what FP8 makes of that."""
    result = {"exact": True, "codes": True, "owned": True, "matrices": 0, "others": 0}
    masters = {
        bucket: states["fp32_param"]
        for bucket, states in zip(
            trainer.optimizer.owned, trainer.optimizer.optimizer.states, strict=True
        )
    }
    for bucket in (b for chunk in trainer.chunks for b in chunk.buckets):
        begin, end = bucket.owned
        whole = bucket.weights.clone()
        parts: list[Any] = [None] * groups.dp_cp.size()
        dist.all_gather_object(parts, whole[begin:end].float().tolist(), group=groups.dp_cp)
        exact = torch.tensor([x for part in parts for x in part]).bfloat16()
        result["owned"] &= begin == end or torch.equal(
            nearest_bf16(masters[bucket]), whole[begin:end]
        )
        for start, stop in bucket.params.values():
            here, owners = whole[start:stop], exact[start:stop]
            kind = "matrices" if bucket.fp8 else "others"
            result[kind] += 1
            if not bucket.fp8:
                result["exact"] &= torch.equal(here, owners)
                continue
            expected = quantize(owners, fmt=E4M3, granularity=TENSOR)
            decoded = expected.dequantize(torch.bfloat16)
            mine = slice(max(begin - start, 0), max(min(end, stop) - start, 0))
            decoded[mine] = owners[mine]
            result["codes"] &= torch.equal(here, decoded)
            cast = quantize(here, fmt=E4M3, granularity=TENSOR)
            result["codes"] &= torch.equal(bits(cast.codes), bits(expected.codes))
    sent = trainer.comm_bytes
    return result | {"sent": {k: v for k, v in sent.items() if "weights" in k}}


def bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "zero1": {},
        "whole-tensor": {"partition": "whole-tensor", "zero": 2, "overlap_param_gather": False},
    },
    4: {"tp2": {"tp": 2, "zero": 2}},
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {}
    for size, cases in CASES.items():
        ranks = run_ranks(size, "tests.parallel.test_weight_gather:train", cases)
        results |= {name: [rank[name] for rank in ranks] for name in cases}
    return results


@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_matrices_of_layers_arrive_as_their_gemm_codes(found: Any, name: str) -> None:
    for rank in found[name]:
        assert rank["codes"] and rank["exact"] and rank["owned"]
        assert rank["matrices"] == 8 and rank["others"] == 7  # norms, embedding, output


def test_a_part_of_the_model_waits_for_its_own_weights_only(found: Any) -> None:
    for rank in found["zero1"]:
        assert rank["pending"] == [3, 1, 0, 0]  # three buckets of matrices; one is of both layers
    for rank in found["tp2"]:
        assert rank["pending"] == [2, 0, 0, 0]  # two
    for rank in found["whole-tensor"]:  # gathers are not overlapped
        assert set(rank["pending"]) == {0}


def test_forward_starts_as_many_gathers_ahead_as_told(found: Any) -> None:
    for rank in found["zero1"]:
        assert rank["ahead"] == [1, 1, 0, 0]
    for rank in found["tp2"]:
        assert rank["ahead"] == [1, 0, 0, 0]


def test_no_part_of_the_model_waits_for_the_number_of_tokens(found: Any) -> None:
    for ranks in found.values():
        assert [rank["before"] for rank in ranks] == [4] * len(ranks)


def test_what_is_dropped_is_freed_with_the_threads_of_its_groups(found: Any) -> None:
    for ranks in found.values():
        assert all(rank["freed"] for rank in ranks)
    for first, second in zip(found["zero1"], found["whole-tensor"], strict=True):
        # one process has run both; megatron-core keeps one group, of three threads, for a while
        assert second["threads"] - first["threads"] <= 3


def test_matrices_take_one_byte(found: Any) -> None:
    sent = found["zero1"][0]["sent"]
    matrices = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96)
    assert sent["comm_bytes_weights_fp8"] == pytest.approx(matrices / 2, rel=0.02)
    assert sent["comm_bytes_weights_bf16"] == pytest.approx((2 * 128 * 64 + 5 * 128), rel=0.02)
