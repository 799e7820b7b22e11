"""Training coatlm's FP8 layers on weights all-gathered as FP8 codes changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coatlm.fp8.formats import E4M3
from coatlm.fp8.producers import as_operand, weight_transposed
from coatlm.fp8.qtensor import TENSOR
from coatlm.fp8.quantize import quantize
from tests.distributed import run_ranks

pytestmark = pytest.mark.slow


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


def bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


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
        "coat-paper": {"precision": {"recipe": "coat-paper"}, "parallel": {"zero": 2}},
        "saved FP8 weights": {"precision": {"keep_weights": True}},
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
        "tp2 dp2 coat-paper": {"precision": {"recipe": "coat-paper"}, "parallel": {"tp": 2}},
        "tp2 dp2 whole-tensor": {"parallel": {"tp": 2, "partition": "whole-tensor", "zero": 2}},
        "dp4": {"optim": {"recipe": "adamw-bf16"}},
    },
}
UNCODED = {"bf16 ends, biases": 8}  # matrices in layers that are not FP8


def train_flow(rank: int, size: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Run the same steps with both formats of all-gathers: curves, what differs, what was sent.

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
            "train": section("train", {"micro_batch": 2, "global_batch": 8}),
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
    same, recipe = True, trainer.config.precision.flow_recipe()
    for bucket in (b for chunk in trainer.chunks for b in chunk.buckets if b.fp8):
        parts: list[Any] = [None] * groups.dp_cp.size()
        dist.all_gather_object(parts, bucket.weights[slice(*bucket.owned)].cpu(), groups.dp_cp)
        whole = torch.cat(parts).to(bucket.weights.device)
        for param, (start, stop) in bucket.params.items():
            here, exact = param.detach(), whole[start:stop].view(param.shape)
            forward, expected = (as_operand(w, recipe.forward.weight) for w in (here, exact))
            same &= torch.equal(forward.scale, expected.scale)
            same &= torch.equal(bits(forward.codes), bits(expected.codes))
            backward = [
                weight_transposed(w, recipe.forward, recipe.dgrad, forward.scale)
                for w in (here, exact)
            ]
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
        ranks = run_ranks(size, "tests.parallel.test_fp8_gather:train_flow", cases)
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


def test_matrices_of_fp8_layers_take_a_byte_per_element_and_a_scale_per_row(
    flow_found: Any,
) -> None:
    for rank in flow_found["wide rows"]:
        sent = rank["sent"]
        coded = sent["comm_bytes_weights_fp8"] + sent["comm_bytes_weights_amax"]
        assert rank["elements"] / 2 <= coded <= 1.04 * rank["elements"] / 2
        outside = rank["sent bf16"]["comm_bytes_weights"] - 2 * rank["elements"] / 2
        assert sent["comm_bytes_weights_bf16"] == pytest.approx(outside, rel=0.02)
        assert sent["comm_bytes_weights"] == coded + sent["comm_bytes_weights_bf16"]
