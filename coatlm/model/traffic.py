"""Bytes that a rank sends over its tensor- and context-parallel groups in a step, in closed form.

    step = microbatches (embedding + sum over layers (forward + backward) + output) + once per step

Counted is what a rank of R sends with the algorithms that move least, as `collectives.Comm` counts:
n (R - 1) / R bytes of an all-gather or reduce-scatter of n bytes in all, twice that of an
all-reduce. Below, x is the residual stream of a microbatch on a context-parallel rank: T tokens of
h elements in the model's dtype.

    tensor parallel          sequence parallel                    all-reduces without it
    embedding, first stage   reduce-scatter x | all-gather x      x | nothing
    BF16 layer               2 (all-gather + reduce-scatter) x    2 x | 2 x
                             | 2 (2 all-gathers + reduce-scatter) x
    FP8 flow                 2 (gather operand, reduce-scatter x)  2 x | 2 x
                             | 2 (2 gather operand, reduce-scatter x)
    output, last stage       all-gather x | reduce-scatter x      nothing | x
    loss, last stage         all-reduces of 3 T fp32 | nothing    the same

Left of the bar is forward, right of it backward; recompute=full adds a layer's forward to its
backward. What a gather of operands carries is a row of `GATHERS`. Once per step the gradients of
weights that every rank holds, but with part of the tokens or heads, are summed. Context parallelism
gathers keys and values of all tokens in forward, and again where attention is recomputed, and
reduce-scatters their gradients.

TransformerEngine's layers gather FP8 codes under its FP8 recipes; the amaxes that its ranks agree
on, some bytes per layer, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coatlm.config import Config
from coatlm.config.recipes import TENSOR
from coatlm.model.accounting import key_size
from coatlm.model.memory import bf16_share, microbatch_tokens, weight_dtype
from coatlm.parallel.collectives import Traffic
from coatlm.parallel.finalize_grads import TensorParallelSums

CODES = torch.uint8
SCALES = torch.float32
MAIN_GRADS = {"fp32": torch.float32, "bf16": torch.bfloat16}
AMAX = torch.int32  # the bits of the largest magnitude, on which ranks agree


@dataclass(frozen=True)
class OperandGather:
    """What the all-gather of one GEMM operand [T, h] over the tokens carries."""

    dtype: torch.dtype | None  # of the elements; None: the model's
    scales: int = 0  # fp32 scales per token
    amaxes: int = 0  # all-reduces of one number, for a scale that the ranks agree on


@dataclass(frozen=True)
class LayerGathers:
    """The operands that a layer gathers under sequence parallelism, each for two of its linears."""

    inputs: OperandGather  # of column-parallel linears, in forward
    again: OperandGather  # the same, recomputed or saved, in backward
    gradients: OperandGather  # of row-parallel linears' outputs, in backward


UNQUANTISED = OperandGather(None)
TENSOR_WISE = OperandGather(CODES)
PLAIN = LayerGathers(UNQUANTISED, UNQUANTISED, UNQUANTISED)
GATHERS = {  # precision.recipe -> what its layers gather; precision.bf16_layers are PLAIN
    "fp32": PLAIN,
    "bf16": PLAIN,
    "te-delayed": LayerGathers(TENSOR_WISE, TENSOR_WISE, TENSOR_WISE),
    "te-current": LayerGathers(TENSOR_WISE, TENSOR_WISE, TENSOR_WISE),
    "te-blockwise": LayerGathers(TENSOR_WISE, TENSOR_WISE, TENSOR_WISE),
}


def layer_gathers(config: Config, *, current: bool) -> LayerGathers:
    """What the layers of `precision.recipe` gather, those of `precision.bf16_layers` apart.

    `current`: gradients are scaled by their own amax.
    """
    if not config.precision.flow:
        return GATHERS[config.precision.recipe]
    recipe, hidden = config.precision.flow_recipe(), config.model.hidden
    columns = recipe.forward.activation.granularity.columns
    whole = recipe.forward.activation.granularity == TENSOR
    scales = 0 if whole else hidden // columns if columns else 1
    inputs = OperandGather(CODES, scales, amaxes=int(whole))
    again = UNQUANTISED
    if recipe.wgrad.activation.scaling == "forward":
        again = TENSOR_WISE
    elif recipe.saved.linear_input:
        again = OperandGather(CODES, scales)
    tensor_wise = recipe.tensor_wise_gradients
    gradients = OperandGather(CODES, amaxes=int(current)) if tensor_wise else UNQUANTISED
    return LayerGathers(inputs, again, gradients)


def step_traffic(
    config: Config,
    *,
    stage: int,
    microbatches: int,
    calibrating: bool = False,
    once: TensorParallelSums,
) -> Traffic:
    """What a rank of pipeline stage `stage` sends in a step, as "tp" and "cp".

    `calibrating`: delayed scales have no history yet, so gradients have current scales.
    """
    traffic = Traffic()
    if config.parallel.tp > 1:
        _Sender(config, traffic, "tp", microbatches).tensor_parallel(stage, calibrating, once)
    if config.parallel.cp > 1:
        _Sender(config, traffic, "cp", microbatches).context_parallel()
    return traffic


class _Sender:
    """Collectives of one group, added up in `traffic`."""

    def __init__(self, config: Config, traffic: Traffic, what: str, microbatches: int) -> None:
        p = config.parallel
        self.config, self.traffic, self.what = config, traffic, what
        self.microbatches = microbatches
        self.ranks = p.tp if what == "tp" else p.cp
        self.tokens, self.dtype = microbatch_tokens(config), weight_dtype(config)

    def tensor_parallel(self, stage: int, calibrating: bool, once: TensorParallelSums) -> None:
        c = self.config
        p, m = c.parallel, c.model
        layers = m.layers // p.pp
        plain = round(layers * bf16_share(c, stage))
        forwards = 2 if c.train.recompute == "full" else 1
        self._sum(2 * layers * (forwards + 1))
        for end in (0, p.pp - 1):
            if stage == end:
                self._sum(1)
                self._gather(UNQUANTISED, 1)
        if stage == p.pp - 1:
            self._all_reduce(self.tokens, torch.float32)
            self._all_reduce(2 * self.tokens, torch.float32)
        current = c.precision.scaling == "current" or calibrating
        for gathers, count in ((layer_gathers(c, current=current), layers - plain), (PLAIN, plain)):
            self._gather(gathers.inputs, 2 * count * forwards)
            self._gather(gathers.again, 2 * count)
            self._gather(gathers.gradients, 2 * count)
        self.microbatches = 1
        self._all_reduce(once.gradients, MAIN_GRADS[p.main_grads])
        self._all_reduce(once.mus, torch.int64)
        self._all_reduce(once.mus, torch.int32)

    def context_parallel(self) -> None:
        c, p = self.config, self.config.parallel
        keys = self.tokens * p.cp * key_size(c.model) // p.tp
        forwards = 1 if c.train.recompute == "none" else 2
        self._move(keys, self.dtype, 2 * (forwards + 1) * (c.model.layers // p.pp))

    def _sum(self, count: int) -> None:
        """Sum x over the ranks; under sequence parallelism each gets the sum of its tokens."""
        x = self.tokens * self.config.model.hidden
        if self.config.parallel.sequence_parallel:
            self._move(x, self.dtype, count)
        else:
            self._all_reduce(x, self.dtype, count)

    def _gather(self, operand: OperandGather, count: int) -> None:
        """Under sequence parallelism, all-gather an operand as wide as x."""
        dtype = operand.dtype or self.dtype
        if not self.config.parallel.sequence_parallel:
            return
        self._move(self.tokens * self.config.model.hidden, dtype, count)
        self._move(self.tokens * operand.scales, SCALES, count)
        self._all_reduce(operand.amaxes, AMAX, count)

    def _move(self, elements: int, dtype: torch.dtype, count: int) -> None:
        """All-gathers or reduce-scatters of `elements` in all, `count` per microbatch."""
        self._add(elements, dtype, count, 1)

    def _all_reduce(self, elements: int, dtype: torch.dtype, count: int = 1) -> None:
        self._add(elements, dtype, count, 2)

    def _add(self, elements: int, dtype: torch.dtype, count: int, times: int) -> None:
        each = round(times * elements * dtype.itemsize * (self.ranks - 1) / self.ranks)
        if each and count:
            self.traffic.add(self.what, dtype, each * count * self.microbatches)
