"""ZeRO over flat buckets: each rank updates its part of the weights and keeps its states.

Stage 0 updates everything everywhere after an all-reduce; stages 1 and 2 reduce-scatter gradients,
update one shard a rank and gather the weights. How states are stored is the optimizer's affair:
this module hands it flat shards, and describes the result to checkpoints as rectangles of logical
tensors, so that a checkpoint does not depend on how many ranks wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.megatron import ShardedTensor
from coatlm.parallel.buckets import Bucket
from coatlm.parallel.buffers import FlatModel
from coatlm.parallel.groups import Groups
from coatlm.parallel.reduce import clip_coefficient, finalize_gradients, grad_norm
from coatlm.parallel.regions import Region, group_regions_of, rectangles, regions_of
from coatlm.parallel.regroup import FlatGroups, Layout, Move, flat_layout, whole_layouts

T = TypeVar("T")


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
        self.regions = {b: r for chunk in chunks for b, r in regions_of(chunk).items()}
        self.group_regions = {
            bucket: group_regions_of(bucket, regions, groups.tp)
            for bucket, regions in self.regions.items()
        }
        self.counted = [part for bucket in self.buckets for part in self._counted(bucket)]
        self.moves: list[tuple[Bucket, dict[str, Tensor], Move]] = []
        self.unshared = [list(self._unshared(bucket)) for bucket in self.owned]
        self.norm_group = groups.world if chunks[0].sharded else groups.model

    def step(
        self,
        lr: float,
        *,
        accepts: Callable[[Tensor], Tensor] | None = None,
        observe: Callable[[Tensor], None] | None = None,
        enter: Callable[[str | None], None] = lambda phase: None,
    ) -> Tensor:
        """One update; returns the global gradient norm on the device.

        It is skipped on NaN or Inf, and where `accepts(norm)`, on the device, is False. `observe`
        is called before weights and states change, with the clip coefficient. `enter` is told where
        the work of this rank begins and ends.
        """
        finalize_gradients(self.chunks, self.groups)
        norm = grad_norm(self.counted, self.norm_group, self.buckets[0].reduced.device)
        coefficient = clip_coefficient(norm, self.clip_grad)
        if accepts is not None:
            coefficient = torch.where(accepts(norm), coefficient, torch.nan)
        if observe is not None:
            observe(coefficient)
        enter("update")
        self.optimizer.step(lr=lr, clip_coefficient=coefficient)
        for chunk in self.chunks:
            chunk.start_param_sync()
        enter(None)
        return norm

    def tensors_to_save(self) -> list[ShardedTensor]:
        """Weights and states of this rank's shards as rectangles; copies are marked."""
        for chunk in self.chunks:
            chunk.finish_param_sync()
        return [*self._weights(whole=False), *self._states()]

    def tensors_to_load(
        self, flat_groups: FlatGroups | None = None, *, weights_only: bool = False
    ) -> list[ShardedTensor]:
        """All local weights and this rank's states, to be filled in place.

        `flat_groups` are those of the checkpoint. Moments whose groups were others there are loaded
        into buffers of their own; `finish_load` makes states of them.
        """
        for chunk in self.chunks:
            chunk.finish_param_sync()
        weights = list(self._weights(whole=True))
        if weights_only:
            return weights
        moved: set[tuple[Bucket, nn.Parameter]] = set()
        pieces: list[ShardedTensor] = []
        self.moves = []
        for bucket, states in zip(self.owned, self.optimizer.states, strict=True):
            for param in bucket.params:
                for move, flat in self._moves(bucket, param, flat_groups):
                    moved.add((bucket, param))
                    pieces += move.pieces(flat)
                    self.moves.append((bucket, states, move))
        return [*weights, *self._states(moved), *pieces]

    def finish_load(self) -> None:
        """Complete a load: regroup what was stored in other groups, and show all ranks' weights."""
        codec = self.optimizer.decode_parts, self.optimizer.encode_parts
        for bucket, states, move in self.moves:
            move.finish(bucket, states, *codec)
        self.moves = []
        if any(bucket.fp8 for bucket in self.buckets):  # others see the codes of our weights
            for chunk in self.chunks:
                chunk.start_param_sync()

    def automatic_scales(self) -> dict[str, float]:
        """FP8-LM's mu of each tensor, for a checkpoint. All ranks call it together."""
        mine: dict[str, float] = {}
        for bucket in self._automatic():
            mine |= dict(zip(self._keys(bucket), bucket.tensors.mu.tolist(), strict=True))
        return {key: mu for report in self._everyones(mine) for key, mu in report.items()}

    def set_automatic_scales(self, saved: Mapping[str, float]) -> None:
        """Go on with the mu of a checkpoint where it has one."""
        for bucket in self._automatic():
            now = bucket.tensors.mu.tolist()
            mu = [saved.get(key, old) for key, old in zip(self._keys(bucket), now, strict=True)]
            bucket.tensors.mu.copy_(torch.tensor(mu))

    def _automatic(self) -> list[Bucket]:
        return [b for chunk in self.chunks if chunk.wire.automatic for b in chunk.buckets]

    def _keys(self, bucket: Bucket) -> list[str]:
        """A key for each parameter of a bucket: that of its first logical tensor."""
        starts = {start: i for i, (start, _) in enumerate(bucket.params.values())}
        first = {starts[r.start]: r.key for r in self.regions[bucket] if r.start in starts}
        return [first[i] for i in range(len(starts))]

    def _everyones(self, mine: T) -> list[T]:
        """What every rank has; all ranks call it together."""
        reports = [mine] * self.groups.control.size()
        dist.all_gather_object(reports, mine, group=self.groups.control)
        return reports

    def flat_groups(self) -> dict[str, list[Layout]]:
        """What groups run over their rows' ends, and over what. All ranks call it together."""
        mine: dict[str, tuple[int, Layout]] = {}
        if self._grouped():
            for bucket in self.buckets:
                for param in bucket.params:
                    layout = self._flat_layout(bucket, param)
                    if layout is not None:
                        mine[layout[0]["key"]] = (self._shard_of(layout), layout)
        found: dict[str, dict[int, Layout]] = {}
        for report in self._everyones(mine):
            for key, (shard, layout) in report.items():
                found.setdefault(key, {})[shard] = layout
        return {key: [shards[i] for i in sorted(shards)] for key, shards in sorted(found.items())}

    def _grouped(self) -> dict[str, dict[str, tuple[torch.dtype, bool]]]:
        """Moments that keep something once a group: name -> suffix -> (dtype, once a group)."""
        found: dict[str, dict[str, tuple[torch.dtype, bool]]] = {}
        for states, bucket in zip(self.optimizer.states[:1], self.owned[:1], strict=True):
            size = bucket.owned[1] - bucket.owned[0]
            for full, tensor in states.items():
                name, dot, suffix = full.partition(".")
                found.setdefault(name, {})[dot + suffix] = (tensor.dtype, tensor.numel() < size)
        return {name: s for name, s in found.items() if any(once for _, once in s.values())}

    def _flat_layout(self, bucket: Bucket, param: nn.Parameter) -> Layout | None:
        """What the groups of `param` run over, if over the ends of rows."""
        start, stop = bucket.params[param]
        inside = [r for r in self.regions[bucket] if start <= r.start < stop]
        if all(not region.shape[-1] % SCALE_BLOCK for region in inside):
            return None
        return flat_layout(inside, start)

    def _shard_of(self, layout: Layout) -> int:
        """The number of this rank's part of a flat tensor."""
        cut = layout[0]["shape"] != layout[0]["global_shape"]
        return self.groups.tp.rank() if cut else 0

    def _moves(
        self,
        bucket: Bucket,
        param: nn.Parameter,
        flat_groups: FlatGroups | None,
    ) -> Iterator[tuple[Move, bool]]:
        """How moments of `param` get here from other groups, and whether those were flat."""
        start, stop = bucket.params[param]
        if flat_groups is None or not len(bucket.summed(param)):
            return
        inside = [r for r in self.regions[bucket] if start <= r.start < stop]
        here, there = self._flat_layout(bucket, param), flat_groups.get(inside[0].key)
        if here is None and there is None:
            return
        if here is not None and there is not None:
            shards = self.groups.tp.size() if inside[0].shape != inside[0].global_shape else 1
            if len(there) == shards and there[self._shard_of(here)] == here:
                return
        layouts = whole_layouts(inside) if there is None else there
        for name, like in self._grouped().items():
            yield Move.plan(name, (start, stop), inside, layouts, like), there is not None

    def _counted(self, bucket: Bucket) -> Iterator[Tensor]:
        """The gradients of this rank's shard that the norm counts: copies are left out."""
        begin, end = bucket.owned
        for region in self.regions[bucket]:
            start, stop = max(region.start, begin), min(region.stop, end)
            if region.main and start < stop:
                yield bucket.reduced[start - begin : stop - begin]

    def _unshared(self, bucket: Bucket) -> Iterator[tuple[int, int]]:
        """Runs of this rank's shard, in multiples of 128, of which `norm_group` has no copies."""
        begin, end = bucket.owned
        for start, stop in bucket.params.values():
            inside = [r for r in self.regions[bucket] if start <= r.start < stop]
            first = max(start, begin)
            last = min(-(-stop // SCALE_BLOCK) * SCALE_BLOCK, end)
            if inside[0].main and first < last:
                yield first - begin, last - begin

    def _weights(self, *, whole: bool) -> Iterator[ShardedTensor]:
        for bucket in self.buckets:
            bounds = (0, bucket.weights.numel()) if whole else bucket.owned
            for region in self.regions[bucket]:
                yield from self._pieces(region, bucket.weights, 0, bounds, "")

    def _states(
        self, moved: Container[tuple[Bucket, nn.Parameter]] = ()
    ) -> Iterator[ShardedTensor]:
        """The states, but for moments in groups of parameters that were `moved`."""
        grouped = self._grouped()
        for bucket, states in zip(self.owned, self.optimizer.states, strict=True):
            bounds = bucket.owned
            for name, tensor in states.items():
                prefix = f"optimizer.state.{name}."
                regions, unit = self.regions[bucket], 1
                if tensor.numel() < bounds[1] - bounds[0]:
                    regions, unit = self.group_regions[bucket], SCALE_BLOCK
                begin, end = bounds[0] // unit, bounds[1] // unit
                assert tensor.numel() == end - begin
                spans = [
                    (start // unit, stop / unit)
                    for param, (start, stop) in bucket.params.items()
                    if (bucket, param) in moved and name.partition(".")[0] in grouped
                ]
                for region in regions:
                    if not any(start <= region.start < stop for start, stop in spans):
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
