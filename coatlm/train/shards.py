"""Write and read sharded tensors in megatron-core's `torch_dist` layout.

Each rank passes its shards, which are rectangles of the global tensors; the shards of all ranks
together cover each tensor. A rank writes one `.distcp` file, or several if its shards are large,
and `.metadata` maps every shard to a file and an offset. A checkpoint can be read with any other
sharding: each requested shard is assembled from the parts of stored shards that it overlaps. Values
are copied bit by bit, so the stored and requested types must be equal.

torch.distributed.checkpoint plans and performs the input and output: see `dcp`. `common.pt` is for
megatron and never read here.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle  # nosec B403 # for UnpicklingError only
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_saver import save

from coatlm.megatron import (
    CheckpointableShardedTensor,
    CheckpointingConfig,
    LocalShardsContainer,
    ShardedTensor,
)
from coatlm.train.agreement import Group, describe_failures, together
from coatlm.train.dcp import CoveringPlanner, MakingPlanner, ShardReader, ShardWriter
from coatlm.train.manifest import CheckpointError, File, write_file
from coatlm.train.reports import error_line

FILES = 8  # that a rank writes in parallel: one thread does not saturate the disk


def write_tensors(
    directory: Path, tensors: Iterable[ShardedTensor], group: Group | None = None
) -> dict[str, File]:
    """Write the shards of all ranks of a gloo group; tensors on the host are not copied.

    Returns the sizes and checksums of the .distcp files that this rank has written, by name.
    Raises CheckpointError on every rank if any rank fails or the shards do not cover a tensor.
    """
    size, tensors = 1 if group is None else group.size(), list(tensors)
    on_host = not any(tensor.data is not None and tensor.data.is_cuda for tensor in tensors)
    writer = ShardWriter(directory, files=FILES if on_host else 1)
    try:
        save(
            _by_key(tensors),
            storage_writer=writer,
            planner=CoveringPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=size == 1,  # otherwise DCP pickles its plan and sends it to itself
        )
    except CheckpointException as error:
        reasons = {rank: error_line(failure[0]) for rank, failure in error.failures.items()}
        raise CheckpointError(describe_failures(reasons, size)) from error
    return writer.written


def write_layout(directory: Path, content: Mapping[str, Any] | None = None) -> None:
    """Write common.pt and metadata.json, by which megatron-core recognizes its checkpoints.

    `content` is that of common.pt, which coatlm itself does not read.
    """
    common = io.BytesIO()
    torch.save(dict(content or {}), common)
    write_file(directory / "common.pt", common.getvalue())
    layout = CheckpointingConfig(sharded_backend="torch_dist")
    write_file(directory / "metadata.json", json.dumps(asdict(layout)).encode())


def load(
    checkpoint: Path,
    tensors: Sequence[ShardedTensor],
    group: Group | None = None,
    *,
    allow_extra: bool = False,
) -> None:
    """Load a checkpoint into the memory of `tensors`. All ranks of a gloo group call it.

    Before any tensor is changed, raises CheckpointError on every rank with the name of a tensor
    that is not stored with the requested shape and type, or that is stored and requested by no rank
    (unless `allow_extra`). Files are not compared with the manifest; `verify` does that.
    """
    reader = ShardReader(checkpoint)
    together(lambda: _check(reader, tensors), group)
    if not allow_extra and (unused := _unused(reader, tensors, group)):
        raise CheckpointError(
            f"{checkpoint} holds another model: {unused[0]} is stored and not part of this one"
            + _more(unused)
        )
    together(lambda: _fill(reader, _by_key(tensors)), group)


class StoredTensors:
    """The global tensors of a checkpoint: their types and shapes, and each tensor on request.

    `files` are those of a checkpoint without a manifest, which megatron-core has written.
    """

    def __init__(self, checkpoint: Path, files: Collection[str] | None = None) -> None:
        self._reader = ShardReader(checkpoint, files)
        self.described: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            key: (stored.properties.dtype, tuple(stored.size))
            for key, stored in sorted(self._reader.tensors().items())
        }

    def read(self, key: str) -> Tensor:
        """Read one whole tensor to the host. Raises CheckpointError if parts are missing."""
        dtype, shape = self.described[key]
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        _fill(self._reader, {key: tensor})
        return tensor

    def read_layer(self, key: str, layer: int) -> Tensor:
        """Read [layer] of a tensor to the host. Raises CheckpointError if parts are missing."""
        return self._read_rows(key, layer, 1)[0]

    def read_range(self, key: str, start: int, length: int) -> Tensor:
        """Read [start : start + length] of a flat tensor to the host. Raises CheckpointError."""
        assert start >= 0 and start + length <= self.described[key][1][0]
        return self._read_rows(key, start, length)

    def _read_rows(self, key: str, first: int, count: int) -> Tensor:
        dtype, shape = self.described[key]
        tensor = torch.empty((count, *shape[1:]), dtype=dtype, device="cpu")
        corner = (first, *(0 for _ in shape[1:]))
        part = ShardedTensor(key, tensor, dtype, tuple(tensor.shape), shape, corner, None)
        _fill(self._reader, _by_key([part]))
        return tensor

    def read_object(self, key: str) -> bytes | None:
        """The bytes of an object that is no tensor, or None if there is none of that name."""
        return self._reader.read_object(key)


def read_tensors(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield each stored global tensor with its key, whole, on the host."""
    stored = StoredTensors(checkpoint)
    for key in stored.described:
        yield key, stored.read(key)


def write_one_by_one(
    directory: Path,
    described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    make: Callable[[str], Tensor],
    *,
    nothing: Iterable[str] = (),
) -> None:
    """Write whole tensors from one process, one at a time; `make(key)` computes each of them.

    A tensor is freed once it is written. `nothing` are the keys of objects that megatron-core asks
    for, each a list of None. Raises CheckpointError, an OSError of the disk, or the ValueError of
    `make`.
    """
    empty: dict[str, Any] = {
        key: torch.empty(shape, dtype=t, device="meta") for key, (t, shape) in described.items()
    }
    empty |= {key: [None] for key in nothing}
    planner = MakingPlanner(make)
    try:
        save(empty, storage_writer=ShardWriter(directory), planner=planner, no_dist=True)
    except CheckpointException as error:
        cause = error.failures[0][0]
        if isinstance(cause, ValueError | OSError):  # raised by `make`, or by the disk
            raise cause from error
        raise CheckpointError(error_line(cause)) from error


def tensor_checksums(checkpoint: Path) -> dict[str, str]:
    """`tensor_checksum` of every global tensor, which does not depend on the sharding."""
    return {key: tensor_checksum(tensor) for key, tensor in read_tensors(checkpoint)}


def tensor_checksum(tensor: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and row-major bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _by_key(tensors: Iterable[ShardedTensor]) -> dict[str, LocalShardsContainer]:
    """The local shards of each global tensor, in DCP's container type."""
    shards: dict[str, list[CheckpointableShardedTensor]] = {}
    for tensor in tensors:
        assert tensor.data is not None and tensor.prepend_axis_num == 0
        detached = replace(tensor, data=tensor.data.detach())
        shard = CheckpointableShardedTensor.from_sh_ten(detached)
        shards.setdefault(tensor.key, []).append(shard)
    return {key: LocalShardsContainer(local) for key, local in shards.items()}


def _check(reader: ShardReader, tensors: Sequence[ShardedTensor]) -> None:
    """Raise CheckpointError if one of `tensors` is not stored with the same shape and dtype."""
    found = {k: _describe(v.size, v.properties.dtype) for k, v in reader.tensors().items()}
    problems = []
    for tensor in tensors:
        wanted = _describe(tensor.global_shape, tensor.dtype)
        if tensor.key not in found:
            problems.append(f"{tensor.key} is not stored, expected {wanted}")
        elif found[tensor.key] != wanted:
            problems.append(f"{tensor.key} is stored as {found[tensor.key]}, expected {wanted}")
    if problems := list(dict.fromkeys(problems)):
        raise CheckpointError(f"{reader.path} holds another model: {problems[0]}{_more(problems)}")


def _unused(
    reader: ShardReader, tensors: Sequence[ShardedTensor], group: Group | None
) -> list[str]:
    """The stored keys that no rank requests."""
    stored = sorted(reader.tensors())
    local = {tensor.key for tensor in tensors}
    wanted = torch.tensor([key in local for key in stored], dtype=torch.uint8)
    if group is not None:
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=group)
    return [key for key, used in zip(stored, wanted.tolist(), strict=True) if not used]


def _fill(reader: ShardReader, targets: Mapping[str, Tensor]) -> None:
    """Load stored values into `targets`. Each rank plans locally, without collectives."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    try:
        planner.set_up_planner(dict(targets), metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        found = sum(math.prod(item.lengths) for item in plan.items)
        if found != sum(map(_elements, targets.values())):
            raise CheckpointError(f"{reader.path}: parts of some tensors are not stored")
        reader.read_data(plan, planner).wait()
    except (OSError, MemoryError, CheckpointError):
        raise
    except pickle.UnpicklingError as error:  # torch's message suggests loading the file anyway
        problem = "a .distcp file holds something other than tensors, refused"
        raise CheckpointError(f"{reader.path}: {problem}") from error
    except Exception as error:  # a damaged file raises nearly anything
        raise CheckpointError(f"{reader.path} is damaged ({error_line(error)})") from error


def _elements(target: Tensor) -> int:
    """The number of elements to load: those of the local shards, or of a plain tensor."""
    if isinstance(target, LocalShardsContainer):
        return sum(math.prod(chunk.sizes) for chunk in target.__create_chunk_list__())
    return target.numel()


def _describe(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _more(items: Sequence[str]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""
