"""States in page-locked host memory on a GPU: the bits and the peak of an update."""

from __future__ import annotations

import gc

import pytest
import torch

from coatlm.optim.adamw import AdamW
from coatlm.optim.offload import BUFFERS
from coatlm.optim.recipes import RECIPES
from coatlm.optim.shards import FlatShard, bytes_per_parameter
from tests.gpu.test_fused_adamw import no_synchronization, tensors, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SIZES = (1 << 20, 128 * 37, (1 << 20) + 128 * 3)
PIECE = 1 << 18
OPTIONS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def optimizer(recipe: str, *, offload: bool) -> AdamW:
    """Three shards with two parameters each; the first has weight decay."""
    generator = torch.Generator().manual_seed(0)
    shards = []
    for n in SIZES:
        half = n // 256 * 128
        weight = (0.02 * torch.randn(n, generator=generator)).bfloat16().cuda()
        params = ((0, half), (half, n))
        shards.append(FlatShard(weight, torch.zeros_like(weight), params[:1], params))
    return AdamW(shards, recipe=recipe, offload=offload, piece=PIECE, **OPTIONS)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_offloaded_states_get_the_bits_of_states_on_the_gpu(recipe: str) -> None:
    plain, offloaded = (optimizer(recipe, offload=offload) for offload in (False, True))
    assert len(offloaded.pieces) > BUFFERS
    for opt in (plain, offloaded):
        train(opt, range(3))
        train(opt, range(3, 4), clip=float("nan"))
        train(opt, range(4, 6))
    assert all(not t.is_cuda and t.is_pinned() for s in offloaded.states for t in s.values())
    expected, found = tensors(plain), tensors(offloaded)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert torch.equal(plain.decode(0, "exp_avg"), offloaded.decode(0, "exp_avg"))


@pytest.mark.parametrize("recipe", ("coat-lean", "adamw-fp32"))
def test_the_gpu_holds_only_the_buffers(recipe: str) -> None:
    torch.cuda.synchronize()
    sizes = {}
    for offload in (False, True):
        gc.collect()  # what earlier tests left is not freed while this one measures
        before = torch.cuda.memory_allocated()
        opt = optimizer(recipe, offload=offload)
        sizes[offload] = torch.cuda.memory_allocated() - before
        del opt
    saved = (sum(SIZES) - BUFFERS * PIECE) * bytes_per_parameter(recipe)
    tables = 1 << 17  # bytes of tables of pieces and of rounding of allocations
    assert sizes[False] - sizes[True] == pytest.approx(saved, abs=tables)


def test_an_update_queues_its_copies_without_waiting_or_allocating() -> None:
    opt = optimizer("coat-lean", offload=True)
    train(opt, range(2))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    with no_synchronization():
        opt.step(lr=1e-3)
    assert torch.cuda.max_memory_allocated() == allocated
    assert opt.step_count.item() == 3
