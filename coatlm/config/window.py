"""The configuration section model.window."""

from __future__ import annotations

from pydantic import StrictInt, model_validator

from coatlm.config.fields import Real, Section, number


class Window(Section):
    """Sliding-window attention: a token attends to itself and to the size - 1 tokens before it."""

    size: StrictInt = number(4096, "tokens", ge=1, le=2**30)
    """Tokens that a token attends to in a layer with a window, itself included."""

    period: StrictInt | None = number(None, "layers", ge=2, le=10_000)
    """Every period-th layer attends to all tokens before it, as in Gemma 2 (2), Gemma 3 (6) and
    OLMo-3 (4); null means that no layer does for this reason."""

    full_layers: StrictInt = number(0, "layers", ge=0, le=10_000)
    """The first layers, which attend to all tokens before them, as Qwen2's max_window_layers."""

    rope_theta: Real | None = number(None, gt=0.0)
    """The base of the rotary frequencies in layers with a window, where model.rope_scaling does not
    apply then, as in Gemma 3 and OLMo-3; null means the frequencies of the other layers."""

    @model_validator(mode="after")
    def _one_rule(self) -> Window:
        if self.period is not None and self.full_layers:
            raise ValueError(f"period={self.period} needs full_layers=0, not {self.full_layers}")
        return self

    def covers(self, layer: int) -> bool:
        """Whether a layer, numbered from 0, has the window."""
        full = self.period is not None and (layer + 1) % self.period == 0
        return layer >= self.full_layers and not full
