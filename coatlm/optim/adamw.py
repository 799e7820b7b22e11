"""The one AdamW: its arithmetic is fixed, how m, v and the weight are stored is a recipe.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2         g = clip * gradient
    w = w - lr (m / c1) / (sqrt(v / c2) + eps) - lr wd w         c = 1 - b^t

Decoupled weight decay: Loshchilov & Hutter 2019 (arXiv 1711.05101), algorithm 2. The moments that
a step uses are those it has computed, not yet rounded to storage, except where a format computes
in BF16 throughout (Collage, arXiv 2405.03637).

The optimizer sees flat shards. Whatever decides about a step is decided on the device: a step with
a clip coefficient that is not finite changes nothing, and the host never waits to find out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coatlm.optim.formats import (
    GROUP,
    Direct,
    Master,
    MomentFormat,
    Plain,
    StrictBf16,
    WeightFormat,
)

CHUNK = 1 << 22  # elements the reference updates at a time: bounds its fp32 temporaries


@dataclass(frozen=True)
class Shard:
    """A flat run of weights that this rank updates.

    n is a multiple of 128; parameters inside start on multiples of 128, gaps are zero padding.
    """

    weight: Tensor  # [n] a view into the parameter buffer, bf16 or fp32; updated in place
    grad: Tensor  # [n] reduced gradients, fp32 or bf16; only read
    decay: tuple[tuple[int, int], ...] = ()  # [start, end) elements that get weight decay
    params: tuple[tuple[int, int], ...] = ()  # [start, end) elements of each parameter's part


@dataclass(frozen=True)
class Recipe:
    """Where each tensor lives. `weights`: the dtypes that the model's weights may have."""

    m: MomentFormat
    v: MomentFormat
    weight: WeightFormat
    weights: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)

    @property
    def named(self) -> tuple[tuple[str, MomentFormat], ...]:
        """Names of the moments in checkpoints, as megatron-core has them."""
        return ("exp_avg", self.m), ("exp_avg_sq", self.v)


MASTER = "fp32_param"  # name of the weight's state in checkpoints
RECIPES: dict[str, Recipe] = {
    "adamw-fp32": Recipe(Plain(torch.float32), Plain(torch.float32), Master()),
    "adamw-bf16": Recipe(StrictBf16(), StrictBf16(), Direct(), weights=(torch.bfloat16,)),
}


def check_recipe(
    recipe: str,
    shards: Sequence[Shard],
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Raise ValueError, with the field and what is allowed, where AdamW could not run."""
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r}: one of {', '.join(RECIPES)}")
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas={betas}: each is in [0, 1)")
    if not eps > 0.0:
        raise ValueError(f"eps={eps}: must be > 0, padding would become 0 / 0")
    if not weight_decay >= 0.0:
        raise ValueError(f"weight_decay={weight_decay}: must be >= 0")
    allowed = RECIPES[recipe].weights
    for i, shard in enumerate(shards):
        n = shard.weight.numel()
        if n % GROUP or shard.weight.shape != (n,) or shard.grad.shape != (n,):
            shapes = f"{tuple(shard.weight.shape)}, {tuple(shard.grad.shape)}"
            raise ValueError(f"shards[{i}]: {shapes} must be equal, flat, a multiple of {GROUP}")
        if shard.weight.dtype not in allowed:
            names = " or ".join(str(dtype) for dtype in allowed)
            raise ValueError(f"shards[{i}].weight is {shard.weight.dtype}; {recipe} needs {names}")
        if shard.grad.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"shards[{i}].grad is {shard.grad.dtype}: bfloat16 or float32")
        for start, end in (*shard.decay, *shard.params):
            if start % GROUP or not 0 <= start <= end <= n:
                raise ValueError(
                    f"shards[{i}]: range [{start}, {end}) must start on a multiple of {GROUP} "
                    f"and lie in [0, {n})"
                )


class AdamW:
    """Updates shards in place. `states[i]` are the flat tensors that shard i keeps."""

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        recipe: str,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        check_recipe(recipe, shards, betas=betas, eps=eps, weight_decay=weight_decay)
        self.shards = tuple(shards)
        self.recipe = RECIPES[recipe]
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        device = shards[0].weight.device if shards else torch.device("cpu")
        self.step_count = torch.zeros((), dtype=torch.int64, device=device)
        self.states: list[dict[str, Tensor]] = [self._empty_states(shard) for shard in shards]
        self._decayed = [_decayed_groups(shard) for shard in shards]

    @torch.no_grad()
    def step(self, *, lr: float, clip_coefficient: Tensor | None = None) -> None:
        """One update with learning rate `lr` >= 0 of gradients times `clip_coefficient`.

        Nothing changes, not even `step_count`, where the coefficient is NaN or Inf.
        """
        if not lr >= 0.0:
            raise ValueError(f"lr={lr}: must be >= 0")
        clip = self.step_count.new_ones((), dtype=torch.float32)
        clip = clip if clip_coefficient is None else clip_coefficient
        go = torch.isfinite(clip)
        self.step_count += go
        corrections = tuple((1.0 - beta**self.step_count.double()).float() for beta in self.betas)
        for i, shard in enumerate(self.shards):
            for at in _chunks(shard):
                self._update(i, at, go, clip, lr, corrections)

    def reload_from_weights(self) -> None:
        """Make what is kept beside each weight anew, after the weights alone were loaded."""
        for shard, states in zip(self.shards, self.states, strict=True):
            for suffix, tensor in self.recipe.weight.split(shard.weight).items():
                states[MASTER + suffix].copy_(tensor)

    def state_bytes(self) -> int:
        """Bytes of all states, the weights themselves not counted."""
        return sum(t.numel() * t.element_size() for states in self.states for t in states.values())

    def decode(self, i: int, name: str) -> Tensor:
        """fp32[n] of "fp32_param" (the weight as precisely as it is known), or a moment."""
        if name == MASTER:
            return self.recipe.weight.decode(
                self.shards[i].weight, _strip(self.states[i], MASTER)
            ).float()
        formats = dict(self.recipe.named)
        if name not in formats:
            raise ValueError(f"name={name!r}: one of {MASTER}, {', '.join(formats)}")
        return formats[name].decode(_strip(self.states[i], name))

    def _empty_states(self, shard: Shard) -> dict[str, Tensor]:
        states = _prefixed(MASTER, self.recipe.weight.split(shard.weight))
        for name, moment in self.recipe.named:
            states |= _prefixed(name, moment.zeros(shard.weight.numel(), shard.weight.device))
        return states

    def _update(
        self,
        i: int,
        at: slice,
        go: Tensor,
        clip: Tensor,
        lr: float,
        corrections: tuple[Tensor, ...],
    ) -> None:
        """The definition of a step, for the elements `at` of shard i."""
        shard, recipe, n = self.shards[i], self.recipe, self.shards[i].weight.numel()
        old = {name: _cut(tensor, at, n) for name, tensor in self.states[i].items()}
        weight = shard.weight[at]
        g = shard.grad[at].float() * clip
        m, new_m = recipe.m.ema(_strip(old, "exp_avg"), g, self.betas[0])
        v, new_v = recipe.v.ema(_strip(old, "exp_avg_sq"), g * g, self.betas[1])
        w = recipe.weight.decode(weight, _strip(old, MASTER))
        decay = _cut(self._decayed[i], at, n).repeat_interleave(GROUP) * (lr * self.weight_decay)
        step = (m / corrections[0]) / ((v / corrections[1]).sqrt() + self.eps)
        new_weight, new_w = recipe.weight.add(
            weight, _strip(old, MASTER), -lr * step - decay * w
        )
        new = _prefixed("exp_avg", new_m) | _prefixed("exp_avg_sq", new_v)
        for name, tensor in (new | _prefixed(MASTER, new_w)).items():
            old[name].copy_(torch.where(go, tensor, old[name]))
        weight.copy_(torch.where(go, new_weight, weight))


def bytes_per_parameter(recipe: str, weight_dtype: torch.dtype = torch.bfloat16) -> float:
    """Bytes a parameter of all states, the weight and its gradient not counted."""
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r}: one of {', '.join(RECIPES)}")
    weight = torch.zeros(GROUP, dtype=weight_dtype)
    shard = Shard(weight, weight)
    optimizer = AdamW([shard], recipe=recipe, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    return optimizer.state_bytes() / GROUP


def _decayed_groups(shard: Shard) -> Tensor:
    """fp32[n / 128]: 1 for groups that decay. Rounding an end up reaches only zero padding."""
    decayed = torch.zeros(shard.weight.numel() // GROUP)
    for start, end in shard.decay:
        decayed[start // GROUP : -(-end // GROUP)] = 1.0
    return decayed.to(shard.weight.device)


def _chunks(shard: Shard) -> Iterator[slice]:
    n = shard.weight.numel()
    return (slice(start, min(start + CHUNK, n)) for start in range(0, n, CHUNK))


def _cut(tensor: Tensor, at: slice, n: int) -> Tensor:
    """The part of a flat state that belongs to elements `at` of n."""
    each = n // tensor.numel()
    return tensor[at.start // each : at.stop // each]


def _strip(states: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The state called `name`, with suffixes for keys."""
    parts = {key: key.removeprefix(name) for key in states if key.startswith(name)}
    return {suffix: states[key] for key, suffix in parts.items() if suffix[:1] in ("", ".")}


def _prefixed(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name + suffix: tensor for suffix, tensor in state.items()}
