"""States that change their recipe: decoded from the old formats, encoded in the new ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from coatlm.fp8.expand import M_E4M3, V_E4M3, Expansion, expand_quantize_ref
from coatlm.fp8.formats import E4M3
from coatlm.optim.adamw import AdamW
from coatlm.optim.convert import convert_states_, optimizer_on_host
from coatlm.optim.weight_formats import nearest_bf16
from tests.optim.toy import BF16, FP32, NAMES, equal, optimizer, shard_of, snapshot, train, weights

M, V, MASTER = "exp_avg", "exp_avg_sq", "fp32_param"
SIZES = (384, 256)  # of the shards
PARAMS = (((0, 128), (128, 384)), ((0, 256),))
STEPS = 6
Encode = Callable[[Tensor], dict[str, Tensor]]


def trained(recipe: str, *, steps: int = STEPS, dtype: torch.dtype = BF16) -> AdamW:
    """An optimizer of two shards after some updates."""
    shards = []
    for seed, (n, params) in enumerate(zip(SIZES, PARAMS, strict=True)):
        shards.append(shard_of(weights(n, dtype=dtype, seed=seed), params=params))
    made = optimizer(shards, recipe)
    for step in range(steps):
        train(made, range(step, step + 1))
    return made


def converted(source: AdamW, recipe: str) -> AdamW:
    """A new optimizer, into which weights and states of `source` are loaded as from a file."""
    target = trained(recipe, steps=0, dtype=source.shards[0].weight.dtype)
    stored = optimizer_on_host(target, source.recipe)
    for i, shard in enumerate(source.shards):
        target.shards[i].weight.copy_(shard.weight)
        for name, tensor in stored.states[i].items():
            tensor.copy_(source.states[i][name])
    convert_states_(target, stored)
    target.step_count.copy_(source.step_count)
    return target


def fp32(x: Tensor) -> dict[str, Tensor]:
    return {"": x}


def bf16(x: Tensor) -> dict[str, Tensor]:
    return {"": x.bfloat16()}


def pair(x: Tensor) -> dict[str, Tensor]:
    high = x.bfloat16()
    return {"": high, ".low": (x.double() - high.double()).bfloat16()}


def scaled(fmt: torch.dtype, largest: float) -> Encode:
    def encode(x: Tensor) -> dict[str, Tensor]:
        scale = 2.0 ** torch.ceil(torch.log2(x.double().abs().max() / largest)).float()
        codes = (x / scale).to(fmt)
        stored = codes.view(torch.uint8) if codes.itemsize == 1 else codes
        return {"": stored, ".scale": scale.expand(len(x) // 128)}

    return encode


def expanded(how: Expansion) -> Encode:
    def encode(x: Tensor) -> dict[str, Tensor]:
        codes, k, scale = expand_quantize_ref(x, how)
        return {"": codes.view(torch.uint8), ".k": k, ".scale": scale}

    return encode


PLAIN = expanded(Expansion(E4M3, signed=True, k16_min=16, k16_max=16))
STORED: dict[str, tuple[Encode, Encode]] = {  # recipe -> how m and v of a parameter are stored
    "adamw-bf16": (bf16, bf16),
    "adamw-bf16-fp32state": (fp32, fp32),
    "kahan": (bf16, bf16),
    "collage-light": (bf16, bf16),
    "collage-plus": (bf16, pair),
    "fp8lm": (scaled(torch.float8_e4m3fn, 448), scaled(torch.float16, 65504)),
    "fp8lm-fp8-v": (scaled(torch.float8_e4m3fn, 448), scaled(torch.float8_e4m3fn, 448)),
    "coat": (expanded(M_E4M3), expanded(V_E4M3)),
    "coat-lean": (expanded(M_E4M3), expanded(V_E4M3)),
    "coat-24": (expanded(M_E4M3), expanded(V_E4M3)),
    "fp8-plain": (PLAIN, PLAIN),
}


@pytest.mark.parametrize("recipe", STORED)
def test_fp32_states_become_what_the_recipe_stores_of_them(recipe: str) -> None:
    source = trained("adamw-fp32")
    target = converted(source, recipe)
    for i, params in enumerate(PARAMS):
        for start, stop in params:
            for name, encode in zip((M, V), STORED[recipe], strict=True):
                for suffix, expected in encode(source.states[i][name][start:stop]).items():
                    state = target.states[i][name + suffix]
                    first = start * len(state) // SIZES[i]
                    assert torch.equal(state[first : first + len(expected)], expected), suffix


MASTER_BITS = {  # the largest relative error of the master: half a unit in the last place
    "adamw-bf16": 2**-8,
    "adamw-bf16-fp32state": 2**-8,
    "fp8lm": 2**-11,
    "fp8lm-bf16": 2**-8,
    "fp8lm-fp8-master": 2**-4,
    "fp8lm-fp8-v": 2**-11,
    "kahan": 2**-16,
    "collage-light": 2**-16,
    "collage-plus": 2**-16,
    "coat-24": 2**-16,
}


@pytest.mark.parametrize("recipe", NAMES)
def test_weights_are_the_nearest_to_the_master_which_keeps_the_recipes_bits(recipe: str) -> None:
    source = trained("adamw-fp32")
    target = converted(source, recipe)
    for i in range(len(SIZES)):
        master, found = source.decode(i, MASTER).double(), target.decode(i, MASTER).double()
        stored = found if recipe == "coat-24" else master  # which rounds to 24 bits first
        assert torch.equal(target.shards[i].weight, nearest_bf16(stored.float()))
        bound = MASTER_BITS.get(recipe, 0.0)
        normal = 0.0  # below 2^-6 scales E4M3 is subnormal
        if recipe == "fp8lm-fp8-master":
            normal = 2**-6 * float(target.states[i][f"{MASTER}.scale"].max())
        assert ((found - master).abs() <= bound * master.abs().clamp(min=normal)).all()
        assert bound == 0.0 or not torch.equal(found, master)


@pytest.mark.parametrize("recipe", NAMES)
def test_states_of_every_recipe_become_their_decoded_values(recipe: str) -> None:
    source = trained(recipe)
    target = converted(source, "adamw-fp32")
    for i in range(len(SIZES)):
        for name in (M, V, MASTER):
            assert torch.equal(target.states[i][name], source.decode(i, name)), name
        assert target.states[i][M].abs().sum() > 0 and target.states[i][V].sum() > 0


@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_becomes_itself_where_its_codes_are_its_values(recipe: str) -> None:
    """The k of expanded formats may change: their values, not their codes, lie on a grid."""
    source = trained(recipe)
    target = converted(source, recipe)
    for i in range(len(SIZES)):
        for name in (M, V, MASTER):
            a, b = source.decode(i, name), target.decode(i, name)
            if recipe.startswith("coat") and name != MASTER:
                assert (a - b).norm() <= 0.027 * a.norm()  # one rounding of E4M3
            else:
                assert torch.equal(a, b), name


@pytest.mark.parametrize("recipe", NAMES)
def test_there_and_back_without_loss_through_fp32(recipe: str) -> None:
    """fp32 holds every value of every recipe: the updates that follow have the same bits."""
    if recipe.startswith("coat"):
        pytest.skip("its k may change, see above")
    source = trained(recipe)
    back = converted(converted(source, "adamw-fp32"), recipe)
    train(source, range(STEPS, STEPS + 3))
    train(back, range(STEPS, STEPS + 3))
    assert equal(snapshot(source), snapshot(back))


@pytest.mark.parametrize("recipe", ("coat", "fp8-plain"))
def test_fp32_weights_stay_their_own_master(recipe: str) -> None:
    source = trained("adamw-fp32", dtype=FP32)
    target = converted(source, recipe)
    assert not any(name.startswith(MASTER) for name in target.states[0])
    assert all(
        torch.equal(a.weight, b.weight) for a, b in zip(target.shards, source.shards, strict=True)
    )


def test_a_source_that_cannot_have_these_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="recipe needs"):
        optimizer_on_host(trained("coat", steps=0, dtype=FP32), "kahan")
    with pytest.raises(ValueError, match="recipe='coot': one of adamw-fp32"):
        optimizer_on_host(trained("coat", steps=0), "coot")
