"""Weights of a Llama rescaled such that its function stays and FP8 has outliers to represent.

A `Stress` is a set of base weights and, for a factor f, which of their rows and columns are
multiplied by what. f is a power of two, so BF16 weights are rescaled without rounding. Per layer,
with x the residual stream, y = RMSNorm(x) * g, a = silu(gate) * up and W the linears:

    swiglu    channels C of a: rows C of up * f, columns C of down / f. Exact, because a is linear
              in up. C is one channel in 64, those with the largest mean square.
    aligned   two channels j, k of a with gate = up = s u and down columns d and -d, which cancel in
              exact arithmetic; gate * f_1, up * f_2 with f_1 f_2 = f, down / f. a_j grows with the
              square of u . y, so it is large for few tokens. This is the state that SwiGLU reaches
              late in training (arXiv 2409.12517, section 4). u is the principal direction of y, j
              and k are the channels that contribute least, s makes a_j as large as the largest of
              the others at f = 1.
    norm      channel 0 of y: g_0 * f, column 0 of the linears that read y / f. Exact. Before, gains
              are folded into these linears and a reflection turns the principal direction of x into
              channel 0; RMSNorm without gains commutes with it.
    stream    channel 0 of x is f times the root mean square of all others. NOT exact: RMSNorm
              divides by the norm of all channels, so only rotations and a factor for the whole
              stream keep the function. The channel would have to follow the norm of the others,
              which no linear can compute, but the rows of proj and down that write it are fitted to
              what the norm grows by (after the embedding it is exact). Before, gains are folded and
              a reflection turns the direction of x with the least power into channel 0, which the
              linears then ignore; the gains of the others are multiplied by what their norm grows
              by. Compare errors only to fp32 with the same weights, whose loss tells how near the
              function is.

The gradient of base weights is that of rescaled weights times the same factors, so errors of
gradients compare across f. Shapes: T tokens, H hidden, F ffn; fc1 is gate | up, [2F, H].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

EMBEDDING, OUTPUT, FINAL = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "decoder.final_layernorm.weight",
)
CHANNELS = 64  # one channel in so many is an outlier of `swiglu`
RIDGE = 1e-4  # of the mean square of the inputs, in the regressions of `stream`

Weights = dict[str, Tensor]  # checkpoint key -> fp32


@dataclass(frozen=True)
class Activations:
    """Inputs of modules on one batch, fp32 [T, ...], by the checkpoint key of the weight."""

    stream: Mapping[str, Tensor]  # by the key of a norm's weight: x [T, H]
    linear: Mapping[str, Tensor]  # by the key of a linear's weight: fc1 y, fc2 a [T, F], proj
    eps: float  # of the norms


@dataclass(frozen=True)
class Rescaling:
    """Elements `index` of dimension `dim` of a weight are multiplied by `factor`."""

    key: str
    dim: int
    index: Tensor  # int64 [n]
    factor: float

    def apply_(self, tensors: Mapping[str, Tensor]) -> None:
        tensor = tensors[self.key]
        part = tensor.index_select(self.dim, self.index.to(tensor.device))
        tensor.index_copy_(self.dim, self.index.to(tensor.device), part * self.factor)


@dataclass(frozen=True)
class Stress:
    """Base weights, exact in BF16, and how a factor rescales them."""

    name: str
    base: Weights
    rescalings: Callable[[int], list[Rescaling]]
    watched: str  # the key of the weight whose input has the outliers
    exact: bool = True

    def weights(self, factor: int) -> Weights:
        """The rescaled weights, fp32 with values that BF16 represents."""
        result = {key: weight.clone() for key, weight in self.base.items()}
        for rescaling in self.rescalings(factor):
            rescaling.apply_(result)
        return rounded(result)

    def pull_back_(self, gradients: Weights, factor: int) -> None:
        """Turn gradients of `weights(factor)` into gradients of the base weights, in place."""
        for rescaling in self.rescalings(factor):
            rescaling.apply_(gradients)


# --- names --------------------------------------------------------------------------------------


def layers_of(weights: Mapping[str, Tensor]) -> list[str]:
    """The prefixes of the layers' keys, `decoder.layers.0` and so on, in order."""
    found = {".".join(key.split(".")[:3]) for key in weights if key.startswith("decoder.layers.")}
    return sorted(found, key=lambda prefix: int(prefix.rpartition(".")[2]))


def readers(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield (key of a norm's gain, key of the linear that reads its output)."""
    for layer in layers_of(weights):
        for linear in (f"{layer}.self_attention.linear_qkv", f"{layer}.mlp.linear_fc1"):
            yield f"{linear}.layer_norm_weight", f"{linear}.weight"
    yield FINAL, OUTPUT


def writers(weights: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the keys of the linears whose outputs are added to the residual stream."""
    for layer in layers_of(weights):
        yield f"{layer}.self_attention.linear_proj.weight"
        yield f"{layer}.mlp.linear_fc2.weight"


# --- transformations that keep the function -----------------------------------------------------


def rounded(weights: Weights) -> Weights:
    """Weights as BF16 represents them, in fp32."""
    return {key: weight.bfloat16().float() for key, weight in weights.items()}


def folded(weights: Weights) -> Weights:
    """The gains of the norms over the residual stream multiplied into the linears after them."""
    result = dict(weights)
    for gain, linear in readers(weights):
        result[linear] = weights[linear] * weights[gain]
        result[gain] = torch.ones_like(weights[gain])
    return result


def reflected(weights: Weights, direction: Tensor) -> Weights:
    """Reflect the residual stream such that `direction`, a unit vector [H], becomes channel 0.

    Q = 1 - 2 u u^T with u = (direction - e_0) / |direction - e_0|. The gains must be equal.
    """
    difference = direction.clone()
    difference[0] -= 1.0
    if not difference.any():
        return dict(weights)
    u = difference / difference.norm()
    result = dict(weights)
    for key in (EMBEDDING, *(linear for _, linear in readers(weights))):
        w = weights[key]
        result[key] = w - 2 * torch.outer(w @ u, u)
    for key in writers(weights):
        w = weights[key]
        result[key] = w - 2 * torch.outer(u, u @ w)
    return result


# --- stresses -----------------------------------------------------------------------------------


def swiglu(weights: Weights, seen: Activations) -> Stress:
    """Outliers in channels of SwiGLU's output: up * f, down / f."""
    chosen: list[tuple[str, int, Tensor]] = []
    for layer in layers_of(weights):
        power = seen.linear[f"{layer}.mlp.linear_fc2.weight"].square().mean(0)
        channels = power.topk(max(len(power) // CHANNELS, 1)).indices.cpu()
        chosen.append((layer, len(power), channels))

    def rescalings(factor: int) -> list[Rescaling]:
        return [
            rescaling
            for layer, width, channels in chosen
            for rescaling in (
                Rescaling(f"{layer}.mlp.linear_fc1.weight", 0, width + channels, factor),
                Rescaling(f"{layer}.mlp.linear_fc2.weight", 1, channels, 1 / factor),
            )
        ]

    return Stress("swiglu", rounded(weights), rescalings, f"{chosen[0][0]}.mlp.linear_fc2.weight")


def aligned(weights: Weights, seen: Activations) -> Stress:
    """Outliers in two channels of SwiGLU's output whose gate and up rows are parallel."""
    base, chosen = dict(weights), []
    for layer in layers_of(weights):
        fc1, fc2 = (f"{layer}.mlp.{name}.weight" for name in ("linear_fc1", "linear_fc2"))
        base[fc1], base[fc2] = weights[fc1].clone(), weights[fc2].clone()
        a, width = seen.linear[fc2], weights[fc2].shape[1]
        share = a.square().mean(0).to(weights[fc2]) * weights[fc2].square().sum(0)
        pair = share.topk(2, largest=False).indices.cpu()
        u = principal(seen.linear[fc1])
        z = seen.linear[fc1].double() @ u
        if -z.min() > z.max():
            u, z = -u, -z
        row = u * (a.abs().amax().double().sqrt() / z.max())
        rows = torch.cat((pair, width + pair))
        base[fc1][rows] = row.to(base[fc1])
        down = weights[fc2][:, pair[0]]
        base[fc2][:, pair[0]], base[fc2][:, pair[1]] = down, -down
        chosen.append((fc1, fc2, width, pair))

    def rescalings(factor: int) -> list[Rescaling]:
        half = 2 ** (round(math.log2(factor)) // 2)  # a power of two as well
        return [
            rescaling
            for fc1, fc2, width, pair in chosen
            for rescaling in (
                Rescaling(fc1, 0, pair, factor / half),
                Rescaling(fc1, 0, width + pair, half),
                Rescaling(fc2, 1, pair, 1 / factor),
            )
        ]

    return Stress("aligned", rounded(base), rescalings, chosen[0][1])


def norm(weights: Weights, seen: Activations) -> Stress:
    """An outlier channel in the output of every norm: gain * f, columns of the linears / f."""
    base = reflected(folded(weights), direction_of(seen, largest=True).to(weights[EMBEDDING]))
    first = torch.tensor([0])

    def rescalings(factor: int) -> list[Rescaling]:
        return [
            rescaling
            for gain, linear in readers(base)
            for rescaling in (
                Rescaling(gain, 0, first, factor),
                Rescaling(linear, 1, first, 1 / factor),
            )
        ]

    return Stress("norm", rounded(base), rescalings, f"{layers_of(base)[0]}.mlp.linear_fc1.weight")


def stream(weights: Weights, seen: Activations) -> Stress:
    """A channel of the residual stream that is f times the others; nearly exact."""
    direction = direction_of(seen, largest=False).to(weights[EMBEDDING])
    base = reflected(folded(weights), direction)
    hidden = base[EMBEDDING].shape[1]
    first, others = torch.tensor([0]), torch.arange(1, hidden)

    def growth(gain: str, factor: int) -> float:
        """The mean over tokens of rms(x with channel 0) / rms(x), with the epsilon of the norm."""
        power = seen.stream[gain].double().square().mean(-1)
        grown = power * (1 + factor**2 / hidden)
        return float(((grown + seen.eps) / (power + seen.eps)).sqrt().mean())

    for gain, linear in readers(base):
        base[linear][:, 0] = 0.0
        base[gain][1:] = growth(gain, 1)
    base[EMBEDDING][:, 0] = 0.0
    base[EMBEDDING][:, 0] = base[EMBEDDING].square().mean(1).sqrt()
    for key, row in tracked_norms(base, seen).items():
        base[key][0] = row

    def rescalings(factor: int) -> list[Rescaling]:
        return [
            Rescaling(EMBEDDING, 1, first, factor),
            *(Rescaling(key, 0, first, factor) for key in writers(base)),
            *(
                Rescaling(gain, 0, others, growth(gain, factor) / growth(gain, 1))
                for gain, _ in readers(base)
            ),
        ]

    watched = f"{layers_of(base)[-1]}.mlp.linear_fc1.layer_norm_weight"
    return Stress("stream", rounded(base), rescalings, watched, exact=False)


def tracked_norms(weights: Weights, seen: Activations) -> Weights:
    """Rows [K] of `writers`, by key, that add to a channel what rms(x) grows by at their token.

    After the embedding the channel is rms(x). Each row is the ridge regression of what is missing
    after the rows before it, so errors do not add up.
    """
    norms = [x.double().square().mean(-1).sqrt() for x in seen.stream.values()]
    reached, rows = norms[0], {}
    for key, wanted in zip(writers(weights), norms[1:], strict=True):
        inputs = seen.linear[key].double()
        gram = inputs.t() @ inputs
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        row = torch.linalg.solve(gram, inputs.t() @ (wanted - reached))
        reached = reached + inputs @ row
        rows[key] = row.to(weights[key])
    return rows


STRESSES: dict[str, Callable[[Weights, Activations], Stress]] = {
    "swiglu": swiglu,
    "aligned": aligned,
    "norm": norm,
    "stream": stream,
}


def principal(x: Tensor, *, largest: bool = True) -> Tensor:
    """The unit vector [K], fp64, along which x [T, K] has the most power, or the least."""
    values = x.double()
    return torch.linalg.eigh(values.t() @ values).eigenvectors[:, -1 if largest else 0]


def direction_of(seen: Activations, *, largest: bool) -> Tensor:
    """`principal` of the residual stream at all norms, each token scaled to norm 1."""
    tokens = torch.cat([x / x.norm(dim=-1, keepdim=True) for x in seen.stream.values()])
    return principal(tokens, largest=largest)


def outlier_ratio(x: Tensor) -> float:
    """The root mean square of the largest channel of x [T, K] over that of the median channel."""
    rms = x.double().square().mean(0).sqrt()
    return float(rms.max() / rms.median())
