"""Checkpoints of several ranks: exact in every layout, one outcome on all, and kill -9.

Starting a process costs seconds, so all of it runs in forks of one process that has imported
everything, which has no threads and has not touched a process group.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.train import checkpoint, manifest
from coatlm.train.checkpoint import (
    Checkpointer,
    find_checkpoint,
    load,
    read_state,
    tensor_checksum,
    tensor_checksums,
    verify,
)
from coatlm.train.shards import ShardedTensor
from tests.distributed import run_ranks
from tests.train.layouts import (
    SPECS,
    bits,
    differing,
    flip,
    full_disk,
    message,
    names,
    outside,
    pieces_of,
    sharded,
    targets_of,
    tensors_of,
)

LOG = logging.getLogger("test_checkpoint")
WORLD = 4
TIMEOUT = timedelta(seconds=60)
KILLS = 12
KILLED_SIZE = 1 << 20  # elements: the larger the file, the likelier a kill in the middle


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
    with full_disk() if case.rank == 1 else nullcontext():
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

    def refuse(*_: Any, **__: Any) -> None:
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
    original = manifest.sha256
    manifest.sha256 = lambda path, *rest: (read.append(path.name), original(path, *rest))[1]
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
    [result] = run_ranks(1, "tests.train.test_checkpoint_ranks:drive", directory, timeout=240)
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
        assert result["less"].endswith("bias is stored and not part of this one")
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
        assert result["error"].endswith("__2_0.distcp is damaged: its checksum differs")


def test_megatron_loads_it(ranks: list[dict[str, Any]]) -> None:
    assert [rank["megatron"] for rank in ranks] == [[]] * WORLD


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
        # by what has been done and not by the clock: a save takes longer on a busy machine
        for _ in range(chance.randint(1, 9)):
            while names(checkpoints) == before and time.monotonic() < deadline:
                time.sleep(0.01)
            before = names(checkpoints)
        time.sleep(chance.uniform(0.0, 0.1))
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
