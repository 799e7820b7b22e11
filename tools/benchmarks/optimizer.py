"""One optimizer step: milliseconds, bandwidth, bytes of state; coatlm's recipes and their peers.

1e9 parameters in 30 flat shards (peers: 30 matrices), or 2000 of 4096 in the rows called "small".
GB/s counts what a step must move, each operand once (FP8-LM reads its operands twice), and
share_of_copy compares that with a device copy in the same process. transient_b_per_param is what a
step allocates on top. Options: params=1e9 reps=20, and tiles=1 for a sweep over kernel layouts.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from coatlm.optim.adamw import AdamW
from coatlm.optim.fused import TileLayout
from coatlm.optim.recipes import RECIPES
from coatlm.optim.shards import FlatShard, bytes_per_parameter

OPTIONS = ("params", "reps", "tiles")
BF16, FP32 = torch.bfloat16, torch.float32
Step = Callable[[], object]
GRADS = {"bf16": BF16, "fp32": FP32}
BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1
TENSORS, COLUMNS = 30, 4096
SMALL = [(4096,)] * 2000
COPY = 1 << 32  # bytes
PEERS: dict[
    str, tuple[torch.dtype, torch.dtype, float]
] = {  # name -> dtype of weights, of gradients, least bytes per parameter that a step moves
    "torch fused fp32": (FP32, FP32, 28),
    "torch fused bf16": (BF16, BF16, 14),
    "te fp32": (FP32, FP32, 28),
    "te master": (BF16, BF16, 28),
    "te remainder": (BF16, BF16, 26),
    "te master fp8 moments": (BF16, BF16, 16),
    "te fp16 master fp8 m fp16 v": (BF16, BF16, 14),
    "torchao fp8": (FP32, FP32, 16),
    "flashoptim 24 bits": (BF16, BF16, 12),
    "flashoptim 32 bits": (BF16, BF16, 14),
}
U8, FP16 = torch.uint8, torch.float16
FP8_MOMENTS = {"exp_avg_dtype": U8, "exp_avg_sq_dtype": U8}
FP8LM = {"master_weight_dtype": FP16, "exp_avg_dtype": U8, "exp_avg_sq_dtype": FP16}
TE: dict[str, dict[str, Any]] = {
    "fp32": {},
    "master": {"master_weights": True},
    "remainder": {"master_weights": True, "store_param_remainders": True},
    "master fp8 moments": {"master_weights": True, **FP8_MOMENTS},
    "fp16 master fp8 m fp16 v": {"master_weights": True, **FP8LM},
}
TILES = [
    TileLayout(groups, warps, run) for groups, warps in ((16, 4), (32, 8)) for run in (16, 8, 4)
]
TILES += [TileLayout(blocks=32, warps=4), TileLayout(blocks=8, warps=2)]


def rows(options: dict[str, str]) -> list[str]:
    """Each recipe with BF16 gradients, some also with fp32 ones, small tensors, then the peers."""
    names = [f"{recipe}, bf16 gradients" for recipe in RECIPES]
    names += [f"{recipe}, fp32 gradients" for recipe in ("coat", "coat-lean", "adamw-fp32")]
    names += [f"small {recipe}, bf16 gradients" for recipe in ("coat", "coat-lean", "adamw-fp32")]
    if "tiles" in options:
        names += [f"tiles {recipe}, bf16 gradients" for recipe in ("coat", "coat-lean")]
    return names + list(PEERS) + [f"small {peer}" for peer in ("torch fused fp32", "te fp32")]


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs that the benchmark needs."""
    return 1


def measure(row: str, options: dict[str, str]) -> dict[str, Any] | list[dict[str, Any]]:
    """One row, or one record per tile. Raises ImportError for a peer that is not installed."""
    reps = int(options.get("reps", "20"))
    kind, _, rest = row.partition(" ")
    name = rest if kind in ("small", "tiles") else row
    side = int(float(options.get("params", "1e9")) / TENSORS / COLUMNS) // 8 * 8
    shapes = SMALL if kind == "small" else [(side, COLUMNS)] * TENSORS
    copy = copy_rate(reps)
    if name in PEERS:
        weight, grad, moved = PEERS[name]
        params = _parameters(shapes, weight, grad)
        allocated = torch.cuda.memory_allocated()
        step: Step = _peer(name, params).step
    else:
        recipe, _, kind_of_grad = name.removesuffix(" gradients").partition(", ")
        moved = bytes_moved(recipe, GRADS[kind_of_grad])
        params = _parameters(shapes, BF16, GRADS[kind_of_grad])
        allocated = torch.cuda.memory_allocated()
        optimizer = _ours(recipe, params)
        step = partial(optimizer.step, lr=1e-4, clip_coefficient=torch.ones((), device="cuda"))
    n = sum(weight.numel() for weight, _ in params)
    if kind == "tiles":
        (fused,) = optimizer.fused
        records = []
        for tile, fma in itertools.product(TILES, (False, True)):
            fused.use(tile)
            fused.constants["enable_fp_fusion"] = fma
            layout = {"row": row, "tile": str(tuple(tile)), "fma": fma}
            records.append(layout | timing(step, n, moved, copy, reps))
        return records
    step()
    torch.cuda.synchronize()
    states = torch.cuda.memory_allocated() - allocated
    return {**timing(step, n, moved, copy, reps), "state_b_per_param": round(states / n, 3)}


def bytes_moved(recipe: str, grad: torch.dtype) -> float:
    """The least bytes per parameter that a step reads and writes, with BF16 weights."""
    found = RECIPES[recipe]
    states = bytes_per_parameter(recipe)
    reads_weight = found.weight.kind not in ("master", "scaled")
    passes = 2 if found.tensor_scaled else 1
    return passes * (grad.itemsize + states) + states + BF16.itemsize * (1 + reads_weight)


def timing(step: Step, n: int, moved: float, copy: float, reps: int) -> dict[str, Any]:
    """The median time of a step, its bandwidth, and the memory that a step allocates."""
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    ms = milliseconds(step, reps)
    transient = torch.cuda.max_memory_allocated() - allocated
    rate = moved * n / ms / 1e6
    return {
        "ms": round(ms, 3),
        "bytes_per_param": round(moved, 2),
        "gb_per_s": round(rate),
        "share_of_copy": round(rate / copy, 3),
        "transient_b_per_param": round(transient / n, 3),
    }


def milliseconds(step: Step, reps: int) -> float:
    """Median over `reps` steps, by events, after three to warm up."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(reps)]
    for start, end in pairs:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def copy_rate(reps: int) -> float:
    """GB/s of a device copy, bytes read and written."""
    source = torch.empty(COPY, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rate = 2 * COPY / milliseconds(partial(target.copy_, source), reps) / 1e6
    del source, target
    torch.cuda.empty_cache()
    return rate


def _parameters(
    shapes: Sequence[tuple[int, ...]], weight: torch.dtype, grad: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [
        (
            (0.02 * torch.randn(shape, device="cuda")).to(weight),
            (1e-3 * torch.randn(shape, device="cuda")).to(grad),
        )
        for shape in shapes
    ]


def _ours(recipe: str, params: Sequence[tuple[Tensor, Tensor]]) -> AdamW:
    flat = [(weight.view(-1), grad.view(-1)) for weight, grad in params]
    shards = [FlatShard(w, g, ((0, w.numel()),), ((0, w.numel()),)) for w, g in flat]
    return AdamW(shards, recipe=recipe, betas=BETAS, eps=EPS, weight_decay=DECAY)


def _peer(name: str, params: Sequence[tuple[Tensor, Tensor]]) -> Any:
    leaves = []
    for weight, grad in params:
        leaf = nn.Parameter(weight)
        leaf.grad = grad
        leaves.append(leaf)
    options: dict[str, Any] = {"lr": 1e-4, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    family, _, variant = name.partition(" ")
    if family == "torch":
        return torch.optim.AdamW(leaves, fused=True, **options)
    if family == "te":
        import transformer_engine.pytorch as te

        return te.optimizers.FusedAdam(leaves, adam_w_mode=True, **options, **TE[variant])
    if family == "torchao":
        from torchao.optim import AdamWFp8  # type: ignore[import-not-found]

        return AdamWFp8(leaves, **options)
    from flashoptim import FlashAdamW  # type: ignore[import-not-found]

    bits = {} if "24" in variant else {"master_weight_bits": 32}
    return FlashAdamW(leaves, lr=1e-4, betas=BETAS, weight_decay=DECAY, **bits)
