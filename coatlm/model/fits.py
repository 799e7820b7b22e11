"""What fits the memory of a device, by the estimate of memory.py: layers that fall back, logits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from coatlm.config import Config
from coatlm.model.memory import fallback_bytes, replaced, stage_bytes

SPARE = 0.15  # of a GPU: what train.logits=auto leaves for what the estimate does not count


def peak_with(config: Config, vocab: int, data_parallel: int, fallen: Collection[int]) -> int:
    """The estimated highest peak of a step, with the layers `fallen`, numbered from 1, in BF16.

    With CUDA graphs these layers count twice: the microbatch that precision.guard measures runs
    eagerly beside the graphs' memory. Building the model comes before steps, and does not count.
    """
    copies = 2 if config.cuda_graphs else 1
    return max(
        replace(rank, initial=0).total
        + copies * fallback_bytes(config, fallen, stage=stage, data_parallel=data_parallel)
        for stage, rank in enumerate(stage_bytes(config, vocab, data_parallel))
    )


def with_logits(config: Config, vocab: int, data_parallel: int, memory: float) -> Config:
    """`config` with `train.logits` decided: auto becomes save if that leaves SPARE of `memory`.

    With precision.guard=fallback that has to hold for all layers in BF16, so that saved logits do
    not decide what the guard may do.
    """
    if config.train.logits != "auto":
        return config
    saving = replaced(config, train={"logits": "save"})
    fallen = range(1, config.model.layers + 1) if config.precision.guard == "fallback" else ()
    if peak_with(saving, vocab, data_parallel, fallen) <= memory * (1 - SPARE):
        return saving
    return replaced(config, train={"logits": "recompute"})
