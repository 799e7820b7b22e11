"""Bytes that a rank sends over its tensor- and context-parallel groups in a step, in closed form.

    step = microbatches (embedding + sum over layers (forward + backward) + output) + once per step

The bytes are those that each of R ranks sends with bandwidth-optimal algorithms, as in
`collectives.Comm`: n (R - 1) / R for an all-gather or reduce-scatter of n bytes in total, and twice
that for an all-reduce. Below, x is the residual stream of a microbatch on a context-parallel rank:
T tokens of h elements in the model's dtype.

    sequence parallelism     forward                            backward
    embedding, first stage   reduce-scatter x                   all-gather x
    layer                    2 all-gathers of inputs,           2 all-gathers of inputs, 2 of
                             2 reduce-scatters of x             gradients, 2 reduce-scatters of x
    output, last stage       all-gather x                       reduce-scatter x
    loss, last stage         all-reduce 3 T fp32

With parallel.tp_comm_reduce=fp8 the reduce-scatters of FP8 layers are all-to-alls of codes with
their scales (`fp8.payload`), one per chunk in forward and one in backward.
Without sequence parallelism there are no all-gathers, and sums are all-reduces. `layer_gathers` has
the format of a layer's all-gathers. recompute=full adds a layer's forward to its backward. Once per
step the gradients of replicated weights are all-reduced, because each rank computes them from its
own tokens or heads. Context parallelism exchanges queries, keys, values and the output of each
layer's attention by all-to-all in forward, and again if attention is recomputed, and their
gradients in backward. With parallel.cp_comm=all_gather it all-gathers keys and values instead, and
reduce-scatters their gradients. With p2p, rank r of R sends its keys and values to the r smaller
ranks, and half of them to the larger ones: in forward, when attention is recomputed, and in
backward, where it also sends gradients of half of their keys and values to the smaller ranks, and
of all to the larger ones. With parallel.cp_comm_kv=fp8 the keys and values of layers that save them
in FP8 are sent as codes with their scales, 1 + 1 / G bytes per element for blocks of G; their
gradients, like queries and outputs, are sent as with bf16.

TransformerEngine's layers all-gather FP8 codes under its FP8 recipes; the all-reduces of their
amaxes, some bytes per layer, are not counted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from coatlm.config import Config
from coatlm.config.operands import TENSOR
from coatlm.fp8.formats import E4M3
from coatlm.fp8.payload_layout import Layout
from coatlm.fp8.qtensor import Granularity
from coatlm.model.accounting import key_size, query_size
from coatlm.model.layer_memory import weight_dtype
from coatlm.model.memory import bf16_share, microbatch_tokens
from coatlm.parallel.collectives import Traffic
from coatlm.parallel.finalize_grads import TensorParallelSums

CODES = torch.uint8
SCALES = torch.float32
MAIN_GRADS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float32}  # as summed
AMAX = torch.int32  # an fp32 amax is all-reduced as its bits


@dataclass(frozen=True)
class OperandGather:
    """What an all-gather of one GEMM operand [T, h] over the tokens sends."""

    dtype: torch.dtype | None  # of the elements; None: the model's
    scales: Granularity | None = None  # of the fp32 scales that travel with the elements
    amaxes: int = 0  # all-reduces of one number, to share a scale among ranks


@dataclass(frozen=True)
class LayerGathers:
    """The operands that a layer all-gathers under sequence parallelism, each for two linears."""

    inputs: OperandGather  # of column-parallel linears, in forward
    again: OperandGather  # the same, recomputed or saved, in backward
    gradients: OperandGather  # of row-parallel linears' outputs, in backward


UNQUANTIZED = OperandGather(None)
TENSOR_WISE = OperandGather(CODES)
PLAIN = LayerGathers(UNQUANTIZED, UNQUANTIZED, UNQUANTIZED)
GATHERS = {  # precision.recipe, but for the FP8 flow -> what its layers all-gather
    "fp32": PLAIN,
    "bf16": PLAIN,
    "te-delayed": LayerGathers(TENSOR_WISE, TENSOR_WISE, TENSOR_WISE),
    "te-current": LayerGathers(TENSOR_WISE, TENSOR_WISE, TENSOR_WISE),
    "te-blockwise": LayerGathers(TENSOR_WISE, TENSOR_WISE, TENSOR_WISE),
}


def layer_gathers(config: Config, *, current: bool) -> LayerGathers:
    """What layers of `precision.recipe` all-gather; those of `precision.bf16_layers` are PLAIN.

    `current`: gradients have current, not delayed scaling.
    """
    if not config.precision.flow:
        return GATHERS[config.precision.recipe]
    recipe = config.precision.flow_recipe()
    granularity = recipe.forward.activation.granularity
    whole = granularity == TENSOR
    scales = None if whole else granularity
    inputs = OperandGather(CODES, scales, amaxes=int(whole))
    again = UNQUANTIZED
    if recipe.wgrad.activation.scaling == "forward":
        again = TENSOR_WISE
    elif recipe.saved.linear_input:
        again = OperandGather(CODES, scales)
    tensor_wise = recipe.tensor_wise_gradients
    gradients = OperandGather(CODES, amaxes=int(current)) if tensor_wise else UNQUANTIZED
    return LayerGathers(inputs, again, gradients)


def kv_block_size(config: Config) -> int | None:
    """Elements per scale of the keys and values that FP8 layers send to context-parallel ranks.

    None if they send them in the model's dtype.
    """
    if config.parallel.cp_comm_kv == "bf16" or not config.precision.flow:
        return None
    saved = config.precision.flow_recipe().saved.k
    return None if saved is None else saved.granularity.columns


def step_traffic(
    config: Config,
    *,
    stage: int,
    microbatches: int,
    cp_rank: int | None = None,
    calibrating: bool = False,
    fallen: Collection[int] = (),
    once: TensorParallelSums,
) -> Traffic:
    """What a rank of pipeline stage `stage` sends in a step, counted as "tp" and "cp".

    `cp_rank`: the context-parallel rank, or None for the last one, which sends the most.
    `calibrating`: delayed scaling has no history yet, so gradients have current scaling. `fallen`:
    layers, numbered from 1, that fell back to BF16. `once`: the sums over the tensor-parallel group
    after the last microbatch.
    """
    traffic = Traffic()
    if config.parallel.tp > 1:
        _Sender(config, traffic, "tp", microbatches).tensor_parallel(stage, calibrating, fallen)
        _Sender(config, traffic, "tp", 1).sums(once)
    if config.parallel.cp > 1:
        rank = config.parallel.cp - 1 if cp_rank is None else cp_rank
        _Sender(config, traffic, "cp", microbatches).context_parallel(stage, rank, fallen)
    return traffic


class _Sender:
    """Adds to `traffic` what a rank sends over one process group, "tp" or "cp", `times` times."""

    def __init__(self, config: Config, traffic: Traffic, what: str, times: int) -> None:
        p = config.parallel
        self.config, self.traffic, self.what, self.times = config, traffic, what, times
        self.ranks = p.tp if what == "tp" else p.cp
        self.tokens, self.dtype = microbatch_tokens(config), weight_dtype(config)

    def tensor_parallel(self, stage: int, calibrating: bool, fallen: Collection[int]) -> None:
        """Count a microbatch over the tensor-parallel group."""
        c = self.config
        p, m = c.parallel, c.model
        layers = m.layers // p.pp
        plain = round(layers * bf16_share(c, stage, fallen))
        forwards = 2 if c.train.recompute == "full" else 1
        self._sum(2 * plain * (forwards + 1))
        self._sum_in_chunks(2 * (layers - plain) * forwards, p.tp_chunks)
        self._sum_in_chunks(2 * (layers - plain), 1)
        for end in (0, p.pp - 1):
            if stage == end:
                self._sum(1)
                self._gather(UNQUANTIZED, 1)
        if stage == p.pp - 1:
            self._all_reduce(self.tokens, torch.float32)
            self._all_reduce(2 * self.tokens, torch.float32)
        current = c.precision.scaling == "current" or calibrating
        for gathers, count in ((layer_gathers(c, current=current), layers - plain), (PLAIN, plain)):
            self._gather(gathers.inputs, 2 * count * forwards)
            self._gather(gathers.again, 2 * count)
            self._gather(gathers.gradients, 2 * count)

    def sums(self, once: TensorParallelSums) -> None:
        """Count the sums over the tensor-parallel group after the last microbatch of a step."""
        self._all_reduce(once.gradients, MAIN_GRADS[self.config.parallel.main_grads])
        self._all_reduce(once.mus, torch.int64)
        self._all_reduce(once.mus, torch.int32)

    def context_parallel(self, stage: int, rank: int, fallen: Collection[int]) -> None:
        """Count what `rank` sends of a microbatch over the context-parallel group."""
        c, p = self.config, self.config.parallel
        layers, forwards = c.model.layers // p.pp, 1 if c.train.recompute == "none" else 2
        keys, exact = self.tokens * key_size(c.model) // p.tp, layers
        each = [(keys, self.dtype)]  # how a layer sends the keys of the rank
        if (columns := kv_block_size(c)) is not None:
            exact = round(layers * bf16_share(c, stage, fallen))
            each.append((keys + keys // columns, CODES))
        for (elements, dtype), count in zip(each, (exact, layers - exact), strict=False):
            if c.context_comm == "p2p":
                # in halves of keys or values: what a pass sends
                self._send(elements * (forwards + 1) * (p.cp - 1 + rank), dtype, count)
            else:
                gathered = 1 if c.context_comm == "a2a" else p.cp
                self._move(elements * gathered, dtype, 2 * forwards * count)
        if c.context_comm == "p2p":
            self._send(keys * (2 * (p.cp - 1) - rank), self.dtype, layers)
        elif c.context_comm == "a2a":
            self._move(keys, self.dtype, 2 * layers)
            queries = self.tokens * query_size(c.model) // p.tp
            self._move(queries, self.dtype, 2 * (forwards + 1) * layers)
        else:
            self._move(keys * p.cp, self.dtype, 2 * layers)

    def _sum(self, count: int) -> None:
        """Count sums of x over the ranks: reduce-scatters under sequence parallelism."""
        x = self.tokens * self.config.model.hidden
        if self.config.parallel.sequence_parallel:
            self._move(x, self.dtype, count)
        else:
            self._all_reduce(x, self.dtype, count)

    def _sum_in_chunks(self, count: int, chunks: int) -> None:
        """Count such sums of FP8 layers, each in `chunks` chunks of columns."""
        if self.config.parallel.tp_comm_reduce == "bf16":
            self._sum(count)
            return
        own = self.tokens * self.config.model.hidden // (self.ranks * chunks)
        self._move(self.ranks * Layout(own, E4M3, scaled=True).nbytes, CODES, count * chunks)

    def _gather(self, operand: OperandGather, count: int) -> None:
        """Count all-gathers of an operand as wide as x, if sequence parallelism is on."""
        dtype = operand.dtype or self.dtype
        if not self.config.parallel.sequence_parallel:
            return
        shape = torch.Size((self.tokens, self.config.model.hidden))
        self._move(shape.numel(), dtype, count)
        if operand.scales is not None:
            self._move(torch.Size(operand.scales.scale_shape(shape)).numel(), SCALES, count)
        self._all_reduce(operand.amaxes, AMAX, count)

    def _move(self, elements: int, dtype: torch.dtype, count: int) -> None:
        """Count all-gathers, reduce-scatters or all-to-alls of `elements` in total."""
        self._add(elements, dtype, count, 1)

    def _send(self, elements: int, dtype: torch.dtype, count: int) -> None:
        """Count `elements` that are sent from one rank to others."""
        if count:
            self.traffic.add(self.what, dtype, elements * dtype.itemsize * count * self.times)

    def _all_reduce(self, elements: int, dtype: torch.dtype, count: int = 1) -> None:
        self._add(elements, dtype, count, 2)

    def _add(self, elements: int, dtype: torch.dtype, count: int, legs: int) -> None:
        each = round(legs * elements * dtype.itemsize * (self.ranks - 1) / self.ranks)
        if each and count:
            self.traffic.add(self.what, dtype, each * count * self.times)
