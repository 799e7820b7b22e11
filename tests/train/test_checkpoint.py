"""Checkpoints: whole or absent, exact in every layout, readable by megatron-core, and not trusted.

All comparisons are of bits: a checkpoint copies, it does not compute. What needs several ranks, or
processes to kill, runs in forks of one process that has imported everything; the rest runs here.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import pickle
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem

from coatlm.parallel.zero import rectangles
from coatlm.train import checkpoint, manifest, shards
from coatlm.train.checkpoint import (
    Checkpointer,
    CheckpointError,
    find_checkpoint,
    load,
    read_state,
    tensor_checksum,
    tensor_checksums,
    verify,
)
from coatlm.train.shards import ShardedTensor
from tests.distributed import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LOG = logging.getLogger("test_checkpoint")
WORLD = 4
TIMEOUT = timedelta(seconds=60)
SPECS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "weight": ((7, 13), torch.float32),
    "wide": ((3, 40), torch.bfloat16),
    "bias": ((11,), torch.bfloat16),
    "m.codes": ((8, 16), torch.float8_e4m3fn),
    "v.codes": ((8, 16), torch.float8_e5m2),
    "remainder": ((6, 10), torch.uint8),
    "step": ((), torch.int64),
}
# How a tensor lies over ranks: (corner, shape, main replica) of each rectangle of a rank.
Rectangle = tuple[tuple[int, ...], tuple[int, ...], bool]


# Tensors and their layouts


def tensors_of(seed: int) -> dict[str, Tensor]:
    """Random bits, NaN payloads among them."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for key, (shape, dtype) in SPECS.items():
        count = torch.Size(shape).numel() * dtype.itemsize
        bits = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
        made[key] = bits.view(dtype).view(shape)
    return made


def cut(axis: int, shape: tuple[int, ...], rank: int, world: int) -> Iterator[Rectangle]:
    """Uneven parts along an axis: the last rank has the rest, and some may have none."""
    if axis >= len(shape):
        yield (0,) * len(shape), shape, rank == 0
        return
    size = -(-shape[axis] // world)
    begin, end = min(rank * size, shape[axis]), min((rank + 1) * size, shape[axis])
    if begin < end:
        corner = tuple(begin if i == axis else 0 for i in range(len(shape)))
        yield corner, tuple(end - begin if i == axis else n for i, n in enumerate(shape)), True


def flat(shape: tuple[int, ...], rank: int, world: int) -> Iterator[Rectangle]:
    """Equal flat ranges, as ZeRO shards are: up to three rectangles each."""
    if not shape:
        yield (), (), rank == 0
        return
    size = -(-torch.Size(shape).numel() // world)
    stop = min((rank + 1) * size, torch.Size(shape).numel())
    for corner, rectangle, _ in rectangles(shape, rank * size, stop):
        yield corner, rectangle, True


LAYOUTS: Mapping[str, Callable[[tuple[int, ...], int, int], Iterator[Rectangle]]] = {
    "rows": lambda shape, rank, world: cut(0, shape, rank, world),
    "columns": lambda shape, rank, world: cut(max(len(shape) - 1, 0), shape, rank, world),
    "flat": flat,
    "copies": lambda shape, rank, world: iter([((0,) * len(shape), shape, rank == 0)]),
}


def sharded(key: str, data: Tensor, shape: tuple[int, ...], rectangle: Rectangle) -> ShardedTensor:
    corner, size, main = rectangle
    return ShardedTensor(
        key, data.view(size), data.dtype, size, shape, corner, None, replica_id=int(not main)
    )


def pieces_of(
    whole: Mapping[str, Tensor], layout: str, rank: int = 0, world: int = 1
) -> list[ShardedTensor]:
    """This rank's rectangles of `whole`."""
    return [
        sharded(key, region(tensor, *rectangle[:2]).contiguous(), tuple(tensor.shape), rectangle)
        for key, tensor in whole.items()
        for rectangle in LAYOUTS[layout](tuple(tensor.shape), rank, world)
    ]


def targets_of(layout: str, rank: int = 0, world: int = 1) -> tuple[list[ShardedTensor], Tensor]:
    """Rectangles to fill, as views into one buffer of 0xA5 with gaps between them."""
    wanted = [
        (key, shape, dtype, rectangle)
        for key, (shape, dtype) in SPECS.items()
        for rectangle in LAYOUTS[layout](shape, rank, world)
    ]
    buffer = torch.full((4096,), 0xA5, dtype=torch.uint8)
    pieces, start = [], 8
    for key, shape, dtype, rectangle in wanted:
        size = torch.Size(rectangle[1]).numel() * dtype.itemsize
        data = buffer[start : start + size].view(dtype)
        pieces.append(sharded(key, data, shape, rectangle))
        start += -(-size // 8) * 8 + 8
    return pieces, buffer


def region(tensor: Tensor, corner: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(corner, size, strict=True))]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def differing(pieces: list[ShardedTensor], whole: Mapping[str, Tensor]) -> list[str]:
    """Keys of rectangles that are not, bit by bit, what `whole` has there."""
    return [
        piece.key
        for piece in pieces
        if not torch.equal(
            bits(piece.data),
            bits(region(whole[piece.key], piece.global_offset, piece.local_shape)),
        )
    ]


def outside(pieces: list[ShardedTensor], buffer: Tensor) -> bool:
    """Whether anything between the rectangles was written to."""
    expected = torch.full_like(buffer, 0xA5)
    for piece in pieces:
        start = piece.data.data_ptr() - buffer.data_ptr()
        expected[start : start + piece.data.nbytes] = bits(piece.data)
    return not torch.equal(expected, buffer)


def message(function: Callable[[], object]) -> str:
    """Of the CheckpointError that `function` raises."""
    try:
        function()
    except CheckpointError as error:
        assert len(str(error).splitlines()) == 1
        return str(error)
    return "nothing raised"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@contextmanager
def full_disk() -> Iterator[None]:
    """Every file that DCP opens for writing is on a full disk."""
    original = FileSystem.create_stream

    @contextmanager
    def create_stream(self: Any, path: Path, mode: str) -> Iterator[Any]:
        with original(self, "/dev/full" if "w" in mode else path, mode) as stream:
            yield stream

    FileSystem.create_stream = create_stream  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileSystem.create_stream = original  # type: ignore[method-assign]


# Cases for four ranks


class Case:
    """What the cases share: four ranks, and groups of the first 4, 2 and 1 of them."""

    def __init__(self, rank: int, directory: str) -> None:
        self.rank, self.directory = rank, Path(directory)
        self.groups = {n: dist.new_group(range(n), timeout=TIMEOUT) for n in (4, 2, 1)}

    def saver(self, name: str, world: int = WORLD, **options: Any) -> Checkpointer:
        options = {"keep": 2, "async_save": True} | options
        return Checkpointer(self.directory / name, group=self.groups[world], **options)

    def save(self, name: str, step: int, layout: str, world: int = WORLD) -> Path:
        """Save `tensors_of(step)`."""
        saver = self.saver(name, world)
        saver.save(step, pieces_of(tensors_of(step), layout, self.rank, world), {"rank": self.rank})
        saver.wait()
        return self.directory / name / manifest.step_name(step)


def case_reshard(case: Case) -> list[str]:
    """Every layout and size read back in every other; returns what differed."""
    whole = tensors_of(5)
    worlds = [("rows", 4), ("columns", 2), ("flat", 4), ("flat", 2), ("copies", 4), ("flat", 1)]
    wrong = []
    for layout, world in worlds:
        name = f"{layout}-{world}"
        if case.rank < world:
            case.save(name, 5, layout, world)
        dist.barrier()
        path = case.directory / name / manifest.step_name(5)
        for other, other_world in worlds:
            if case.rank >= other_world:
                continue
            targets, buffer = targets_of(other, case.rank, other_world)
            load(path, targets, case.groups[other_world])
            wrong += [f"{name} as {other}-{other_world}: {k}" for k in differing(targets, whole)]
            if outside(targets, buffer):
                wrong.append(f"{name} as {other}-{other_world}: memory beside the targets")
        if case.rank == 0:
            expected = {key: tensor_checksum(tensor) for key, tensor in whole.items()}
            if tensor_checksums(path) != expected:
                wrong.append(f"{name}: tensor_checksums")
        dist.barrier()
    return wrong


def case_state(case: Case) -> dict[str, Any]:
    return read_state(case.save("state", 1, "rows"))


def case_full_disk(case: Case) -> dict[str, Any]:
    """The disk of rank 1 fills while step 2 is written."""
    saver = case.saver("full")
    saver.save(1, pieces_of(tensors_of(1), "flat", case.rank, WORLD), {})
    saver.wait()
    with full_disk() if case.rank == 1 else nothing():
        saver.save(2, pieces_of(tensors_of(2), "flat", case.rank, WORLD), {})
        error = message(saver.wait)
    dist.barrier()
    left = names(case.directory / "full")
    dist.barrier()
    saver.save(3, pieces_of(tensors_of(3), "flat", case.rank, WORLD), {})
    saver.wait()
    return {"error": error, "left": left, "after": names(case.directory / "full")}


def case_commit_fails(case: Case) -> dict[str, Any]:
    """Rank 0 alone cannot write the manifest."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    saver = case.saver("commit", async_save=False)
    original, checkpoint.write_manifest = checkpoint.write_manifest, refuse
    error = message(lambda: saver.save(1, pieces_of(tensors_of(1), "rows", case.rank, WORLD), {}))
    checkpoint.write_manifest = original
    dist.barrier()
    return {"error": error, "left": names(case.directory / "commit")}


def case_hole(case: Case) -> str:
    """Rank 2 forgets its part of one tensor."""
    saver = case.saver("hole")
    pieces = pieces_of(tensors_of(1), "rows", case.rank, WORLD)
    kept = [p for p in pieces if case.rank != 2 or p.key != "weight"]
    saver.save(1, kept, {})
    return message(saver.wait)


def case_other_shape(case: Case) -> dict[str, Any]:
    """One rank's model has another shape; another time, another type."""
    path = case.save("shape", 1, "rows")
    targets, buffer = targets_of("copies", case.rank, WORLD)
    if case.rank == 3:
        other = torch.zeros(9, 13)
        targets[0] = sharded("weight", other, (9, 13), ((0, 0), (9, 13), True))
    shape = message(lambda: load(path, targets, case.groups[WORLD]))
    if case.rank == 3:
        other = torch.zeros(7, 13, dtype=torch.bfloat16)
        targets[0] = sharded("weight", other, (7, 13), ((0, 0), (7, 13), True))
    dtype = message(lambda: load(path, targets, case.groups[WORLD]))
    return {"shape": shape, "dtype": dtype, "touched": bool((buffer != 0xA5).any())}


def case_keys(case: Case) -> dict[str, str]:
    """Ranks want different tensors, as pipeline stages do; together all, or all but one."""
    path = case.save("keys", 1, "rows")
    targets, _ = targets_of("copies", case.rank, WORLD)
    mine = [t for i, t in enumerate(targets) if i % WORLD == case.rank]
    less = [t for t in mine if t.key != "bias"]
    more = [*mine, sharded("added", torch.zeros(3), (3,), ((0,), (3,), True))]
    group = case.groups[WORLD]
    return {
        "all": message(lambda: load(path, mine, group)),
        "less": message(lambda: load(path, less, group)),
        "allowed": message(lambda: load(path, less, group, allow_extra=True)),
        "more": message(lambda: load(path, more if case.rank == 1 else mine, group)),
    }


def case_shared_verification(case: Case) -> dict[str, Any]:
    """Files are shared out among the ranks; a bit flipped in one of them is known to all."""
    case.save("verify", 1, "rows")
    path = case.save("verify", 2, "rows")
    group, directory = case.groups[WORLD], case.directory / "verify"
    before = find_checkpoint("auto", directory, LOG, group)
    read = []
    original, manifest.sha256 = manifest.sha256, lambda p: (read.append(p.name), original(p))[1]
    find_checkpoint("auto", directory, LOG, group)
    manifest.sha256 = original
    dist.barrier()
    if case.rank == 0:
        flip(path / "__2_0.distcp")
    dist.barrier()
    after = find_checkpoint("auto", directory, LOG, group)
    error = message(lambda: find_checkpoint(str(path), directory, LOG, group))
    return {"before": before.name, "read": read, "after": after.name, "error": error}


def case_megatron(case: Case) -> list[str]:
    """megatron-core's own loader on our directory: new tensors from ZeRO's rectangles."""
    from megatron.core import dist_checkpointing

    path = case.save("megatron", 6, "flat")
    whole = tensors_of(6)
    wanted = {
        key: ShardedTensor.from_rank_offsets(
            key, torch.empty(shape, dtype=dtype), replica_id=case.rank
        )
        for key, (shape, dtype) in SPECS.items()
    }
    wanted["m.codes"] = ShardedTensor.from_rank_offsets(
        "m.codes", torch.empty(2, 16, dtype=torch.float8_e4m3fn), (0, case.rank, WORLD)
    )
    found = dist_checkpointing.load(wanted, str(path))
    whole["m.codes"] = whole["m.codes"][2 * case.rank : 2 * case.rank + 2]
    return [key for key, tensor in whole.items() if not torch.equal(bits(found[key]), bits(tensor))]


CASES = {
    name.removeprefix("case_"): function
    for name, function in list(globals().items())
    if name.startswith("case_")
}


def run_cases(rank: int, directory: Path) -> None:
    """Every case on one rank; what they return is left in a file."""
    join(directory / "store", rank, WORLD)
    case = Case(rank, directory)
    results = {name: function(case) for name, function in CASES.items()}
    dist.barrier()
    (directory / f"{rank}.json").write_text(json.dumps(results))


def join(store: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    options = {"rank": rank, "world_size": world, "timeout": TIMEOUT}
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world), **options)


def fork(function: Callable[..., None], *arguments: Any) -> int:
    child = os.fork()
    if child:
        return child
    try:
        function(*arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def drive(_rank: int, _size: int, directory: str) -> dict[str, Any]:
    """In a process that has imported everything: the cases, then the killed savers."""
    root = Path(directory)
    children = [fork(run_cases, rank, root) for rank in range(WORLD)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * WORLD
    ranks = [json.loads((root / f"{rank}.json").read_text()) for rank in range(WORLD)]
    return {"ranks": ranks, "kills": kill_repeatedly(root)}


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = str(tmp_path_factory.mktemp("driven"))
    [result] = run_ranks(1, "tests.train.test_checkpoint:drive", directory, timeout=240)
    return result


@pytest.fixture(scope="module")
def ranks(driven: dict[str, Any]) -> list[dict[str, Any]]:
    """What each case returned on each rank."""
    return driven["ranks"]


def test_every_layout_is_read_back_exactly_in_every_other(ranks: list[dict[str, Any]]) -> None:
    assert [rank["reshard"] for rank in ranks] == [[]] * WORLD


def test_state_is_that_of_rank_zero(ranks: list[dict[str, Any]]) -> None:
    assert [rank["state"] for rank in ranks] == [{"rank": 0}] * WORLD


def test_full_disk_of_one_rank_is_an_error_on_all_and_leaves_the_older_checkpoint(
    ranks: list[dict[str, Any]],
) -> None:
    for result in (rank["full_disk"] for rank in ranks):
        assert result["error"].endswith(
            "step_00000002 was not written: OSError: [Errno 28] No space left on device (rank 1)"
        )
        assert result["left"] == ["latest", "step_00000001"]
        assert result["after"] == ["latest", "step_00000001", "step_00000003"]


def test_failure_of_rank_zero_at_the_end_is_an_error_on_all_and_leaves_nothing(
    ranks: list[dict[str, Any]],
) -> None:
    for result in (rank["commit_fails"] for rank in ranks):
        assert "Read-only file system (rank 0)" in result["error"]
        assert result["left"] == []


def test_tensor_with_a_hole_is_named(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:  # rank 2 of 4 holds 2 of the 7 rows of 13
        assert "65 of the 91 elements of weight were given" in rank["hole"]


def test_other_shape_on_one_rank_is_named_on_all_and_nothing_is_loaded(
    ranks: list[dict[str, Any]],
) -> None:
    for result in (rank["other_shape"] for rank in ranks):
        expected = "weight is stored as float32 [7, 13], expected {} (rank 3)"
        assert "shape/step_00000001 holds another model" in result["shape"]
        assert result["shape"].endswith(expected.format("float32 [9, 13]"))
        assert result["dtype"].endswith(expected.format("bfloat16 [7, 13]"))
        assert not result["touched"]


def test_keys_are_compared_over_all_ranks_both_ways(ranks: list[dict[str, Any]]) -> None:
    for result in (rank["keys"] for rank in ranks):
        assert result["all"] == result["allowed"] == "nothing raised"
        assert result["less"].endswith("bias is stored and has no place here")
        assert result["more"].endswith("added is not stored, expected float32 [3] (rank 1)")


def test_verification_reads_each_file_on_one_rank_and_all_learn_the_result(
    ranks: list[dict[str, Any]],
) -> None:
    results = [rank["shared_verification"] for rank in ranks]
    read = [name for result in results for name in result["read"]]
    assert len(read) == len(set(read)) == len(manifest.REQUIRED) + WORLD
    assert all(result["read"] for result in results)
    for result in results:
        assert (result["before"], result["after"]) == ("step_00000002", "step_00000001")
        assert result["error"].endswith(
            "__2_0.distcp is not what was written: its checksum differs"
        )


def test_megatron_loads_it(ranks: list[dict[str, Any]]) -> None:
    assert [rank["megatron"] for rank in ranks] == [[]] * WORLD


# One process


def saver_in(directory: Path, **options: Any) -> Checkpointer:
    return Checkpointer(directory, **({"keep": 2, "async_save": False} | options))


def save(directory: Path, *steps: int, **options: Any) -> Path:
    """Save `tensors_of(step)` for each step; returns the last checkpoint."""
    saver = saver_in(directory, **options)
    for step in steps:
        saver.save(step, pieces_of(tensors_of(step), "copies"), {"step": step})
    saver.wait()
    return directory / manifest.step_name(steps[-1])


def flip(path: Path) -> None:
    """One bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@contextmanager
def nothing() -> Iterator[None]:
    yield


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing waits until this is set."""
    event = threading.Event()

    def write_later(*arguments: Any) -> None:
        assert event.wait(30)
        shards.write_tensors(*arguments)

    monkeypatch.setattr(checkpoint, "write_tensors", write_later)
    yield event
    event.set()


def test_async_save_returns_before_writing_and_stores_the_values_of_that_moment(
    tmp_path: Path, held: threading.Event
) -> None:
    saver = saver_in(tmp_path, async_save=True)
    pieces = pieces_of(tensors_of(1), "copies")
    saver.save(1, pieces, {})
    for piece in pieces:
        bits(piece.data).fill_(0)
    saver.poll()
    assert not (tmp_path / "step_00000001").exists()
    held.set()
    saver.wait()
    targets, _ = targets_of("copies")
    load(tmp_path / "step_00000001", targets)
    assert differing(targets, tensors_of(1)) == []


def test_save_waits_for_the_one_before(tmp_path: Path, held: threading.Event) -> None:
    saver = saver_in(tmp_path, async_save=True)
    saver.save(1, pieces_of(tensors_of(1), "copies"), {})
    threading.Timer(0.3, held.set).start()
    saver.save(2, pieces_of(tensors_of(2), "copies"), {})
    assert (tmp_path / "step_00000001").exists()
    saver.wait()
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]


def test_failed_background_save_is_raised_once_by_poll_and_leaves_the_older_one(
    tmp_path: Path,
) -> None:
    saver = saver_in(tmp_path, async_save=True)
    saver.save(1, pieces_of(tensors_of(1), "copies"), {})
    saver.wait()
    with full_disk():
        saver.save(2, pieces_of(tensors_of(2), "copies"), {})
        deadline = time.monotonic() + 30
        while (error := message(saver.poll)) == "nothing raised" and time.monotonic() < deadline:
            time.sleep(0.01)
    assert error.endswith(
        "step_00000002 was not written: OSError: [Errno 28] No space left on device"
    )
    saver.wait()
    assert names(tmp_path) == ["latest", "step_00000001"]
    assert find_checkpoint("auto", tmp_path, LOG) == tmp_path / "step_00000001"


def test_write_that_fails_in_the_middle_of_a_tensor_is_reported_by_its_cause(
    tmp_path: Path,
) -> None:
    """Where torch's zip writer would only say that it is at the wrong position."""
    data = torch.zeros(1 << 20)
    piece = sharded("large", data, (1 << 20,), ((0,), (1 << 20,), True))
    saver, limits = saver_in(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (data.nbytes // 2, limits[1]))
    try:
        error = message(lambda: saver.save(1, [piece], {}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.endswith("step_00000001 was not written: OSError: [Errno 27] File too large")


def test_directory_that_nobody_can_write_to_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "Not a directory" in message(lambda: saver_in(tmp_path / "file" / "checkpoints"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_directory_is_an_error_at_the_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in message(lambda: saver_in(tmp_path))


def test_directory_that_disappears_is_an_error_of_the_save(tmp_path: Path) -> None:
    saver = saver_in(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").rmdir()
    error = message(lambda: saver.save(1, pieces_of(tensors_of(1), "copies"), {}))
    assert "step_00000001 was not written: FileNotFoundError" in error


def test_the_newest_are_kept_and_latest_names_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30, 40)
    assert names(tmp_path) == ["latest", "step_00000030", "step_00000040"]
    assert (tmp_path / "latest").read_text() == "step_00000040\n"
    assert read_state(tmp_path / "step_00000040") == {"step": 40}


def test_newest_is_the_last_written_after_going_back_to_an_earlier_step(tmp_path: Path) -> None:
    save(tmp_path, 30, 40)
    save(tmp_path, 15)
    assert find_checkpoint("auto", tmp_path, LOG) == tmp_path / "step_00000015"
    assert names(tmp_path) == ["latest", "step_00000015", "step_00000040"]


def test_pruning_neither_counts_nor_deletes_what_is_not_whole(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    (tmp_path / "step_00000020" / "__0_0.distcp").unlink()
    save(tmp_path, 30)
    expected = ["latest", "step_00000010", "step_00000020", "step_00000030"]
    assert names(tmp_path) == expected
    save(tmp_path, 40)
    assert names(tmp_path) == ["latest", "step_00000020", "step_00000030", "step_00000040"]


def test_keep_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0"):
        saver_in(tmp_path, keep=0)


def test_step_written_again_replaces_the_older_one(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    saver_in(tmp_path).save(1, pieces_of(tensors_of(2), "copies"), {"again": True})
    assert names(tmp_path) == ["latest", "step_00000001"]
    assert read_state(path) == {"again": True}
    targets, _ = targets_of("copies")
    load(path, targets)
    assert differing(targets, tensors_of(2)) == []


def test_checkpoint_set_aside_by_a_killed_process_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    path.rename(tmp_path / f"{manifest.REPLACED}{path.name}")
    assert find_checkpoint("auto", tmp_path, LOG) == path


def test_start_removes_what_killed_processes_left_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / ".tmp-step_00000002-0badcafe").mkdir()
    (tmp_path / ".tmp-step_00000002-0badcafe" / "__0_0.distcp").touch()
    (tmp_path / ".tmp-latest").touch()
    (tmp_path / "notes.txt").touch()
    saver_in(tmp_path)
    assert names(tmp_path) == ["latest", "notes.txt", "step_00000001"]


# Damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped bit": (lambda p: flip(p / "__0_0.distcp"), "its checksum differs"),
    "flipped bit of the state": (lambda p: flip(p / "state.json"), "its checksum differs"),
    "truncated": (lambda p: truncate(p / "__0_0.distcp"), "were written"),
    "missing file": (lambda p: (p / ".metadata").unlink(), ".metadata is missing"),
    "missing manifest": (
        lambda p: (p / "manifest.json").unlink(),
        "manifest.json: No such file or directory",
    ),
    "truncated manifest": (lambda p: truncate(p / "manifest.json"), "manifest.json is damaged"),
    "later format": (
        lambda p: edit_manifest(p, {"format": 2}),
        "format 2, this version reads 1",
    ),
    "file elsewhere": (
        lambda p: edit_manifest(p, {"files": {"../x": {"bytes": 0, "sha256": ""}}}),
        "lists '../x', which is not a file's name",
    ),
}


def edit_manifest(path: Path, changes: dict[str, Any]) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoint_is_passed_over_with_a_warning_and_refused_by_name(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage, reason = DAMAGE[kind]
    broken = save(tmp_path, 1, 2)
    damage(broken)
    assert find_checkpoint("auto", tmp_path, LOG) == tmp_path / "step_00000001"
    [warning] = [record.getMessage() for record in caplog.records if record.name == LOG.name]
    error = message(lambda: find_checkpoint(str(broken), tmp_path, LOG))
    for text in (warning, error):
        assert str(broken) in text
        assert reason in text
    damage(tmp_path / "step_00000001")
    assert reason in message(lambda: find_checkpoint("auto", tmp_path, LOG))


def test_resume_finds_a_checkpoint_in_a_run_or_checkpoints_directory_or_by_itself(
    tmp_path: Path,
) -> None:
    path = save(tmp_path / "run" / "checkpoints", 1, 2)
    nowhere = tmp_path / "nowhere"
    for resume in (path, path.parent, path.parent.parent):
        assert find_checkpoint(str(resume), nowhere, LOG) == path
    assert find_checkpoint("none", path.parent, LOG) is None
    assert find_checkpoint("auto", nowhere, LOG) is None
    assert "nowhere is not a directory" in message(
        lambda: find_checkpoint(str(nowhere), path.parent, LOG)
    )
    assert "holds no checkpoint" in message(lambda: find_checkpoint(str(tmp_path), nowhere, LOG))


# Distrust


def seal(path: Path) -> None:
    """Give the manifest the sizes and checksums of the files as they are now."""
    files = {
        p.name: {"bytes": p.stat().st_size, "sha256": manifest.sha256(p)}
        for p in path.iterdir()
        if p.name != "manifest.json"
    }
    edit_manifest(path, {"files": files})


class Touch:
    """Unpickled without care, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self.path),)


def test_code_in_the_metadata_is_refused(tmp_path: Path) -> None:
    path, created = save(tmp_path / "checkpoints", 1), tmp_path / "created"
    attack = pickle.dumps(Touch(created))
    pickle.loads(attack)
    assert created.exists()  # the attack works
    created.unlink()
    (path / ".metadata").write_bytes(attack)
    seal(path)
    assert verify(path) == []
    targets, _ = targets_of("copies")
    assert "mknod is not a part of metadata, refused" in message(lambda: load(path, targets))
    assert "refused" in message(lambda: tensor_checksums(path))
    assert not created.exists()


def test_code_in_the_tensors_is_refused(tmp_path: Path) -> None:
    path, created = save(tmp_path / "checkpoints", 1), tmp_path / "created"
    data = path / "__0_0.distcp"
    attack = pickle.dumps(Touch(created), protocol=2)
    data.write_bytes(attack.ljust(data.stat().st_size, b"\0"))
    seal(path)
    targets, _ = targets_of("copies")
    assert "Weights only load failed" in message(lambda: load(path, targets))
    assert not created.exists()


def test_metadata_cannot_point_outside_the_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    metadata = shards._Reader(path).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere.distcp"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(path)
    targets, _ = targets_of("copies")
    assert "refers to data outside the checkpoint" in message(lambda: load(path, targets))


# Killed processes

KILLS = 12
KILLED_SIZE = 1 << 20  # elements: the larger the file, the likelier a kill in the middle


def killed_tensor(step: int) -> Tensor:
    return torch.full((KILLED_SIZE,), step, dtype=torch.int64)


def save_until_killed(rank: int, directory: Path, attempt: int) -> None:
    """One of two ranks that save every step, from the newest whole checkpoint on."""
    join(directory.parent / f"store{attempt}", rank, 2)
    group = dist.group.WORLD
    checkpoints = Checkpointer(directory, keep=2, async_save=True, group=group)
    found = find_checkpoint("auto", directory, LOG, group)
    start = read_state(found)["step"] if found else 0
    half, shape = KILLED_SIZE // 2, (KILLED_SIZE,)
    for step in itertools.count(start + 1):
        data = killed_tensor(step)[rank * half : (rank + 1) * half]
        piece = sharded("tensor", data, shape, ((rank * half,), (half,), True))
        checkpoints.save(step, [piece], {"step": step})


def kill_repeatedly(root: Path) -> dict[str, Any]:
    """Fork two savers, kill one and then the other, look; many times."""
    checkpoints, chance = root / "killed", random.Random(0)
    checkpoints.mkdir()
    steps, leftovers = [0], 0
    for attempt in range(KILLS):
        before = names(checkpoints)
        children = [fork(save_until_killed, rank, checkpoints, attempt) for rank in range(2)]
        deadline = time.monotonic() + 20
        while names(checkpoints) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.8))
        for child in chance.sample(children, 2):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            time.sleep(chance.choice([0.0, 0.2]))
        leftovers += any(name.startswith(manifest.TEMPORARY) for name in names(checkpoints))
        assert [verify(path) for path in checkpoints.glob("step_*") if verify(path)] == []
        found = find_checkpoint("auto", checkpoints, LOG)
        step = read_state(found)["step"] if found else 0
        assert step >= steps[-1], "a whole checkpoint was lost"
        if found:
            assert tensor_checksums(found) == {"tensor": tensor_checksum(killed_tensor(step))}
        steps.append(step)
    return {"steps": steps, "leftovers": leftovers}


def test_after_kill_9_at_any_moment_every_checkpoint_is_whole_and_none_is_lost(
    driven: dict[str, Any],
) -> None:
    result = driven["kills"]
    assert result["steps"][-1] >= KILLS // 2, result  # they did save
    assert result["leftovers"] >= 2, result  # and some were killed in the middle of it
