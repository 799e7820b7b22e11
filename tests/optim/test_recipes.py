"""The recipes: bytes per parameter, and the errors of impossible arguments."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from coatlm.config import FP32_RECIPES, OptimRecipe
from coatlm.optim import adamw
from coatlm.optim.adamw import AdamW
from coatlm.optim.recipes import RECIPES
from coatlm.optim.shards import FlatShard, bytes_per_parameter
from tests.optim.toy import (
    BETAS,
    BF16,
    FP32,
    equal,
    optimizer,
    shard_of,
    snapshot,
    state_bytes,
    train,
    weights,
)


@pytest.mark.parametrize(
    ("recipe", "budget"),
    {
        "adamw-fp32": 12,
        "adamw-bf16": 4,
        "adamw-bf16-fp32state": 8,
        "kahan": 6,
        "collage-light": 6,
        "collage-plus": 8,
        "fp8lm": 5 + 3 * 4 / 128,
        "fp8lm-bf16": 3 + 2 * 4 / 128,
        "fp8lm-fp8-master": 4 + 3 * 4 / 128,
        "fp8lm-fp8-v": 4 + 3 * 4 / 128,
        "coat": 4 + 2 * (1 + 5 / 128),
        "coat-lean": 2 + 2 * (1 + 5 / 128),
        "coat-24": 1 + 2 * (1 + 5 / 128),
        "fp8-plain": 4 + 2 * (1 + 5 / 128),
    }.items(),
)
def test_bytes_per_parameter(recipe: str, budget: float) -> None:
    """Beside the BF16 weight; with it coat-lean has 6.08, coat-24 5.08; m and v of COAT 2.08."""
    assert bytes_per_parameter(recipe, BF16) == budget
    n = 128 * 7
    assert state_bytes(optimizer([shard_of(weights(n))], recipe)) == budget * n


def test_fp32_weights_are_their_own_master() -> None:
    assert bytes_per_parameter("adamw-fp32", FP32) == 8
    assert bytes_per_parameter("coat", FP32) == 2 + 10 / 128


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"recipe": "coat-leaner"}, r"recipe='coat-leaner': one of adamw-fp32, .*coat-lean"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0\.9, 1\.0\): each is in \[0, 1\)"),
        ({"betas": (-0.1, 0.9)}, r"betas=\(-0\.1, 0\.9\)"),
        ({"eps": 0.0}, r"eps=0\.0: must be >= 1\.18e-38, or zeros become 0 / 0"),
        ({"eps": 2.0**-127}, r"eps=5\.87.*e-39: must be >= 1\.18e-38"),
        ({"weight_decay": -0.1}, r"weight_decay=-0\.1: must be >= 0"),
    ),
)
def test_impossible_options_name_field_and_limit(change: dict[str, Any], message: str) -> None:
    options = {"recipe": "coat", "betas": BETAS, "eps": 1e-8, "weight_decay": 0.1, **change}
    with pytest.raises(ValueError, match=message):
        AdamW([shard_of(weights(128))], **options)


@pytest.mark.parametrize(
    ("shards", "message"),
    (
        ([], r"shards=\(\): there is nothing"),
        ([shard_of(torch.zeros(100, dtype=BF16))], r"shards\[0\]: shapes \(100,\).*128"),
        ([shard_of(torch.zeros(128, dtype=torch.half))], r"shards\[0\]\.weight is torch\.float16"),
        ([shard_of(weights(128), grad=torch.half)], r"shards\[0\]\.grad is torch\.float16"),
        ([shard_of(weights(128, dtype=FP32))], r"shards\[0\]\.weight is torch\.float32"),
        ([shard_of(weights(256), decay=((64, 256),))], r"shards\[0\]: \[64, 256\)"),
        ([shard_of(weights(256), params=((0, 300),))], r"shards\[0\]: \[0, 300\)"),
        ([shard_of(weights(256), decay=((-128, 128),))], r"shards\[0\]: \[-128, 128\)"),
        ([shard_of(weights(256), decay=((128, 100),))], r"shards\[0\]: \[128, 100\)"),
        ([FlatShard(weights(256), torch.zeros(128), ())], r"shards\[0\]: shapes \(256,\) and"),
        ([shard_of(weights(256).view(2, 128))], r"shards\[0\]: shapes \(2, 128\)"),
        ([shard_of(weights(128)), shard_of(weights(128), grad=FP32)], r"shards\[1\]: dtype"),
    ),
)
def test_impossible_shards_are_refused(shards: list[FlatShard], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer(shards, "adamw-bf16")


def test_an_empty_range_and_a_rate_of_zero_change_no_weight() -> None:
    shard = shard_of(weights(256), decay=((128, 128),))
    opt = optimizer([shard], "adamw-fp32")
    train(opt, range(1), lr=0.0)
    assert torch.equal(shard.weight, weights(256))
    assert opt.step_count.item() == 1 and opt.decode(0, "exp_avg").any()


@pytest.mark.parametrize("recipe", ("adamw-fp32", "coat-lean", "collage-plus"))
def test_results_do_not_depend_on_the_chunks_of_the_reference(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for chunk in (1 << 22, 384):
        monkeypatch.setattr(adamw, "CHUNK", chunk)
        opt = optimizer([shard_of(weights(1024), decay=((0, 500),))], recipe)
        train(opt, range(2))
        found.append(snapshot(opt))
    assert equal(*found)


def test_betas_are_floats_whatever_they_are_given_as() -> None:
    """A kernel is compiled for the types of its arguments, and an integer 0 has another type."""
    betas = optimizer([shard_of(weights(128))], "coat", betas=[0, torch.tensor(0.5)]).betas
    assert betas == (0.0, 0.5) and {type(beta) for beta in betas} == {float}


def test_a_negative_rate_is_refused() -> None:
    opt = optimizer([shard_of(weights(128))], "coat")
    with pytest.raises(ValueError, match=r"lr=-0\.1: must be >= 0"):
        opt.step(lr=-0.1, clip_coefficient=None)


def test_an_unknown_state_names_those_there_are() -> None:
    opt = optimizer([shard_of(weights(128))], "coat")
    with pytest.raises(ValueError, match=r"name='exp_avg_cubed': .*exp_avg_sq"):
        opt.decode(0, "exp_avg_cubed")


def test_the_configuration_names_the_recipes_that_there_are() -> None:
    """config.py is below optim and lists the names itself."""
    assert set(get_args(OptimRecipe)) == set(RECIPES)
    fp32 = {name for name, recipe in RECIPES.items() if torch.float32 in recipe.weights}
    assert set(FP32_RECIPES) == fp32
