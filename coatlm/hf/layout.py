"""Map the tensors of a Llama between coatlm's checkpoint and Hugging Face's.

A layer of coatlm (and megatron-core) has q, k and v in one matrix and gate and up in another:

    linear_qkv.weight [(N + 2 G) D, H]  = for each of G key/value heads: N/G query heads, key, value
    linear_fc1.weight [2 F, H]          = gate, then up

N query heads, G key/value heads, D elements per head, H hidden, F ffn. Rotary embeddings rotate the
same pairs of elements in both, so rows are only moved and values do not change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coatlm.config import Model

Shape = tuple[int, ...]
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Entry:
    """A tensor of coatlm, and the tensors of Hugging Face that it consists of."""

    key: str
    shape: Shape
    parts: Mapping[str, Shape]  # in order
    fusion: Literal["rows", "groups"] = "rows"  # concatenated | interleaved q, k, v per kv head
    groups: int = 1  # number of key/value heads, for "groups"

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join Hugging Face's tensors into coatlm's."""
        if len(parts) == 1:
            return parts[0]
        if self.fusion == "rows":
            return torch.cat(list(parts))
        return torch.cat([p.unflatten(0, (self.groups, -1)) for p in parts], 1).flatten(0, 1)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Split coatlm's tensor into Hugging Face's, contiguous and in the order of `parts`."""
        rows = [shape[0] for shape in self.parts.values()]
        if len(rows) == 1:
            return [whole]
        if self.fusion == "rows":
            return list(whole.split(rows))
        each = whole.unflatten(0, (self.groups, -1)).split([n // self.groups for n in rows], 1)
        return [part.flatten(0, 1).contiguous() for part in each]


def entries(model: Model, vocab: int) -> Iterator[Entry]:
    """All tensors of a model in the order of a forward pass. `vocab`: rows of the embedding."""
    H = model.hidden
    yield _same("embedding.word_embeddings.weight", EMBEDDING, (vocab, H))
    for layer in range(model.layers):
        yield from _layer_entries(model, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    yield _same("decoder.final_layernorm.weight", "model.norm.weight", (H,))
    if not model.tie_embeddings:
        yield _same("output_layer.weight", HEAD, (vocab, H))


def check_layers(model: Model, stored: Collection[str], where: str) -> None:
    """Raise ValueError if a model has more layers than there are stored tensors.

    `entries` takes memory per layer, and the configuration may be untrusted.
    """
    if model.layers > len(stored):
        raise ValueError(
            f"{where} has {model.layers} layers, its weights only {len(stored)} tensors"
        )


def zero_biases(model: Model) -> dict[str, Shape]:
    """Biases that Hugging Face's `attention_bias` adds and coatlm does not have."""
    return {
        f"model.layers.{layer}.self_attn.o_proj.bias": (model.hidden,)
        for layer in range(model.layers)
    }


def is_linear(name: str) -> bool:
    """Whether a tensor of Hugging Face is the weight of a linear layer in a transformer block."""
    return name.endswith("_proj.weight")


def _layer_entries(model: Model, ours: str, theirs: str) -> Iterator[Entry]:
    H, F, D, G = model.hidden, model.ffn, model.size_per_head, model.queries_groups
    rows = {"q": model.heads * D, "k": G * D, "v": G * D}
    attention, mlp = ours + "self_attention.", ours + "mlp."
    yield _same(attention + "linear_qkv.layer_norm_weight", f"{theirs}input_layernorm.weight", (H,))
    for kind, tail in [("weight", (H,)), *([("bias", ())] if model.qkv_bias else [])]:
        yield Entry(
            f"{attention}linear_qkv.{kind}",
            (sum(rows.values()), *tail),
            {f"{theirs}self_attn.{n}_proj.{kind}": (r, *tail) for n, r in rows.items()},
            "groups",
            G,
        )
    if model.qk_norm:
        for n in ("q", "k"):
            name = f"{theirs}self_attn.{n}_norm.weight"
            yield _same(f"{attention}{n}_layernorm.weight", name, (D,))
    output = f"{theirs}self_attn.o_proj.weight"
    yield _same(attention + "linear_proj.weight", output, (H, model.heads * D))
    norm = f"{theirs}post_attention_layernorm.weight"
    yield _same(mlp + "linear_fc1.layer_norm_weight", norm, (H,))
    halves = {f"{theirs}mlp.{n}_proj.weight": (F, H) for n in ("gate", "up")}
    yield Entry(mlp + "linear_fc1.weight", (2 * F, H), halves)
    yield _same(mlp + "linear_fc2.weight", f"{theirs}mlp.down_proj.weight", (H, F))


def _same(key: str, name: str, shape: Shape) -> Entry:
    return Entry(key, shape, {name: shape})
