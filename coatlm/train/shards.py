"""Rectangles of logical tensors to and from a directory, in megatron-core's `torch_dist` layout.

Each rank hands in the rectangles it holds; together they tile the logical tensors. A rank writes
one `.distcp` file of its own, and `.metadata` says where every rectangle lies. Any other tiling can
be read back: each rectangle wanted is assembled from its intersections with those stored. Values
are copied bit by bit, so stored and wanted types must agree.

torch.distributed.checkpoint does the planning and the input/output. Its two uses of pickle are
fenced: `.metadata` is read with an allow-list of types (see `metadata`), and tensors are read with
torch's `weights_only` unpickler. `common.pt` is for megatron alone and never read here.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle  # nosec B403 # for a subclass of Unpickler that makes an allow-list of types only
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from coatlm.megatron import (
    CheckpointableShardedTensor,
    CheckpointingConfig,
    LocalShardsContainer,
    ShardedTensor,
)
from coatlm.train.agreement import Group, describe_failures, together
from coatlm.train.manifest import CheckpointError, write_file
from coatlm.train.metadata import read_metadata
from coatlm.train.reports import error_line


def write_tensors(
    directory: Path, tensors: Iterable[ShardedTensor], group: Group | None = None
) -> None:
    """Write the rectangles of all ranks of a gloo group; on the host they are written in place.

    Raises CheckpointError on every rank if any of them fails or a tensor is not covered.
    """
    try:
        save(
            _by_key(tensors),
            storage_writer=_Writer(directory),
            planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        reasons = {rank: error_line(failure[0]) for rank, failure in error.failures.items()}
        size = 1 if group is None else group.size()
        raise CheckpointError(describe_failures(reasons, size)) from error


def write_layout(directory: Path) -> None:
    """Write what makes megatron-core recognise the directory as a checkpoint of its own."""
    common = io.BytesIO()
    torch.save({}, common)
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
    """Fill the memory of `tensors` in place from a checkpoint. All ranks of a gloo group call it.

    Raises CheckpointError on every rank, and names the tensor, if one is not stored with the wanted
    shape and type, or is stored and wanted by no rank (unless `allow_extra`). Nothing has been
    written to memory then. Files are not checked against the manifest: `verify` does that.
    """
    reader = _Reader(checkpoint)
    together(lambda: _check(reader, tensors), group)
    if not allow_extra and (unused := _unused(reader, tensors, group)):
        raise CheckpointError(
            f"{checkpoint} holds another model: {unused[0]} is stored and has no place here"
            + _more(unused)
        )
    together(lambda: _fill(reader, _by_key(tensors)), group)


class StoredTensors:
    """The logical tensors of a checkpoint: what they are, and each of them when it is wanted."""

    def __init__(self, checkpoint: Path) -> None:
        self._reader = _Reader(checkpoint)
        self.described: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            key: (stored.properties.dtype, tuple(stored.size))
            for key, stored in sorted(self._reader.tensors().items())
        }

    def read(self, key: str) -> Tensor:
        """One of them, whole, on the host. Raises CheckpointError where parts are missing."""
        dtype, shape = self.described[key]
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        _fill(self._reader, {key: tensor})
        return tensor


def read_tensors(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """The logical tensors stored, whole, by key and one at a time, on the host."""
    stored = StoredTensors(checkpoint)
    for key in stored.described:
        yield key, stored.read(key)


def write_one_by_one(
    directory: Path,
    described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    make: Callable[[str], Tensor],
) -> None:
    """Write whole tensors from one process; `make(key)` gives each when its turn has come.

    What it gives is freed after it was written. Raises CheckpointError, OSError of the disk and the
    ValueError of `make`.
    """
    empty = {
        key: torch.empty(shape, dtype=t, device="meta") for key, (t, shape) in described.items()
    }
    planner = _MakingPlanner(make)
    try:
        save(empty, storage_writer=_Writer(directory), planner=planner, no_dist=True)
    except CheckpointException as error:
        cause = error.failures[0][0]
        if isinstance(cause, ValueError | OSError):  # of `make`, or of the disk
            raise cause from error
        raise CheckpointError(error_line(cause)) from error


def tensor_checksums(checkpoint: Path) -> dict[str, str]:
    """`tensor_checksum` of every logical tensor: equal before and after any resharding."""
    return {key: tensor_checksum(tensor) for key, tensor in read_tensors(checkpoint)}


def tensor_checksum(tensor: Tensor) -> str:
    """SHA-256 of a tensor's type, shape and row-major bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _by_key(tensors: Iterable[ShardedTensor]) -> dict[str, LocalShardsContainer]:
    """The local rectangles of each logical tensor, as DCP takes them."""
    shards: dict[str, list[CheckpointableShardedTensor]] = {}
    for tensor in tensors:
        assert tensor.data is not None and tensor.prepend_axis_num == 0
        detached = replace(tensor, data=tensor.data.detach())
        shard = CheckpointableShardedTensor.from_sh_ten(detached)
        shards.setdefault(tensor.key, []).append(shard)
    return {key: LocalShardsContainer(local) for key, local in shards.items()}


def _check(reader: _Reader, tensors: Sequence[ShardedTensor]) -> None:
    """Raise CheckpointError if one of `tensors` is not stored, or as something else."""
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


def _unused(reader: _Reader, tensors: Sequence[ShardedTensor], group: Group | None) -> list[str]:
    """Keys stored that no rank wants."""
    stored = sorted(reader.tensors())
    local = {tensor.key for tensor in tensors}
    wanted = torch.tensor([key in local for key in stored], dtype=torch.uint8)
    if group is not None:
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=group)
    return [key for key, used in zip(stored, wanted.tolist(), strict=True) if not used]


def _fill(reader: _Reader, targets: Mapping[str, Tensor]) -> None:
    """Copy what is stored into `targets`. Each rank plans for itself: nothing is to be agreed."""
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
    except pickle.UnpicklingError as error:  # torch's message advises to read the file all the same
        problem = "a .distcp file holds something other than tensors, refused"
        raise CheckpointError(f"{reader.path}: {problem}") from error
    except Exception as error:  # a damaged file raises nearly anything
        raise CheckpointError(f"{reader.path} is damaged ({error_line(error)})") from error


def _elements(target: Tensor) -> int:
    """Elements to be filled: of the local rectangles, or of a plain tensor."""
    if isinstance(target, LocalShardsContainer):
        return sum(math.prod(chunk.sizes) for chunk in target.__create_chunk_list__())
    return target.numel()


def _describe(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _more(items: Sequence[str]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner, which names a tensor with holes, also when one process saves alone."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:  # of the copy on its way to the disk, not of the tensor
            assert item.tensor_data is not None
            item.tensor_data.properties.pin_memory = False
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        sizes: dict[str, int] = {}
        covered: Counter[str] = Counter()
        for item in (item for plan in all_plans for item in plan.items):
            assert item.tensor_data is not None
            sizes[item.index.fqn] = math.prod(item.tensor_data.size)
            covered[item.index.fqn] += math.prod(item.tensor_data.chunk.sizes)
        for key, size in sizes.items():
            if covered[key] != size:
                raise CheckpointError(f"{covered[key]} of the {size} elements of {key} were given")
        return super().create_global_plan(all_plans)


class _MakingPlanner(_SavePlanner):
    """Plans with tensors that have no data yet, and takes it away again once it is written.

    DCP keeps every tensor of a file until the file is complete.
    """

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._make = make
        self._written = torch.empty(0)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        self._written.untyped_storage().resize_(0)
        tensor = self._make(write_item.index.fqn).contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        assert write_item.tensor_data is not None
        assert tensor.shape == write_item.tensor_data.size
        assert tensor.dtype == write_item.tensor_data.properties.dtype
        self._written = tensor
        return tensor


class _Writer(filesystem.FileSystemWriter):
    """One file a rank, synced, by one thread: DCP loses the exceptions of its other threads.

    Nothing is copied ahead: DCP's copier would start CUDA on device 0 in a thread.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, sync_files=True, thread_count=1, per_thread_copy_ahead=0)

    def storage_meta(self) -> StorageMeta:
        """Nothing of this machine, such as the temporary path."""
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write, and report a full disk as such: torch's zip writer reports a wrong position."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


class _Reader(filesystem.FileSystemReader):
    """Reads a checkpoint that may have been tampered with."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, from the allowed types only. Raises CheckpointError for any other."""
        if self._metadata is None:
            self._metadata = read_metadata(Path(self.path))
        return self._metadata

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """What is stored, by key."""
        stored = self.read_metadata().state_dict_metadata
        return {k: v for k, v in stored.items() if isinstance(v, TensorStorageMetadata)}
