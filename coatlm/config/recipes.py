"""The FP8 recipes of layers, as data: formats of GEMM operands and of tensors saved for backward.

A layer has four linears, each with three GEMMs (x input, W weight, y output; T tokens):

    forward   y = x W^T         sums over the input features
    dgrad     dx = dy W         sums over the output features
    wgrad     dW = dy^T x       sums over the tokens

Hopper's FP8 tensor cores need the summed axis of both operands contiguous (last), so a tensor that
enters two GEMMs is needed both as it is and transposed: x and x^T, W and W^T, dy and dy^T. An
`Operand` (operands.py) is the 8-bit format of one of these six. Its granularity refers to the
layout that the GEMM reads: ROW for x^T [features, T] is a scale per feature.

RECIPES is the only list of recipes. A new entry that combines existing operands needs no other
change: the values of `precision.recipe`, validation, the memory planner and the benchmarks read
RECIPES. This module does not import torch; coatlm.fp8.operand quantizes tensors to operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from coatlm.config.operands import ROW, TENSOR, Operand, block

GemmName = Literal["forward", "dgrad", "wgrad"]
GEMMS: tuple[GemmName, ...] = get_args(GemmName)
FAST: tuple[GemmName, ...] = ("forward", "dgrad")  # wgrad's sums, over tokens, come out short
OperandName = Literal[
    "forward.activation",
    "forward.weight",
    "dgrad.gradient",
    "dgrad.weight",
    "wgrad.gradient",
    "wgrad.activation",
]
AttentionName = Literal["q", "k", "v", "o"]  # what attention saves: its inputs and its output
ATTENTION: tuple[AttentionName, ...] = get_args(AttentionName)
IN_BLOCKS = ("norm_input", "gate_up", *ATTENTION)  # of SavedTensors, in blocks or BF16
SavedName = Literal["saved.norm_input", "saved.gate_up", "saved.q", "saved.k", "saved.v", "saved.o"]
Bf16Name = Literal[OperandName, SavedName]  # what can stay in BF16


@dataclass(frozen=True)
class ForwardGemm:
    """y = x W^T: x [T, in] and W [out, in]."""

    activation: Operand
    weight: Operand


@dataclass(frozen=True)
class DgradGemm:
    """dx = dy W: dy [T, out] and W^T [in, out]."""

    gradient: Operand
    weight: Operand


@dataclass(frozen=True)
class WgradGemm:
    """dW = dy^T x: dy^T [out, T] and x^T [in, T]."""

    gradient: Operand
    activation: Operand


@dataclass(frozen=True)
class SavedTensors:
    """The formats of the tensors that a layer saves for backward; None means BF16."""

    norm_input: Operand | None  # the residual stream before both norms
    gate_up: Operand | None  # the input of SwiGLU
    linear_input: bool  # save the FP8 outputs of norms and SwiGLU; else backward recomputes them
    projection_input: bool  # save the FP8 attention output too; else it is quantized again
    q: Operand | None = None  # queries after RoPE, along head_dim, as the next three
    k: Operand | None = None  # keys after RoPE
    v: Operand | None = None  # values
    o: Operand | None = None  # the attention output

    @property
    def attention(self) -> dict[AttentionName, Operand]:
        """The format of each tensor of attention that is saved in FP8."""
        return {name: getattr(self, name) for name in ATTENTION if getattr(self, name)}


@dataclass(frozen=True)
class FlowRecipe:
    """The FP8 formats of a layer's GEMMs, and of what the layer saves for backward."""

    forward: ForwardGemm
    dgrad: DgradGemm
    wgrad: WgradGemm
    saved: SavedTensors
    fast: frozenset[GemmName] = frozenset(FAST)  # fast accumulation
    keep_weights: bool = False  # cache FP8 weights for a step instead of one use
    bf16: frozenset[OperandName] = frozenset()  # operands that their GEMM takes in BF16

    def __post_init__(self) -> None:
        one, other = self.dgrad.gradient, self.wgrad.gradient
        if one != other and TENSOR in (one.granularity, other.granularity):
            raise ValueError("dgrad.gradient, wgrad.gradient: must be the same if per tensor")
        for name, operand in (("forward.activation", self.forward.activation), *self._saved()):
            if operand is not None and operand.scaling != "current":
                raise ValueError(f"{name}: scaling={operand.scaling}; only current is possible")
        nearest = (self.forward.activation, self.forward.weight, self.dgrad.weight)
        if any(o.rounding != "nearest" for o in (*nearest, self.wgrad.activation)):
            raise ValueError("rounding=stochastic is for gradients alone")
        self._check_int8()
        for name, operand in self._saved():
            if operand is not None and (operand.granularity.rows, operand.fmt) != (1, "e4m3"):
                raise ValueError(f"{name}: {operand}; must be e4m3 in blocks of one row")
            if operand is not None and operand.granularity == ROW:
                raise ValueError(f"{name}: {operand}; must be block(1, G), not a whole row")
        formats = set(self.saved.attention.values())
        if len(formats) > 1 or not all(operand.power_of_two for operand in formats):
            raise ValueError("saved.q, k, v, o: one format with power-of-two scales, or None each")
        if self.bf16 and not self.exact_in_bf16:
            raise ValueError("bf16: the scales of all operands must be powers of two")
        if "wgrad.activation" in self.bf16 and (
            self.saved.linear_input or self.saved.projection_input
        ):
            raise ValueError("bf16: wgrad.activation; then the codes of linear inputs have no use")

    def _check_int8(self) -> None:
        """Raise ValueError for INT8 outside of forward, whose codes backward cannot use."""
        forward = self.forward.activation.fmt, self.forward.weight.fmt
        others = self.operands[2:]
        if "int8" in forward and forward[0] != forward[1]:
            raise ValueError("forward: both operands are int8, or none")
        if any(operand.fmt == "int8" for operand in others):
            raise ValueError("int8: only for the operands of forward")
        if "int8" in forward and (self.saved.linear_input or self.saved.projection_input):
            raise ValueError("saved.linear_input: int8 codes of linear inputs have no use in wgrad")

    def _saved(self) -> list[tuple[str, Operand | None]]:
        return [(f"saved.{name}", getattr(self.saved, name)) for name in IN_BLOCKS]

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The six operands of the three GEMMs."""
        return (
            *(self.forward.activation, self.forward.weight),
            *(self.dgrad.gradient, self.dgrad.weight),
            *(self.wgrad.gradient, self.wgrad.activation),
        )

    @property
    def rotated(self) -> bool:
        """Whether forward rotates the rows of its operands (fp8/rotation.py), for INT8."""
        return self.forward.activation.fmt == "int8"

    @property
    def exact_in_bf16(self) -> bool:
        """Whether BF16 represents all dequantized operands exactly: their scales are 2^n."""
        return all(operand.power_of_two for operand in self.operands)

    @property
    def tensor_wise_gradients(self) -> bool:
        """Whether gradients have tensor-wise scales; dgrad and wgrad then take the same codes."""
        return self.dgrad.gradient.granularity == TENSOR

    @property
    def fused_gradients(self) -> bool:
        """Whether gradients have a tensor-wise power-of-two scale, as the fused kernels need."""
        return self.tensor_wise_gradients and self.dgrad.gradient.power_of_two

    @property
    def stochastic(self) -> bool:
        """Whether the codes of gradients are rounded up or down at random."""
        return self.dgrad.gradient.rounding == "stochastic"

    @property
    def summed_multiple(self) -> int:
        """The length of each GEMM's summed axis must be a multiple of this; at least 16 for FP8."""
        return max(16, *(operand.granularity.columns or 1 for operand in self.operands))

    @property
    def gathers_codes(self) -> bool:
        """Whether weights can be all-gathered as FP8 without changing a code of a GEMM.

        The received codes must determine those of forward, and those of forward must determine
        those of dgrad. coatlm/parallel/fp8_gather.py shows it for powers of two per row, and for
        amax / MAX per tensor.
        """
        codes = self.bf16.isdisjoint(("forward.weight", "dgrad.weight"))
        cast = self.forward.weight in (ROWS, EXACT)
        return codes and cast and self.dgrad.weight.scaling == "forward"


ROWS = Operand("e4m3", ROW)
OF_FORWARD = Operand("e4m3", TENSOR, "forward")
GRADIENT = Operand("e5m2", TENSOR)
BLOCKS_16 = Operand("e4m3", block(1, 16))

# COAT (arXiv 2410.19313, section 5), but with power-of-two scales, which are per row in forward.
COAT = FlowRecipe(
    forward=ForwardGemm(activation=ROWS, weight=ROWS),
    dgrad=DgradGemm(gradient=GRADIENT, weight=OF_FORWARD),
    wgrad=WgradGemm(gradient=GRADIENT, activation=OF_FORWARD),
    saved=SavedTensors(
        norm_input=BLOCKS_16, gate_up=BLOCKS_16, linear_input=False, projection_input=False
    ),
)

# COAT as published: every scale is amax / MAX in fp32, every GEMM operand is scaled tensor-wise,
# and linear inputs are saved, except the attention output, which attention saves already.
EXACT = Operand("e4m3", TENSOR, power_of_two=False)
EXACT_OF_FORWARD = replace(EXACT, scaling="forward")
EXACT_16 = replace(BLOCKS_16, power_of_two=False)
COAT_PAPER = FlowRecipe(
    forward=ForwardGemm(activation=EXACT, weight=EXACT),
    dgrad=DgradGemm(gradient=replace(EXACT, fmt="e5m2"), weight=EXACT_OF_FORWARD),
    wgrad=WgradGemm(gradient=replace(EXACT, fmt="e5m2"), activation=EXACT_OF_FORWARD),
    saved=replace(COAT.saved, norm_input=EXACT_16, gate_up=EXACT_16, linear_input=True),
)

# COAT that saves what attention needs in FP8 too.
LEAN = replace(COAT, saved=replace(COAT.saved, q=BLOCKS_16, k=BLOCKS_16, v=BLOCKS_16, o=BLOCKS_16))

# Rotated INT8 operands in forward, whose rounding errors are about a third of those of E4M3.
ROTATED = Operand("int8", ROW, power_of_two=False)
INT8_FORWARD = ForwardGemm(activation=ROTATED, weight=ROTATED)

# Block-wise: 1 x 128 along the summed axis for activations and gradients, 128 x 128 for weights.
ALONG, SQUARE = Operand("e4m3", block(1, 128)), Operand("e4m3", block(128, 128))

RECIPES: dict[str, FlowRecipe] = {
    "fp8-linear": replace(
        COAT,
        saved=SavedTensors(norm_input=None, gate_up=None, linear_input=True, projection_input=True),
    ),
    "coat": COAT,
    "coat-lean": LEAN,
    "coat-int8": replace(COAT, forward=INT8_FORWARD),
    "coat-lean-int8": replace(LEAN, forward=INT8_FORWARD),
    "coat-rowgrad": replace(
        COAT,
        dgrad=replace(COAT.dgrad, gradient=ROWS),
        wgrad=replace(COAT.wgrad, gradient=ROWS),
    ),
    "coat-paper": COAT_PAPER,
    "rowwise": replace(
        COAT,
        dgrad=DgradGemm(gradient=ROWS, weight=ROWS),
        wgrad=WgradGemm(gradient=ROWS, activation=ROWS),
    ),
    "fp8-block": replace(
        COAT,
        forward=ForwardGemm(activation=ALONG, weight=SQUARE),
        dgrad=DgradGemm(gradient=ALONG, weight=SQUARE),
        wgrad=WgradGemm(gradient=ALONG, activation=ALONG),
    ),
}
BF16_RECIPES = ("fp32", "bf16")
TE_RECIPES = ("te-delayed", "te-current", "te-blockwise")  # TransformerEngine's
PRECISION_RECIPES = (*BF16_RECIPES, *TE_RECIPES, *RECIPES)


def fp8_weight_recipes() -> tuple[str, ...]:
    """The recipes whose weights can be all-gathered as FP8 without changing a GEMM's codes."""
    return ("te-current", *(name for name, r in RECIPES.items() if r.gathers_codes))


def with_bf16(recipe: FlowRecipe, names: Sequence[Bf16Name]) -> FlowRecipe:
    """A copy of `recipe` in which the named operands and saved tensors are BF16.

    wgrad's activation in BF16 is recomputed from what is saved, not from codes of linear inputs.
    """
    fields: dict[str, Any] = {
        name.removeprefix("saved."): None for name in names if name.startswith("saved.")
    }
    operands = frozenset(name for name in get_args(OperandName) if name in names)
    if "wgrad.activation" in operands:
        fields |= {"linear_input": False, "projection_input": False}
    return replace(recipe, saved=replace(recipe.saved, **fields), bf16=operands)


def with_block_size(saved: SavedTensors, size: int) -> SavedTensors:
    """A copy of `saved` in which every block has `size` elements."""
    held: dict[str, Any] = {name: x for name in IN_BLOCKS if (x := getattr(saved, name))}
    return replace(
        saved, **{name: replace(x, granularity=block(1, size)) for name, x in held.items()}
    )
