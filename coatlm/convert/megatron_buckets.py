"""States in the flat buckets of Megatron's distributed optimizer, as tensors of parameters.

Megatron's default format (`dp_reshardable`) stores the fp32 weights and moments as they lie in
memory, one flat tensor per bucket and state, in which the shards of data-parallel ranks are joined:

    optimizer.distributed.dp_group_idx_G.gbuf_idx_C.dtype_(...).bucket_idx_B.STATE

is bucket B of model chunk C of the model-parallel rank G = tp_rank + tp * pp_rank. In the buckets
of a chunk its parameters follow each other in the reverse order of their registration, each
beginning at a multiple of ALIGNMENT. A bucket is as long as its parameters, and is padded to
ALIGNMENT if a tied embedding comes next, which has a bucket of its own.

Which parameter lies where is not stored. `find_states` computes it from the shapes of the model and
the lengths of the buckets, for each tp that divides the number of ranks and for the layers of
megatron-core and of TransformerEngine. A layout counts only if every fp32 weight in it, rounded to
the type of the stored weight, is the stored weight bit by bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coatlm.convert.megatron_split import EMBEDDING, HEAD, join, split_axis
from coatlm.hf.layout import TensorShape
from coatlm.train.shards import StoredTensors

ALIGNMENT = 64  # elements
WEIGHT = "param"
BUCKETED = (WEIGHT, "exp_avg", "exp_avg_sq")
NAME = re.compile(
    r"(optimizer\.distributed\.dp_group_idx_(\d{1,6})\.gbuf_idx_(\d{1,6})"
    r"\.dtype_[\w(), .]{1,99}\.bucket_idx_(\d{1,6}))\.(\w+)"
)
LAYER = "decoder.layers.{}.{}"
TIED = "tied." + HEAD  # the embedding again, as the output layer of the last pipeline stage
FINAL_NORM = "decoder.final_layernorm.weight"
NORM, OUTPUT = "self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_proj.weight"
OTHERS = (
    *("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"),
    *("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"),
    *("mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"),
)
# TransformerEngine's norms belong to the linear layers behind them; linear_proj comes first there.
ORDERS = ((NORM, OUTPUT, *OTHERS), (OUTPUT, NORM, *OTHERS))


class FlatBucket(NamedTuple):
    name: str  # the key in the checkpoint, without .STATE
    length: int  # elements


class ParameterPiece(NamedTuple):
    """Where the tensor of a parameter on one tensor-parallel rank lies."""

    bucket: str
    start: int
    shape: TensorShape


Chunks = Mapping[tuple[int, int], Sequence[FlatBucket]]  # (rank, chunk) -> its buckets
BucketLayout = dict[str, list[ParameterPiece]]  # key -> the pieces of all tensor-parallel ranks


class BucketStates:
    """The states of all parameters, which are read on request."""

    def __init__(self, stored: StoredTensors, layout: BucketLayout) -> None:
        self._stored, self._layout = stored, layout

    def read(self, state: str, key: str) -> Tensor:
        """A state (BUCKETED) of a parameter in fp32; the first rank's if it is replicated."""
        pieces = self._layout[key]
        pieces = pieces[:1] if split_axis(key) is None else pieces
        return join(key, [self._read(piece, state) for piece in pieces])

    def rounds_to(self, key: str, weight: Tensor) -> bool:
        """Whether the fp32 weights, rounded to the type of `weight`, have its bits on each rank."""
        parts = [self._read(piece, WEIGHT) for piece in self._layout[key]]
        wholes = parts if split_axis(key) is None else [join(key, parts)]
        expected = weight.contiguous().view(torch.uint8)
        rounded = (whole.to(weight.dtype).view(torch.uint8) for whole in wholes)
        return all(torch.equal(found, expected) for found in rounded)

    def _read(self, piece: ParameterPiece, state: str) -> Tensor:
        flat = self._stored.read_range(
            f"{piece.bucket}.{state}", piece.start, math.prod(piece.shape)
        )
        return flat.view(piece.shape)


def find_states(
    stored: StoredTensors, shapes: Mapping[str, TensorShape], read_weight: Callable[[str], Tensor]
) -> BucketStates | None:
    """The states of a model with tensors of these shapes; None unless exactly one layout fits.

    `read_weight(key)` reads a stored weight. Reads every weight and its fp32 weight for the layout
    that fits, and the first ones for others of the same lengths.
    """
    chunks = _find_chunks(stored)
    if not chunks:
        return None
    ranks = 1 + max(rank for rank, _ in chunks)
    fitting: list[BucketLayout] = []
    for tp in (tp for tp in range(1, ranks + 1) if ranks % tp == 0):
        for order in ORDERS:
            layout = _lay_out(chunks, shapes, tp, order)
            if layout is None or layout in fitting:
                continue
            states = BucketStates(stored, layout)
            weights = {key: EMBEDDING if key == TIED else key for key in layout}
            if all(states.rounds_to(key, read_weight(name)) for key, name in weights.items()):
                fitting.append(layout)
    return BucketStates(stored, fitting[0]) if len(fitting) == 1 else None


def _find_chunks(stored: StoredTensors) -> Chunks:
    """The buckets of each chunk; nothing unless all have all states in fp32."""
    found: dict[tuple[int, int, int], dict[str, FlatBucket]] = {}
    for key, (dtype, shape) in stored.described.items():
        if (match := NAME.fullmatch(key)) and match[5] in BUCKETED:
            if dtype != torch.float32 or len(shape) != 1:
                return {}
            states = found.setdefault((int(match[2]), int(match[3]), int(match[4])), {})
            states[match[5]] = FlatBucket(match[1], shape[0])
    chunks: dict[tuple[int, int], list[FlatBucket]] = {}
    for (rank, chunk, number), states in sorted(found.items()):
        buckets = chunks.setdefault((rank, chunk), [])
        if number != len(buckets) or states.keys() != set(BUCKETED) or len({*states.values()}) != 1:
            return {}
        buckets.append(states[WEIGHT])
    ranks, numbers = ({place[i] for place in chunks} for i in (0, 1))
    whole = _counts_from_zero(ranks) and _counts_from_zero(numbers)
    return chunks if whole and len(chunks) == len(ranks) * len(numbers) else {}


def _lay_out(
    chunks: Chunks, shapes: Mapping[str, TensorShape], tp: int, order: Sequence[str]
) -> BucketLayout | None:
    """Where the parameters lie for this tp and order; None if the lengths do not fit."""
    local = _local_shapes(shapes, tp)
    if local is None:
        return None
    sizes = {key: math.prod(shape) for key, shape in local.items()}
    stages, per_stage = (1 + max(place[i] for place in chunks) for i in (0, 1))
    stages //= tp
    layout: BucketLayout = {}
    first = 0
    for number in range(stages * per_stage):  # in the order of a forward pass
        chunk, stage = divmod(number, stages)
        of_ranks = [chunks[stage * tp + rank, chunk] for rank in range(tp)]
        room = _room(bucket.length for bucket in of_ranks[0])
        keys, first = _registered(sizes, order, room, (number, stages * per_stage), first)
        for buckets in of_ranks:
            starts = _cut([sizes[key] for key in keys], buckets)
            if starts is None:
                return None
            for key, (bucket, start) in zip(keys, starts, strict=True):
                layout.setdefault(key, []).append(ParameterPiece(bucket, start, local[key]))
    return layout if shapes.keys() <= layout.keys() else None


def _registered(
    sizes: Mapping[str, int], order: Sequence[str], room: int, place: tuple[int, int], first: int
) -> tuple[list[str], int]:
    """A chunk's parameters in the order of registration, and the first layer of the next chunk.

    `place`: which chunk of how many. Between the embedding and the output layer, where it has them,
    it has as many layers from `first` on as `room` elements can hold.
    """
    number, count = place
    before = [EMBEDDING] if number == 0 else []
    after = [FINAL_NORM, HEAD] if number == count - 1 else []
    if after and HEAD not in sizes:  # tied: the last of several stages has a copy
        after = [FINAL_NORM, TIED] if count > 1 else [FINAL_NORM]
    layer = [name for name in order if LAYER.format(0, name) in sizes]
    per_layer = _room(sizes[LAYER.format(0, name)] for name in layer)
    rest = room - _room(sizes[key] for key in (*before, *after))
    last = first
    while rest >= per_layer and LAYER.format(last, OUTPUT) in sizes:
        last, rest = last + 1, rest - per_layer
    layers = [LAYER.format(index, name) for index in range(first, last) for name in layer]
    return [*before, *layers, *after], last


def _cut(sizes: Sequence[int], buckets: Sequence[FlatBucket]) -> list[tuple[str, int]] | None:
    """Bucket and start of each parameter, in the order of registration; None if they do not fit."""
    left = list(sizes)
    starts: list[tuple[str, int]] = []
    for name, length in buckets:
        end = 0
        while left and (start := _aligned(end)) < length:
            starts.append((name, start))
            end = start + left.pop()
        if length not in (end, _aligned(end)):
            return None
    return None if left else starts[::-1]


def _local_shapes(shapes: Mapping[str, TensorShape], tp: int) -> dict[str, TensorShape] | None:
    """The shapes on one tensor-parallel rank; None if tp does not divide them."""
    local = {TIED: shapes[EMBEDDING], **shapes}
    for key, shape in local.items():
        if (axis := split_axis(key)) is not None:
            if shape[axis] % tp:
                return None
            local[key] = (*shape[:axis], shape[axis] // tp, *shape[axis + 1 :])
    return local


def _room(sizes: Iterable[int]) -> int:
    """The elements that tensors of these sizes take in buckets, which are padded to ALIGNMENT."""
    return sum(map(_aligned, sizes))


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


def _counts_from_zero(numbers: Collection[int]) -> bool:
    return set(numbers) == set(range(len(numbers)))
