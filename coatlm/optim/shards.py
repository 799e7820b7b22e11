"""The shards that the optimizer updates, and what it can be constructed with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coatlm.fp8.accumulate import BlockFp8
from coatlm.fp8.formats import E4M3, SCALE_BLOCK
from coatlm.optim.recipes import BF16, FP32, Recipe, find_recipe


@dataclass(frozen=True)
class FlatShard:
    """A contiguous flat range of n weights and their gradients, which this rank updates.

    n is a multiple of 128. Each parameter inside starts at a multiple of 128; gaps between
    parameters are zero padding.
    """

    weight: Tensor  # [n] view into the parameter buffer, bf16 or fp32; updated in place
    grad: Tensor | BlockFp8  # [n] view of the reduced gradients, fp32, bf16 or E4M3; only read
    decay: tuple[tuple[int, int], ...]  # [start, end) of elements that get weight decay
    params: tuple[tuple[int, int], ...] = ()  # [start, end) of each parameter, for fp8lm
    cut: Mapping[int, int] = field(default_factory=dict)  # start -> number of a cut parameter


def check_recipe(
    recipe: str | Recipe,
    shards: Sequence[FlatShard],
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Raise ValueError, with the field and what is allowed, for arguments AdamW cannot run with."""
    allowed = find_recipe(recipe).weights
    if not shards:
        raise ValueError("shards=(): there is nothing to update")
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas={betas}: each is in [0, 1)")
    if not eps > 0.0:
        raise ValueError(f"eps={eps}: must be > 0, or zero padding becomes 0 / 0")
    if not weight_decay >= 0.0:
        raise ValueError(f"weight_decay={weight_decay}: must be >= 0")
    for i, shard in enumerate(shards):
        n = shard.weight.numel()
        if n % SCALE_BLOCK or shard.weight.shape != (n,) or shard.grad.shape != (n,):
            shapes = f"{tuple(shard.weight.shape)} and {tuple(shard.grad.shape)}"
            raise ValueError(
                f"shards[{i}]: shapes {shapes} must be one (n,), n % {SCALE_BLOCK} == 0"
            )
        if shard.weight.dtype not in allowed:
            raise ValueError(f"shards[{i}].weight is {shard.weight.dtype}: recipe needs {allowed}")
        if shard.grad.dtype not in (BF16, FP32, E4M3.dtype):
            allowed_grads = (BF16, FP32, E4M3.dtype)
            raise ValueError(f"shards[{i}].grad is {shard.grad.dtype}: one of {allowed_grads}")
        kind = [(t.dtype, t.device) for t in (shard.weight, shard.grad)]
        if kind != [(t.dtype, t.device) for t in (shards[0].weight, shards[0].grad)]:
            raise ValueError(f"shards[{i}]: dtype or device differs from that of shards[0]")
        for start, end in (*shard.decay, *shard.params):
            if start % SCALE_BLOCK or not 0 <= start <= end <= n:
                raise ValueError(
                    f"shards[{i}]: [{start}, {end}) must lie in [0, {n}) and start at a multiple "
                    f"of {SCALE_BLOCK}"
                )


def decayed_blocks(shard: FlatShard) -> Tensor:
    """uint8[n / 128]: 1 for blocks with weight decay. An end is rounded up, into zero padding."""
    decayed = torch.zeros(shard.weight.numel() // SCALE_BLOCK, dtype=torch.uint8)
    for start, end in shard.decay:
        decayed[start // SCALE_BLOCK : round_up(end) // SCALE_BLOCK] = 1
    return decayed


def round_up(n: int) -> int:
    return -(-n // SCALE_BLOCK) * SCALE_BLOCK
