"""Moments in groups of 128, moved to a layout that groups their elements otherwise.

Where a row of a local weight is no multiple of 128, groups run over its end, and another
tensor-parallel layout has other groups. A checkpoint therefore says of each such tensor what its
groups ran over (`flat_groups`). Loading compares that with the groups here: where they differ the
stored codes and scales are read whole, on the host, decoded with the groups of then, cut to the
rectangles held here and encoded with the groups of now. That rounds once; groups that are the same
in both layouts are copied as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.megatron import ShardedTensor
from coatlm.parallel.buckets import Bucket
from coatlm.parallel.regions import Region

Layout = list[dict[str, Any]]  # what the groups of one tensor-parallel rank run over, in order
FlatGroups = Mapping[str, Sequence[Layout]]  # key of a flat tensor -> its shards' layouts
State = dict[str, Tensor]  # by suffix, as optimizers keep it


def flat_layout(regions: Sequence[Region], start: int) -> Layout:
    """The regions of one parameter that begins at `start` of its bucket, as values of JSON."""
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


def whole_layouts(regions: Sequence[Region]) -> list[Layout]:
    """What groups ran over where rows were multiples of 128: each logical tensor by itself."""
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
class Source:
    """One stored shard of a moment: buffers on the host that a load fills, to be decoded."""

    layout: Layout
    state: State

    def values_in(self, decoded: Tensor, region: Region, into: Tensor) -> None:
        """Copy what this shard has of `region` to `into`, which has the region's shape."""
        for stored in self.layout:
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
class Move:
    """One moment of one parameter that changes its groups."""

    name: str
    span: tuple[int, int]  # of the parameter, in elements of the bucket
    regions: Sequence[Region]
    sources: Sequence[Source]

    @classmethod
    def plan(
        cls,
        name: str,
        span: tuple[int, int],
        regions: Sequence[Region],
        layouts: Sequence[Layout],
        like: Mapping[str, tuple[torch.dtype, bool]],
    ) -> Move:
        """`like`: suffix -> dtype of the state, and whether it is kept once a group."""
        sources = []
        for layout in layouts:
            end = max(r["start"] + torch.Size(r["shape"]).numel() for r in layout)
            groups = -(-end // SCALE_BLOCK)
            state = {
                suffix: torch.zeros(
                    groups if once else groups * SCALE_BLOCK, dtype=dtype, device="cpu"
                )
                for suffix, (dtype, once) in like.items()
            }
            sources.append(Source(layout, state))
        return cls(name, span, regions, sources)

    def pieces(self, flat: bool) -> Iterator[ShardedTensor]:
        """What a load has to fill. `flat`: the groups are stored as parts of one flat tensor."""
        shards = len(self.sources)
        for number, source in enumerate(self.sources):
            for suffix, tensor in source.state.items():
                prefix = f"optimizer.state.{self.name}{suffix}."
                if len(tensor) == max(map(len, source.state.values())):
                    for r in source.layout:
                        data = tensor[r["start"] :][: torch.Size(r["shape"]).numel()]
                        yield _piece(
                            prefix + r["key"], data, r["shape"], r["global_shape"], r["offset"]
                        )
                elif flat:
                    key, n = prefix + source.layout[0]["key"], len(tensor)
                    yield _piece(key, tensor, [n], [n * shards], [n * number])
                else:
                    (r,) = source.layout
                    shape = [*r["shape"][:-1], r["shape"][-1] // SCALE_BLOCK]
                    yield _piece(prefix + r["key"], tensor, shape, shape, [0] * len(shape))

    def finish(
        self,
        bucket: Bucket,
        states: State,
        decode: Callable[..., Tensor],
        encode: Callable[..., State],
    ) -> None:
        """Decode what was loaded, encode it here: the part of `states` that is the parameter's."""
        start, stop = self.span
        groups = -(-(stop - start) // SCALE_BLOCK)
        values = torch.zeros(groups * SCALE_BLOCK, device="cpu")
        for source in self.sources:
            decoded = decode(self.name, source.state)
            for region in self.regions:
                first = region.start - start
                into = values[first : first + torch.Size(region.shape).numel()]
                source.values_in(decoded, region, into.view(region.shape))
        begin, end = bucket.owned
        for suffix, encoded in encode(self.name, values).items():
            state = states[self.name + suffix]
            unit = (end - begin) // len(state)
            low, high = max(start, begin), min(start + groups * SCALE_BLOCK, end)
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
