"""The configuration section optim."""

from __future__ import annotations

from typing import Literal

from pydantic import StrictInt, model_validator

from coatlm.config.fields import FOREVER, Real, Section, number

OptimRecipe = Literal[  # how weights and moments are stored: coatlm.optim.recipes.RECIPES
    "adamw-fp32",
    "adamw-bf16",
    "adamw-bf16-fp32state",
    "kahan",
    "collage-light",
    "collage-plus",
    "fp8lm",
    "fp8lm-bf16",
    "fp8lm-fp8-master",
    "fp8lm-fp8-v",
    "coat",
    "coat-lean",
    "coat-24",
    "fp8-plain",
]
FP32_RECIPES = ("adamw-fp32", "coat", "fp8-plain")  # optim.recipe that can update fp32 weights


class Optim(Section):
    """AdamW, the formats of its states, and its learning-rate schedule."""

    recipe: OptimRecipe = "adamw-fp32"
    """How weights and moments are stored. Bytes per parameter with BF16 weights: adamw-fp32 14,
    adamw-bf16 6, adamw-bf16-fp32state 10, kahan 8, collage-light 8, collage-plus 10, fp8lm 7.1,
    fp8lm-bf16 5.1, fp8lm-fp8-master 6.1, fp8lm-fp8-v 6.1, coat 8.1, coat-lean 6.1, coat-24 5.1,
    fp8-plain 8.1."""

    offload: Literal["none", "states"] = "none"
    """What of the optimizer is in host memory between updates: nothing, or its states, which pass
    through the GPU in pieces during the update. Results have the same bits."""

    lr: Real = number(1e-3, gt=0.0)
    """The peak learning rate, reached at the end of the warmup."""

    min_lr: Real = number(1e-4, ge=0.0)
    """The learning rate at the end of the schedule, at most lr."""

    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """How the learning rate falls from lr to min_lr between the warmup and the end of the run; wsd
    stays at lr until its last decay_steps, constant stays at lr."""

    warmup_steps: StrictInt = number(20, "steps", ge=0, le=FOREVER)
    """Steps over which the learning rate rises linearly from 0 to lr."""

    decay_steps: StrictInt | None = number(None, "steps", ge=1, le=FOREVER)
    """Steps of the final decay of schedule=wsd, the only schedule that has it; null means a tenth
    of train.steps."""

    weight_decay: Real = number(0.1, ge=0.0)
    """The coefficient of decoupled weight decay for matrices; norms and biases are not decayed."""

    betas: tuple[Real, Real] = (0.9, 0.95)
    """Decay rates of the first and second moment, as [beta1, beta2]; each is in [0, 1)."""

    eps: Real = number(1e-8, gt=0.0)
    """The epsilon that AdamW adds to the denominator of its update, a normal number in fp32."""

    clip_grad: Real = number(1.0, ge=0.0)
    """The global L2 norm to which gradients are clipped; 0 means off."""

    @model_validator(mode="after")
    def _ranges(self) -> Optim:
        if not all(0.0 <= b < 1.0 for b in self.betas):
            raise ValueError(f"betas={list(self.betas)}: each is in [0, 1)")
        if self.eps < 2.0**-126:
            raise ValueError(f"eps={self.eps}: must be at least 1.18e-38, a normal number of fp32")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr}")
        if self.decay_steps is not None and self.schedule != "wsd":
            raise ValueError(f"decay_steps={self.decay_steps} needs schedule=wsd")
        return self
