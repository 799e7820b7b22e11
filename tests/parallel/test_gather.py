"""Weights gathered as FP8 are those that a GEMM's cast makes, and owners keep the exact ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coatlm.fp8.formats import E4M3
from coatlm.fp8.qtensor import TENSOR
from coatlm.fp8.quantize import quantize
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
                "parallel": {"bucket_size": 20000} | parallel,
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
            trainer.train_step(trainer.place(batches(config, groups, step)), lr=1e-3)
        for chunk in trainer.chunks:
            chunk.finish_param_sync()
        found[name] = judge(trainer, groups)
        release_groups()
    return found


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


def test_matrices_take_one_byte(found: Any) -> None:
    sent = found["zero1"][0]["sent"]
    matrices = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96)
    assert sent["comm_bytes_weights_fp8"] == pytest.approx(matrices / 2, rel=0.02)
    assert sent["comm_bytes_weights_bf16"] == pytest.approx((2 * 128 * 64 + 5 * 128), rel=0.02)
