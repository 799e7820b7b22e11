"""Llama layers to measure: coatlm's by recipe, and a plain torch layer that is also the reference.

Shapes: S tokens, B samples, H hidden, N heads of D elements, F ffn. A `Stack` is a few equal layers
with what a step of them needs; every stack takes and returns BF16 (or fp32) hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coatlm.config.recipes import RECIPES
from tools.benchmarks.clock import DEVICE

ROPE_THETA, NORM_EPS, INIT_STD, SEED = 10000.0, 1e-5, 0.02, 1234
VOCAB = 128  # of the embedding around coatlm's layers, which no step touches
COATLM = {  # row -> model.spec, precision.recipe, precision.scaling
    "coatlm fp32": ("local", "fp32", "current"),
    "coatlm bf16": ("local", "bf16", "current"),
    "coatlm te bf16": ("te", "bf16", "current"),
    "coatlm te-delayed": ("te", "te-delayed", "current"),
    "coatlm te-current": ("te", "te-current", "current"),
    "coatlm te-blockwise": ("te", "te-blockwise", "current"),
    **{f"coatlm {name}": ("local", name, "current") for name in RECIPES},
    **{
        f"coatlm {name} delayed": ("local", name, "delayed")
        for name, recipe in RECIPES.items()
        if recipe.tensor_wise_gradients
    },
}


class LayerShape(NamedTuple):
    """The sizes of a layer and its microbatch: elements, heads, tokens per sample, samples."""

    hidden: int
    ffn: int
    heads: int
    seq: int
    batch: int
    shared: int = 1  # query heads that share a key head and a value head

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_heads(self) -> int:
        return self.heads // self.shared

    @property
    def tokens(self) -> int:
        return self.seq * self.batch


@dataclass(frozen=True)
class Stack:
    """Equal layers, one after the other, and what a benchmark needs of them."""

    forward: Callable[[Tensor], Tensor]
    input_shape: Callable[[int], tuple[int, ...]]  # batch -> shape of x
    dtype: torch.dtype
    parameters: Sequence[nn.Parameter]
    new_weights: Callable[[], None] = lambda: None  # called first in a step: weights have changed
    compiled: bool = False  # for one batch size; several layers are calls of the same one
    weights: Callable[[], dict[str, nn.Parameter]] | None = None  # of the first layer

    def step(self, x: Tensor, dy: Tensor) -> Tensor:
        """Run forward and backward; returns y. Clears earlier gradients as `clear` does."""
        self.clear(x)
        self.new_weights()
        y = self.forward(x)
        y.backward(dy)
        return y

    def clear(self, x: Tensor) -> None:
        """Clear the gradients of x and those that are not in `main_grad`."""
        x.grad = None
        for parameter in self.parameters:
            parameter.grad = None

    def repeated(self, layers: int) -> Stack:
        """Call this layer `layers` times, which saves for backward as much as so many layers."""

        def forward(x: Tensor) -> Tensor:
            for _ in range(layers):
                x = self.forward(x)
            return x

        return replace(self, forward=forward)

    def inputs(self, batch: int) -> tuple[Tensor, Tensor]:
        """x, a leaf, and dy: equal for all stacks of the same layout and dtype."""
        generator = torch.Generator(DEVICE).manual_seed(SEED)
        shape = self.input_shape(batch)
        x, dy = (torch.randn(shape, device=DEVICE, generator=generator) for _ in range(2))
        return x.to(self.dtype).requires_grad_(), (0.01 * dy).to(self.dtype)


# coatlm


@cache
def groups() -> Any:
    """Initialize this process as a run of one rank, once."""
    from coatlm.config import Parallel
    from coatlm.parallel.groups import make_groups
    from coatlm.train.setup import Launch, quiet_megatron, start_processes

    quiet_megatron()
    start_processes(Launch())
    return make_groups(Parallel())


def coatlm_stack(
    row: str, shape: LayerShape, layers: int, overrides: Sequence[str] = (), *, first: bool = False
) -> Stack:
    """Build layers as the trainer does, with fp32 weight gradients in `main_grad`.

    Weight gradients are added to it or, with `first`, overwrite it, as in a step's first
    microbatch. `overrides` are dotted options of the run, such as `precision.recipe=...`. Delayed
    scales come from one step that is run here, and stay: a run updates them once per step for the
    whole model. Raises ConfigError.
    """
    from coatlm.config import make_config, override
    from coatlm.model.builder import build_model
    from coatlm.model.coat_layer import tune_layers
    from coatlm.parallel.buckets import Cut
    from coatlm.parallel.collectives import Traffic
    from coatlm.parallel.flat_model import FlatModel
    from coatlm.parallel.wire import Plain
    from coatlm.train.chunks import delayed_scales, gradient_noise

    spec, recipe, scaling = COATLM[row]
    model = {"hidden": shape.hidden, "ffn": shape.ffn, "heads": shape.heads, "layers": layers}
    model["kv_heads"] = shape.kv_heads
    rope_and_norm = {"rope_theta": ROPE_THETA, "norm_eps": NORM_EPS, "init_std": INIT_STD}
    sections = {
        "run": {"seed": SEED},
        "model": {"spec": spec, **model, **rope_and_norm},
        "data": {"text": ["-"], "seq_len": shape.seq},
        "precision": {"recipe": recipe, "scaling": scaling},
        "train": {"micro_batch": shape.batch, "global_batch": shape.batch},
    }
    config = make_config(override(sections, overrides))
    (chunk,) = build_model(config, groups(), VOCAB)
    decoder, cos_sin = chunk.decoder, chunk.cos_sin
    decoder.final_layernorm = None  # layers alone
    flat = FlatModel(
        chunk,
        group=groups().dp_cp,
        cut=Cut(
            rank=0,
            ranks=1,
            zero=1,
            grad_dtype=torch.float32,
            bucket_size=config.parallel.bucket_size,
        ),
        wire=Plain(torch.float32),
        traffic=Traffic(),
        overlap_grad_reduce=False,
        overlap_param_gather=False,
    )

    if config.precision.tune_gemms and DEVICE == "cuda":
        tune_layers(decoder.layers, shape.batch * shape.seq, torch.float32, {})

    def forward(x_SBH: Tensor) -> Tensor:
        return decoder(hidden_states=x_SBH, attention_mask=None, rotary_pos_emb=cos_sin)

    def start_step() -> None:
        flat.set_is_first_microbatch()
        if first:
            flat.zero_grad_buffer()

    stack = Stack(
        forward=forward,
        input_shape=lambda batch: (shape.seq, batch, shape.hidden),
        dtype=torch.float32 if recipe == "fp32" else torch.bfloat16,
        parameters=list(decoder.parameters()),
        new_weights=start_step,
        weights=lambda: _first_layer(decoder),
    )
    gradient_noise(config, [chunk], groups())  # layers refer to it
    scales = delayed_scales(config, [chunk], groups())
    if scales is not None:
        stack.step(*stack.inputs(shape.batch))
        scales.update_()
    return stack


def _first_layer(decoder: Any) -> dict[str, nn.Parameter]:
    """Weights of the first layer by the plain layer's names; `te` has norm weights in linears."""
    names = {
        "input_layernorm.weight": "norm1",
        "self_attention.linear_qkv.layer_norm_weight": "norm1",
        "self_attention.linear_qkv.weight": "qkv",
        "self_attention.linear_proj.weight": "proj",
        "pre_mlp_layernorm.weight": "norm2",
        "mlp.linear_fc1.layer_norm_weight": "norm2",
        "mlp.linear_fc1.weight": "fc1",
        "mlp.linear_fc2.weight": "fc2",
    }
    return {names[name]: p for name, p in decoder.layers[0].named_parameters()}


# plain torch


class PlainRMSNorm(nn.Module):
    """RMSNorm in fp32, rounded before the weight is applied, as in Hugging Face's Llama."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + NORM_EPS)
        return self.weight * normed.to(x.dtype)


class PlainLayer(nn.Module):
    """A Llama layer of torch operations on [B, S, H].

    q, k, v (in that order) share one weight, and so do gate and up: torch.compile and torchao are
    fastest with these.
    """

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.head_dim, self.shared = shape.head_dim, shape.shared
        self.heads = [shape.heads, shape.kv_heads, shape.kv_heads]  # of q, k and v
        hidden, ffn = shape.hidden, shape.ffn
        self.norm1, self.norm2 = PlainRMSNorm(hidden), PlainRMSNorm(hidden)
        self.qkv = nn.Linear(hidden, sum(self.heads) * self.head_dim, bias=False)
        self.proj = nn.Linear(hidden, hidden, bias=False)
        self.fc1 = nn.Linear(hidden, 2 * ffn, bias=False)
        self.fc2 = nn.Linear(ffn, hidden, bias=False)
        for linear in (self.qkv, self.proj, self.fc1, self.fc2):
            nn.init.normal_(linear.weight, 0.0, INIT_STD)

    def forward(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x_BSH)).unflatten(-1, (-1, self.head_dim))
        q, k, v = (part.transpose(1, 2) for part in qkv.split(self.heads, dim=2))
        q, k = _rotate(q, cos_SD, sin_SD), _rotate(k, cos_SD, sin_SD)
        o_BNSD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shared > 1)
        x_BSH = x_BSH + self.proj(o_BNSD.transpose(1, 2).flatten(2))
        gate, up = self.fc1(self.norm2(x_BSH)).chunk(2, dim=-1)
        return x_BSH + self.fc2(F.silu(gate) * up)


def _rotate(x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    first, second = x_BNSD.chunk(2, dim=-1)
    return x_BNSD * cos_SD + torch.cat((-second, first), dim=-1) * sin_SD


def rope_tables(shape: LayerShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [S, D] on the device; the two halves of D are equal."""
    exponent = torch.arange(0, shape.head_dim, 2, device=DEVICE).float() / shape.head_dim
    angle = torch.outer(torch.arange(shape.seq, device=DEVICE).float(), ROPE_THETA**-exponent)
    both = torch.cat((angle, angle), dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def plain_stack(shape: LayerShape, *, compiled: Callable[[PlainLayer], Any] | None = None) -> Stack:
    """One BF16 layer, or `compiled(layer)`; autograd stores gradients in `grad`."""
    torch.manual_seed(SEED)
    with torch.device(DEVICE):
        layer = PlainLayer(shape).to(torch.bfloat16)
    run = compiled(layer) if compiled else layer
    cos, sin = rope_tables(shape, torch.bfloat16)
    return Stack(
        forward=lambda x_BSH: run(x_BSH, cos, sin),
        input_shape=lambda batch: (batch, shape.seq, shape.hidden),
        dtype=torch.bfloat16,
        parameters=list(layer.parameters()),
        compiled=compiled is not None,
    )


def reference_gradients(
    weights: dict[str, Tensor], shape: LayerShape, x_SBH: Tensor, dy_SBH: Tensor
) -> dict[str, Tensor]:
    """y, dx and the weights' gradients of the same layer in fp32, in megatron's layouts."""
    with torch.device(DEVICE):
        layer = PlainLayer(shape)
    with torch.no_grad():
        for name, module in layer.named_children():
            weight = weights[name].float()
            module.get_parameter("weight").copy_(
                _by_kind(weight, shape) if name == "qkv" else weight
            )
    x = x_SBH.detach().float().transpose(0, 1).contiguous().requires_grad_()
    y = layer(x, *rope_tables(shape, torch.float32))
    y.backward(dy_SBH.float().transpose(0, 1))
    assert x.grad is not None
    found = {"y": y.detach().transpose(0, 1), "dx": x.grad.transpose(0, 1)}
    for name, module in layer.named_children():
        grad: Any = module.weight.grad
        found[name] = _by_head(grad, shape) if name == "qkv" else grad
    return found


def _by_kind(weight: Tensor, shape: LayerShape) -> Tensor:
    """Rows ordered key head, (its query heads, k, v), element -> (q, k, v), head, element."""
    by_key_head = weight.unflatten(0, (shape.kv_heads, shape.shared + 2, -1))
    parts = by_key_head.split([shape.shared, 1, 1], dim=1)
    return torch.cat([part.flatten(0, 2) for part in parts])


def _by_head(weight: Tensor, shape: LayerShape) -> Tensor:
    parts = weight.unflatten(0, (-1, shape.head_dim)).split(
        [shape.heads, shape.kv_heads, shape.kv_heads]
    )
    by_key_head = [part.unflatten(0, (shape.kv_heads, -1)) for part in parts]
    return torch.cat(by_key_head, dim=1).flatten(0, 2)
