"""Weights gathered as FP8 are those that a GEMM's cast makes, and owners keep the exact ones.

With coatlm's FP8 layers training does not change by a bit; with TransformerEngine's, which need a
GPU, the codes are compared.
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
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coatlm.fp8.formats import E4M3
from coatlm.fp8.norm_quantize import quantize_rows
from coatlm.fp8.qtensor import TENSOR
from coatlm.fp8.quantize import quantize
from coatlm.fp8.transpose import quantize_rows_transposed
from coatlm.optim.formats import nearest_bf16
from tests.distributed import run_ranks


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([2.0**-100, 1e-6, 0.02, 1.0, 2.0**80]),  # all finite
    spread=st.floats(0.0, 8.0),
)
def test_a_decoded_weight_has_the_codes_and_the_scale_of_the_exact_one(
    seed: int, size: float, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(4096, generator=generator)
    w = (w * torch.exp2(spread * torch.randn(4096, generator=generator)) * size).bfloat16()
    exact = quantize(w, fmt=E4M3, granularity=TENSOR)
    again = quantize(exact.dequantize(torch.bfloat16), fmt=E4M3, granularity=TENSOR)
    assert torch.equal(again.scale, exact.scale)
    assert torch.equal(again.codes.view(torch.uint8), exact.codes.view(torch.uint8))


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
    """How many buckets the embedding, each layer and the last norm did not wait for."""
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

    On a GPU that number comes after the weights that the same group gathers.
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
        ranks = run_ranks(size, "tests.parallel.test_gather:train", cases)
        results |= {name: [rank[name] for rank in ranks] for name in cases}
    return results


@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_matrices_of_layers_arrive_as_their_gemm_codes(found: Any, name: str) -> None:
    for rank in found[name]:
        assert rank["codes"] and rank["exact"] and rank["owned"]
        assert rank["matrices"] == 8 and rank["others"] == 7  # norms, embedding, output


def test_a_part_of_the_model_waits_for_no_weights_but_its_own(found: Any) -> None:
    for rank in found["zero1"]:
        assert rank["pending"] == [3, 1, 0, 0]  # three buckets of matrices; one is of both layers
    for rank in found["tp2"]:
        assert rank["pending"] == [2, 0, 0, 0]  # two
    for rank in found["whole-tensor"]:  # gathers are not overlapped
        assert set(rank["pending"]) == {0}


def test_gathers_that_go_with_forward_are_so_far_ahead_as_told(found: Any) -> None:
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


# coatlm's FP8 layers

FLOW_MODEL = {"layers": 3, "hidden": 96, "heads": 6, "kv_heads": 2, "head_dim": 16, "ffn": 160}
WIDE = {"layers": 2, "hidden": 512, "heads": 4, "kv_heads": 2, "ffn": 1024}
STEPS = 4
FLOW_CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "coat": {},
        "coat zero2": {"parallel": {"zero": 2}},
        "coat whole-tensor": {
            "parallel": {"partition": "whole-tensor", "overlap_param_gather": False}
        },
        "coat whole-tensor zero2": {"parallel": {"partition": "whole-tensor", "zero": 2}},
        "coat-lean": {"precision": {"recipe": "coat-lean"}, "optim": {"recipe": "coat-lean"}},
        "fp8-linear": {"precision": {"recipe": "fp8-linear", "grad_format": "e4m3"}},
        "kept weights": {"precision": {"keep_weights": True}},
        "recompute": {"train": {"recompute": "full"}},
        "bf16 ends, biases": {
            "model": {"qkv_bias": True, "qk_norm": True},
            "precision": {"bf16_layers": [1, 1]},
        },
        "wide rows": {"model": WIDE, "parallel": {"bucket_size": 1500000}},
    },
    4: {
        "tp2 dp2": {"parallel": {"tp": 2}},
        "tp2 dp2 sp zero2": {"parallel": {"tp": 2, "sequence_parallel": True, "zero": 2}},
        "tp2 dp2 whole-tensor": {"parallel": {"tp": 2, "partition": "whole-tensor", "zero": 2}},
        "dp4": {"optim": {"recipe": "adamw-bf16"}},
    },
}
UNCODED = {"bf16 ends, biases": 8}  # matrices in layers that are not FP8


def train_flow(rank: int, size: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The same steps with both ways to gather: curves, what differs, what was sent.

    Buckets differ, and with them the order in which squares are summed for the norm: gradients are
    not clipped by it.
    """
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes

    start_processes(Launch.from_environment())
    found: dict[str, Any] = {}
    for name, sections in cases.items():
        runs = []
        for gather in ("bf16", "fp8"):
            config = flow_config(sections, gather)
            groups = make_groups(config.parallel)
            runs.append(train_run(config, groups))
            if gather == "fp8":
                found[name] = {"codes": codes_are_the_owners(runs[1][0], groups)}
            release_groups()
        found[name] |= compare_runs(*runs)
    return found


def flow_config(sections: dict[str, Any], gather: str) -> Any:
    from coatlm.config import make_config

    def section(name: str, defaults: dict[str, Any]) -> dict[str, Any]:
        return defaults | sections.get(name, {})

    return make_config(
        {
            "model": section("model", FLOW_MODEL),
            "data": {"text": ["unused"], "seq_len": 32},
            "parallel": section(
                "parallel", {"bucket_size": 30000, "weight_gather": gather, "grad_comm": "fp32"}
            ),
            "precision": section("precision", {"recipe": "coat"}),
            "optim": section("optim", {"recipe": "adamw-fp32", "clip_grad": 0.0}),
            "train": section("train", {"micro_batch": 1, "global_batch": 8}),
        }
    )


def train_run(config: Any, groups: Any) -> tuple[Any, list[tuple[float, float]], float]:
    """The trainer afterwards, its curve, and the share of weights that have moved."""
    from coatlm.train.step import Trainer
    from tests.parallel.test_parity import batches

    trainer = Trainer(config, groups, vocab=128)
    scatter_rows(trainer)
    params = [p for chunk in trainer.chunks for p in chunk.module.decoder.layers.parameters()]
    before = torch.cat([p.detach().flatten() for p in params if p.dim() == 2])
    curve = []
    for step in range(STEPS):
        placed = trainer.place(batches(config, groups, step))
        loss, norm = trainer.train_step(placed, lr=2e-6)
        curve.append((float(loss), float(norm)))
    held_out = trainer.place(batches(config, groups, 99))
    curve.append((float(trainer.evaluate(held_out)), 0.0))
    for chunk in trainer.chunks:
        chunk.finish_param_sync()
    after = torch.cat([p.detach().flatten() for p in params if p.dim() == 2])
    return trainer, curve, (after != before).float().mean().item()


@torch.no_grad()
def scatter_rows(trainer: Any) -> None:
    """Rows of matrices 2^-16 to 1 times as large: subnormal under the scale of the whole tensor.

    The largest number of the largest row is 226 * 2^-13, whose code alone would give another scale.
    """
    for chunk in trainer.chunks:
        for weight in chunk.module.decoder.layers.parameters():
            if weight.dim() == 2:
                weight *= 2.0 ** -(torch.arange(len(weight)) % 17)[:, None].to(weight)
                weight[0, ::7] = 226.0 * 2.0**-13
                weight[0].clamp_(-226.0 * 2.0**-13, 226.0 * 2.0**-13)
                weight[1:].clamp_(-224.0 * 2.0**-13, 224.0 * 2.0**-13)
    trainer.optimizer.optimizer.reload_from_weights()


def codes_are_the_owners(trainer: Any, groups: Any) -> bool:
    """Whether forward and backward cast what is here to what they cast the exact weights to."""
    same = True
    for bucket in (b for chunk in trainer.chunks for b in chunk.buckets if b.fp8):
        parts: list[Any] = [None] * groups.dp_cp.size()
        dist.all_gather_object(parts, bucket.weights[slice(*bucket.owned)].cpu(), groups.dp_cp)
        whole = torch.cat(parts).to(bucket.weights.device)
        for param, (start, stop) in bucket.params.items():
            here, exact = param.detach(), whole[start:stop].view(param.shape)
            forward, expected = quantize_rows(here), quantize_rows(exact)
            same &= torch.equal(forward.scale, expected.scale)
            same &= torch.equal(bits(forward.codes), bits(expected.codes))
            backward = [quantize_rows_transposed(w, forward.scale) for w in (here, exact)]
            same &= torch.equal(*(bits(w.codes) for w in backward))
    return same


def compare_runs(bf16: Any, fp8: Any) -> dict[str, Any]:
    (exact, curve, moved), (coded, coded_curve, _) = bf16, fp8
    result = {"curve": curve, "coded curve": coded_curve, "owned": True, "rest": True}
    result["moved"] = moved
    result |= {"others'": 0, "coded": 0, "elements": 0, "sent": coded.comm_bytes}
    result["sent bf16"] = exact.comm_bytes
    weights = {name: p for c in exact.chunks for name, p in c.module.named_parameters()}
    for chunk in coded.chunks:
        names = {p: name for name, p in chunk.module.named_parameters()}
        for bucket in chunk.buckets:
            begin, end = bucket.owned
            for param, (start, stop) in bucket.params.items():
                here, there = param.detach().flatten(), weights[names[param]].detach().flatten()
                mine = slice(max(begin - start, 0), max(min(end, stop) - start, 0))
                result["owned"] &= torch.equal(here[mine], there[mine])
                if bucket.fp8:
                    result["others'"] += not torch.equal(here, there)
                    result["coded"] += 1
                    result["elements"] += param.numel()
                else:
                    result["rest"] &= torch.equal(here, there)
    return result


@pytest.fixture(scope="module")
def flow_found() -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {}
    for size, cases in FLOW_CASES.items():
        ranks = run_ranks(size, "tests.parallel.test_gather:train_flow", cases)
        results |= {name: [rank[name] for rank in ranks] for name in cases}
    return results


@pytest.mark.parametrize("name", [name for cases in FLOW_CASES.values() for name in cases])
def test_training_fp8_layers_on_gathered_codes_changes_no_bit(flow_found: Any, name: str) -> None:
    layers = 2 if name == "wide rows" else 3
    for rank in flow_found[name]:
        losses, norms = zip(*rank["curve"], strict=True)
        coded_losses, coded_norms = zip(*rank["coded curve"], strict=True)
        assert coded_losses == losses and coded_norms == pytest.approx(norms, rel=1e-6)
        assert rank["codes"] and rank["owned"] and rank["rest"] and rank["moved"] > 0.5
        assert rank["coded"] == 4 * layers - UNCODED.get(name, 0)
    # nothing would be compared if codes had not replaced what others own
    assert all(rank["others'"] for rank in flow_found[name])


def test_matrices_of_fp8_layers_take_a_byte_and_a_scale_a_row(flow_found: Any) -> None:
    for rank in flow_found["wide rows"]:
        sent = rank["sent"]
        coded = sent["comm_bytes_weights_fp8"] + sent["comm_bytes_weights_amax"]
        assert rank["elements"] / 2 <= coded <= 1.04 * rank["elements"] / 2
        outside = rank["sent bf16"]["comm_bytes_weights"] - 2 * rank["elements"] / 2
        assert sent["comm_bytes_weights_bf16"] == pytest.approx(outside, rel=0.02)
        assert sent["comm_bytes_weights"] == coded + sent["comm_bytes_weights_bf16"]
