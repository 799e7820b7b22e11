"""What a transformer layer computes and keeps in FP8 (COAT, arXiv 2410.19313, section 5).

    recipe       norm inputs, gate | up     linear inputs        q, k, v, o of attention
    fp8-linear   BF16                       FP8, kept            BF16
    coat         FP8, 1 x 16                made again           BF16
    coat-lean    FP8, 1 x 16                made again           FP8, 1 x 16

All GEMMs of a layer take FP8 operands: E4M3 in forward, and in backward E5M2 gradients against
E4M3. All scales are powers of two (scaling.py): one a row for the operands of forward, one a tensor
for those of backward, one byte a group for what is kept. They are those of the current values, as
in COAT. With `precision.scaling=delayed` those of gradients, and no others, are fixed before a step
by the amaxes of earlier ones (delayed.py): finding them takes passes of its own. Not here, as it is
nothing that a layer chooses: who trains gives layers their scales (coatlm.model.scales).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from coatlm.config import Precision
from coatlm.fp8.formats import E5M2, FORMATS, Fp8Format

Gemm = Literal["forward", "dgrad", "wgrad"]


@dataclass(frozen=True)
class FlowRecipe:
    """The choices of one layer."""

    group: int  # elements a scale of kept norm inputs and gate | up; 0 keeps them in BF16
    attention_group: int  # the same of q, k, v and the attention output
    keep_linear_inputs: bool  # else norm and SwiGLU outputs are made again from their kept inputs
    grad_fmt: Fp8Format = E5M2  # of gradients that enter a GEMM
    fast: frozenset[Gemm] = frozenset({"forward", "dgrad", "wgrad"})  # fast accumulation
    keep_weights: bool = False  # FP8 weights live for a step instead of one use


FLOW_RECIPES = {
    "fp8-linear": FlowRecipe(group=0, attention_group=0, keep_linear_inputs=True),
    "coat": FlowRecipe(group=16, attention_group=0, keep_linear_inputs=False),
    "coat-lean": FlowRecipe(group=16, attention_group=16, keep_linear_inputs=False),
}


def recipe_of(precision: Precision) -> FlowRecipe:
    """What the section `precision` of a run asks of its FP8 layers."""
    recipe, size = FLOW_RECIPES[precision.recipe], precision.group_size
    if size is not None:  # of what is kept in groups
        recipe = replace(
            recipe,
            group=size if recipe.group else 0,
            attention_group=size if recipe.attention_group else 0,
        )
    keep = precision.keep_linear_inputs
    return replace(
        recipe,
        keep_linear_inputs=recipe.keep_linear_inputs if keep is None else keep,
        grad_fmt=FORMATS[precision.grad_format],
        fast=frozenset(precision.fast_accumulation),
        keep_weights=precision.keep_weights,
    )
