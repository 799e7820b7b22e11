"""The rectangles of logical tensors that lie in flat buckets, for checkpoints.

A flat range [a, b) of a row-major matrix is at most three rectangles: the rest of its first row,
whole rows, the start of its last row. States with one element per block of 128 consecutive elements
(the scales of quantized moments) are rectangles of a tensor that is 128 times narrower. Where rows
are not multiples of 128 long, blocks cross the ends of rows. The blocks of each tensor-parallel
rank are then a shard of a flat tensor, which only the same tensor-parallel layout can read;
`reblock` converts it for others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.megatron import ShardedTensor, apply_factories, is_main_replica
from coatlm.parallel.buckets import Bucket

METADATA = {"non_homogeneous_layers": True}  # keys name the layer: decoder.layers.7. ...


@dataclass(frozen=True)
class Region:
    """A rectangle of a logical tensor, stored row-major at `start` of a bucket."""

    key: str
    shape: tuple[int, ...]  # of the rectangle
    global_shape: tuple[int, ...]  # of the logical tensor
    offset: tuple[int, ...]  # of the rectangle in it
    start: int  # first element in the bucket or, in `regions_of`, in the parameter
    main: bool  # not a replica of a tensor that another model-parallel rank writes

    def narrowed(self) -> Region:
        """The region in units of 128 elements. Its last dimension is a multiple of 128."""
        *shape, width = self.shape
        *global_shape, global_width = self.global_shape
        *offset, first = self.offset
        return Region(
            self.key,
            (*shape, width // SCALE_BLOCK),
            (*global_shape, global_width // SCALE_BLOCK),
            (*offset, first // SCALE_BLOCK),
            self.start // SCALE_BLOCK,
            self.main,
        )

    @property
    def stop(self) -> int:
        size = 1
        for length in self.shape:
            size *= length
        return self.start + size

    def of(self, parameter: Tensor) -> Tensor:
        """The view of this region, of `regions_of`, in its parameter or a tensor of that shape."""
        return parameter.view(-1)[self.start : self.stop].view(self.shape)


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


def regions_of(module: Any) -> list[tuple[nn.Parameter, Region]]:
    """The parameters of a model chunk and their regions, whose `start` is inside the parameter."""
    named = dict(module.named_parameters())
    regions: list[tuple[nn.Parameter, Region]] = []
    seen: set[nn.Parameter] = set()
    for name, value in sharded_tensors(module):
        param = named.get(name)
        if param is None:  # the output layer's name for a tied embedding
            param = module.shared_embedding_or_output_weight()
        assert value.data is not None
        inside = value.data.storage_offset() - param.storage_offset()
        assert value.data.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()
        assert value.data.is_contiguous() and 0 <= inside < param.numel()
        if param in seen and name not in named:
            continue
        seen.add(param)
        skipped = value.prepend_axis_num
        replica = value.replica_id
        region = Region(
            key=value.key,
            shape=tuple(value.data.shape),
            global_shape=tuple(value.global_shape[skipped:]),
            offset=tuple(value.global_offset[skipped:]),
            start=inside,
            main=is_main_replica(replica[:-1] if isinstance(replica, tuple) else replica),
        )
        regions.append((param, region))
    assert seen == set(named.values()), "every parameter is saved"
    return regions


def block_regions_of(
    bucket: Bucket, regions: Sequence[Region], tp: dist.ProcessGroup
) -> list[Region]:
    """The regions in units of 128 elements, for states with one element per block."""
    result = []
    for start, stop in bucket.params.values():
        inside = [region for region in regions if start <= region.start < stop]
        if all(not region.shape[-1] % SCALE_BLOCK for region in inside):
            result += [region.narrowed() for region in inside]
            continue
        count = -(-(stop - start) // SCALE_BLOCK)
        shards = tp.size() if inside[0].shape != inside[0].global_shape else 1
        result.append(
            Region(
                key=inside[0].key,
                shape=(count,),
                global_shape=(count * shards,),
                offset=(count * tp.rank() if shards > 1 else 0,),
                start=start // SCALE_BLOCK,
                main=inside[0].main,
            )
        )
    return result


def sharded_tensors(model: Any) -> Iterator[tuple[str, ShardedTensor]]:
    """Yield (parameter name, its ShardedTensor) of a model, from megatron-core.

    Their data are views of the parameters. A fused gate|up weight yields two tensors.
    """
    state = model.sharded_state_dict(metadata=METADATA)
    apply_factories(state)
    for name, value in state.items():
        found = value if isinstance(value, list | tuple) else [value]
        for item in found:
            if isinstance(item, ShardedTensor):
                yield name, item
