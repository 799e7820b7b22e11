"""The shards that the optimizer updates: initial states, checks, and the tables of its kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from coatlm.fp8.accumulate import BlockFp8
from coatlm.fp8.formats import E4M3, SCALE_BLOCK, SMALLEST
from coatlm.optim.host_memory import fetch_pages, host_zeros
from coatlm.optim.moment_formats import Stored
from coatlm.optim.recipes import BF16, FP32, MASTER, Recipe, find_recipe

THREADS = 8  # that give states in host memory their pages, while the start of the run waits


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
    if not eps >= SMALLEST:
        raise ValueError(f"eps={eps}: must be >= {SMALLEST:.3g}, or zeros become 0 / 0 in fp32")
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


def initial_states(recipe: Recipe, block: Tensor, n: int, device: torch.device | None) -> Stored:
    """Initial states of all n elements of a rank's shards, concatenated, so that one launch covers
    all shards. `device=None`: in host memory.

    `block` are 128 weights, of which only the dtype counts: weight states are zeros, until
    `AdamW.reload_from_weights`.
    """
    of_block: Stored = {}
    for name, moment in recipe.moments.items():
        zeros = moment.zeros(SCALE_BLOCK, torch.device("cpu"))
        of_block |= {name + suffix: tensor for suffix, tensor in zeros.items()}
    sample = recipe.weight.initial(block)
    of_block |= {MASTER + suffix: torch.zeros_like(t, device="cpu") for suffix, t in sample.items()}
    flat: Stored = {}
    for name, tensor in of_block.items():
        size, dtype = n * tensor.numel() // SCALE_BLOCK, tensor.dtype
        if device is None:
            flat[name] = host_zeros(size, dtype)
            fetch_pages(flat[name], THREADS)  # which filling would do in one thread
        else:
            flat[name] = torch.empty(size, dtype=dtype, device=device)
        flat[name].fill_(tensor[0])
    return flat


def decayed_blocks(shard: FlatShard) -> Tensor:
    """uint8[n / 128]: 1 for blocks with weight decay. An end is rounded up, into zero padding."""
    decayed = torch.zeros(shard.weight.numel() // SCALE_BLOCK, dtype=torch.uint8)
    for start, end in shard.decay:
        decayed[start // SCALE_BLOCK : round_up(end) // SCALE_BLOCK] = 1
    return decayed


def round_up(n: int) -> int:
    return -(-n // SCALE_BLOCK) * SCALE_BLOCK


@cache
def bytes_per_parameter(recipe: str | Recipe, weight_dtype: torch.dtype = BF16) -> float:
    """Bytes per parameter of all states, without the weight and its gradient."""
    block = torch.zeros(SCALE_BLOCK, dtype=weight_dtype)
    states = initial_states(find_recipe(recipe), block, SCALE_BLOCK, block.device)
    return sum(tensor.nbytes for tensor in states.values()) / SCALE_BLOCK


def program_tables(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor | BlockFp8],
    spans: Sequence[tuple[int, int, int]],
    blocks: int,
    first_block: int,
) -> tuple[Tensor, Tensor]:
    """The span of each program, int32[programs], and the table of spans of the fused step's kernel.

    A row of the table: the weight's and the gradient's address, the first block, the number of
    blocks, the first program, and the address of the gradient's scales, 0 if it has none.
    """
    starts = list(accumulate((w.numel() // SCALE_BLOCK for w in weights), initial=-first_block))
    rows, programs, total = [], [], 0
    for shard, start, stop in spans:
        first_grad, first_scale = _grad_addresses(grads[shard][start:stop])
        addresses = [weights[shard][start:].data_ptr(), first_grad]
        assert not any(address % 16 for address in addresses), "accesses are 16 bytes wide"
        count = (stop - start) // SCALE_BLOCK
        first = starts[shard] + start // SCALE_BLOCK
        rows.append([*addresses, first, count, total, first_scale])
        programs.append(-(-count // blocks))
        total += programs[-1]
    span_of = torch.arange(len(spans), dtype=torch.int32)
    repeats = torch.tensor(programs, dtype=torch.int64)
    return span_of.repeat_interleave(repeats), torch.tensor(rows, dtype=torch.int64)


def _grad_addresses(grad: Tensor | BlockFp8) -> tuple[int, int]:
    """The addresses of a gradient and of its scales, 0 if it has none."""
    if isinstance(grad, BlockFp8):
        return grad.codes.data_ptr(), grad.scale.data_ptr()
    return grad.data_ptr(), 0
