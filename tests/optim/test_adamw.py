"""AdamW on the CPU, the reference: its arithmetic, and what holds for every recipe."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from coatlm.fp8.accumulate import BlockFp8
from coatlm.optim.recipes import RECIPES
from coatlm.optim.shards import FlatShard
from tests.optim.toy import (
    BETAS,
    BF16,
    FP32,
    NAMES,
    bits,
    equal,
    fill,
    optimizer,
    shard_of,
    snapshot,
    train,
    weights,
)


@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_adamw_fp32_equals_torch_adamw(dtype: torch.dtype) -> None:
    shard = shard_of(weights(4096, dtype=dtype), grad=FP32)
    opt = optimizer([shard], "adamw-fp32")
    expected = torch.nn.Parameter(shard.weight.float().clone())
    peer = torch.optim.AdamW([expected], lr=1e-2, betas=BETAS, eps=1e-8, weight_decay=0.1)
    for seed in range(50):
        fill([shard], seed)
        expected.grad = 0.5 * shard.grad
        peer.step()
        opt.step(lr=1e-2, clip_coefficient=torch.tensor(0.5))
    # 50 steps of a few roundings of 2^-24 on weights of about 0.2
    torch.testing.assert_close(opt.decode(0, "fp32_param"), expected.data, rtol=1e-6, atol=1e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        state = peer.state[expected][name]
        # gradients of both signs cancel in m: an error is one of the size that m had in the last
        # ten steps (beta1 = 0.9), not of what is left
        atol = 10 * 2.0**-24 * state.abs().max().item()
        torch.testing.assert_close(opt.decode(0, name), state, rtol=1e-5, atol=atol)
    half_ulp = 2.0**-8 if dtype is BF16 else 1e-6
    torch.testing.assert_close(shard.weight.float(), expected.data, rtol=half_ulp, atol=1e-6)


@pytest.mark.parametrize("recipe", NAMES)
def test_every_recipe_follows_adamw_within_its_precision(recipe: str) -> None:
    """After 60 steps, at a rate that BF16 weights can resolve, the change is right to a tenth.

    It is not with an FP8 master, which forgets updates, and an FP8 v, which has zeros: the rows of
    FP8-LM's ablation that lose accuracy and that diverge.
    """
    start = weights(8192)
    opt = optimizer([shard_of(start.clone())], recipe)
    reference = optimizer([shard_of(start.clone())], "adamw-fp32")
    train(opt, range(60))
    train(reference, range(60))
    expected = reference.decode(0, "fp32_param")
    change = (expected - start.float()).norm()
    error = (opt.decode(0, "fp32_param") - expected).norm() / change
    if recipe in ("fp8lm-fp8-master", "fp8lm-fp8-v"):
        assert error > 0.1
    else:
        assert error <= (0.0 if recipe == "adamw-fp32" else 0.1)


def test_coat_lean_equals_coat_bit_for_bit() -> None:
    start = weights(128 * 96)
    pair = [optimizer([shard_of(start.clone())], recipe) for recipe in ("coat", "coat-lean")]
    for opt in pair:
        train(opt, range(40))
    assert torch.equal(bits(pair[0].shards[0].weight), bits(pair[1].shards[0].weight))
    for name in ("fp32_param", "exp_avg", "exp_avg_sq"):
        assert torch.equal(bits(pair[0].decode(0, name)), bits(pair[1].decode(0, name)))


@pytest.mark.parametrize("recipe", NAMES)
def test_only_bf16_recipes_round_gradients_to_bf16(recipe: str) -> None:
    """fp32 gradients with bits that BF16 has not; those of 2^-3 to 2^-4 round by up to 2^-12."""
    grad = torch.linspace(2.0**-4, 2.0**-3, 128) * (1 + 2.0**-10)
    moments = []
    for g in (grad, grad.bfloat16().float()):
        shard = shard_of(torch.zeros(128, dtype=BF16), grad=FP32)
        opt = optimizer([shard], recipe, betas=(0.0, 0.0))
        shard.grad.copy_(g)
        new = opt.propose(0, 0, 128, lr=1.0, clip_coefficient=torch.ones(()))
        moments.append(new.update)
    strict = recipe in ("adamw-bf16", "kahan", "collage-light", "collage-plus")
    assert RECIPES[recipe].strict == strict
    assert torch.equal(*moments) or not strict


@pytest.mark.parametrize("recipe", NAMES)
def test_rates_on_the_device_give_the_bits_of_python_numbers(recipe: str) -> None:
    """fp32 represents neither these rates nor their products with weight decay exactly."""
    opt = optimizer([shard_of(weights(1024), decay=((0, 512),))], recipe, device_rate=True)
    train(opt, range(2))
    fill(opt.shards, 2)
    for lr in (1e-3 / 3, 0.7e-5, 0.1):
        opt.set_rate(lr)
        on_device, python = (
            opt.propose(0, 0, 1024, lr=rate, clip_coefficient=torch.tensor(0.7))
            for rate in (None, lr)
        )
        assert torch.equal(bits(on_device.update), bits(python.update))
        assert torch.equal(bits(on_device.weight), bits(python.weight))


def test_coat_24_keeps_24_bits_of_the_master() -> None:
    opt = optimizer([shard_of(weights(1024))], "coat-24")
    train(opt, range(3))
    master = bits(opt.decode(0, "fp32_param"))
    assert not (master & 0xFF).any() and (master & 0x100).any()


def test_fp8_plain_does_not_expand() -> None:
    """k = 1, whether the elements of a block are equal or differ by 2^40."""
    shard = shard_of(weights(256), grad=FP32)
    opt = optimizer([shard], "fp8-plain")
    shard.grad.copy_(torch.cat([torch.ones(128), torch.exp2(torch.linspace(-40, 0, 128))]))
    opt.step(lr=1e-3)
    for name in ("exp_avg", "exp_avg_sq"):
        assert opt.states[0][f"{name}.k"].tolist() == [16, 16]


def test_expansion_makes_m_over_root_v_more_accurate() -> None:
    """COAT's table 1 in small: the direction m / sqrt(v) after 30 steps against fp32 moments."""
    errors = {}
    for recipe in ("adamw-fp32", "coat", "fp8-plain"):
        opt = optimizer([shard_of(weights(8192))], recipe, weight_decay=0.0)
        train(opt, range(30))
        errors[recipe] = opt.decode(0, "exp_avg") / (opt.decode(0, "exp_avg_sq").sqrt() + 1e-8)
    exact = errors.pop("adamw-fp32")
    relative = {name: ((x - exact).norm() / exact.norm()).item() for name, x in errors.items()}
    assert relative["coat"] < 0.1
    assert relative["fp8-plain"] > 1.6 * relative["coat"]  # 1.63 in the paper


@pytest.mark.parametrize("coefficient", (float("nan"), float("inf"), float("-inf")))
@pytest.mark.parametrize("recipe", NAMES)
def test_a_coefficient_that_is_not_finite_skips_the_step(recipe: str, coefficient: float) -> None:
    opt = optimizer([shard_of(weights(512))], recipe)
    train(opt, range(2))
    before = snapshot(opt)
    train(opt, range(2, 3), clip=coefficient)
    assert equal(snapshot(opt), before)
    assert opt.step_count.item() == 2


@pytest.mark.parametrize("recipe", NAMES)
def test_a_skipped_first_step_leaves_no_trace(recipe: str) -> None:
    skipping, plain = (optimizer([shard_of(weights(512))], recipe) for _ in range(2))
    train(skipping, range(9, 10), clip=float("nan"))
    for opt in (skipping, plain):
        train(opt, range(3))
    assert equal(snapshot(skipping), snapshot(plain))


@pytest.mark.parametrize("recipe", NAMES)
def test_only_decay_ranges_decay(recipe: str) -> None:
    """Without gradients weights shrink by lr * weight_decay where they decay, else not at all."""
    shard = shard_of(torch.ones(1024, dtype=BF16), decay=((128, 300), (512, 640)))
    opt = optimizer([shard], recipe, weight_decay=0.5)
    opt.step(lr=0.5, clip_coefficient=None)  # 0.25 of the weight: visible in every format
    decayed = torch.zeros(1024, dtype=torch.bool)
    decayed[128:384] = decayed[512:640] = True  # an end is rounded up to a block
    assert torch.equal(shard.weight, torch.where(decayed, 0.75, 1.0).to(BF16))


@pytest.mark.parametrize("recipe", NAMES)
def test_padding_stays_zero(recipe: str) -> None:
    weight = weights(1024)
    params = ((0, 100), (128, 129), (256, 900))  # a tail, one element, a long one; then padding
    real = torch.zeros(1024, dtype=torch.bool)
    for start, end in params:
        real[start:end] = True
    weight[~real] = 0
    shard = shard_of(weight, params=params, decay=params)
    opt = optimizer([shard], recipe)
    for seed in range(5):
        fill([shard], seed)
        shard.grad[~real] = 0
        opt.step(lr=1e-3, clip_coefficient=torch.tensor(1.0))
    for tensor in (shard.weight, *(opt.decode(0, n) for n in ("fp32_param", "exp_avg"))):
        assert torch.equal(tensor[~real].float(), torch.zeros(int((~real).sum())))
    assert (opt.decode(0, "exp_avg")[real] != 0).float().mean() > 0.9


@pytest.mark.parametrize("recipe", NAMES)
def test_saved_states_continue_bit_for_bit(recipe: str) -> None:
    opt = optimizer([shard_of(weights(512)), shard_of(weights(256, seed=1))], recipe)
    train(opt, range(4))
    shards = [shard_of(s.weight.clone()) for s in opt.shards]
    other = optimizer(shards, recipe)
    other.step_count.copy_(opt.step_count)
    for mine, theirs in zip(other.states, opt.states, strict=True):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            mine[name].copy_(tensor)
    for o in (opt, other):
        train(o, range(4, 8))
    assert equal(snapshot(opt), snapshot(other))


@pytest.mark.parametrize("recipe", [n for n in NAMES if not RECIPES[n].tensor_scaled])
def test_shards_can_be_cut_anywhere_on_multiples_of_128(recipe: str) -> None:
    """What resharding relies on: an element's states do not depend on the shard it is in.

    Tensor-wise scales are shared over ranks: `test_cut`.
    """
    start, generator = weights(1024), torch.Generator()
    whole = optimizer([shard_of(start.clone())], recipe)
    pieces = [start[:128].clone(), start[128:640].clone(), start[640:].clone()]
    cut = optimizer([shard_of(piece) for piece in pieces], recipe)
    for seed in range(4):
        grad = 1e-3 * torch.randn(1024, generator=generator.manual_seed(seed))
        whole.shards[0].grad.copy_(grad)
        for shard, part in zip(cut.shards, grad.split([128, 512, 384]), strict=True):
            shard.grad.copy_(part)
        for opt in (whole, cut):
            opt.step(lr=1e-3, clip_coefficient=torch.tensor(1.0))
    for name, tensor in whole.states[0].items():
        assert torch.equal(bits(torch.cat([s[name] for s in cut.states])), bits(tensor))
    assert torch.equal(torch.cat([s.weight for s in cut.shards]), whole.shards[0].weight)


@pytest.mark.parametrize("recipe", NAMES)
def test_many_small_shards_are_updated_as_one_is(recipe: str) -> None:
    n = 50
    many = optimizer([shard_of(weights(128, seed=i)) for i in range(n)], recipe)
    train(many, range(2))
    for i in (0, n - 1):
        alone = optimizer([shard_of(weights(128, seed=i))], recipe)
        for seed in range(2):
            shards = [shard_of(weights(128)) for _ in range(n)]
            fill(shards, seed)
            alone.shards[0].grad.copy_(shards[i].grad)
            alone.step(lr=1e-3, clip_coefficient=torch.tensor(0.7))
        assert torch.equal(alone.shards[0].weight, many.shards[i].weight)


def test_fp8lm_scales_belong_to_parameters() -> None:
    shard = shard_of(weights(512), params=((0, 256), (256, 384)))
    opt = optimizer([shard], "fp8lm")
    shard.grad[:256], shard.grad[256:384] = 1e-3, 1e-6
    opt.step(lr=1e-3, clip_coefficient=None)
    scale = opt.states[0]["exp_avg.scale"]
    assert scale[0] == scale[1] > 100 * scale[2]
    assert (opt.decode(0, "exp_avg")[:384] > 0).all()  # neither part underflows


@pytest.mark.parametrize(
    "grad",
    (
        torch.zeros(128),
        torch.full((128,), 1e-3),
        torch.cat([torch.full((1,), 1e3), torch.zeros(127)]),
        torch.cat([torch.full((64,), 1e-20), torch.full((64,), 1.0)]),
        torch.full((128,), 1e-30),
    ),
    ids=("zeros", "all equal", "one and zeros", "wide", "tiny"),
)
@pytest.mark.parametrize("recipe", ("coat", "coat-lean", "fp8lm", "fp8-plain", "collage-plus"))
def test_odd_blocks_stay_finite_and_keep_their_sign(recipe: str, grad: Tensor) -> None:
    shard = shard_of(weights(128), grad=FP32)
    opt = optimizer([shard], recipe, weight_decay=0.0)
    start = opt.decode(0, "fp32_param").clone()
    shard.grad.copy_(grad)
    for _ in range(3):
        opt.step(lr=1e-3, clip_coefficient=None)
    for name in ("fp32_param", "exp_avg", "exp_avg_sq"):
        assert opt.decode(0, name).isfinite().all()
    assert (opt.decode(0, "exp_avg_sq") >= 0).all()
    moved = opt.decode(0, "fp32_param") - start
    assert ((moved == 0) | (moved.sign() == -grad.sign())).all()


def test_reload_from_weights_forgets_the_old_master() -> None:
    for recipe in NAMES:
        opt = optimizer([shard_of(weights(256))], recipe)
        train(opt, range(3))
        opt.shards[0].weight.copy_(weights(256, seed=1))
        opt.reload_from_weights()
        # FP16 holds BF16's bits, but not its range; the weights are at most 448 * 2^-12
        eps = {"fp8lm": 2.0**-11, "fp8lm-fp8-v": 2.0**-11, "fp8lm-fp8-master": 2.0**-4}
        atol = 2.0**-10 * 2.0**-12 if recipe == "fp8lm-fp8-master" else 1e-8
        expected, found = weights(256, seed=1).float(), opt.decode(0, "fp32_param")
        torch.testing.assert_close(found, expected, rtol=eps.get(recipe, 0.0), atol=atol)


@pytest.mark.parametrize(
    ("recipe", "name", "code", "scale"),
    (
        ("fp8lm", "exp_avg", 0x78, 2.0**-8),  # 256 in E4M3: 1 / 2^-9 = 512 is beyond 448
        ("fp8lm", "exp_avg_sq", 2.0**15, 2.0**-15),  # FP16: 1 / 2^-16 is beyond 65504
        ("fp8lm", "fp32_param", 2.0**15, 2.0**-15),
        ("coat", "exp_avg", 0x7E, -math.log2(448) * 16 / 255),  # 448, k16 = 255, L
    ),
)
def test_parts_of_a_scaled_state_are_those_of_its_format(
    recipe: str, name: str, code: float, scale: float
) -> None:
    opt = optimizer([shard_of(weights(128))], recipe)
    parts = opt.encode_parts(name, torch.ones(256))
    assert parts[""].tolist() == [code] * 256
    assert parts[".scale"].tolist() == pytest.approx([scale] * 2)
    # exact with scales of powers of two; COAT takes a log2 and an exp2 in fp32
    decoded = opt.decode_parts(name, parts)
    torch.testing.assert_close(decoded, torch.ones(256), rtol=0, atol=2.0**-20 * (recipe == "coat"))


@pytest.mark.parametrize("recipe", ["adamw-fp32", "fp8lm"])
def test_one_byte_gradients_update_as_their_values_do(recipe: str) -> None:
    grads = BlockFp8.zeros(384, torch.zeros(4, dtype=torch.int32))
    grads.copy_(torch.randn(384, generator=torch.Generator().manual_seed(0)))
    updated = []
    for grad in (grads, grads.float()):
        shard = FlatShard(weights(384, dtype=BF16), grad, ((0, 256),), ((0, 130), (256, 384)))
        opt = optimizer([shard], recipe)
        opt.step(lr=1e-2, clip_coefficient=torch.tensor(0.7))
        updated.append(torch.cat([shard.weight.float(), opt.decode(0, "exp_avg_sq")]))
    assert torch.equal(*updated)
