"""Metrics of what storage loses: known answers, and that measuring changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coatlm.optim import edq
from coatlm.optim.adamw import AdamW
from coatlm.optim.edq import local_sums, measure, to_metrics
from coatlm.optim.recipes import RECIPES
from coatlm.optim.shards import FlatShard
from tests.optim.toy import optimizer as toy_optimizer
from tests.optim.toy import shard_of

N = 4096


def trained(recipe: str, *, steps: int, beta2: float = 0.95, lr: float = 1e-4) -> AdamW:
    """Adam on N(0, .02) weights and N(.3 N, 1) * 1e-3 gradients; one more gradient is in place."""
    generator = torch.Generator().manual_seed(0)
    weight = (0.02 * torch.randn(N, generator=generator)).bfloat16()
    mu = 0.3 * torch.randn(N, generator=generator)
    shard = FlatShard(weight, torch.zeros(N, dtype=torch.bfloat16), ((0, N),), ((0, N),))
    optimizer = AdamW([shard], recipe=recipe, betas=(0.9, beta2), eps=1e-8, weight_decay=0.1)
    for _ in range(steps):
        shard.grad.copy_(1e-3 * (mu + torch.randn(N, generator=generator)))
        optimizer.step(lr=lr)
    shard.grad.copy_(1e-3 * (mu + torch.randn(N, generator=generator)))
    return optimizer


def blocks(recipe: str, weight: torch.Tensor, grad: torch.Tensor, **options: Any) -> AdamW:
    """Fresh states, no weight decay: at the first step every update is lr or zero."""
    n, params = grad.numel(), options.pop("params", ((0, grad.numel()),))
    shard = shard_of(weight.bfloat16().expand(n).clone(), grad=torch.float32, params=params)
    shard.grad.copy_(grad)
    return toy_optimizer([shard], recipe, weight_decay=0.0, **options)


@pytest.mark.parametrize("recipe", ("collage-light", "collage-plus", "kahan", "adamw-fp32"))
def test_nothing_of_the_update_is_lost_where_weights_have_a_low_half(recipe: str) -> None:
    # each weight errs by half a unit in the 16th bit, 2^-17 of 0.02 against updates of 1e-4
    assert measure(trained(recipe, steps=30), lr=1e-4)["edq_ratio"] == pytest.approx(1, abs=2e-3)


def test_bf16_weights_lose_most_of_a_small_update() -> None:
    """Half a unit of a weight of 0.02 is 6e-5: of updates of 1e-5 only small weights see any."""
    optimizer = trained("adamw-bf16", steps=30)
    found = measure(optimizer, lr=1e-5)
    assert found["edq_ratio"] < 0.5
    assert found["update_lost"] > 0.5
    assert found["edq_weight"] == found["edq"]  # there is no rest
    proposal = optimizer.propose(0, 0, N, lr=1e-5, clip_coefficient=torch.ones(()))
    size = proposal.update.double().norm().item()
    assert found["edq"] == pytest.approx(found["edq_ratio"] * size)


def test_v_tells_light_from_plus_where_edq_does_not() -> None:
    light, plus = (
        measure(trained(r, steps=50, beta2=0.999), lr=1e-4)
        for r in ("collage-light", "collage-plus")
    )
    assert light["edq_ratio"] == pytest.approx(plus["edq_ratio"], abs=2e-3)
    assert light["exp_avg_sq_stalled"] > 5 * plus["exp_avg_sq_stalled"]


def test_edq_of_the_weight_alone_leaves_its_low_half_out() -> None:
    optimizer = trained("collage-light", steps=30)
    found = measure(optimizer, lr=1e-4)
    new = optimizer.propose(0, 0, N, lr=1e-4, clip_coefficient=torch.ones(()))
    change = new.weight.double() - optimizer.shards[0].weight.double()
    update = new.update.double()
    assert found["edq_weight"] == pytest.approx((update @ change / update.norm()).item())
    # BF16 weights of 0.02 move by 2^-13 or not at all: right on average, wrong each
    assert abs(found["edq_weight_ratio"] - 1) > 5 * abs(found["edq_ratio"] - 1)


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_measuring_changes_nothing_and_gives_finite_floats(recipe: str) -> None:
    optimizer = trained(recipe, steps=3)
    tensors = [optimizer.step_count, optimizer.shards[0].weight, *optimizer.states[0].values()]
    before = [tensor.clone() for tensor in tensors]
    found = measure(optimizer, lr=1e-4)
    assert all(map(torch.equal, before, tensors))
    assert all(isinstance(value, float) and value == value for value in found.values())


def test_errors_are_those_of_the_formats() -> None:
    found = measure(trained("coat", steps=5), lr=1e-4)
    # E4M3 rounds to 2^-4 at most, to 2^-4 / sqrt(3) on average, and expansion divides that by k
    for name in ("exp_avg_error", "exp_avg_sq_error"):
        assert 2.0**-10 < found[name] < 2.0**-4
    assert found["exp_avg_sq_underflow"] == 0.0
    exact = measure(trained("adamw-fp32", steps=5), lr=1e-4)
    assert exact["exp_avg_sq_error"] < 2.0**-23


def test_code_statistics_count_blocks_and_codes() -> None:
    optimizer = trained("coat", steps=5)
    found = measure(optimizer, lr=1e-4)
    optimizer.step(lr=1e-4)
    k = optimizer.states[0]["exp_avg.k"].double() / 16
    assert found["exp_avg_k_mean"] == pytest.approx(k.mean().item())
    assert found["exp_avg_k_p50"] == k.quantile(0.5, interpolation="lower").item()
    assert found["exp_avg_k_p05"] <= found["exp_avg_k_p50"] <= found["exp_avg_k_p95"]
    codes = optimizer.states[0]["exp_avg"].view(torch.float8_e4m3fn).float()
    assert found["exp_avg_zero"] == (codes == 0).double().mean().item()
    assert found["exp_avg_saturated"] == (codes.abs() == 448).double().mean().item() >= 1 / 128


def test_formats_without_codes_have_no_code_statistics() -> None:
    found = measure(trained("collage-plus", steps=1), lr=1e-4)
    assert not [key for key in found if "_k_" in key or "saturated" in key]


def test_several_shards_are_measured_together() -> None:
    one = trained("coat", steps=2)
    weight, grad = one.shards[0].weight, one.shards[0].grad
    halves = [
        FlatShard(weight[a:b].clone(), grad[a:b].clone(), ((0, b - a),))
        for a, b in ((0, N // 2), (N // 2, N))
    ]
    options = {"recipe": "coat", "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    whole = AdamW([FlatShard(weight.clone(), grad, ((0, N),))], **options)
    assert measure(AdamW(halves, **options), lr=1e-4) == pytest.approx(
        measure(whole, lr=1e-4), rel=1e-9
    )


def test_sums_of_runs_add_up_and_what_is_not_owned_does_not_count() -> None:
    optimizer = trained("coat", steps=2)
    first, second = (
        local_sums(optimizer, lr=1e-4, counted=[[run]]) for run in ((0, 1280), (1280, N))
    )
    together = {name: first[name] + second[name] for name in first}
    assert to_metrics(optimizer.recipe, together) == pytest.approx(measure(optimizer, lr=1e-4))
    nothing = local_sums(optimizer, lr=1e-4, counted=[[]])
    assert nothing.keys() == first.keys()
    assert not any(value.any() for value in nothing.values())


class Largest(TorchDispatchMode):
    """`elements`: of the largest tensor that an operation made; views are not made."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor._base is None:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("recipe", ("adamw-fp32", "coat-lean", "collage-plus"))
def test_temporaries_are_as_long_as_a_piece(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = trained(recipe, steps=1)
    whole = measure(optimizer, lr=1e-4)
    monkeypatch.setattr(edq, "PIECE", N // 4)
    with Largest() as made:
        pieces = measure(optimizer, lr=1e-4)
    assert 256 < made.elements <= N // 4
    assert pieces == pytest.approx(whole)


def test_updates_of_zero_are_neither_asked_for_nor_lost() -> None:
    """Weights of 1 lose an update of 2^-12, weights of 0 do not: 24 of 24 + 8."""
    weight = torch.cat([torch.ones(120), torch.zeros(8)])
    grad = torch.cat([torch.zeros(96), torch.ones(32)])
    found = measure(blocks("adamw-bf16", weight, grad), lr=2.0**-12)
    assert found["update_lost"] == 24 / 32


def test_an_error_is_relative_to_the_average_and_stalled_to_its_change() -> None:
    """A moment of 1 becomes its mean with g = 2^-8: 2^-1 + 2^-9, a BF16 tie that becomes 2^-1."""
    optimizer = blocks("adamw-bf16", torch.zeros(1), torch.full((128,), 2.0**-7), betas=(0.5, 0.5))
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.states[0][name].fill_(1.0)
    found = measure(optimizer, lr=1e-4, clip_coefficient=torch.tensor(0.5))
    assert found["exp_avg_error"] == pytest.approx(1 / 257, rel=1e-9)  # 2^-9 / (2^-1 + 2^-9)
    assert found["exp_avg_stalled"] == pytest.approx(1 / 255, rel=1e-9)
    assert found["exp_avg_sq_error"] == pytest.approx(1 / 65537, rel=1e-9)  # g^2 = 2^-16
    assert found["exp_avg_sq_stalled"] == pytest.approx(1 / 65535, rel=1e-9)


def test_values_that_become_zero_are_a_share_of_those_that_were_not() -> None:
    grad = torch.cat([torch.zeros(96), torch.ones(24), torch.full((8,), 2.0**-20)])
    found = measure(blocks("fp8-plain", torch.zeros(1), grad), lr=1e-4)
    for name in ("exp_avg", "exp_avg_sq"):
        assert found[name + "_underflow"] == 8 / 32  # 2^-20 of the largest: E4M3 spans 2^18
        assert found[name + "_zero"] == 104 / 128 and found[name + "_saturated"] == 24 / 128
        assert found[name + "_k_mean"] == found[name + "_k_lowest"] == 1.0


def test_nothing_is_lost_of_nothing() -> None:
    found = measure(blocks("collage-plus", torch.ones(1), torch.zeros(128)), lr=1e-4)
    assert set(found.values()) == {0.0}


def test_percentiles_of_k_are_those_that_at_least_this_share_reaches() -> None:
    optimizer = blocks("coat", torch.ones(1), torch.ones(128))
    sums = local_sums(optimizer, lr=1e-4)
    sums["exp_avg.k"].zero_()[[16, 32, 48]] = torch.tensor([45.0, 900.0, 55.0]).double()
    found = to_metrics(optimizer.recipe, sums)
    assert [found[f"exp_avg_k_{p}"] for p in ("p05", "p50", "p95")] == [2.0, 2.0, 3.0]
    assert found["exp_avg_k_mean"] == pytest.approx(2.01)


def test_only_the_parameters_that_count_are_measured_with_tensor_scales() -> None:
    """An empty part of a parameter, beside the one that counts, has no largest value."""
    params = ((0, 128), (128, 256), (256, 384))
    optimizer = blocks("fp8lm", torch.ones(1), torch.ones(384), params=params)
    sums = local_sums(optimizer, lr=2.0**-4, counted=[[(128, 256)]])
    assert sums["asked"] == sums["exp_avg.nonzero"] == 128
