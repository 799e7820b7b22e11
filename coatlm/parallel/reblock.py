"""Conversion of moments in blocks of 128 elements when the tensor-parallel layout changes.

Where the rows of a local weight are not multiples of 128 long, blocks cross the ends of rows, and
another tensor-parallel layout has other blocks. A checkpoint therefore records which rectangles the
blocks of each such tensor cover (`ZeroCheckpoint.flat_blocks`), and loading compares these with the
blocks of the current layout. If they are equal, codes and scales are copied. If not, the stored
codes and scales are read whole, on the host, decoded in the stored blocks, cut to the rectangles of
this rank and encoded in the current blocks, which rounds once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coatlm.files import STATE_PREFIX
from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.megatron import ShardedTensor
from coatlm.parallel.buckets import Bucket, round_up
from coatlm.parallel.regions import Region

Extents = list[dict[str, Any]]  # the rectangles that the blocks of one rank cover, in order
FlatBlocks = Mapping[str, Sequence[Extents]]  # key of a flat tensor -> the extents of each shard
MomentState = dict[str, Tensor]  # by suffix, as the optimizer stores it


def extents_of(regions: Sequence[Region], start: int) -> Extents:
    """The regions of one parameter, which begins at `start` of its bucket, as JSON values."""
    return [
        {
            "key": region.key,
            "shape": list(region.shape),
            "global_shape": list(region.global_shape),
            "offset": list(region.offset),
            "start": region.start - start,
        }
        for region in regions
    ]


def whole_extents(regions: Sequence[Region]) -> list[Extents]:
    """The extents of a tensor whose rows are multiples of 128: each logical tensor is whole."""
    return [
        [
            {
                "key": region.key,
                "shape": list(region.global_shape),
                "global_shape": list(region.global_shape),
                "offset": [0] * len(region.shape),
                "start": 0,
            }
        ]
        for region in regions
    ]


@dataclass(eq=False)
class StoredShard:
    """One stored shard of a moment: host buffers of codes and scales, which a load fills."""

    extents: Extents
    state: MomentState

    def values_in(self, decoded: Tensor, region: Region, into: Tensor) -> None:
        """Copy this shard's part of `region` from `decoded` to `into`, of the region's shape."""
        for stored in self.extents:
            if stored["key"] != region.key:
                continue
            shape = stored["shape"]
            begin, size = stored["start"], torch.Size(shape).numel()
            there, here = [], []
            for length, first, local, origin in zip(
                shape, stored["offset"], region.shape, region.offset, strict=True
            ):
                low, high = max(first, origin), min(first + length, origin + local)
                there.append(slice(low - first, max(high, low) - first))
                here.append(slice(low - origin, max(high, low) - origin))
            if all(part.start < part.stop for part in here):
                values = decoded[begin : begin + size].view(shape)
                into[tuple(here)] = values[tuple(there)]


@dataclass(eq=False)
class Reblock:
    """The conversion of one moment of one parameter to other blocks."""

    name: str
    span: tuple[int, int]  # of the parameter, in elements of the bucket
    regions: Sequence[Region]
    shards: Sequence[StoredShard]

    @classmethod
    def plan(
        cls,
        name: str,
        span: tuple[int, int],
        regions: Sequence[Region],
        stored: Sequence[Extents],
        like: Mapping[str, tuple[torch.dtype, bool]],
    ) -> Reblock:
        """Allocate host buffers for the `stored` shards of the moment `name`.

        `like`: suffix -> dtype of the state, and whether it has one element per block.
        """
        shards = []
        for extents in stored:
            end = max(r["start"] + torch.Size(r["shape"]).numel() for r in extents)
            blocks = -(-end // SCALE_BLOCK)
            state = {
                suffix: torch.zeros(
                    blocks if once else blocks * SCALE_BLOCK, dtype=dtype, device="cpu"
                )
                for suffix, (dtype, once) in like.items()
            }
            shards.append(StoredShard(extents, state))
        return cls(name, span, regions, shards)

    def pieces(self, flat: bool) -> Iterator[ShardedTensor]:
        """The tensors to load. `flat`: states per block are stored as shards of a flat tensor."""
        for number, shard in enumerate(self.shards):
            for suffix, tensor in shard.state.items():
                prefix = f"{STATE_PREFIX}{self.name}{suffix}."
                if len(tensor) == max(map(len, shard.state.values())):
                    for r in shard.extents:
                        data = tensor[r["start"] :][: torch.Size(r["shape"]).numel()]
                        yield _piece(
                            prefix + r["key"], data, r["shape"], r["global_shape"], r["offset"]
                        )
                elif flat:
                    key, n = prefix + shard.extents[0]["key"], len(tensor)
                    yield _piece(key, tensor, [n], [n * len(self.shards)], [n * number])
                else:
                    (r,) = shard.extents
                    shape = [*r["shape"][:-1], r["shape"][-1] // SCALE_BLOCK]
                    yield _piece(prefix + r["key"], tensor, shape, shape, [0] * len(shape))

    def finish(
        self,
        bucket: Bucket,
        states: MomentState,
        decode: Callable[..., Tensor],
        encode: Callable[..., MomentState],
    ) -> None:
        """Decode the loaded moment and encode it into the parameter's part of `states`."""
        start, stop = self.span
        padded = round_up(stop - start, SCALE_BLOCK)
        values = torch.zeros(padded, device="cpu")
        for shard in self.shards:
            decoded = decode(self.name, shard.state)
            for region in self.regions:
                first = region.start - start
                into = values[first : first + torch.Size(region.shape).numel()]
                shard.values_in(decoded, region, into.view(region.shape))
        begin, end = bucket.owned
        for suffix, encoded in encode(self.name, values).items():
            state = states[self.name + suffix]
            unit = (end - begin) // len(state)
            low, high = max(start, begin), min(start + padded, end)
            part = encoded[(low - start) // unit : (high - start) // unit]
            state[(low - begin) // unit : (high - begin) // unit].copy_(part)


def _piece(
    key: str, data: Tensor, shape: list[int], global_shape: list[int], offset: list[int]
) -> ShardedTensor:
    return ShardedTensor(
        key=key,
        data=data.view(shape),
        dtype=data.dtype,
        local_shape=tuple(shape),
        global_shape=tuple(global_shape),
        global_offset=tuple(offset),
        axis_fragmentations=None,
        replica_id=0,
    )
