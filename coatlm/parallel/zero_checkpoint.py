"""Checkpoints of ZeRO shards: weights and optimizer states, independent of the parallel layout.

Every shard is written as rectangles of logical tensors (`regions`), so a checkpoint does not depend
on how many ranks wrote it. Moments that are quantized in blocks of 128 elements are stored as codes
and scales; where tensor parallelism splits a matrix so that blocks cross the ends of rows, loading
into another tensor-parallel layout decodes them and encodes them again (`reblock`).

States in the formats of another optimizer recipe are loaded into an optimizer over the same shards
that has that recipe; the caller converts them between the load and the all-gather of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coatlm.files import STATE_PREFIX
from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.megatron import ShardedTensor
from coatlm.parallel.buckets import Bucket
from coatlm.parallel.fp8lm_scaling import SMALLEST_MU
from coatlm.parallel.reblock import Extents, FlatBlocks, Reblock, extents_of, whole_extents
from coatlm.parallel.regions import Region, block_regions_of, rectangles
from coatlm.parallel.zero import ZeroOptimizer

T = TypeVar("T")


class ZeroCheckpoint:
    """Saves and loads the weights and states of a ZeroOptimizer."""

    def __init__(self, zero: ZeroOptimizer) -> None:
        self.zero, self.groups = zero, zero.groups
        self.regions = zero.regions
        self.block_regions = {
            bucket: block_regions_of(bucket, regions, zero.groups.tp)
            for bucket, regions in zero.regions.items()
        }
        self.loaded: Any = zero.optimizer  # the optimizer whose states a load fills
        self.reblocked: list[tuple[Bucket, dict[str, Tensor], Reblock]] = []

    def tensors_to_save(self) -> list[ShardedTensor]:
        """The weights and states of this rank's shards, as rectangles of logical tensors.

        Tensors that another rank writes too are marked as replicas.
        """
        for chunk in self.zero.chunks:
            chunk.finish_param_sync()
        return [*self._weights(whole=False), *self._states(self.zero.optimizer)]

    def tensors_to_load(
        self,
        flat_blocks: FlatBlocks | None = None,
        *,
        weights_only: bool = False,
        states_of: Any = None,
    ) -> list[ShardedTensor]:
        """All local weights (at ZeRO stage 3 this rank's) and its states, to be filled in place.

        `flat_blocks` is the result of `flat_blocks()` in the run that wrote the checkpoint. Moments
        stored in other blocks are loaded into buffers, which `finish_load` converts to states.
        `states_of` is an optimizer over the same shards in whose formats the states are stored, and
        which they fill; None: the run's own.
        """
        for chunk in self.zero.chunks:
            chunk.finish_param_sync()
        weights = list(self._weights(whole=True))
        if weights_only:
            return weights
        moved: set[tuple[Bucket, nn.Parameter]] = set()
        pieces: list[ShardedTensor] = []
        self.reblocked = []
        self.loaded = self.zero.optimizer if states_of is None else states_of
        for bucket, states in zip(self.zero.owned, self.loaded.states, strict=True):
            for param in bucket.params:
                for reblock, flat in self._reblocks(bucket, param, flat_blocks):
                    moved.add((bucket, param))
                    pieces += reblock.pieces(flat)
                    self.reblocked.append((bucket, states, reblock))
        return [*weights, *self._states(self.loaded, moved), *pieces]

    def finish_load(self, convert: Callable[[], None] | None = None) -> None:
        """Convert moments loaded in other blocks, call `convert`, and all-gather the weights that
        other ranks do not have as this one does.

        `convert` sets this rank's shards and states from those of `states_of`.
        """
        codec = self.loaded.decode_parts, self.loaded.encode_parts
        for bucket, states, reblock in self.reblocked:
            reblock.finish(bucket, states, *codec)
        self.reblocked = []
        if convert is not None:
            convert()
        self.loaded = self.zero.optimizer
        # other ranks compute with the FP8 codes of this rank's weights, not with what they loaded
        if convert is not None or any(bucket.fp8 for bucket in self.zero.buckets):
            for chunk in self.zero.chunks:
                chunk.start_param_sync()

    def automatic_scales(self) -> dict[str, float]:
        """FP8-LM's mu of each tensor, for a checkpoint. A collective call."""
        mine: dict[str, float] = {}
        for bucket in self._automatic():
            mine |= dict(zip(self.keys(bucket), bucket.tensors.mu.tolist(), strict=True))
        return {key: mu for report in self._from_all_ranks(mine) for key, mu in report.items()}

    def summed_ranks(self) -> int:
        """The number of ranks whose gradients are summed."""
        return self.zero.chunks[0].group.size()

    def set_automatic_scales(self, saved: Mapping[str, float], ranks: int | None = None) -> None:
        """Set mu of every tensor that has one in a checkpoint.

        `ranks`: `summed_ranks` of the run that saved it; None: as many as here. Sums of more ranks
        are larger, so mu is saved * ranks / `summed_ranks` here, at most 1.
        """
        factor = 1.0 if ranks is None else ranks / self.summed_ranks()
        for bucket in self._automatic():
            now = bucket.tensors.mu.tolist()
            mu = [
                min(max(saved[key] * factor, SMALLEST_MU), 1.0) if key in saved else old
                for key, old in zip(self.keys(bucket), now, strict=True)
            ]
            bucket.tensors.mu.copy_(torch.tensor(mu))

    def _automatic(self) -> list[Bucket]:
        return [b for chunk in self.zero.chunks if chunk.wire.automatic for b in chunk.buckets]

    def keys(self, bucket: Bucket) -> list[str]:
        """The checkpoint key of each parameter of a bucket: that of its first logical tensor."""
        starts = {start: i for i, (start, _) in enumerate(bucket.params.values())}
        first = {starts[r.start]: r.key for r in self.regions[bucket] if r.start in starts}
        return [first[i] for i in range(len(starts))]

    def _from_all_ranks(self, mine: T) -> list[T]:
        """`mine` of every rank, in rank order. A collective call."""
        reports = [mine] * self.groups.control.size()
        dist.all_gather_object(reports, mine, group=self.groups.control)
        return reports

    def flat_blocks(self) -> dict[str, list[Extents]]:
        """The tensors whose blocks cross the ends of rows -> the extents of each shard.

        A collective call.
        """
        mine: dict[str, tuple[int, Extents]] = {}
        if self._blocked(self.zero.optimizer):
            for bucket in self.zero.buckets:
                for param in bucket.params:
                    extents = self._flat_extents(bucket, param)
                    if extents is not None:
                        mine[extents[0]["key"]] = (self._shard_of(extents), extents)
        found: dict[str, dict[int, Extents]] = {}
        for report in self._from_all_ranks(mine):
            for key, (shard, extents) in report.items():
                found.setdefault(key, {})[shard] = extents
        return {key: [shards[i] for i in sorted(shards)] for key, shards in sorted(found.items())}

    def _blocked(self, optimizer: Any) -> dict[str, dict[str, tuple[torch.dtype, bool]]]:
        """The moments in blocks: name -> suffix -> (dtype, one element per block)."""
        found: dict[str, dict[str, tuple[torch.dtype, bool]]] = {}
        for states, bucket in zip(optimizer.states[:1], self.zero.owned[:1], strict=True):
            size = bucket.owned[1] - bucket.owned[0]
            for full, tensor in states.items():
                name, dot, suffix = full.partition(".")
                found.setdefault(name, {})[dot + suffix] = (tensor.dtype, tensor.numel() < size)
        return {name: s for name, s in found.items() if any(once for _, once in s.values())}

    def _flat_extents(self, bucket: Bucket, param: nn.Parameter) -> Extents | None:
        """The rectangles that the blocks of `param` cover if they cross ends of rows; else None."""
        start, stop = bucket.params[param]
        inside = [r for r in self.regions[bucket] if start <= r.start < stop]
        if all(not region.shape[-1] % SCALE_BLOCK for region in inside):
            return None
        return extents_of(inside, start)

    def _shard_of(self, extents: Extents) -> int:
        """The index of this rank's shard of a flat tensor."""
        split = extents[0]["shape"] != extents[0]["global_shape"]
        return self.groups.tp.rank() if split else 0

    def _reblocks(
        self,
        bucket: Bucket,
        param: nn.Parameter,
        flat_blocks: FlatBlocks | None,
    ) -> Iterator[tuple[Reblock, bool]]:
        """The moments of `param` that were stored in other blocks, and whether those were flat."""
        start, stop = bucket.params[param]
        if flat_blocks is None or not len(bucket.summed(param)):
            return
        inside = [r for r in self.regions[bucket] if start <= r.start < stop]
        here, there = self._flat_extents(bucket, param), flat_blocks.get(inside[0].key)
        if here is None and there is None:
            return
        if here is not None and there is not None:
            shards = self.groups.tp.size() if inside[0].shape != inside[0].global_shape else 1
            if len(there) == shards and there[self._shard_of(here)] == here:
                return
        extents = whole_extents(inside) if there is None else there
        for name, like in self._blocked(self.loaded).items():
            yield Reblock.plan(name, (start, stop), inside, extents, like), there is not None

    def _weights(self, *, whole: bool) -> Iterator[ShardedTensor]:
        for bucket in self.zero.buckets:
            bounds, flat = bucket.owned, bucket.shard
            if whole and not bucket.weights_sharded:
                bounds, flat = (0, bucket.weights.numel()), bucket.weights
            for region in self.regions[bucket]:
                yield from self._pieces(region, flat, bounds[0], bounds, "")

    def _states(
        self, optimizer: Any, moved: Container[tuple[Bucket, nn.Parameter]] = ()
    ) -> Iterator[ShardedTensor]:
        """The states, without the block-quantized moments of `moved` parameters."""
        blocked = self._blocked(optimizer)
        for bucket, states in zip(self.zero.owned, optimizer.states, strict=True):
            bounds = bucket.owned
            for name, tensor in states.items():
                prefix = f"{STATE_PREFIX}{name}."
                regions, unit = self.regions[bucket], 1
                if tensor.numel() < bounds[1] - bounds[0]:
                    regions, unit = self.block_regions[bucket], SCALE_BLOCK
                begin, end = bounds[0] // unit, bounds[1] // unit
                assert tensor.numel() == end - begin
                spans = [
                    (start // unit, stop / unit)
                    for param, (start, stop) in bucket.params.items()
                    if (bucket, param) in moved and name.partition(".")[0] in blocked
                ]
                for region in regions:
                    if not any(start <= region.start < stop for start, stop in spans):
                        yield from self._pieces(region, tensor, begin, (begin, end), prefix)

    def _pieces(
        self, region: Region, flat: Tensor, origin: int, bounds: tuple[int, int], prefix: str
    ) -> Iterator[ShardedTensor]:
        """The rectangles of `region` inside `bounds`; flat[0] is element `origin` of the bucket."""
        start, stop = max(region.start, bounds[0]), min(region.stop, bounds[1])
        copy = not region.main or (not self.zero.chunks[0].sharded and self.groups.dp_cp.rank() > 0)
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
