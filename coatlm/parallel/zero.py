"""ZeRO over flat buckets: each rank updates its part of the weights and keeps its states.

Stage 0 updates everything everywhere after an all-reduce; stages 1 and 2 reduce-scatter gradients,
update one shard a rank and gather the weights. How states are stored is the optimizer's affair:
this module hands it flat shards, and describes the result to checkpoints as rectangles of logical
tensors, so that a checkpoint does not depend on how many ranks wrote it.

A flat range [a, b) of a row-major matrix is at most three rectangles: the rest of its first row,
whole rows, the start of its last row. States that are kept once for 128 consecutive elements (the
scales of quantised moments) are rectangles of a tensor that is 128 times narrower. Where a row is
no multiple of 128, groups run over its end; then the groups of each tensor-parallel rank are a part
of a flat tensor, which only the same tensor-parallel layout can load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coatlm.parallel.buckets import ALIGNMENT, Bucket
from coatlm.parallel.buffers import FlatModel
from coatlm.parallel.groups import Groups
from coatlm.parallel.reduce import clip_coefficient, finalize_gradients, grad_norm
from coatlm.platform import enable_cpu

enable_cpu()

from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica  # noqa: E402

METADATA = {"non_homogeneous_layers": True}  # keys name the layer: decoder.layers.7. ...


@dataclass(frozen=True)
class Region:
    """A rectangle of a logical tensor, stored row-major at `start` of a bucket."""

    key: str
    shape: tuple[int, ...]  # of the rectangle
    global_shape: tuple[int, ...]  # of the logical tensor
    offset: tuple[int, ...]  # of the rectangle in it
    start: int  # first element in the bucket
    main: bool  # not a copy of what another model-parallel rank writes

    def narrowed(self) -> Region:
        """The same in units of 128 elements. The last dimension is a multiple of 128."""
        *shape, width = self.shape
        *global_shape, global_width = self.global_shape
        *offset, first = self.offset
        return Region(
            self.key,
            (*shape, width // ALIGNMENT),
            (*global_shape, global_width // ALIGNMENT),
            (*offset, first // ALIGNMENT),
            self.start // ALIGNMENT,
            self.main,
        )

    @property
    def stop(self) -> int:
        size = 1
        for length in self.shape:
            size *= length
        return self.start + size


class ZeroOptimizer:
    """Reduces, clips, updates, gathers. `make_optimizer(shards)` builds the update rule."""

    def __init__(
        self,
        chunks: Sequence[FlatModel],
        groups: Groups,
        *,
        clip_grad: float,
        make_optimizer: Callable[[Sequence[Any]], Any],
        make_shard: Callable[..., Any],
    ) -> None:
        self.chunks, self.groups, self.clip_grad = list(chunks), groups, clip_grad
        self.buckets = [bucket for chunk in chunks for bucket in chunk.buckets]
        self.owned = [b for b in self.buckets if b.owned[0] < b.owned[1]]
        self.optimizer = make_optimizer([_shard(make_shard, bucket) for bucket in self.owned])
        self.regions = {b: r for chunk in chunks for b, r in _regions(chunk).items()}
        self.group_regions = {
            bucket: _group_regions(bucket, regions, groups.tp)
            for bucket, regions in self.regions.items()
        }
        self.counted = [part for bucket in self.buckets for part in self._counted(bucket)]
        self.norm_group = groups.world if chunks[0].sharded else groups.model

    def step(self, lr: float) -> Tensor:
        """One update; returns the global gradient norm on the device. Skips on NaN or Inf."""
        finalize_gradients(self.chunks, self.groups)
        norm = grad_norm(self.counted, self.norm_group, self.buckets[0].reduced.device)
        self.optimizer.step(lr=lr, clip_coefficient=clip_coefficient(norm, self.clip_grad))
        for chunk in self.chunks:
            chunk.start_param_sync()
        return norm

    def tensors_to_save(self) -> list[ShardedTensor]:
        """Weights and states of this rank's shards as rectangles; copies are marked."""
        for chunk in self.chunks:
            chunk.finish_param_sync()
        return [*self._weights(whole=False), *self._states()]

    def tensors_to_load(self, *, weights_only: bool = False) -> list[ShardedTensor]:
        """All local weights and this rank's states, to be filled in place."""
        for chunk in self.chunks:
            chunk.finish_param_sync()
        return [*self._weights(whole=True), *(() if weights_only else self._states())]

    def _counted(self, bucket: Bucket) -> Iterator[Tensor]:
        """The gradients of this rank's shard that the norm counts: copies are left out."""
        begin, end = bucket.owned
        for region in self.regions[bucket]:
            start, stop = max(region.start, begin), min(region.stop, end)
            if region.main and start < stop:
                yield bucket.reduced[start - begin : stop - begin]

    def _weights(self, *, whole: bool) -> Iterator[ShardedTensor]:
        for bucket in self.buckets:
            bounds = (0, bucket.weights.numel()) if whole else bucket.owned
            for region in self.regions[bucket]:
                yield from self._pieces(region, bucket.weights, 0, bounds, "")

    def _states(self) -> Iterator[ShardedTensor]:
        for bucket, states in zip(self.owned, self.optimizer.states, strict=True):
            bounds = bucket.owned
            for name, tensor in states.items():
                prefix = f"optimizer.state.{name}."
                regions, unit = self.regions[bucket], 1
                if tensor.numel() < bounds[1] - bounds[0]:
                    regions, unit = self.group_regions[bucket], ALIGNMENT
                begin, end = bounds[0] // unit, bounds[1] // unit
                assert tensor.numel() == end - begin
                for region in regions:
                    yield from self._pieces(region, tensor, begin, (begin, end), prefix)

    def _pieces(
        self, region: Region, flat: Tensor, origin: int, bounds: tuple[int, int], prefix: str
    ) -> Iterator[ShardedTensor]:
        """The rectangles of `region` inside `bounds`; flat[0] is the bucket's element `origin`."""
        start, stop = max(region.start, bounds[0]), min(region.stop, bounds[1])
        copy = not region.main or (not self.chunks[0].sharded and self.groups.dp_cp.rank() > 0)
        for corner, shape, first in rectangles(
            region.shape, start - region.start, stop - region.start
        ):
            at = region.start + first - origin
            size = torch.Size(shape).numel()
            yield ShardedTensor(
                key=prefix + region.key,
                data=flat[at : at + size].view(shape),
                dtype=flat.dtype,
                local_shape=shape,
                global_shape=region.global_shape,
                global_offset=tuple(a + b for a, b in zip(region.offset, corner, strict=True)),
                axis_fragmentations=None,
                replica_id=int(copy),
            )


def _shard(make_shard: Callable[..., Any], bucket: Bucket) -> Any:
    """What this rank updates of a bucket, for the optimizer."""
    begin, end = bucket.owned
    inside = [
        (param, (max(start, begin) - begin, min(stop, end) - begin))
        for param, (start, stop) in bucket.params.items()
        if max(start, begin) < min(stop, end)
    ]
    return make_shard(
        weight=bucket.weights[begin:end],
        grad=bucket.reduced,
        decay=tuple(span for param, span in inside if decays(param)),
        params=tuple(span for _, span in inside),
    )


def decays(param: nn.Parameter) -> bool:
    """Weight decay is for matrices; norms and biases are exempt."""
    return param.dim() > 1


def rectangles(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Cut the flat range [start, stop) of a row-major tensor into (corner, shape, first element).

    `shape` has one or two dimensions; the range may be empty.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,), start
        return
    _, width = shape
    while start < stop:
        row, column = divmod(start, width)
        if column == 0 and stop - start >= width:
            count = (stop - start) // width
            yield (row, 0), (count, width), start
            start += count * width
        else:
            length = min(width - column, stop - start)
            yield (row, column), (1, length), start
            start += length


def _regions(chunk: FlatModel) -> dict[Bucket, list[Region]]:
    """Where the logical tensors of a chunk lie in its buckets."""
    named = dict(chunk.module.named_parameters())
    regions: dict[Bucket, list[Region]] = {bucket: [] for bucket in chunk.buckets}
    seen: set[nn.Parameter] = set()
    for name, value in sharded_tensors(chunk.module):
        param = named.get(name)
        if param is None:  # the output layer's name for a tied embedding
            param = chunk.module.shared_embedding_or_output_weight()
        bucket = chunk.bucket_of[param]
        assert value.data is not None
        inside = (value.data.data_ptr() - param.data_ptr()) // param.element_size()
        assert value.data.is_contiguous() and 0 <= inside < param.numel()
        if param in seen and name not in named:
            continue
        seen.add(param)
        skipped = value.prepend_axis_num
        replica = value.replica_id
        regions[bucket].append(
            Region(
                key=value.key,
                shape=tuple(value.data.shape),
                global_shape=tuple(value.global_shape[skipped:]),
                offset=tuple(value.global_offset[skipped:]),
                start=bucket.params[param][0] + inside,
                main=is_main_replica(replica[:-1] if isinstance(replica, tuple) else replica),
            )
        )
    assert seen == set(chunk.bucket_of), "every parameter is saved"
    return regions


def _group_regions(
    bucket: Bucket, regions: Sequence[Region], tp: dist.ProcessGroup
) -> list[Region]:
    """The regions in units of 128 elements, for what is stored once a group."""
    result = []
    for start, stop in bucket.params.values():
        inside = [region for region in regions if start <= region.start < stop]
        if all(not region.shape[-1] % ALIGNMENT for region in inside):
            result += [region.narrowed() for region in inside]
            continue
        count = -(-(stop - start) // ALIGNMENT)
        shards = tp.size() if inside[0].shape != inside[0].global_shape else 1
        result.append(
            Region(
                key=inside[0].key,
                shape=(count,),
                global_shape=(count * shards,),
                offset=(count * tp.rank() if shards > 1 else 0,),
                start=start // ALIGNMENT,
                main=inside[0].main,
            )
        )
    return result


def sharded_tensors(model: Any) -> Iterator[tuple[str, ShardedTensor]]:
    """(parameter name, where its data lies in which logical tensor) as megatron-core describes it.

    The data are views of the parameters; a fused gate|up weight gives two.
    """
    state = model.sharded_state_dict(metadata=METADATA)
    apply_factories(state)
    for name, value in state.items():
        found = value if isinstance(value, list | tuple) else [value]
        for item in found:
            if isinstance(item, ShardedTensor):
                yield name, item
