"""torch.distributed.checkpoint (DCP) as `shards` uses it: how a save is planned, written and read.

`tensor_reader` reads the tensors. Both uses of pickle are restricted: `.metadata` is read with an
allow-list of types (see `metadata`), and tensors with torch's `weights_only` unpickler.
"""

from __future__ import annotations

import heapq
import io
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from coatlm.train.hashed_file import HashedFiles
from coatlm.train.manifest import CheckpointError, File
from coatlm.train.metadata import read_metadata
from coatlm.train.tensor_reader import TensorReader

FILE = 1 << 28  # bytes; a rank writes at most one file per this many


class CoveringPlanner(DefaultSavePlanner):
    """DCP's planner with a check, also in a single process, that shards cover each tensor."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:  # a property of the host copy that is written, not of the tensor
            if item.tensor_data is not None:  # else an object
                item.tensor_data.properties.pin_memory = False
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        sizes: dict[str, int] = {}
        covered: Counter[str] = Counter()
        for item in (item for plan in all_plans for item in plan.items):
            if item.tensor_data is None:  # an object
                continue
            sizes[item.index.fqn] = math.prod(item.tensor_data.size)
            covered[item.index.fqn] += math.prod(item.tensor_data.chunk.sizes)
        for key, size in sizes.items():
            if covered[key] != size:
                raise CheckpointError(f"{covered[key]} of the {size} elements of {key} were given")
        return super().create_global_plan(all_plans)


class MakingPlanner(CoveringPlanner):
    """Plans with meta tensors; computes each tensor when it is written, then frees it.

    DCP alone would hold every tensor of a file until the file is complete.
    """

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._make = make
        self._written = torch.empty(0)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.tensor_data is None:
            return super().resolve_data(write_item)
        self._written.untyped_storage().resize_(0)
        tensor = self._make(write_item.index.fqn).contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        assert tensor.shape == write_item.tensor_data.size
        assert tensor.dtype == write_item.tensor_data.properties.dtype
        self._written = tensor
        return tensor


class ShardWriter(filesystem.FileSystemWriter):
    """Writes the shards of a rank with fsync, large ones into up to `files` files in parallel.

    Each file has a thread of its own; DCP's own threads would lose exceptions. DCP's copying ahead
    is off, because its thread would initialize CUDA on device 0. For that reason tensors on a GPU
    need files=1, which writes in the calling thread.
    """

    def __init__(self, directory: Path, *, files: int = 1) -> None:
        super().__init__(directory, sync_files=True, thread_count=1, per_thread_copy_ahead=0)
        self._files = files
        self.fs: HashedFiles = HashedFiles()

    @property
    def written(self) -> dict[str, File]:
        """The sizes and checksums of the files that this rank has written, by name."""
        return dict(self.fs.files)

    def storage_meta(self) -> StorageMeta:
        """Return empty metadata, so that `.metadata` does not contain the temporary path."""
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write shards as DCP does, but raise a full disk's OSError, which torch's writer hides."""
        parts = split_by_size(plan.items, self._files)
        prefix = plan.storage_data.prefix
        names = [prefix, *(f"{prefix}{number}_" for number in range(1, len(parts)))]
        plans = [
            replace(plan, items=items, storage_data=replace(plan.storage_data, prefix=name))
            for items, name in zip(parts, names, strict=True)
        ]
        outcomes: list[list[WriteResult] | Exception] = [[] for _ in plans]

        def write(number: int) -> None:
            try:
                outcomes[number] = self._write_file(plans[number], planner)
            except Exception as error:
                outcomes[number] = error

        # not a pool of concurrent.futures, which takes no work once the main thread has ended: a
        # run waits for its save before (`Checkpointer.join`), other callers need not
        threads = []
        for number in range(1, len(plans)):
            thread = Thread(target=write, args=(number,))
            try:
                thread.start()
            except RuntimeError:  # from Python 3.12 on, for the same reason
                write(number)
            else:
                threads.append(thread)
        write(0)
        for thread in threads:
            thread.join()
        results: list[WriteResult] = []
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            results += outcome
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def _write_file(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        try:
            return super().write_data(plan, planner).wait()
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def split_by_size(items: Sequence[WriteItem], parts: int) -> list[list[WriteItem]]:
    """`items` in their order in at most `parts` lists, of bytes as equal as whole items allow.

    There is at least one list, and at most one per `FILE` bytes; further ones are not empty.
    """
    sizes = [_size(item) for item in items]
    count = max(1, min(parts, sum(sizes) // FILE))
    lists: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for at in sorted(range(len(items)), key=lambda at: -sizes[at]):
        load, number = heapq.heappop(loads)
        lists[number].append(at)
        heapq.heappush(loads, (load + sizes[at], number))
    filled = [numbers for numbers in lists if numbers] or [[]]
    return [[items[at] for at in sorted(numbers)] for numbers in filled]


def _size(item: WriteItem) -> int:
    """Bytes of a tensor's shard; 0 of an object."""
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


class ShardReader(TensorReader):
    """Reads an untrusted checkpoint."""

    def __init__(self, checkpoint: Path, files: Collection[str] | None = None) -> None:
        super().__init__(checkpoint)
        self._files = files
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata`, once. Raises CheckpointError for types that are not allowed."""
        if self._metadata is None:
            self._metadata = read_metadata(Path(self.path), self._files)
        return self._metadata

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """The stored tensors by key."""
        stored = self.read_metadata().state_dict_metadata
        return {k: v for k, v in stored.items() if isinstance(v, TensorStorageMetadata)}

    def read_object(self, key: str) -> bytes | None:
        """The stored bytes of an object. Raises CheckpointError if the file is shorter."""
        metadata = self.read_metadata()
        if not isinstance(metadata.state_dict_metadata.get(key), BytesStorageMetadata):
            return None
        place = (metadata.storage_data or {}).get(MetadataIndex(key))
        if place is None:
            raise CheckpointError(f"{key}: the checkpoint does not say where it is stored")
        path, start, length = Path(self.path) / place.relative_path, place.offset, place.length
        ends = type(start) is type(length) is int and 0 <= start <= start + length
        if not ends or start + length > path.stat().st_size:
            raise CheckpointError(f"{path} is damaged ({key} is said to lie outside)")
        with path.open("rb") as file:
            file.seek(start)
            return file.read(length)
