"""What fits a device, by the estimate of memory.py: what falls back, logits, CUDA graphs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from coatlm.config import Config
from coatlm.model.bf16_tensors import SAVED_AS, layer_of, names_in
from coatlm.model.layer_memory import layer_activation_bytes
from coatlm.model.memory import (
    bf16_gemm_bytes,
    bf16_share,
    chunks_in_flight,
    fallback_bytes,
    microbatch_tokens,
    replaced,
    stage_bytes,
)

SPARE = 0.15  # of a GPU: what `auto` leaves for what the estimate does not count


def peak_with(
    config: Config,
    vocab: int,
    data_parallel: int,
    fallen: Collection[int],
    tensors: Collection[str] = (),
) -> int:
    """The estimated highest peak of a step, with the layers `fallen`, numbered from 1, in BF16.

    `tensors`: keys LAYER/TENSOR of what is in BF16 in other layers. With CUDA graphs both count
    twice: the microbatch that precision.guard measures runs eagerly beside the graphs' memory.
    Building the model comes before steps, and does not count.
    """
    copies = 2 if config.cuda_graphs else 1
    at = {"data_parallel": data_parallel}
    return max(
        replace(rank, initial=0).total
        + copies * fallback_bytes(config, fallen, stage=stage, **at)
        + copies * tensor_bytes(config, tensors, stage=stage, **at)
        for stage, rank in enumerate(stage_bytes(config, vocab, data_parallel))
    )


def tensor_bytes(
    config: Config, tensors: Collection[str], *, stage: int, data_parallel: int
) -> int:
    """At most what a stage's peak grows by when `tensors`, keys LAYER/TENSOR, are in BF16.

    A saved tensor takes more in every microbatch in flight, counted for both norms if it is the
    input of one; with recompute=full only while its layer is recomputed. The GEMM of an operand has
    temporaries.
    """
    at_once = chunks_in_flight(config, stage, config.train.microbatches(data_parallel))
    extra, operands, plain = [0.0], False, bf16_share(config, stage)
    for layer in {layer_of(key) for key in tensors}:
        if bf16_share(config, stage, [layer]) == plain:  # another stage's, or in BF16 as a whole
            continue
        names = names_in(tensors, layer)
        saved = {f"saved.{SAVED_AS[name]}" for name in names & SAVED_AS.keys()}
        extra.append(layer_activation_bytes(_in_bf16(config, *saved)))
        extra[-1] -= layer_activation_bytes(config)
        operands = operands or not names <= SAVED_AS.keys()
    full = config.train.recompute == "full"
    each_token = max(extra) if full else sum(extra) * at_once / config.parallel.vpp
    size = round(microbatch_tokens(config) * each_token)
    if operands:
        size += bf16_gemm_bytes(_in_bf16(config, "forward.weight")) - bf16_gemm_bytes(config)
    return size


def _in_bf16(config: Config, *names: str) -> Config:
    """`config` with more `precision.bf16_operands`."""
    both = (*config.precision.bf16_operands, *sorted(names))
    return replaced(config, precision={"bf16_operands": both})


def with_fitting(config: Config, vocab: int, data_parallel: int, memory: float) -> Config:
    """`config` with what `auto` decides by memory: choices are made if they leave SPARE of it.

    CUDA graphs of tensor-parallel layers come first, whose pool may exist beside an eager
    microbatch; smaller models have them in any case. Then train.logits becomes save or recompute.
    With precision.guard=fallback or operand all of this has to hold for all layers in BF16, so that
    the choices do not decide what the guard may do.
    """
    fallen = range(1, config.model.layers + 1) if config.precision.falls_back else ()

    def fits(chosen: Config) -> bool:
        return peak_with(chosen, vocab, data_parallel, fallen) <= memory * (1 - SPARE)

    graphs = config.train.cuda_graphs == "auto" and config.cuda_graphs
    if graphs and config.parallel.tp > 1 and not fits(config):  # auto logits count as recomputed
        config = replaced(config, train={"cuda_graphs": False})
    if config.train.logits != "auto":
        return config
    saving = replaced(config, train={"logits": "save"})
    return saving if fits(saving) else replaced(config, train={"logits": "recompute"})
