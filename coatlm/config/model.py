"""The configuration sections model and precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, model_validator

from coatlm.config.fields import FOREVER, Real, Section, number
from coatlm.config.operands import TENSOR, Operand
from coatlm.config.recipes import (
    FAST,
    PRECISION_RECIPES,
    RECIPES,
    Bf16Name,
    FlowRecipe,
    GemmName,
    with_bf16,
    with_block_size,
)
from coatlm.config.rope import RopeScaling
from coatlm.config.window import Window

if TYPE_CHECKING:
    PrecisionRecipe = str
else:  # type checkers accept no computed literal
    PrecisionRecipe = Literal[PRECISION_RECIPES]
MOST_LAYERS, MOST_HIDDEN = 10_000, 2**20
Layers = Annotated[StrictInt, Field(le=MOST_LAYERS)]


class Model(Section):
    """A Llama-family transformer: RMSNorm, SwiGLU, rotary embeddings, grouped-query attention."""

    spec: Literal["local", "te"] = "local"
    """The implementation of the layers: coatlm's own, or TransformerEngine's."""

    layers: StrictInt = number(4, "layers", ge=1, le=MOST_LAYERS)
    """Transformer layers of the whole model."""

    hidden: StrictInt = number(256, "elements", ge=1, le=MOST_HIDDEN)
    """The width of the residual stream."""

    heads: StrictInt = number(8, "heads", ge=1, le=2**16)
    """Query heads per layer."""

    kv_heads: StrictInt | None = number(None, "heads", ge=1, le=2**16)
    """Key and value heads per layer, each shared by heads / kv_heads queries; null means heads."""

    head_dim: StrictInt | None = number(None, "elements", ge=2, le=2**16)
    """The width of a head, an even number; null means hidden / heads."""

    ffn: StrictInt = number(704, "elements", ge=1, le=2**22)
    """The width of the MLP between its gate and up projections and its down projection."""

    vocab: StrictInt | None = number(None, "tokens", ge=1, le=2**24)
    """Tokens in the vocabulary, the rows of the embedding; null means the tokenizer's vocabulary,
    padded to a multiple of 128."""

    rope_theta: Real = number(10000.0, gt=0.0)
    """The base of the rotary frequencies."""

    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies for long contexts; null means none."""

    partial_rotary_factor: Real = number(1.0, gt=0.0, le=1.0)
    """The share of a head's elements that rotary embeddings rotate, as in Phi-4-mini: of the pairs
    (i, i + head_dim / 2) the first ones."""

    window: Window | None = None
    """Sliding-window attention; null means that every token attends to all tokens before it."""

    attention_softcap: Real | None = number(None, gt=0.0)
    """The cap c of c tanh(score / c), which replaces the scores of attention, as in Gemma 2; null
    means none, as FP8 layers need."""

    norm_eps: Real = number(1e-5, gt=0.0)
    """The epsilon that RMSNorm adds to the mean square before the square root."""

    tie_embeddings: StrictBool = False
    """Share one weight between the embedding and the output layer."""

    qkv_bias: StrictBool = False
    """Add a bias to the query, key and value projections, as Qwen2 does."""

    qk_norm: StrictBool = False
    """Apply RMSNorm to the queries and keys, as Qwen3 and OLMo-2 do."""

    qk_norm_width: Literal["head", "all"] = "head"
    """The elements that qk_norm normalizes at once: those of a head, as in Qwen3, or those of all
    heads, as in OLMo-2, which needs parallel.tp=1."""

    norm_after: StrictBool = False
    """Normalize the outputs of attention and MLP instead of their inputs, as OLMo-2 does; layers
    compute in BF16 or fp32 then."""

    sandwich_norm: StrictBool = False
    """Normalize both the inputs and the outputs of attention and MLP, as Gemma 2 and 3 do; not in
    FP8 layers."""

    zero_centered_norm: StrictBool = False
    """Multiply by 1 + weight in every RMSNorm, as Gemma does; not in FP8 layers."""

    activation: Literal["silu", "gelu_tanh"] = "silu"
    """The function of the MLP's gate: SiLU, or GELU with its tanh approximation, as in Gemma; only
    silu in FP8 layers."""

    scale_embeddings: StrictBool = False
    """Multiply the output of the embedding by sqrt(hidden), rounded to its dtype, as in Gemma."""

    embedding_multiplier: Real = number(1.0, gt=0.0)
    """What the output of the embedding is multiplied by, as in Granite."""

    residual_multiplier: Real = number(1.0, gt=0.0)
    """What the outputs of attention and MLP are multiplied by before they are added to the residual
    stream, as in Granite; only 1 in FP8 layers."""

    attention_multiplier: Real | None = number(None, gt=0.0)
    """What the scores of attention are multiplied by, as in Granite; null means
    1 / sqrt(head_dim)."""

    logits_scaling: Real = number(1.0, gt=0.0)
    """What the input of the output layer, and so the logits, are divided by, as in Granite."""

    logits_softcap: Real | None = number(None, gt=0.0)
    """The cap c of c tanh(logit / c), which replaces the logits, as in Gemma 2; null means none."""

    init_std: Real = number(0.02, gt=0.0)
    """Standard deviation of initial weights; projections into the residual stream are divided by
    sqrt(2 * layers)."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        data = dict(data)
        heads, hidden = data.get("heads", 8), data.get("hidden", 256)
        if data.get("kv_heads") is None:
            data["kv_heads"] = heads
        known = all(type(n) is int and 0 < n <= MOST_HIDDEN for n in (heads, hidden))
        if data.get("head_dim") is None and known:
            if hidden % heads:
                raise ValueError(f"hidden={hidden} is not a multiple of heads={heads}")
            data["head_dim"] = hidden // heads
        return data

    @model_validator(mode="after")
    def _sizes(self) -> Model:
        if self.heads % self.key_value_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.size_per_head % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings rotate pairs")
        if self.qk_norm_width == "all" and not self.qk_norm:
            raise ValueError("qk_norm_width=all needs qk_norm=true")
        if self.norm_after and self.sandwich_norm:
            raise ValueError("norm_after=true with sandwich_norm=true: at most one of them")
        if self.scale_embeddings and self.embedding_multiplier != 1.0:
            raise ValueError(
                f"scale_embeddings=true with embedding_multiplier={self.embedding_multiplier}: "
                "must be 1"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"partial_rotary_factor={self.partial_rotary_factor} of head_dim={self.head_dim} "
                f"are {self.rotary_dim} elements: must be an even number above 0"
            )
        for name in ("period", "full_layers"):
            given = 0 if self.window is None else getattr(self.window, name) or 0
            if given > self.layers - (name == "full_layers"):
                raise ValueError(f"window.{name}={given} has no effect with layers={self.layers}")
        if (scaling := self.rope_scaling) is None:
            return self
        if scaling.type == "yarn" and self.rope_theta <= 1.0:
            raise ValueError(f"rope_theta={self.rope_theta}: yarn needs one above 1")
        for name in ("short_factor", "long_factor"):
            factors = getattr(scaling, name)
            if factors is not None and 2 * len(factors) != self.rotary_dim:
                raise ValueError(
                    f"rope_scaling.{name} has {len(factors)} numbers: must have one for each of "
                    f"the {self.rotary_dim // 2} frequencies"
                )
        return self

    @property
    def rotary_dim(self) -> int:
        """The elements of a head that rotary embeddings rotate."""
        return int(self.size_per_head * self.partial_rotary_factor)

    @property
    def output_number(self) -> int:
        """The number of the output layer, which follows that of the last layer."""
        return self.layers + 1

    def window_of(self, layer: int) -> int | None:
        """The tokens that a token of a layer, numbered from 0, attends to; None means all."""
        return self.window.size if self.window and self.window.covers(layer) else None

    @property
    def key_value_heads(self) -> int:
        assert self.kv_heads is not None  # filled in by _derive
        return self.kv_heads

    @property
    def size_per_head(self) -> int:
        assert self.head_dim is not None  # filled in by _derive
        return self.head_dim

    @property
    def fused_heads(self) -> bool:
        """Whether fused kernels of attention take heads of this size: multiples of 8, to 256."""
        return self.size_per_head % 8 == 0 and self.size_per_head <= 256


class Precision(Section):
    """The number formats of GEMMs and of tensors saved for backward.

    All keys but recipe and output_layer apply only to coatlm's FP8 recipes: fp8-linear and those
    listed after it.
    """

    recipe: PrecisionRecipe = "bf16"
    """The number formats in which layers compute and save tensors for backward. te-* are
    TransformerEngine's FP8 recipes. fp8-linear saves linear inputs in FP8; coat saves norm inputs
    and gate and up in FP8 and recomputes linear inputs; coat-lean saves queries, keys, values and
    the attention output in FP8 too; coat-paper is COAT as published, with tensor-wise scaling of
    GEMM operands. coat-int8, coat-rowgrad, rowwise and fp8-block save what coat saves and differ in
    their GEMM operands: coat-int8 has rotated 8-bit integers in forward, coat-rowgrad has gradients
    in e4m3 with a scale per row, rowwise has such scales for all operands, fp8-block one per 128
    elements of a row and one per 128 x 128 elements of a weight. coat-lean-int8 is coat-lean with
    the forward of coat-int8."""

    group_size: Literal[16, 32, 64, 128] | None = None
    """Elements per scale (block size) of tensors saved for backward in FP8; null means 16."""

    grad_format: Literal["e5m2", "e4m3"] | None = None
    """The FP8 format of gradients that enter a GEMM: e5m2 has more range, e4m3 more precision. null
    means the recipe's: e4m3 in coat-rowgrad, rowwise and fp8-block, e5m2 in the others."""

    grad_rounding: Literal["nearest", "stochastic"] = "nearest"
    """How gradients that enter a GEMM are rounded to codes: to the nearest, or up or down at random
    so that the expected code is the gradient, with twice the mean square error. stochastic depends
    on run.seed and on the layout, and needs a recipe whose gradients have one power-of-two scale
    per tensor. This is of layers: in an FP8 output layer rounding is always stochastic."""

    scaling: Literal["current", "delayed"] = "current"
    """How gradients that enter a GEMM are scaled: by their own amax, or by the largest amax of the
    last 16 steps, which saves a pass over them and needs a recipe with tensor-wise gradients."""

    delayed_margin: StrictInt | None = number(None, "binades", ge=0, le=15)
    """With scaling=delayed, the scale leaves room for gradients 2^margin times the largest amax: a
    larger margin saturates fewer gradients that grow, a smaller one loses fewer that are small.
    null means 3 in e5m2 and 1 in e4m3."""

    fast_accumulation: tuple[GemmName, ...] = FAST
    """The GEMMs that accumulate with about 14 bits in the tensor cores; the others promote partial
    sums to fp32 every 128 elements of the summed axis, which is slower and more precise. wgrad sums
    over all tokens of a microbatch: with fast accumulation its gradients come out short, by up to
    42 % (docs/results/layer.md). Of the output layer's GEMMs, only forward may accumulate fast.
    The INT8 sums of coat-int8's forward are exact, whether or not forward is listed."""

    keep_linear_inputs: StrictBool | None = None
    """Save the FP8 inputs of linear layers for backward instead of recomputing them; null means
    the recipe's choice."""

    keep_weights: StrictBool = False
    """Cache the FP8 weights for all microbatches of a step: 2 more bytes per weight, and one cast
    per step instead of one per use."""

    tune_gemms: StrictBool = True
    """Time cuBLASLt's algorithms at the first start and use the fastest; later starts find them in
    data.cache_dir. false uses the first that its heuristic suggests."""

    tune_attention: StrictBool = True
    """Time the backends of causal attention on a GPU at the first start; later starts find the
    choice in data.cache_dir. cuDNN is used unless FlashAttention-2 or torch's memory-efficient
    kernels are 3 % faster and repeat their bits. false uses cuDNN wherever it accepts the shape.
    Documents, windows, soft caps and fp32 have backends of their own."""

    bf16_layers: tuple[Layers, Layers] = (0, 0)
    """How many of the first and of the last layers compute in BF16, as [first, last]; together at
    most model.layers."""

    bf16_operands: tuple[Bf16Name, ...] = ()
    """Operands and saved tensors that stay in BF16, to measure what their quantization costs. Their
    GEMMs run in BF16 with fp32 sums, on the dequantized codes of the other operand; FP8 codes are
    computed as well, so this saves neither time nor memory. GEMM operands need parallel.tp=1."""

    output_layer: Literal["bf16", "fp8-gradients", "fp8", "int8"] = "bf16"
    """The operands of the output layer's GEMMs, under any recipe but fp32. fp8-gradients computes
    logits in BF16, and the gradients of hidden states and weights from operands in e4m3; the
    gradients of logits, but for labels', and the weight are rounded stochastically. fp8 computes
    logits from operands in FP8 as well, int8 from rotated 8-bit integers, as coat-int8 does in
    layers. The loss is computed from the logits as with bf16.
    model.hidden must be a multiple of 16."""

    guard: Literal["off", "warn", "fallback", "operand"] = "off"
    """What happens when FP8 hurts a layer: warn logs the layer and its tensor. fallback also lets
    the layer compute in BF16 from the next step on, and operand only that tensor: where a GEMM
    takes it, or as it is saved for backward. Both hold for runs that resume from the checkpoints
    with the same guard. With parallel.tp > 1, coat-paper and coat-int8, operand lets the whole
    layer compute in BF16 for an operand of a GEMM; with parallel.cp_comm_kv=fp8 for keys and
    values. docs/concepts.md has the limits."""

    guard_every: StrictInt = number(500, "steps", ge=1, le=FOREVER)
    """Steps between the measurements of guard, which acts if two in a row find the same tensor."""

    @property
    def flow(self) -> bool:
        """Whether `recipe` is one of coatlm's FP8 recipes, whose layers are the FP8 flow."""
        return self.recipe in RECIPES

    @property
    def falls_back(self) -> bool:
        """Whether `guard` lets what FP8 hurts be in BF16."""
        return self.guard in ("fallback", "operand")

    def flow_recipe(self) -> FlowRecipe:
        """The recipe's entry of RECIPES, changed by the keys of this section. Requires `flow`."""
        return _flow_recipe(self)


@cache
def _flow_recipe(precision: Precision) -> FlowRecipe:
    """`Precision.flow_recipe`, which the search of layouts asks for thousands of times."""
    recipe, inputs = RECIPES[precision.recipe], precision.keep_linear_inputs
    saved, dgrad, wgrad = recipe.saved, recipe.dgrad, recipe.wgrad
    if precision.group_size is not None:
        saved = with_block_size(saved, precision.group_size)
    if inputs is not None:
        saved = replace(saved, linear_input=inputs, projection_input=inputs)
    gradients: list[Operand] = []
    for gradient in (dgrad.gradient, wgrad.gradient):
        if precision.grad_format is not None:
            gradient = replace(gradient, fmt=precision.grad_format)
        if precision.scaling == "delayed" and gradient.granularity == TENSOR:
            gradient = replace(gradient, scaling="delayed", power_of_two=True)
        gradients.append(replace(gradient, rounding=precision.grad_rounding))
    changed = replace(
        recipe,
        saved=saved,
        dgrad=replace(dgrad, gradient=gradients[0]),
        wgrad=replace(wgrad, gradient=gradients[1]),
        fast=frozenset(precision.fast_accumulation),
        keep_weights=precision.keep_weights,
    )
    return with_bf16(changed, precision.bf16_operands) if precision.bf16_operands else changed
