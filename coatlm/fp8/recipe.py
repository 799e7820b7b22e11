"""What a transformer layer computes and keeps in FP8 (COAT, arXiv 2410.19313, section 5).

    recipe       norm inputs, gate | up     linear inputs        q, k, v, o of attention
    fp8-linear   BF16                       FP8, kept            BF16
    coat         FP8, 1 x 16                made again           BF16
    coat-lean    FP8, 1 x 16                made again           FP8, 1 x 16

All GEMMs of a layer take FP8 operands: E4M3 in forward, and in backward E5M2 gradients against
E4M3. All scales are powers of two of the current values (scaling.py): one a row for the operands of
forward, one a tensor for those of backward, one byte a group for what is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

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


def flow_recipe(
    name: str,
    *,
    group: int | None = None,
    keep_linear_inputs: bool | None = None,
    grad_format: str = "e5m2",
    fast_accumulation: tuple[Gemm, ...] = ("forward", "dgrad", "wgrad"),
    keep_weights: bool = False,
) -> FlowRecipe:
    """The recipe `name` with other choices; None leaves the recipe's own.

    `group` replaces the group sizes that are not 0.
    """
    recipe = FLOW_RECIPES[name]
    if group is not None:
        recipe = replace(
            recipe,
            group=group if recipe.group else 0,
            attention_group=group if recipe.attention_group else 0,
        )
    if keep_linear_inputs is not None:
        recipe = replace(recipe, keep_linear_inputs=keep_linear_inputs)
    return replace(
        recipe,
        grad_fmt=FORMATS[grad_format],
        fast=frozenset(fast_accumulation),
        keep_weights=keep_weights,
    )
