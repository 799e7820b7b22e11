"""The configuration section log."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool, StrictInt, model_validator

from coatlm.config.fields import FOREVER, YEAR, Real, Section, Text, number

StepNumber = Annotated[StrictInt, Field(ge=1, le=FOREVER)]


class Log(Section):
    """What is logged, and how often."""

    every: StrictInt = number(10, "steps", ge=1, le=FOREVER)
    """Steps between lines on the console and in metrics.jsonl; the first and the last step are
    logged too."""

    states_every: StrictInt = number(0, "steps", ge=0, le=FOREVER)
    """Steps between records in states.jsonl of the rounding errors of stored weights and moments; 0
    means never."""

    numerics_every: StrictInt = number(0, "steps", ge=0, le=FOREVER)
    """Steps between records in numerics.jsonl of the quantization errors in each layer of the FP8
    flow and, under any recipe, of the kurtosis of the residual stream and the size of the logits; 0
    means never."""

    tensorboard: StrictBool = False
    """Write TensorBoard events to tb/ in run.dir."""

    wandb_project: Text | None = None
    """The project in Weights & Biases to log to; null means none."""

    profile: tuple[StepNumber, StepNumber] | None = None
    """The steps that torch's profiler traces on rank 0, as [first, last] with last at most
    train.steps; null means none."""

    hang_timeout: Real = number(0.0, "seconds", ge=0.0, le=YEAR)
    """Seconds without a finished step or evaluation batch after which the run writes the stacks of
    all threads and ends with exit code 5; 0 means off."""

    straggler_factor: Real = number(2.0, ge=0.0)
    """Warn of the slowest rank when its time per step, without waiting for other ranks, exceeds
    this factor times the median over ranks; 0 means off."""

    @model_validator(mode="after")
    def _window(self) -> Log:
        if self.profile and self.profile[0] > self.profile[1]:
            raise ValueError(f"profile={list(self.profile)}: [first, last] with 1 <= first <= last")
        return self
