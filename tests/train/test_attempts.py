"""Nothing that a run directory holds is deleted by a start that does not continue it."""

from __future__ import annotations

import json
from pathlib import Path

from coatlm.train.attempts import go_back, set_aside
from coatlm.train.manifest import MANIFEST
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
