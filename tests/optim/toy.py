"""Small shards and gradients for tests of AdamW, and how results are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coatlm.optim.adamw import AdamW
from coatlm.optim.recipes import RECIPES, Recipe
from coatlm.optim.shards import FlatShard

BF16, FP32 = torch.bfloat16, torch.float32
BETAS = (0.9, 0.95)
NAMES = sorted(RECIPES)


def shard_of(weight: Tensor, *, grad: torch.dtype = BF16, **ranges: Any) -> FlatShard:
    n = weight.numel()
    ranges = {"decay": ((0, n),), "params": ((0, n),), **ranges}
    return FlatShard(weight, torch.zeros(n, dtype=grad), **ranges)


def weights(n: int, *, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return (0.02 * torch.randn(n, generator=torch.Generator().manual_seed(seed))).to(dtype)


def optimizer(shards: list[FlatShard], recipe: str | Recipe, **options: Any) -> AdamW:
    options = {"betas": BETAS, "eps": 1e-8, "weight_decay": 0.1, **options}
    return AdamW(shards, recipe=recipe, **options)


def fill(shards: list[FlatShard], seed: int) -> None:
    """New gradients of uneven size, the same for the same seed and layout."""
    generator = torch.Generator().manual_seed(seed)
    for shard in shards:
        n = shard.grad.numel()
        g = 1e-3 * torch.randn(n, generator=generator) * torch.randn(n, generator=generator).exp()
        shard.grad.copy_(g)


def train(opt: AdamW, steps: range, *, clip: float | None = 0.7, lr: float = 1e-3) -> None:
    for seed in steps:
        fill(list(opt.shards), seed)
        opt.step(lr=lr, clip_coefficient=None if clip is None else torch.tensor(clip))


def bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()]).clone()


def snapshot(opt: AdamW) -> list[Tensor]:
    parts = [opt.step_count, *(s.weight for s in opt.shards)]
    parts += [tensor for states in opt.states for tensor in states.values()]
    return [bits(tensor) for tensor in parts]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def state_bytes(opt: AdamW) -> int:
    """Bytes of all states, without weights and gradients."""
    return sum(tensor.nbytes for states in opt.states for tensor in states.values())
