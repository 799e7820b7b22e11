"""The fused AdamW step on a GPU against its reference, which is AdamW on the CPU.

Recipes whose arithmetic is IEEE throughout must give the reference's bits. COAT's decoding goes
through lg2 and ex2 instructions: their errors (2^-22 absolute, 2^-22 relative) and the rounding of
an exponent of up to 64 in fp32 (2^-18) make decoded moments, and with them the update, agree to
2^-15; a code then differs only where the unrounded value is that close to the middle between two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.optim.adamw import AdamW
from coatlm.optim.recipes import RECIPES, Recipe
from coatlm.optim.shards import FlatShard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

BF16, FP32 = torch.bfloat16, torch.float32
SIZES = (128, 128 * 16, 128 * 37, 128 * 300)  # one block, one program, tails, many programs
APPROXIMATE = ("coat", "coat-lean", "coat-24", "fp8-plain")
EXACT = sorted(set(RECIPES) - set(APPROXIMATE))
OVER_INT32 = 2**31 + 2**20  # elements


def optimizer(
    recipe: str | Recipe,
    device: str,
    *,
    weight: torch.dtype = BF16,
    grad: torch.dtype = BF16,
    sizes: tuple[int, ...] = SIZES,
    device_rate: bool = False,
) -> AdamW:
    """Several shards with padding at the end, decay and two parameters in some part of each."""
    generator = torch.Generator().manual_seed(0)
    shards = []
    for n in sizes:
        w = (0.02 * torch.randn(n, generator=generator)).to(weight)
        w[-27:] = 0
        half = n // 256 * 128
        parts = ((0, half), (half, n - 27)) if half else ((0, n - 27),)
        shards.append(
            FlatShard(w.to(device), torch.zeros(n, dtype=grad, device=device), parts[:1], parts)
        )
    return AdamW(
        shards,
        recipe=recipe,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        device_rate=device_rate,
    )


def fill(opt: AdamW, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for shard in opt.shards:
        n = shard.grad.numel()
        g = 1e-3 * torch.randn(n, generator=generator) * torch.randn(n, generator=generator).exp()
        g[-27:] = 0
        shard.grad.copy_(g)


def train(opt: AdamW, steps: range, *, clip: float = 0.7) -> None:
    for seed in steps:
        fill(opt, seed)
        coefficient = torch.tensor(clip, device=opt.step_count.device)
        opt.step(lr=1e-3, clip_coefficient=coefficient)


def tensors(opt: AdamW) -> dict[str, Tensor]:
    """Everything a step may change, as integers, by name."""
    found = {"step_count": opt.step_count}
    for i, (shard, states) in enumerate(zip(opt.shards, opt.states, strict=True)):
        found |= {f"{i} weight": shard.weight} | {f"{i} {k}": v for k, v in states.items()}
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {name: t.cpu().contiguous().view(kinds[t.element_size()]) for name, t in found.items()}


def different(a: AdamW, b: AdamW) -> dict[str, int]:
    """Name -> how many entries differ in their bits; zeros may differ in sign."""
    found = {}
    for (name, x), y in zip(tensors(a).items(), tensors(b).values(), strict=True):
        both_zero = ((x | y) << 1) == 0 if x.dtype != torch.uint8 else torch.zeros_like(x).bool()
        if count := int(((x != y) & ~both_zero).sum()):
            found[name] = count
    return found


def copy_states(to: AdamW, source: AdamW) -> None:
    to.step_count.copy_(source.step_count)
    for i, shard in enumerate(to.shards):
        shard.weight.copy_(source.shards[i].weight)
        for name, tensor in to.states[i].items():
            tensor.copy_(source.states[i][name])


@contextmanager
def no_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("grad", (BF16, FP32))
@pytest.mark.parametrize("recipe", EXACT)
def test_kernel_equals_the_reference_bit_for_bit(recipe: str, grad: torch.dtype) -> None:
    cpu, gpu = (optimizer(recipe, device, grad=grad) for device in ("cpu", "cuda"))
    for opt in (cpu, gpu):
        train(opt, range(3))
        train(opt, range(3, 4), clip=float("nan"))
        train(opt, range(4, 8))
    assert different(cpu, gpu) == {}


def test_kernel_equals_the_reference_for_fp32_weights() -> None:
    cpu, gpu = (
        optimizer("adamw-fp32", device, weight=FP32, grad=FP32) for device in ("cpu", "cuda")
    )
    for opt in (cpu, gpu):
        train(opt, range(5))
    assert different(cpu, gpu) == {}


@pytest.mark.parametrize(("weight", "grad"), [(BF16, BF16), (BF16, FP32), (FP32, FP32)])
@pytest.mark.parametrize("recipe", APPROXIMATE)
def test_coat_step_agrees_with_the_reference(
    recipe: str, weight: torch.dtype, grad: torch.dtype
) -> None:
    if weight not in RECIPES[recipe].weights:
        pytest.skip("BF16 weights only")
    cpu, gpu = (optimizer(recipe, device, weight=weight, grad=grad) for device in ("cpu", "cuda"))
    train(cpu, range(6))
    copy_states(gpu, cpu)
    before = [cpu.decode(i, "fp32_param").clone() for i in range(len(SIZES))]
    for opt in (cpu, gpu):
        train(opt, range(6, 7))
    for i, old in enumerate(before):
        new, master = (opt.decode(i, "fp32_param").cpu() for opt in (cpu, gpu))
        ulp = 2.0**-14 if recipe == "coat-24" else 2.0**-22
        # what is rounded is old * (1 - decay) - step, so a sum that cancels keeps old's error
        bound = 2.0**-14 * (new - old).abs() + ulp * torch.maximum(new.abs(), old.abs())
        assert ((master - new).abs() <= bound).all()
        for name in ("exp_avg", "exp_avg_sq"):
            x, y = (opt.decode(i, name).cpu() for opt in (cpu, gpu))
            apart = ((x - y).abs() > 2.0**-14 * x.abs()).double().mean().item()
            # near a middle with probability 2^-12; or all of a block, if its k was near a half
            assert apart <= max(5e-3, 130 / x.numel())
            assert torch.equal(x == 0, y == 0) or apart > 0


@pytest.mark.parametrize("grad", (BF16, FP32))
def test_coat_lean_equals_coat_bit_for_bit(grad: torch.dtype) -> None:
    coat, lean = (optimizer(recipe, "cuda", grad=grad) for recipe in ("coat", "coat-lean"))
    for opt in (coat, lean):
        train(opt, range(20))
    for i in range(len(SIZES)):
        assert torch.equal(coat.shards[i].weight, lean.shards[i].weight)
        for name in ("fp32_param", "exp_avg", "exp_avg_sq"):
            assert torch.equal(coat.decode(i, name), lean.decode(i, name))


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_step_neither_waits_nor_allocates_and_skips_on_the_device(recipe: str) -> None:
    opt = optimizer(recipe, "cuda")
    train(opt, range(2))
    fill(opt, 2)
    before, bad = tensors(opt), torch.tensor(float("inf"), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    with no_synchronization():
        opt.step(lr=1e-3, clip_coefficient=bad)
    assert torch.cuda.max_memory_allocated() == allocated
    after = tensors(opt)
    assert all(torch.equal(before[name], after[name]) for name in before)
    with no_synchronization():
        opt.step(lr=1e-3, clip_coefficient=None)
    assert opt.step_count.item() == 3


@pytest.mark.parametrize("recipe", ("coat", "collage-plus", "adamw-fp32"))
def test_two_thousand_tiny_shards_are_updated_as_one_large_is(recipe: str) -> None:
    n = 2000
    weight = (0.02 * torch.randn(n * 128, device="cuda")).to(BF16)
    grads = [1e-3 * torch.randn(n * 128, device="cuda") for _ in range(3)]
    grad = torch.zeros(n * 128, dtype=BF16, device="cuda")
    options: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    one = AdamW([FlatShard(weight.clone(), grad, ((0, n * 128),))], recipe=recipe, **options)
    parts = zip(weight.clone().split(128), grad.split(128), strict=True)
    many = AdamW([FlatShard(w, g, ((0, 128),)) for w, g in parts], recipe=recipe, **options)
    for g in grads:
        grad.copy_(g)
        for opt in (one, many):
            opt.step(lr=1e-3, clip_coefficient=None)
    assert torch.equal(torch.cat([s.weight for s in many.shards]), one.shards[0].weight)
    for name, tensor in one.states[0].items():
        assert torch.equal(torch.cat([states[name] for states in many.states]), tensor)


def test_more_elements_than_an_int32_counts() -> None:
    """The last million weights of a flat tensor are updated as they are alone."""
    tail = 2**20
    weight = torch.zeros(OVER_INT32, dtype=BF16, device="cuda")
    grad = torch.zeros(OVER_INT32, dtype=BF16, device="cuda")
    weight[-tail:] = 0.02 * torch.randn(tail, device="cuda")
    options: dict[str, Any] = {"recipe": "coat-lean", "betas": (0.9, 0.95), "eps": 1e-8}
    large = AdamW([FlatShard(weight, grad, ((0, OVER_INT32),))], weight_decay=0.1, **options)
    small_grad = torch.zeros(tail, dtype=BF16, device="cuda")
    small = AdamW(
        [FlatShard(weight[-tail:].clone(), small_grad, ((0, tail),))], weight_decay=0.1, **options
    )
    for _ in range(2):
        small_grad.copy_(1e-3 * torch.randn(tail, device="cuda"))
        grad[-tail:] = small_grad
        for opt in (large, small):
            opt.step(lr=1e-3, clip_coefficient=None)
    assert torch.equal(weight[-tail:], small.shards[0].weight)
    assert not weight[: 2**20].any()
    for name, tensor in small.states[0].items():
        assert torch.equal(large.states[0][name][-tensor.numel() :], tensor)


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_the_same_gradients_give_the_same_bits_twice(recipe: str) -> None:
    first, second = (optimizer(recipe, "cuda") for _ in range(2))
    for opt in (first, second):
        train(opt, range(5))
    assert different(first, second) == {}


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_moments_that_decay_to_nothing_stay_finite(recipe: str) -> None:
    """A weight that gets one gradient and then none: m passes fp32's denormals after 800 steps."""
    weight = torch.full((256,), 0.02, dtype=torch.bfloat16, device="cuda")
    grad = torch.zeros(256, dtype=torch.float32, device="cuda")
    grad[:128] = torch.linspace(1e-6, 1e-3, 128)
    shard = FlatShard(weight, grad, decay=(), params=((0, 256),))
    optimizer = AdamW([shard], recipe=recipe, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(2000):
        if step == 1:
            grad.zero_()
        optimizer.step(lr=1e-4)
    for name in ("fp32_param", "exp_avg", "exp_avg_sq"):
        assert optimizer.decode(0, name).isfinite().all(), name
    assert weight.isfinite().all()


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_replays_use_the_newest_rate_with_the_bits_of_launches(recipe: str) -> None:
    """fp32 represents neither these rates nor their products with weight decay exactly."""
    launched, replayed = (optimizer(recipe, "cuda", device_rate=on) for on in (False, True))
    clip = torch.tensor(0.7, device="cuda")
    for opt in (launched, replayed):
        fill(opt, 0)
        opt.step(lr=1e-3, clip_coefficient=clip)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.update(clip)
    for seed, lr in enumerate((1e-3 / 3, 0.7e-5, 0.1), start=1):
        for opt in (launched, replayed):
            fill(opt, seed)
        launched.step(lr=lr, clip_coefficient=clip)
        replayed.set_rate(lr)
        graph.replay()
        assert not different(launched, replayed), lr
