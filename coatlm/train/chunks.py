"""The model chunks of a rank: their flat buckets, their delayed scales and their rounding noise."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from coatlm.config import Config, Parallel
from coatlm.config.operands import ROW
from coatlm.fp8.accumulate import SumNoise
from coatlm.fp8.formats import E3M4, E4M3
from coatlm.fp8.operand import format_of
from coatlm.model.builder import Llama, init_weight
from coatlm.model.coat_layer import CoatTransformerLayer, flows_of
from coatlm.model.output_gemms import Fp8Output
from coatlm.model.rounding import GradientNoise, Rounded
from coatlm.model.scales import DelayedScales
from coatlm.parallel.buckets import Cut
from coatlm.parallel.collectives import Comm, Traffic
from coatlm.parallel.exchange import Fp8Exchange, Levels
from coatlm.parallel.flat_model import FlatModel
from coatlm.parallel.groups import Groups
from coatlm.parallel.partition import largest_first
from coatlm.parallel.wire import Fp8Sum, Plain, Wire
from coatlm.platform import device

logger = logging.getLogger("coatlm")
GRAD_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}  # in transit


def make_chunks(
    config: Config,
    modules: Sequence[Llama],
    groups: Groups,
    traffic: Traffic,
    sum_noise: SumNoise | None,
    *,
    cuda_graphs: bool,
) -> list[FlatModel]:
    """Each of `modules` in flat buckets. `traffic` counts the bytes that they send.

    With `cuda_graphs` each chunk communicates on a stream of its own.
    """
    p = config.parallel
    owner = plan_owners(modules, groups) if p.partition == "whole-tensor" else None
    noises = [None] * len(modules) if sum_noise is None else [*sum_noise.noise]
    flow = config.precision.flow_recipe() if config.precision.flow else None
    return [
        FlatModel(
            module,
            group=groups.dp_cp,
            cut=Cut(
                rank=groups.dp_cp.rank(),
                ranks=groups.dp_cp.size(),
                zero=p.zero,
                grad_dtype=GRAD_DTYPES[p.main_grads],
                bucket_size=p.bucket_size,
                owner=owner,
                fp8_weights=fp8_weights(module, config),
                fp8_rows=flow is not None and flow.forward.weight.granularity == ROW,
                noise=noise,
            ),
            wire=make_wire(p, groups, traffic),
            traffic=traffic,
            overlap_grad_reduce=p.overlap_grad_reduce,
            overlap_param_gather=p.overlap_param_gather,
            update_in_backward=config.train.update == "backward",
            stream=torch.cuda.Stream() if cuda_graphs else None,
            initial=None if module.allocated else partial(init_weight, config=config),
        )
        for module, noise in zip(modules, noises, strict=True)
    ]


def sum_noise(config: Config, chunks: int, groups: Groups) -> SumNoise | None:
    """The noise of one-byte gradients in this rank's model chunks; None with other gradients."""
    if config.parallel.main_grads != "fp8":
        return None
    return SumNoise(chunks, seed=config.run.seed, rank=groups.dp_cp.rank(), device=device())


def make_wire(parallel: Parallel, groups: Groups, traffic: Traffic) -> Wire:
    """The gradient format that parallel.grad_comm names."""
    if parallel.grad_comm in GRAD_DTYPES:
        return Plain(GRAD_DTYPES[parallel.grad_comm])
    if parallel.grad_comm == "fp8-nccl":
        return Fp8Sum()
    levels = None
    if groups.node is not None and groups.nodes is not None:
        levels = Levels(Comm(groups.node, traffic, "grad"), Comm(groups.nodes, traffic, "grad"))
    fmt = E3M4 if parallel.grad_comm_format == "e3m4" else E4M3
    return Fp8Exchange(fmt, parallel.grad_comm_scale, levels=levels)


def plan_owners(modules: Sequence[nn.Module], groups: Groups) -> dict[nn.Parameter, int]:
    """The data-parallel rank that owns each parameter of this stage as a whole tensor.

    A weight that two stages share has the same owner on both. The balance is logged.
    """
    params = [p for module in modules for p in module.parameters() if p.requires_grad]
    shared = [i for i, p in enumerate(params) if getattr(p, "shared_embedding", False)]
    plan = largest_first([p.numel() for p in params], groups.dp_cp.size(), pinned=shared)
    logger.info("partition: %s", plan)
    return dict(zip(params, plan.owner, strict=True))


def fp8_weights(module: Any, config: Config) -> frozenset[nn.Parameter]:
    """The weights to be all-gathered in FP8: those of the linears of FP8 layers."""
    if config.parallel.weight_gather != "fp8":
        return frozenset()
    layers = list(module.decoder.layers)
    if config.precision.flow:  # not those of precision.bf16_layers
        layers = [layer for layer in layers if isinstance(layer, CoatTransformerLayer)]
    params = [p for layer in layers for p in layer.parameters()]
    return frozenset(p for p in params if p.requires_grad and p.dim() == 2)


def delayed_scales(
    config: Config, modules: Sequence[Llama], groups: Groups
) -> DelayedScales | None:
    """The delayed scales of this pipeline stage's FP8 layers; None with current scaling."""
    precision = config.precision
    if precision.scaling == "current":
        return None
    flows = flows_of(layer for module in modules for layer in module.decoder.layers)
    fmt = format_of(precision.flow_recipe().dgrad.gradient)
    margin = precision.delayed_margin
    return DelayedScales(flows, fmt, device=device(), margin=margin, group=groups.stage)


def gradient_noise(
    config: Config, modules: Sequence[Llama], groups: Groups
) -> GradientNoise | None:
    """The noise of stochastic rounding in this pipeline stage's layers; None without it.

    An FP8 output layer always has it, the others with precision.grad_rounding=stochastic.
    """
    layers: dict[int, Rounded] = {}
    if config.precision.grad_rounding == "stochastic":
        layers.update(flows_of(layer for module in modules for layer in module.decoder.layers))
    for module in modules:
        if module.post_process and isinstance(module.gemms, Fp8Output):
            layers[config.model.output_number] = module.gemms
    if not layers:
        return None
    rank = groups.world.rank()
    return GradientNoise(layers, seed=config.run.seed, rank=rank, device=device())
