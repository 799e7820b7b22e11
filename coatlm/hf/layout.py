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
    """A tensor of coatlm, and the tensors of Hugging Face that it consists of.

    `whole` is the name of a tensor in which a family stores all parts, one after the other.
    """

    key: str
    shape: Shape
    parts: Mapping[str, Shape]  # in order
    fusion: Literal["rows", "groups"] = "rows"  # concatenated | interleaved q, k, v per kv head
    groups: int = 1  # number of key/value heads, for "groups"
    whole: str | None = None

    @property
    def stored(self) -> dict[str, Shape]:
        """The names and shapes of Hugging Face's tensors."""
        if self.whole is None:
            return dict(self.parts)
        shapes = list(self.parts.values())
        return {self.whole: (sum(shape[0] for shape in shapes), *shapes[0][1:])}

    def join(self, stored: Sequence[Tensor]) -> Tensor:
        """Join Hugging Face's tensors into coatlm's."""
        rows = [shape[0] for shape in self.parts.values()]
        parts = list(stored) if self.whole is None else list(stored[0].split(rows))
        if len(parts) == 1:
            return parts[0]
        if self.fusion == "rows":
            return torch.cat(parts)
        return torch.cat([p.unflatten(0, (self.groups, -1)) for p in parts], 1).flatten(0, 1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Split coatlm's tensor into Hugging Face's, contiguous and in the order of `stored`."""
        rows = [shape[0] for shape in self.parts.values()]
        if self.fusion == "rows":
            parts = list(tensor.split(rows))
        else:
            sizes = [n // self.groups for n in rows]
            each = tensor.unflatten(0, (self.groups, -1)).split(sizes, 1)
            parts = [part.flatten(0, 1).contiguous() for part in each]
        return parts if self.whole is None else [torch.cat(parts)]

    def runs(self, first: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """The rows [first, stop) of coatlm's tensor as (stored tensor, first row, number of rows).

        Rows beyond `shape`, which pad a vocabulary, are in no run.
        """
        start = 0
        for turn in range(self.groups):
            before = 0  # rows of earlier parts
            for name, shape in self.parts.items():
                count = shape[0] // self.groups
                low, high = max(first, start), min(stop, start + count)
                row = turn * count + low - start
                if low < high and self.whole is None:
                    yield name, row, high - low
                elif low < high and self.whole is not None:
                    yield self.whole, before + row, high - low
                start += count
                before += shape[0]


def entries(model: Model, vocab: int, family: str = "llama") -> Iterator[Entry]:
    """All tensors of a model in the order of a forward pass. `vocab`: rows of the embedding.

    `family` is the model_type of config.json; phi3 stores q, k and v, and gate and up, together.
    """
    H = model.hidden
    yield _same("embedding.word_embeddings.weight", EMBEDDING, (vocab, H))
    for layer in range(model.layers):
        prefixes = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        yield from _layer_entries(model, *prefixes, together=family == "phi3")
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


def _layer_entries(model: Model, ours: str, theirs: str, *, together: bool) -> Iterator[Entry]:
    H, F, D, G = model.hidden, model.ffn, model.size_per_head, model.queries_groups
    rows = {"q": model.heads * D, "k": G * D, "v": G * D}
    attention, mlp = ours + "self_attention.", ours + "mlp."
    if not model.norm_after:
        norm = f"{theirs}input_layernorm.weight"
        yield _same(attention + "linear_qkv.layer_norm_weight", norm, (H,))
    for kind, tail in [("weight", (H,)), *([("bias", ())] if model.qkv_bias else [])]:
        yield Entry(
            f"{attention}linear_qkv.{kind}",
            (sum(rows.values()), *tail),
            {f"{theirs}self_attn.{n}_proj.{kind}": (r, *tail) for n, r in rows.items()},
            "groups",
            G,
            f"{theirs}self_attn.qkv_proj.{kind}" if together else None,
        )
    if model.qk_norm:
        for n in ("q", "k"):
            name = f"{theirs}self_attn.{n}_norm.weight"
            width = rows[n] if model.qk_norm_width == "all" else D
            yield _same(f"{attention}{n}_layernorm.weight", name, (width,))
    output = f"{theirs}self_attn.o_proj.weight"
    yield _same(attention + "linear_proj.weight", output, (H, model.heads * D))
    norm = f"{theirs}post_attention_layernorm.weight"
    after = attention + "branch.norm.weight"
    yield _same(after if model.norm_after else mlp + "linear_fc1.layer_norm_weight", norm, (H,))
    halves = {f"{theirs}mlp.{n}_proj.weight": (F, H) for n in ("gate", "up")}
    whole = f"{theirs}mlp.gate_up_proj.weight" if together else None
    yield Entry(mlp + "linear_fc1.weight", (2 * F, H), halves, whole=whole)
    yield _same(mlp + "linear_fc2.weight", f"{theirs}mlp.down_proj.weight", (H, F))
    if model.norm_after:
        norm = f"{theirs}post_feedforward_layernorm.weight"
        yield _same(mlp + "branch.norm.weight", norm, (H,))


def _same(key: str, name: str, shape: Shape) -> Entry:
    return Entry(key, shape, {name: shape})
