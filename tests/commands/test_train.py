"""What the command refuses before a run begins, and how it names a full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from coatlm.commands import train
from coatlm.config import Config, make_config
from coatlm.train import start
from coatlm.train.manifest import CheckpointError
from coatlm.train.setup import Launch


@pytest.mark.parametrize("source", ["step_00000002", "latest", "", ".."])
def test_weights_alone_are_not_loaded_from_the_run_itself(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether a checkpoint, the directory of them or the run is named, and by whatever path."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "same").symlink_to(tmp_path / "run")
    resume = tmp_path / "same" / "checkpoints" / source
    words = [f"run.dir={tmp_path}/run", f"checkpoint.resume={resume}"]
    assert train.main(["quickstart", *words, "checkpoint.weights_only=true"]) == 2
    message = f"error: checkpoint.weights_only=true: checkpoint.resume={resume} is of this run"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message) and "another run.dir" in line
    assert list((tmp_path / "run").rglob("*")) == [tmp_path / "run" / "checkpoints"]


@pytest.mark.parametrize("source", ["other", "run/attempts/2026-11-22T174122Z"])
def test_weights_alone_are_loaded_from_other_runs_and_from_attempts(
    source: str, tmp_path: Path
) -> None:
    resume = tmp_path / source / "checkpoints" / "step_00000002"
    words = ["quickstart", f"run.dir={tmp_path}/run", f"checkpoint.resume={resume}"]
    config = train.load(train.parse([*words, "checkpoint.weights_only=true"]))
    assert config.checkpoint.weights_only


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config({"run": {"dir": str(tmp_path / "run")}})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("cache/kernel.cubin", "{root}/cache/kernel.cubin"),
        ("run-2/metrics.jsonl", "{root}/run-2/metrics.jsonl"),
        ("run/metrics.jsonl", "run.dir={root}/run"),
        (None, "run.dir={root}/run"),
    ],
)
def test_a_full_disk_is_blamed_on_the_file_that_could_not_be_written(
    file: str | None,
    named: str,
    number: int,
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), file and str(tmp_path / file))

    monkeypatch.setattr(start, "train", fail)
    with pytest.raises(CheckpointError) as error:
        train.start(config, Launch())
    where = named.format(root=tmp_path)
    assert str(error.value) == f"{where}: {os.strerror(number)}; the same command resumes"
