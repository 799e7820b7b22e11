"""Checkpoints of one process: whole or absent, kept, found, and skipped when damaged."""

from __future__ import annotations

import errno
import logging
import os
import platform
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coatlm.config import Config
from coatlm.console import in_bytes
from coatlm.train import checkpoint, manifest, shards
from coatlm.train.checkpoint import (
    Checkpointer,
    LostPeerError,
    find_checkpoint,
    load,
    named_checkpoint,
    read_state,
    saved_config,
)
from coatlm.train.manifest import read_checkpoint_manifest
from tests.train.layouts import (
    bits,
    differing,
    edit_manifest,
    flip,
    full_disk,
    message,
    names,
    pieces_of,
    sharded,
    targets_of,
    tensors_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LOG = logging.getLogger("test_checkpoint")


def saver_in(directory: Path, **options: Any) -> Checkpointer:
    return Checkpointer(directory, **({"keep": 2, "async_save": False} | options))


def save(directory: Path, *steps: int, **options: Any) -> Path:
    """Save `tensors_of(step)` for each step; returns the last checkpoint."""
    saver = saver_in(directory, **options)
    for step in steps:
        saver.save(step, pieces_of(tensors_of(step), "copies"), {"step": step})
    saver.wait()
    return directory / manifest.step_name(steps[-1])


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing waits until this is set."""
    event = threading.Event()

    def write_later(*arguments: Any) -> dict[str, Any]:
        assert event.wait(30)
        return shards.write_tensors(*arguments)

    monkeypatch.setattr(checkpoint, "write_tensors", write_later)
    yield event
    event.set()


def test_async_save_returns_before_writing_and_stores_the_values_of_that_moment(
    tmp_path: Path, held: threading.Event
) -> None:
    saver = saver_in(tmp_path, async_save=True)
    pieces = pieces_of(tensors_of(1), "copies")
    saver.save(1, pieces, {})
    saver.wait_for_copies()
    for piece in pieces:
        bits(piece.data).fill_(0)
    saver.poll()
    assert not (tmp_path / "step_00000001").exists()
    held.set()
    saver.wait()
    targets, _ = targets_of("copies")
    load(tmp_path / "step_00000001", targets)
    assert differing(targets, tensors_of(1)) == []


def test_writing_takes_short_turns_with_training(tmp_path: Path, held: threading.Event) -> None:
    usual = sys.getswitchinterval()
    saver = saver_in(tmp_path, async_save=True)
    saver.save(1, pieces_of(tensors_of(1), "copies"), {})
    deadline = time.monotonic() + 30
    while sys.getswitchinterval() == usual and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sys.getswitchinterval() < usual / 100
    held.set()
    saver.wait()
    assert sys.getswitchinterval() == usual


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


def test_memory_for_copies_that_cannot_be_allocated_is_an_error_before_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("coatlm.train.host_copies.host_zeros", full)
    saver = saver_in(tmp_path, async_save=True)
    saver.poll()
    saver._copies.reserve([torch.ones(2)])
    deadline = time.monotonic() + 30
    while (error := message(saver.poll)) == "nothing raised" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert error.startswith(f"rank 0 ({platform.node()}): no memory for copies of checkpoints: ")
    assert error.endswith("Cannot allocate memory; checkpoint.async_save=false needs none")
    assert message(saver.poll) == "nothing raised"  # a second time


def test_a_save_without_memory_for_its_copies_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coatlm.train.host_copies.host_zeros", lambda *_: 1 / 0)
    saver = saver_in(tmp_path, async_save=True)
    saver.save(1, pieces_of(tensors_of(1), "copies"), {})
    assert "step_00000001 was not written: ZeroDivisionError" in message(saver.wait)
    assert message(saver.wait) == "nothing raised"


def test_a_save_whose_thread_cannot_start_leaves_nothing_to_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = saver_in(tmp_path, async_save=True)
    monkeypatch.setattr(threading.Thread, "start", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        saver.save(1, pieces_of(tensors_of(1), "copies"), {})
    saver.join()


def test_a_peer_that_has_gone_is_told_from_a_checkpoint_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Checkpointer(tmp_path, keep=1, async_save=False)

    def closed(*_: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(checkpoint, "together", closed)  # as gloo fails in an agreement
    with pytest.raises(LostPeerError, match=r"step_00000001 was not written: .*closed by peer"):
        saver.save(1, [], {})


def test_write_that_fails_in_the_middle_of_a_tensor_is_reported_by_its_cause(
    tmp_path: Path,
) -> None:
    """torch's zip writer alone would only say that it is at the wrong position."""
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


@pytest.mark.parametrize("async_save", [False, True])
def test_a_published_checkpoint_is_logged_with_size_and_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, async_save: bool
) -> None:
    caplog.set_level("INFO", logger="coatlm")
    saver = saver_in(tmp_path, async_save=async_save)
    saver.save(1, pieces_of(tensors_of(1), "copies"), {})
    saver.wait()
    saver.poll()
    lines = [record for record in caplog.records if record.name == "coatlm"]
    written = sum(
        file.bytes for file in read_checkpoint_manifest(tmp_path / "step_00000001").files.values()
    )
    assert len(lines) == 1
    assert re.fullmatch(
        rf"saved step_00000001: {re.escape(in_bytes(written))} in \d+\.\d s", lines[0].getMessage()
    )
    assert lines[0].threadName == "MainThread"  # between steps, not across a line of the loop


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_file_of_nested_json_is_damage_of_that_file(tmp_path: Path, name: str) -> None:
    saver_in(tmp_path).save(1, pieces_of(tensors_of(1), "copies"), {})
    path = tmp_path / "step_00000001"
    (path / name).write_text('{"config": ' + "[" * 100_000)
    read = read_checkpoint_manifest if name == "manifest.json" else read_state
    assert message(lambda: read(path)) == f"{path / name} is damaged (nested too deeply)"


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({"step": 1}, "state.json is damaged (it has no configuration)"),
        ({"config": []}, "state.json is damaged (it has no configuration)"),
        ({"config": {"model": {"layers": 0}}}, "cannot be used: model.layers=0"),
        ({"config": {"model": {"depth": 3}}}, "cannot be used: model.depth: unknown key"),
    ],
)
def test_a_state_without_a_usable_configuration_is_refused_by_its_file(
    tmp_path: Path, state: dict[str, Any], complaint: str
) -> None:
    error = message(lambda: saved_config(tmp_path, state))
    assert complaint in error and str(tmp_path / "state.json") in error


def test_a_key_that_is_no_more_does_not_stop_a_checkpoint_from_being_read(tmp_path: Path) -> None:
    config = Config().model_dump(mode="json")
    config["parallel"]["tp_comm"] = "fp8"
    assert saved_config(tmp_path, {"config": config}) == Config()


def test_profiled_steps_after_the_last_do_not_stop_a_checkpoint_from_being_read(
    tmp_path: Path,
) -> None:
    config = Config().model_dump(mode="json")
    config["log"]["profile"] = [1, config["train"]["steps"] + 1]
    assert saved_config(tmp_path, {"config": config}) == Config()


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


def test_pruning_does_not_count_what_a_start_found_damaged(tmp_path: Path) -> None:
    """Only a start compares checksums, and later starts do not read the damaged one again."""
    save(tmp_path, 10, 20)
    flip(tmp_path / "step_00000020" / "__0_0.distcp")
    assert find_checkpoint("auto", tmp_path, LOG) == tmp_path / "step_00000010"
    save(tmp_path, 30)
    left = ["latest", "step_00000010", "step_00000020", "step_00000030"]
    assert names(tmp_path) == left
    assert find_checkpoint("auto", tmp_path, LOG) == tmp_path / "step_00000030"
    save(tmp_path, 40, 50)
    assert names(tmp_path) == ["latest", "step_00000020", "step_00000040", "step_00000050"]
    told = (tmp_path / "step_00000020" / "damaged.txt").read_text()
    assert told.endswith("__0_0.distcp is damaged: its checksum differs\n")


def test_a_damaged_checkpoint_that_was_repaired_counts_again(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    for _ in range(2):  # the second flip repairs it
        flip(tmp_path / "step_00000020" / "__0_0.distcp")
        find_checkpoint("auto", tmp_path, LOG)
    assert not (tmp_path / "step_00000020" / "damaged.txt").exists()
    save(tmp_path, 30)
    assert names(tmp_path) == ["latest", "step_00000020", "step_00000030"]


def test_readers_do_not_write_into_a_damaged_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    flip(tmp_path / "step_00000020" / "__0_0.distcp")
    assert named_checkpoint(tmp_path, LOG) == tmp_path / "step_00000010"
    assert not (tmp_path / "step_00000020" / "damaged.txt").exists()


def test_the_newest_checkpoint_that_is_needed_stays_beside_the_newest_ones(tmp_path: Path) -> None:
    def needed(state: dict[str, Any]) -> bool:
        return state["step"] in (1, 2, 6)

    save(tmp_path, 1, 2, 3, 4, 5, needed=needed)
    assert names(tmp_path) == ["latest", "step_00000002", "step_00000004", "step_00000005"]
    save(tmp_path, 6, 7, 8, needed=needed)
    assert names(tmp_path) == ["latest", "step_00000006", "step_00000007", "step_00000008"]


@pytest.mark.parametrize("async_save", [False, True])
def test_an_older_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    async_save: bool,
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    saver = saver_in(tmp_path, keep=1, async_save=async_save)
    saver.save(1, pieces_of(tensors_of(1), "copies"), {})
    saver.wait()
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "_remove", refuse)
        saver.save(2, pieces_of(tensors_of(2), "copies"), {})
        saver.save(2, pieces_of(tensors_of(4), "copies"), {})  # as after a rollback
        saver.wait()
    assert "an older checkpoint was not removed: OSError: [Errno 16] Device or" in caplog.text
    left = [".replaced-step_00000002", "latest", "step_00000001", "step_00000002"]
    assert names(tmp_path) == left
    saver.save(3, pieces_of(tensors_of(3), "copies"), {})
    saver.wait()
    assert names(tmp_path) == ["latest", "step_00000003"]


def test_a_peer_that_is_lost_during_an_upload_does_not_deny_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(checkpoint, "upload_checkpoint", closed)
    saver = saver_in(tmp_path, upload="s3://data/run")
    error = message(lambda: saver.save(1, pieces_of(tensors_of(1), "copies"), {}))
    assert "step_00000001 was not uploaded: " in error and "closed by peer" in error
    assert checkpoint.verify(tmp_path / "step_00000001") == []


def test_numbers_continue_those_of_the_checkpoint_that_a_run_comes_from(tmp_path: Path) -> None:
    first = read_checkpoint_manifest(save(tmp_path / "here", 1, after=7))
    second = read_checkpoint_manifest(save(tmp_path / "here", 2, after=7))
    assert (first.serial, second.serial) == (8, 9)


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


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoint_is_skipped_with_a_warning_and_refused_by_name(
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
    for resume in (path, path.parent, path.parent.parent, path.parent / "latest"):
        assert find_checkpoint(str(resume), nowhere, LOG) == path
    assert find_checkpoint("none", path.parent, LOG) is None
    assert find_checkpoint("auto", nowhere, LOG) is None
    assert "nowhere is not a directory" in message(
        lambda: find_checkpoint(str(nowhere), path.parent, LOG)
    )
    assert "holds no checkpoint" in message(lambda: find_checkpoint(str(tmp_path), nowhere, LOG))


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "common.pt", "__0_0.distcp"])
def test_a_pipe_in_a_checkpoint_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1)
    (path / name).unlink()
    os.mkfifo(path / name)
    assert f"{name}: is not a regular file" in message(
        lambda: find_checkpoint("auto", tmp_path, LOG)
    )
