"""Post-training casts to FP8, as in the study of the FP8 formats (arXiv 2209.05433, section 4.3).

Values are rounded to FP8 and brought back, X' = S cast(X / S), and the model computes with X' in
the wide type, so what is seen is the effect of the format and not of an FP8 GEMM's accumulation.

    scales      S of a weight                  S of an activation
    tensor      amax / MAX of the matrix       amax / MAX of the batch
    channel     amax / MAX of an output row    amax / MAX of a token (of q, k, v: and a head)
    biasN       2^(B - N), a fixed exponent bias N for everything; B is the format's own, 7 or 15

    what        is cast
    gemm        weights and inputs of every linear, the output layer among them, and q, k, v. The
                probabilities that multiply v are not: they exist only inside the attention kernel
    residual    those, and both inputs of every residual addition

With tied embeddings the output layer's weight is the embedding, which is then cast as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from coatlm.fp8.formats import FORMATS, Fp8Format, cast
from coatlm.fp8.qtensor import ROW, TENSOR
from coatlm.fp8.quantize import quantize
from coatlm.model.builder import Llama

What = Literal["gemm", "residual"]
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
NORMS = ("input_layernorm", "pre_mlp_layernorm")  # what reads the residual stream
BRANCHES = ("self_attention", "mlp")  # what is added to it
BIAS = re.compile(r"bias(-?\d{1,2})")  # 2^(B - N) is then a normal number of fp32
SCALES = "tensor, channel, or biasN with a whole number N from -99 to 99"


@dataclass(frozen=True)
class Cast:
    """One way of casting. Raises ValueError for names that are not in the tables above."""

    format: str  # e4m3 | e5m2
    scales: str = "tensor"
    what: What = "gemm"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format={self.format!r}: one of {', '.join(FORMATS)}")
        if self.scales not in ("tensor", "channel") and not BIAS.fullmatch(self.scales):
            raise ValueError(f"scales={self.scales!r}: {SCALES}")
        if self.what not in get_args(What):
            raise ValueError(f"what={self.what!r}: one of {', '.join(get_args(What))}")

    @property
    def name(self) -> str:
        return f"{self.format} {self.scales} {self.what}"

    def __call__(self, x: Tensor) -> Tensor:
        """X' in the type of x; a row is an output channel or a token."""
        fmt = FORMATS[self.format]
        fixed = BIAS.fullmatch(self.scales)
        if fixed:
            return _with_bias(x, fmt, int(fixed[1]))
        granularity = ROW if self.scales == "channel" else TENSOR
        return quantize(x, fmt=fmt, granularity=granularity).dequantize(x.dtype)


@contextmanager
def casting(model: Llama, how: Cast) -> Iterator[None]:
    """Cast the weights, and the activations of every forward pass inside. Weights stay cast."""
    hooks: list[Any] = []
    try:
        with torch.no_grad():
            for weight in _weights(model):
                weight.copy_(how(weight))
        for name, module in model.named_modules():
            hooks += _hooks(name.rpartition(".")[2], module, how)
        final = model.decoder.final_layernorm
        assert final is not None  # evaluation has one stage
        hooks.append(final.register_forward_hook(lambda _, __, out: how(out)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _weights(model: Llama) -> Iterator[Tensor]:
    """The weights of the linears, the output layer's last."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LINEARS:
            yield module.weight
    tied = model.share_embeddings_and_output_weights
    yield model.shared_embedding_or_output_weight() if tied else model.output_layer.weight


def _hooks(kind: str, module: nn.Module, how: Cast) -> list[Any]:
    if kind in LINEARS:
        return [module.register_forward_pre_hook(_cast_inputs(how, 1))]
    if kind == "core_attention":
        return [module.register_forward_pre_hook(_cast_inputs(how, 3))]
    if how.what != "residual":
        return []
    if kind in NORMS:
        return [module.register_forward_pre_hook(_cast_stream(how))]
    if kind in BRANCHES:
        return [module.register_forward_hook(_cast_output(how))]
    return []


def _cast_inputs(how: Cast, count: int) -> Callable[..., Any]:
    """The first `count` arguments."""

    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*(how(x) for x in inputs[:count]), *inputs[count:])

    return hook


def _cast_stream(how: Cast) -> Callable[..., None]:
    """In place: the layer adds to the very tensor that it normalises."""

    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        inputs[0].copy_(how(inputs[0]))

    return hook


def _cast_output(how: Cast) -> Callable[..., Any]:
    def hook(_: nn.Module, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return how(output[0]), output[1]

    return hook


def _with_bias(x: Tensor, fmt: Fp8Format, bias: int) -> Tensor:
    """A power of two as scale, which changes no significand."""
    scale = 2.0 ** (fmt.bias - bias)
    return (cast(x.float() / scale, fmt).float() * scale).to(x.dtype)
