"""Where each tensor of a Llama lies in coatlm's checkpoint and in Hugging Face's.

coatlm's (megatron-core's) layer keeps q, k and v in one matrix and gate and up in another:

    linear_qkv.weight [(N + 2 G) D, H]  = for each of G groups: N/G query heads, one key, one value
    linear_fc1.weight [2 F, H]          = gate, then up

N query heads, G key/value heads, D elements a head, H hidden, F ffn. Rotary embeddings rotate the
same pairs on both sides, so rows are moved and values never change.
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
    """One tensor of coatlm, and the tensors of Hugging Face that it consists of."""

    key: str
    shape: Shape
    parts: Mapping[str, Shape]  # in order
    fusion: Literal["rows", "groups"] = "rows"  # one after the other | q, k, v a group
    groups: int = 1  # key/value heads, for "groups"

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """coatlm's tensor from Hugging Face's."""
        if len(parts) == 1:
            return parts[0]
        if self.fusion == "rows":
            return torch.cat(list(parts))
        return torch.cat([p.unflatten(0, (self.groups, -1)) for p in parts], 1).flatten(0, 1)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Hugging Face's tensors from coatlm's, in the order of `parts`, contiguous."""
        rows = [shape[0] for shape in self.parts.values()]
        if len(rows) == 1:
            return [whole]
        if self.fusion == "rows":
            return list(whole.split(rows))
        each = whole.unflatten(0, (self.groups, -1)).split([n // self.groups for n in rows], 1)
        return [part.flatten(0, 1).contiguous() for part in each]


def entries(model: Model, vocab: int) -> Iterator[Entry]:
    """All tensors of a model, in the order of a forward pass. `vocab`: rows of the embedding."""
    H = model.hidden
    yield _same("embedding.word_embeddings.weight", EMBEDDING, (vocab, H))
    for layer in range(model.layers):
        yield from _layer_entries(model, f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    yield _same("decoder.final_layernorm.weight", "model.norm.weight", (H,))
    if not model.tie_embeddings:
        yield _same("output_layer.weight", HEAD, (vocab, H))


def check_layers(model: Model, stored: Collection[str], where: str) -> None:
    """Raise ValueError where a model has more layers than there are tensors.

    `entries` takes memory per layer, and a configuration may come from a stranger.
    """
    if model.layers > len(stored):
        raise ValueError(
            f"{where} has {model.layers} layers, its weights only {len(stored)} tensors"
        )


def zero_biases(model: Model) -> dict[str, Shape]:
    """Biases that Hugging Face's `attention_bias` brings and coatlm has not."""
    return {
        f"model.layers.{layer}.self_attn.o_proj.bias": (model.hidden,)
        for layer in range(model.layers)
    }


def is_linear(name: str) -> bool:
    """Whether a tensor of Hugging Face is the weight of a linear layer inside a block."""
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
