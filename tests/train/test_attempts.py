"""Nothing that a run directory holds is deleted by a start that does not continue it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from coatlm.train.attempts import go_back, make_newest, set_aside
from coatlm.train.manifest import MANIFEST, last_serial, newest_first, read_checkpoint_manifest
from coatlm.train.run_directory import earlier_attempts, loss_plot, read_metrics


def make_run(run: Path, steps: list[int], started: str = "2026-03-01T12:00:00+00:00") -> None:
    """A run directory with a line for each step up to the last, and checkpoints of `steps`."""
    for serial, step in enumerate(steps, start=1):
        checkpoint = run / "checkpoints" / f"step_{step:08d}"
        checkpoint.mkdir(parents=True)
        names = (".metadata", "metadata.json", "common.pt", "state.json")
        files = {name: {"bytes": 0, "sha256": ""} for name in names}
        manifest = {"format": 1, "serial": serial, "files": files}
        (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    if steps:
        (run / "checkpoints" / "latest").write_text(f"step_{steps[-1]:08d}\n")
    run.mkdir(exist_ok=True)
    lines = [
        {"step": i + 1, "loss": 5.0 - i / 100, "lr": 0.1} for i in range(max(steps, default=4))
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "config.yaml").write_text("run: {}\n")
    (run / "env.json").write_text(json.dumps({"started": started}))


def content(directory: Path) -> dict[str, bytes]:
    files = [p for p in directory.rglob("*") if p.is_file() and "attempts" not in p.parts]
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}


def test_a_history_moves_whole_and_is_a_run_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, [2, 4])
    before = content(run)
    attempt = set_aside(run)
    assert attempt == run / "attempts" / "2026-03-01T120000Z"
    files = [path for path in attempt.rglob("*") if path.is_file()]
    assert {str(path.relative_to(attempt)): path.read_bytes() for path in files} == before
    assert content(run) == {}
    assert [record["step"] for record in read_metrics(attempt)] == [1, 2, 3, 4]


def test_records_without_checkpoints_are_a_history_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, [])
    assert set_aside(run) is not None
    assert not (run / "metrics.jsonl").exists()


def test_a_directory_without_history_stays_as_it_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "train.log").write_text("a line\n")
    (run / "config.yaml").write_text("run: {}\n")  # of a start that ended before its first step
    assert set_aside(run) is None
    assert not (run / "attempts").exists()


def test_attempts_of_the_same_second_get_numbers_and_stay_in_order(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for _ in range(3):
        make_run(run, [2])
        set_aside(run)
    make_run(run, [2], started="2026-03-02T12:00:00+01:00")
    set_aside(run)
    names = [attempt.name for attempt in earlier_attempts(run)]
    assert names == [
        "2026-03-01T120000Z",
        "2026-03-01T120000Z-2",
        "2026-03-01T120000Z-3",
        "2026-03-02T110000Z",
    ]


def test_going_back_moves_newer_checkpoints_and_copies_the_records(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, [2, 4, 6])
    before = content(run)
    attempt = go_back(run, run / "checkpoints" / "step_00000002")
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["latest", "step_00000002"]
    assert (run / "checkpoints" / "latest").read_text() == "step_00000002\n"
    kept = [p.name for p in (attempt / "checkpoints").iterdir()]
    assert sorted(kept) == ["latest", "step_00000004", "step_00000006"]
    assert (attempt / "checkpoints" / "latest").read_text() == "step_00000006\n"
    assert (attempt / "metrics.jsonl").read_bytes() == before["metrics.jsonl"]
    assert (run / "metrics.jsonl").read_bytes() == before["metrics.jsonl"]


@pytest.fixture(params=["absolute", "relative"])
def linked(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run whose checkpoints are on another disk, to which a link points."""
    run, disk = tmp_path / "run", tmp_path / "disk" / "mine"
    make_run(run, [2, 4, 6])
    disk.parent.mkdir()
    (run / "checkpoints").rename(disk)
    target = disk if request.param == "absolute" else os.path.relpath(disk, run)
    (run / "checkpoints").symlink_to(target)
    return run


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_link_to_checkpoints_stays_and_what_moves_stays_on_its_disk(linked: Path) -> None:
    link, disk = os.readlink(linked / "checkpoints"), linked.parent / "disk"
    before = content(linked / "checkpoints")
    for number, steps in enumerate(([2, 4, 6], [1]), 1):
        attempt = set_aside(linked)
        assert attempt is not None and os.readlink(linked / "checkpoints") == link
        assert names(linked / "checkpoints") == []
        aside = Path(os.readlink(attempt / "checkpoints"))
        assert aside == disk / f"mine-{attempt.name}"
        assert names(aside) == ["latest", *(f"step_{step:08d}" for step in steps)]
        assert len(names(linked / "attempts")) == number
        if number == 1:
            assert content(aside) == before
            make_run(linked, [1])  # through the link


def test_going_back_leaves_a_link_to_checkpoints_alone(linked: Path) -> None:
    link, disk = os.readlink(linked / "checkpoints"), linked.parent / "disk"
    attempt = go_back(linked, disk / "mine" / "step_00000002")
    assert os.readlink(linked / "checkpoints") == link
    assert names(disk / "mine") == ["latest", "step_00000002"]
    assert (disk / "mine" / "latest").read_text() == "step_00000002\n"
    aside = Path(os.readlink(attempt / "checkpoints"))
    assert aside == disk / f"mine-{attempt.name}"
    assert names(aside) == ["latest", "step_00000004", "step_00000006"]
    assert (aside / "latest").read_text() == "step_00000006\n"


OTHERS = ["attempts", "lost+found"]  # what stays on the disk


def test_beside_a_disk_that_is_linked_whole_is_inside_of_it(
    linked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "mine")
    disk = linked.parent / "disk"
    (disk / "mine/lost+found").mkdir(mode=0o700)  # of root
    attempt = set_aside(linked)
    assert attempt is not None
    assert Path(os.readlink(attempt / "checkpoints")) == disk / "mine/attempts" / attempt.name
    assert len(names(attempt / "checkpoints")) == 4 and names(disk / "mine") == OTHERS
    assert set_aside(linked) is None


def test_a_kill_while_a_history_moves_leaves_its_newest_checkpoint_to_resume_from(
    linked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, moved = Path.rename, []

    def killed(path: Path, to: Path) -> Path:
        if len(moved) == 2:
            raise KeyboardInterrupt
        moved.append(path)
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        set_aside(linked)
    assert names(linked / "checkpoints") == ["latest", "step_00000006"]
    assert (linked / "metrics.jsonl").exists()


def test_the_newest_checkpoint_is_the_one_that_a_rollback_chose(tmp_path: Path) -> None:
    make_run(tmp_path, [2, 4, 6])
    directory = tmp_path / "checkpoints"
    chosen = directory / "step_00000002"
    files = read_checkpoint_manifest(chosen).files
    make_newest(chosen)
    once = content(tmp_path)
    make_newest(chosen)
    assert content(tmp_path) == once  # it is the newest already
    assert [int(path.name[-1]) for path in newest_first(directory)] == [2, 6, 4]
    assert last_serial(directory) == 4 and read_checkpoint_manifest(chosen).files == files
    assert (directory / "latest").read_text() == "step_00000002\n"


def test_the_plot_of_a_run_shows_earlier_attempts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, [3])
    plain = loss_plot(run)
    assert plain is not None
    alone = plain.read_bytes()
    plain.unlink()
    set_aside(run)
    make_run(run, [3])
    both = loss_plot(run)
    assert both is not None and both.read_bytes() != alone
