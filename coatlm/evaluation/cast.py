"""Post-training casts to FP8, as in the study of the FP8 formats (arXiv 2209.05433, section 4.3).

Values are rounded to FP8 and converted back, X' = S cast(X / S), and the model computes with X' in
its own dtype. So the result shows the effect of the format alone, not of FP8 GEMM accumulation.

    scales      S of a weight                    S of an activation
    tensor      amax / MAX per matrix            amax / MAX per batch
    channel     amax / MAX per output channel    amax / MAX per token (q, k, v: per token and head)
    biasN       2^(B - N), a fixed exponent bias N for all; B is the bias of the format, 7 or 15

    what        tensors that are cast
    gemm        weights and inputs of every linear layer and of the output layer, and q, k, v; not
                the attention probabilities, which exist only inside the attention kernel
    residual    those of gemm, and both inputs of every residual addition

With tied embeddings the output layer's weight is the embedding, which is then cast too.
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
NORMS = ("input_layernorm", "pre_mlp_layernorm")  # modules that read the residual stream
BRANCHES = ("self_attention", "mlp")  # modules whose outputs are added to it
BIAS = re.compile(r"bias(-?\d{1,2})")  # two digits keep 2^(B - N) a normal fp32 number
SCALES = "tensor, channel, or biasN with a whole number N from -99 to 99"


@dataclass(frozen=True)
class Cast:
    """How values are cast to FP8. Raises ValueError for names that are not in the tables above."""

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
        """X' in the dtype of x; the last dimension of x is the one that a channel scale covers."""
        fmt = FORMATS[self.format]
        fixed = BIAS.fullmatch(self.scales)
        if fixed:
            return _with_bias(x, fmt, int(fixed[1]))
        granularity = ROW if self.scales == "channel" else TENSOR
        return quantize(x, fmt=fmt, granularity=granularity).dequantize(x.dtype)


@contextmanager
def casting(model: Llama, how: Cast) -> Iterator[None]:
    """Cast the weights, permanently, and the activations of every forward pass in the block."""
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
    """The weights of the linear layers, then that of the output layer."""
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
    """A pre-forward hook that casts the first `count` arguments."""

    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*(how(x) for x in inputs[:count]), *inputs[count:])

    return hook


def _cast_stream(how: Cast) -> Callable[..., None]:
    """A pre-forward hook that casts in place, because the layer later adds to the same tensor."""

    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        inputs[0].copy_(how(inputs[0]))

    return hook


def _cast_output(how: Cast) -> Callable[..., Any]:
    def hook(_: nn.Module, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return how(output[0]), output[1]

    return hook


def _with_bias(x: Tensor, fmt: Fp8Format, bias: int) -> Tensor:
    """Cast with a power of two as scale, which does not change significands."""
    scale = 2.0 ** (fmt.bias - bias)
    return (cast(x.float() / scale, fmt).float() * scale).to(x.dtype)
