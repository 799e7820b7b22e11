"""The named recipes: the formats in which an optimizer stores m, v and the weight's extra bits.

A recipe is a row of `RECIPES`, whose names are the values of the key `optim.recipe`; the formats
are those of `moment_formats` and `weight_formats`. A new combination of formats is one more row,
its name in `coatlm.config.optim.OptimRecipe`, and the bytes per parameter in
tests/optim/test_recipes.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coatlm.fp8.expand import M_E4M3, V_E4M3, Expansion
from coatlm.fp8.formats import E4M3
from coatlm.optim.moment_formats import (
    Bf16,
    Bf16Pair,
    ExpandedFp8,
    Fp32,
    MomentFormat,
    TensorScaled,
)
from coatlm.optim.weight_formats import (
    Direct,
    Kahan,
    Master,
    Pair,
    Remainder,
    TensorScaledMaster,
    WeightFormat,
)

MASTER, M, V = "fp32_param", "exp_avg", "exp_avg_sq"  # names in checkpoints, as megatron-core's
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Recipe:
    """The storage format of each optimizer state."""

    m: MomentFormat
    v: MomentFormat
    weight: WeightFormat
    weights: tuple[torch.dtype, ...] = (BF16,)  # dtypes that the model's weights may have
    strict: bool = False  # round gradients, and every result computed from them, to BF16

    @property
    def tensor_scaled(self) -> bool:
        """Whether a state has one scale per parameter tensor, as FP8-LM's have."""
        return any(part.kind == "scaled" for part in (self.m, self.v, self.weight))

    def at_least(self, m: Tensor, v: Tensor, weight: Tensor) -> Recipe:
        """The recipe whose tensor-wise scales are at least these, each fp32 []."""
        scales = {"m": m, "v": v, "weight": weight}
        found = {name: getattr(self, name) for name in scales}
        changed = {
            name: each.at_least(scales[name])
            for name, each in found.items()
            if each.kind == "scaled"
        }
        return replace(self, **changed)

    @property
    def expanded(self) -> bool:
        """Whether a moment is in COAT's expanded FP8."""
        return any(moment.kind == "expanded" for moment in (self.m, self.v))

    def scaled_format(self, name: str) -> ExpandedFp8 | TensorScaled:
        """The format of a state with scales: only there it matters which elements form a block."""
        weight = self.weight
        master = weight.scaled if isinstance(weight, TensorScaledMaster) else weight
        found = master if name == MASTER else self.moments[name]
        assert isinstance(found, ExpandedFp8 | TensorScaled), name
        return found

    @property
    def moments(self) -> dict[str, MomentFormat]:
        return {M: self.m, V: self.v}


def _recipes() -> dict[str, Recipe]:
    fp32, bf16, pair = Fp32(), Bf16(), Bf16Pair()
    m, v = ExpandedFp8(M_E4M3), ExpandedFp8(V_E4M3)
    plain = ExpandedFp8(Expansion(E4M3, signed=True, k16_min=16, k16_max=16))
    fp8, fp16 = (TensorScaled(t) for t in (torch.float8_e4m3fn, torch.float16))
    master, both = Master(), (BF16, FP32)
    return {
        "adamw-fp32": Recipe(fp32, fp32, master, both),  # Collage's option D
        "adamw-bf16": Recipe(bf16, bf16, Direct(), strict=True),  # A
        "adamw-bf16-fp32state": Recipe(fp32, fp32, Direct()),  # D without master weights
        "kahan": Recipe(bf16, bf16, Kahan(), strict=True),
        "collage-light": Recipe(bf16, bf16, Pair(), strict=True),  # B
        "collage-plus": Recipe(bf16, pair, Pair(), strict=True),  # C
        "fp8lm": Recipe(fp8, fp16, TensorScaledMaster()),  # FP8-LM; its ablation has the next three
        "fp8lm-bf16": Recipe(fp8, fp16, Direct()),  # a BF16 master without a scale
        "fp8lm-fp8-master": Recipe(fp8, fp16, TensorScaledMaster(fp8)),
        "fp8lm-fp8-v": Recipe(fp8, fp8, TensorScaledMaster()),
        "coat": Recipe(m, v, master, both),
        "coat-lean": Recipe(m, v, Remainder(16)),
        "coat-24": Recipe(m, v, Remainder(8)),
        "fp8-plain": Recipe(plain, plain, master, both),  # COAT without dynamic range expansion
    }


RECIPES = _recipes()


def find_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe of that name, or the given one. Raises ValueError that lists the names."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r}: one of {', '.join(RECIPES)}")
    return RECIPES[recipe]
