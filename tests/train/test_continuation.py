"""What each start of a run continues from, and that none of them deletes what others did."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from coatlm.train.manifest import verify
from tests.distributed import run_ranks
from tests.train.test_resume import metrics_of, run_config

BASE, RUN = "base", "run"
FIFTH = "checkpoints/step_00000005"


class Lives:
    """Starts of runs below `root`, one after the other in this process."""

    def __init__(self, root: Path) -> None:
        from coatlm.train import phases, start

        self.root, self.start = root, start
        started: list[Any] = []
        start_processes = phases.start_processes
        phases.start_processes = lambda *arguments, **options: (  # type: ignore[assignment]
            started or started.append(start_processes(*arguments, **options)) or started
        )[0]

    def live(
        self, name: str, *, until: int | None = None, job: str | None = None, **changes: Any
    ) -> dict[str, Any]:
        """Start the run `name`, let it take all steps or stop as if killed after `until`.

        With `job` a launcher has started it again. Returns its error, the samples read first by
        each step, and the tokens counted.
        """
        from contextlib import ExitStack
        from dataclasses import replace

        from coatlm.config import ConfigError
        from coatlm.parallel.groups import release_groups
        from coatlm.train.checkpoint import CheckpointError
        from coatlm.train.setup import Launch

        config = run_config(self.root / name, "single", **changes)
        read: list[int] = []
        found: dict[str, Any] = {"error": None, "read": read, "tokens": None, "step": None}
        names = () if job is None else (job,)
        launch = replace(Launch(), restarted=names, job=names)
        with ExitStack() as stack:
            try:
                session = self.start.set_up(config, launch, stack)
                if session is not None:
                    self._run(session, until, read)
                    found |= {"tokens": session.run.tokens, "step": session.run.step}
            except (ConfigError, CheckpointError) as error:
                found["error"] = str(error)
        release_groups()
        return found

    def _run(self, session: Any, until: int | None, read: list[int]) -> None:
        step = session._step

        def watched(batches: Any) -> None:
            if until is not None and session.run.step == until:
                raise KeyboardInterrupt  # as a kill: nothing is saved
            read.append(session.run.samples)
            step(batches)

        session._step = watched
        try:
            session.run_steps()
        except KeyboardInterrupt:
            session.checkpoints.wait()


def digest(run: Path) -> str:
    """The checksums of all files but the log, which says that there was a start."""
    files = sorted(p for p in run.rglob("*") if p.is_file() and p.name != "train.log")
    parts = [f"{p.relative_to(run)} {hashlib.sha256(p.read_bytes()).hexdigest()}" for p in files]
    return "\n".join(parts)


def story(rank: int, size: int, argument: str) -> dict[str, Any]:
    """All starts, in one process; what the tests below ask."""
    root = Path(argument)
    lives = Lives(root)
    told: dict[str, Any] = {}
    told["base"] = lives.live(BASE)
    path = str(root / BASE / "checkpoints" / "step_00000005")
    for name, weights_only in (("resumed", False), ("weights", True)):
        asked = {"resume": path, "weights_only": weights_only, "every": 2}
        steps = {"steps": 9, "eval_every": 0}
        told[name] = [
            lives.live(name, until=until, checkpoint=asked, train=steps) for until in (7, None)
        ]
        told[f"{name} straight"] = lives.live(f"{name} straight", checkpoint=asked, train=steps)

    for source in ("none", "back", "same", "fewer", "edited", "batch"):
        shutil.copytree(root / BASE, root / source)
    fresh = {"resume": "none"}
    told["none"] = lives.live("none", until=6, checkpoint=fresh | {"every": 5}, job="7")
    told["none again"] = lives.live("none", checkpoint=fresh | {"every": 5}, job="7")

    back = {"resume": str(root / "back" / "checkpoints" / "step_00000005"), "every": 3}
    told["back"] = [lives.live("back", until=8, checkpoint=back) for _ in range(2)]

    for steps in (10, 8):
        before = digest(root / "fewer")
        told[f"fewer {steps}"] = lives.live("fewer", train={"steps": steps, "eval_every": 0})
        told[f"fewer {steps}"]["same"] = digest(root / "fewer") == before
    upload = {"upload": f"file://{root}/url"}
    done = {"steps": 5, "eval_every": 0}
    lives.live("fewer", train=done, checkpoint=upload | {"resume": str(root / "fewer" / FIFTH)})
    told["not uploaded"] = sorted(str(path) for path in (root / "url").glob("step_*"))
    told["uploaded"] = lives.live("fewer", train=done | {"steps": 10}, checkpoint=upload)
    told["beyond"] = lives.live("beyond", train={"steps": 5}, checkpoint={"resume": path})

    longer = {"steps": 12, "eval_every": 0}
    split = {"data": data(root, split=[90, 5, 5])}
    before = digest(root / "same")
    told["split"] = lives.live("same", train=longer, **split)
    told["split"]["same"] = digest(root / "same") == before
    allowed = {"checkpoint": {"allow_changes": ["data.split"]}}
    told["split allowed"] = lives.live("same", train=longer, **split, **allowed)

    wide = {"global_batch": 32, "steps": 12, "eval_every": 0}
    told["batch"] = lives.live("batch", train=wide)
    told["long"] = lives.live("batch", train=wide | {"steps": 14}, data=data(root, seq_len=64))

    text = root / "text.txt"
    text.write_text(text.read_text().replace("return", "retorn"))
    told["edited"] = lives.live("edited", train=longer)
    return told


def data(root: Path, **changes: Any) -> dict[str, Any]:
    cache = str(root / "cache")
    return {"text": [str(root / "text.txt")], "seq_len": 32, "cache_dir": cache} | changes


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lives")
    text = "".join(f"def f{i}(x):\n    return x * {i} + {i * i}\n\n" for i in range(2000))
    (directory / "text.txt").write_text(text)
    return directory


@pytest.fixture(scope="module")
def told(root: Path) -> dict[str, Any]:
    (found,) = run_ranks(1, f"{__name__}:story", str(root))
    return found


def steps_of(run: Path) -> list[int]:
    return [line["step"] for line in metrics_of(run) if "loss" in line]


def log_of(run: Path) -> str:
    return (run / "train.log").read_text()


@pytest.mark.parametrize("name", ["resumed", "weights"])
def test_the_same_command_with_a_path_continues_the_run_itself(
    root: Path, told: dict[str, Any], name: str
) -> None:
    first, second = told[name]
    assert first["error"] is second["error"] is None
    begins = first["read"][0] // 16
    assert second["read"][0] // 16 == 6  # the run's own checkpoint of step 6, and not PATH again
    assert steps_of(root / name) == list(range(begins + 1, 10))
    assert metrics_of(root / name) == metrics_of(root / f"{name} straight")
    assert not (root / name / "attempts").exists()
    assert "is used only for a first start" in log_of(root / name)


def test_a_restart_from_scratch_sets_the_history_aside(root: Path, told: dict[str, Any]) -> None:
    """A launcher's second start does so too, if its first start did not come so far."""
    assert told["none"]["error"] is None and told["none"]["read"][0] == 0
    (attempt,) = (root / "none" / "attempts").iterdir()
    for name in ("metrics.jsonl", "config.yaml", "env.json", "checkpoints/latest"):
        assert (attempt / name).read_bytes() == (root / BASE / name).read_bytes()
    assert (attempt / "checkpoints/step_00000010/manifest.json").exists()


def test_a_launcher_that_starts_again_continues(root: Path, told: dict[str, Any]) -> None:
    assert told["none again"]["read"][0] == 5 * 16
    assert metrics_of(root / "none") == metrics_of(root / BASE)
    assert len(list((root / "none" / "attempts").iterdir())) == 1


def test_a_run_goes_back_to_its_own_checkpoint_once(root: Path, told: dict[str, Any]) -> None:
    first, second = told["back"]
    assert first["read"][0] == 5 * 16 and second["read"][0] == 6 * 16
    (attempt,) = (root / "back" / "attempts").iterdir()
    assert metrics_of(attempt) == metrics_of(root / BASE)
    assert (attempt / "checkpoints/step_00000010/manifest.json").exists()
    assert steps_of(root / "back") == list(range(1, 9))
    assert metrics_of(root / "back") == [r for r in metrics_of(root / BASE) if r["step"] <= 8]
    assert "before and continues its newest checkpoint" in log_of(root / "back")


@pytest.mark.parametrize("steps", [10, 8])
def test_a_run_with_no_steps_left_changes_nothing(
    root: Path, told: dict[str, Any], steps: int
) -> None:
    found = told[f"fewer {steps}"]
    assert found["error"] is None and found["same"] and found["read"] == []
    assert f"is at step 10, train.steps={steps}: nothing to train" in log_of(root / "fewer")


def test_a_run_with_no_steps_left_uploads_its_last_checkpoint_and_no_other(
    root: Path, told: dict[str, Any]
) -> None:
    """Also if it is asked to go back to another one, of the last step."""
    assert told["not uploaded"] == [] and told["uploaded"]["read"] == []
    assert [path.name for path in (root / "url").glob("step_*")] == ["step_00000010"]
    assert verify(root / "url" / "step_00000010") == []
    lines = log_of(root / "fewer").splitlines()[-3:]
    assert "is missing: uploading" in lines[0] and "INFO uploaded file://" in lines[1]
    assert "nothing to train" in lines[2]


def test_a_path_beyond_train_steps_is_refused(told: dict[str, Any]) -> None:
    assert told["beyond"]["error"].startswith("train.steps=5: ")
    assert told["beyond"]["error"].endswith("is at step 5 already")


def test_another_split_is_refused_and_nothing_is_written(told: dict[str, Any]) -> None:
    assert "data.split: [96.0, 2.0, 2.0] -> [90.0, 5.0, 5.0]" in told["split"]["error"]
    assert "checkpoint.allow_changes=[data.split]" in told["split"]["error"]
    assert told["split"]["same"]


def test_an_allowed_change_is_logged_and_the_run_goes_on(root: Path, told: dict[str, Any]) -> None:
    assert told["split allowed"]["error"] is None
    assert told["split allowed"]["step"] == 12
    said = "changed since step 10: data.split: [96.0, 2.0, 2.0] -> [90.0, 5.0, 5.0]"
    assert said in log_of(root / "same")


def test_edited_text_is_refused(told: dict[str, Any]) -> None:
    assert told["edited"]["error"].startswith("data.text: ")
    assert "checkpoint.allow_changes=[data.text]" in told["edited"]["error"]


def test_tokens_are_counted_and_samples_follow_over_a_change_of_batch(
    root: Path, told: dict[str, Any]
) -> None:
    assert told["batch"]["read"] == [160, 192]  # behind the 10 * 16 samples read before
    assert told["batch"]["tokens"] == (10 * 16 + 2 * 32) * 32
    assert told["long"]["read"] == [112, 144]  # 224 samples of 32 tokens are 112 of 64
    assert told["long"]["tokens"] == (10 * 16 + 2 * 32) * 32 + 2 * 32 * 64
    lines = {line["step"]: line["tokens"] for line in metrics_of(root / "batch") if "loss" in line}
    assert (lines[10], lines[12], lines[14]) == (5120, 7168, 11264)
    said = log_of(root / "batch")
    assert "changed since step 10: train.global_batch: 16 -> 32" in said
    assert "changed since step 12: data.seq_len: 32 -> 64" in said
