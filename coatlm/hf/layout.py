"""Map the tensors of a model between coatlm's checkpoint and Hugging Face's.

A layer of coatlm (and megatron-core) has q, k and v in one matrix and gate and up in another:

    linear_qkv.weight [(N + 2 G) D, H]  = for each of G key/value heads: N/G query heads, key, value
    linear_fc1.weight [2 F, H]          = gate, then up

N query heads, G key/value heads, D elements per head, H hidden, F ffn. Rows are only moved and
values do not change. Rotary embeddings rotate the same pairs of elements in both, (i, i + D/2),
unless they rotate only the first R of the D elements: Hugging Face pairs (i, i + R/2) then, and
coatlm (i, i + D/2) for i < R/2, so the rows of each query and key head are in another order:

    0 ... R/2 | R ... (R + D)/2 | R/2 ... R | (R + D)/2 ... D       rows of Hugging Face's head
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from coatlm.config import Model

TensorShape = tuple[int, ...]
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
FUSED = ("phi3",)  # families that store q, k and v, and gate and up, together


class RowRun(NamedTuple):
    """Adjacent rows of a tensor of Hugging Face."""

    name: str
    row: int
    length: int


@dataclass(frozen=True)
class Entry:
    """A tensor of coatlm, and the tensors of Hugging Face that it consists of."""

    key: str
    shape: TensorShape
    stored: Mapping[str, TensorShape]  # Hugging Face's tensors
    order: tuple[RowRun, ...]  # the rows of coatlm's tensor, from the first to the last

    def join(self, stored: Sequence[Tensor]) -> Tensor:
        """Join Hugging Face's tensors, in the order of `stored`, into coatlm's."""
        if len(self.order) == 1:
            return stored[0]
        named = dict(zip(self.stored, stored, strict=True))
        return torch.cat([named[name][row : row + count] for name, row, count in self.order])

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Split coatlm's tensor into Hugging Face's, contiguous and in the order of `stored`."""
        if len(self.order) == 1:
            return [tensor]
        named = {name: tensor.new_empty(shape) for name, shape in self.stored.items()}
        start = 0
        for name, row, count in self.order:
            named[name][row : row + count] = tensor[start : start + count]
            start += count
        return list(named.values())

    def runs(self, first: int, stop: int) -> Iterator[RowRun]:
        """The rows [first, stop) of coatlm's tensor.

        Rows beyond `shape`, which pad a vocabulary, are in no run.
        """
        start = 0
        for name, row, count in self.order:
            low, high = max(first, start), min(stop, start + count)
            if low < high:
                yield RowRun(name, row + low - start, high - low)
            start += count


def entries(model: Model, vocab: int, family: str = "llama") -> Iterator[Entry]:
    """All tensors of a model in the order of a forward pass. `vocab`: rows of the embedding.

    `family` is the model_type of config.json.
    """
    H = model.hidden
    yield _same("embedding.word_embeddings.weight", EMBEDDING, (vocab, H))
    for layer in range(model.layers):
        prefixes = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        yield from _layer_entries(model, *prefixes, together=family in FUSED)
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


def zero_biases(model: Model) -> dict[str, TensorShape]:
    """Biases that Hugging Face's `attention_bias` adds and coatlm does not have."""
    return {
        f"model.layers.{layer}.self_attn.o_proj.bias": (model.hidden,)
        for layer in range(model.layers)
    }


def is_linear(name: str) -> bool:
    """Whether a tensor of Hugging Face is the weight of a linear layer in a transformer block."""
    return name.endswith("_proj.weight")


def _layer_entries(model: Model, ours: str, theirs: str, *, together: bool) -> Iterator[Entry]:
    H, F, D = model.hidden, model.ffn, model.size_per_head
    rows = {"q": model.heads * D, "k": model.key_value_heads * D, "v": model.key_value_heads * D}
    attention, mlp = ours + "self_attention.", ours + "mlp."
    norms = _norm_names(model)
    if "input" in norms:
        name = f"{theirs}{norms['input']}.weight"
        yield _same(attention + "linear_qkv.layer_norm_weight", name, (H,))
    for kind, tail in [("weight", (H,)), *([("bias", ())] if model.qkv_bias else [])]:
        parts = {n: f"{theirs}self_attn.{n}_proj.{kind}" for n in rows}
        order = [RowRun(parts[n], row, count) for n, row, count in _head_rows(model)]
        stored = {parts[n]: (count, *tail) for n, count in rows.items()}
        whole = f"{theirs}self_attn.qkv_proj.{kind}" if together else None
        yield _joined(f"{attention}linear_qkv.{kind}", stored, order, whole)
    if model.qk_norm:
        for n in ("q", "k"):
            name = f"{theirs}self_attn.{n}_norm.weight"
            width = rows[n] if model.qk_norm_width == "all" else D
            yield _same(f"{attention}{n}_layernorm.weight", name, (width,))
    output = f"{theirs}self_attn.o_proj.weight"
    yield _same(attention + "linear_proj.weight", output, (H, model.heads * D))
    if "attention" in norms:
        name = f"{theirs}{norms['attention']}.weight"
        yield _same(attention + "branch.norm.weight", name, (H,))
    if "mlp" in norms:
        name = f"{theirs}{norms['mlp']}.weight"
        yield _same(mlp + "linear_fc1.layer_norm_weight", name, (H,))
    halves = {f"{theirs}mlp.{n}_proj.weight": (F, H) for n in ("gate", "up")}
    order = [RowRun(name, 0, F) for name in halves]
    whole = f"{theirs}mlp.gate_up_proj.weight" if together else None
    yield _joined(mlp + "linear_fc1.weight", halves, order, whole)
    yield _same(mlp + "linear_fc2.weight", f"{theirs}mlp.down_proj.weight", (H, F))
    if "output" in norms:
        yield _same(mlp + "branch.norm.weight", f"{theirs}{norms['output']}.weight", (H,))


def _norm_names(model: Model) -> dict[str, str]:
    """Hugging Face's names of the norms of a layer.

    They are of the inputs of attention ("input") and MLP ("mlp"), and of the outputs of attention
    ("attention") and MLP ("output").
    """
    after = {"attention": "post_attention_layernorm", "output": "post_feedforward_layernorm"}
    if model.norm_after:
        return after
    if model.sandwich_norm:
        return {"input": "input_layernorm", "mlp": "pre_feedforward_layernorm", **after}
    return {"input": "input_layernorm", "mlp": "post_attention_layernorm"}


def _head_rows(model: Model) -> Iterator[RowRun]:
    """The rows of linear_qkv, from q, k and v."""
    D, R, G = model.size_per_head, model.rotary_dim, model.key_value_heads
    rest = (D - R) // 2
    turned = [(0, R // 2), (R, rest), (R // 2, R // 2), (R + rest, D - R - rest)]
    pieces = turned if R < D else [(0, D)]
    for kv_head in range(G):
        queries = range(kv_head * model.heads // G, (kv_head + 1) * model.heads // G)
        for name, heads in (("q", queries), ("k", range(kv_head, kv_head + 1))):
            for head in heads:
                yield from (RowRun(name, head * D + row, count) for row, count in pieces)
        yield RowRun("v", kv_head * D, D)


def _joined(
    key: str, parts: Mapping[str, TensorShape], order: list[RowRun], whole: str | None
) -> Entry:
    """An entry of several parts, which are stored one after the other as `whole` if it is given."""
    rows = [shape[0] for shape in parts.values()]
    shape = (sum(rows), *next(iter(parts.values()))[1:])
    if whole is not None:
        first = {name: sum(rows[:i]) for i, name in enumerate(parts)}
        order = [RowRun(whole, first[name] + row, count) for name, row, count in order]
        parts = {whole: shape}
    merged = order[:1]
    for run in order[1:]:
        name, row, count = merged[-1]
        if (run.name, run.row) == (name, row + count):
            merged[-1] = RowRun(name, row, count + run.length)
        else:
            merged.append(run)
    return Entry(key, shape, parts, tuple(merged))


def _same(key: str, name: str, shape: TensorShape) -> Entry:
    return Entry(key, shape, {name: shape}, (RowRun(name, 0, shape[0]),))
