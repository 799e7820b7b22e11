"""The output layer and its loss in BF16 and FP8, with logits that are saved or recomputed.

Rows are hidden sizes. `ratio` divides the time of forward and backward by that in BF16 with
recomputed logits and the first chunk. `extra_mib` is the peak memory beside inputs and the fp32
gradient of the weight; `error` the relative error of the loss, of the gradient of the hidden states
and of that of the weight against BF16, for random tensors.
Options: tokens=8192 vocab=128256 sizes=1024,2048,4096 chunks=0,8192 (vocabulary entries per chunk;
0, the default, is what a run uses).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coatlm.model.loss import default_chunk, linear_cross_entropy
from coatlm.model.output_gemms import FP8_GEMMS, Fp8Output, MakeGemms, PlainGemms
from coatlm.model.rounding import GradientNoise
from tools.benchmarks.clock import milliseconds, release

OPTIONS = ("tokens", "vocab", "sizes", "chunks")
GEMMS = ("bf16", *FP8_GEMMS)


def gemms_of(name: str, device: str | torch.device = "cuda") -> MakeGemms:
    """The GEMMs of that name, in FP8 with noise as in a run."""
    if name == "bf16":
        return PlainGemms
    made = Fp8Output(FP8_GEMMS[name])
    GradientNoise({1: made}, seed=0, rank=0, device=torch.device(device))
    return made


def rows(options: dict[str, str]) -> list[str]:
    """One process measures all variants of a hidden size."""
    return options.get("sizes", "1024,2048,4096").split(",")


def gpus(options: dict[str, str]) -> int:
    """The number of GPUs that the benchmark needs."""
    return 1


def measure(row: str, options: dict[str, str]) -> list[dict[str, Any]]:
    """One record per variant: milliseconds of forward and of both passes, memory and errors."""
    tokens, vocab = int(options.get("tokens", 8192)), int(options.get("vocab", 128256))
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 1, int(row), device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(vocab, int(row), device="cuda") / int(row) ** 0.5).bfloat16()
    labels = torch.randint(vocab, (tokens, 1), device="cuda")
    weight.requires_grad_()
    main_grad = torch.zeros(weight.shape, device="cuda")
    weight.main_grad = main_grad  # type: ignore[attr-defined]
    expected: list[Tensor] = []
    records: list[dict[str, Any]] = []
    chunks = [int(size) or None for size in options.get("chunks", "0").split(",")]
    for name, save, chunk in itertools.product(GEMMS, (False, True), chunks):
        layer = partial(linear_cross_entropy, gemms=gemms_of(name), save_logits=save, chunk=chunk)

        def forward(layer: Callable[..., Tensor] = layer) -> Tensor:
            return layer(hidden, weight, labels)

        def both() -> Tensor:
            loss = forward()
            hidden.grad = None
            loss.sum().backward()
            return loss.detach()

        both()  # compiles, and allocates workspaces
        main_grad.zero_()
        release()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = both()
        extra = torch.cuda.max_memory_allocated() - before
        assert hidden.grad is not None
        found = [loss, hidden.grad, main_grad.clone()]
        expected = expected or found
        times = milliseconds(forward), milliseconds(both)
        record: dict[str, Any] = {"hidden": row, "gemms": name, "save_logits": save}
        if "chunks" in options:
            record["chunk"] = chunk or default_chunk(tokens, weight.dtype)
        record |= {"forward_ms": round(times[0], 3), "total_ms": round(times[1], 3)}
        record["ratio"] = round(times[1] / (records[0]["total_ms"] if records else times[1]), 3)
        record["extra_mib"] = round(extra / 2**20)
        pairs = zip(found, expected, strict=True)
        record["error"] = " ".join(
            f"{float((a.float() - b.float()).norm() / b.float().norm()):.1e}" for a, b in pairs
        )
        records.append(record)
    return records
