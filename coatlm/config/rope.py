"""The configuration section model.rope_scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, model_validator

from coatlm.config.fields import Real, Section, number

SCALINGS: dict[str, dict[str, Any]] = {  # type of rope_scaling -> its keys and what null means
    "llama3": {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "linear": {},
    "yarn": {
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": None,
        "truncate": True,
    },
    "longrope": {
        "original_max_position_embeddings": 4096,
        "short_factor": None,
        "long_factor": None,
        "attention_factor": None,
    },
}
Factor = Annotated[Real, Field(gt=0.0)]


class RopeScaling(Section):
    """Scaling of the rotary frequencies for long contexts, under Hugging Face's names.

    A key that another type uses must be null.
    """

    type: Literal["llama3", "linear", "yarn", "longrope"] = "llama3"
    """How frequencies are scaled: llama3 divides low frequencies by factor, linear all of them;
    yarn divides low ones and also multiplies the rotated queries and keys; longrope divides each
    frequency by a factor of its own, and multiplies as well."""

    factor: Real = number(8.0, ge=1.0)
    """The extended context length divided by the original one."""

    low_freq_factor: Real | None = number(None, gt=0.0)
    """With llama3, frequencies that complete fewer rotations than this in the original context are
    divided by factor; null means 1."""

    high_freq_factor: Real | None = number(None, gt=0.0)
    """With llama3, frequencies that complete more rotations than this in the original context are
    unchanged; null means 4."""

    original_max_position_embeddings: StrictInt | None = number(None, "tokens", ge=1, le=2**30)
    """The context length of the original pretraining, for llama3, yarn and longrope; null means
    8192, for longrope 4096."""

    beta_fast: Real | None = number(None, gt=0.0)
    """With yarn, frequencies that complete more rotations than this in the original context are
    unchanged; null means 32."""

    beta_slow: Real | None = number(None, gt=0.0)
    """With yarn, frequencies that complete fewer rotations than this in the original context are
    divided by factor; null means 1."""

    attention_factor: Real | None = number(None, gt=0.0)
    """What rotated queries and keys are multiplied by: with yarn null means 0.1 ln(factor) + 1,
    with longrope sqrt(1 + ln(factor) / ln(original_max_position_embeddings))."""

    truncate: StrictBool | None = None
    """With yarn, round the ends of the range of frequency indices in which scaled and unscaled
    frequencies are blended, the lower end down and the upper end up; null means true."""

    short_factor: tuple[Factor, ...] | None = None
    """With longrope, what each frequency is divided by if data.seq_len is at most
    original_max_position_embeddings: one number per frequency."""

    long_factor: tuple[Factor, ...] | None = None
    """With longrope, what each frequency is divided by in longer sequences."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        kind = data.get("type", "llama3")
        own = SCALINGS.get(kind, {}) if isinstance(kind, str) else {}
        return {**data, **{k: v for k, v in own.items() if data.get(k) is None}}

    @model_validator(mode="after")
    def _band(self) -> RopeScaling:
        foreign = set(RopeScaling.model_fields) - {"type", "factor", *SCALINGS[self.type]}
        for name in sorted(foreign):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)} does not apply to type={self.type}")
        if self.type == "longrope" and None in (self.short_factor, self.long_factor):
            raise ValueError("type=longrope needs short_factor and long_factor")
        if self.type == "longrope" and self.original_max_position_embeddings == 1:
            raise ValueError("original_max_position_embeddings=1: longrope needs at least 2")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            below, above = getattr(self, low), getattr(self, high)
            if below is not None and below >= above:
                raise ValueError(f"{low}={below} must be below {high}={above}")
        return self

    def parameters(self) -> dict[str, Any]:
        """The type and its keys, as `coatlm.kernels.rope_scaling` takes them."""
        return {name: getattr(self, name) for name in ("type", "factor", *SCALINGS[self.type])}
