"""What a run does when it ends, and when a signal comes during an evaluation."""

from __future__ import annotations

import functools
import json
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.train.test_resume import run_config


def taken_down(rank: int, size: int, arguments: tuple[str, float]) -> list[str]:
    """What was taken down, in order, by a run with this learning rate."""
    import torch.distributed as dist

    from coatlm.train import start
    from coatlm.train.faults import NonFiniteError
    from coatlm.train.setup import Launch

    happened: list[str] = []

    class Trainer(start.Trainer):
        def close(self) -> None:
            happened.append("graphs")
            super().close()

    start.Trainer = Trainer  # type: ignore[misc]
    dist.destroy_process_group = lambda *_: happened.append("groups")  # type: ignore[assignment]
    root, rate = arguments
    config = run_config(
        Path(root) / "run",
        "single",
        optim={"lr": rate, "warmup_steps": 0},
        train={"steps": 8, "micro_batch": 2, "global_batch": 2, "eval_every": 0, "max_skipped": 2},
        checkpoint={"every": 0},
    )
    try:
        start.train(config, Launch())
    except NonFiniteError:
        happened.append("error")
    return happened


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(1e-3, ["graphs", "groups"]), (1e30, ["graphs", "error"])],
    ids=["ends", "gives up"],
)
def test_cuda_graphs_are_released_before_the_process_groups(
    tmp_path: Path, rate: float, expected: list[str]
) -> None:
    """NCCL blocks on communicators that a graph has captured."""
    (tmp_path / "text.txt").write_text("one two three four\n" * 2000)
    (found,) = run_ranks(1, f"{__name__}:taken_down", (str(tmp_path), rate))
    assert found == expected


STOPPED: dict[str, dict[str, Any]] = {  # sections of the configuration, the step of the signal
    "saved before": {"checkpoint": {"every": 2}, "at": 4},
    "saved then": {"checkpoint": {"every": 0}, "at": 4},
    "last step": {"checkpoint": {"every": 0}, "at": 6},
    "zero3": {"parallel": {"zero": 3}, "checkpoint": {"every": 0}, "at": 4},
}


def evaluated(rank: int, size: int, root: str) -> dict[str, Any]:
    """Run each case undisturbed, and with SIGTERM on the last rank in the evaluation `at` a step.

    The result has the exit code and the batches that the evaluation read until it ended.
    """
    from coatlm.parallel.groups import release_groups
    from coatlm.train import phases, start
    from coatlm.train.setup import Launch

    phases.start_processes = functools.cache(phases.start_processes)  # joined once for all
    found: dict[str, Any] = {}
    saved: list[bool] = []  # for each batch of the evaluation: whether a checkpoint was there

    def live(directory: Path, sections: dict[str, Any], at: int | None = None) -> list[int]:
        with ExitStack() as stack:
            train = {"steps": 6, "micro_batch": 4, "eval_every": 2, "eval_batches": 4}
            config = run_config(directory, "single", **({"train": train} | sections))
            session = start.set_up(config, Launch.from_environment(), stack)
            assert session is not None
            trainer, read = session.trainer, saved
            read.clear()
            evaluate = trainer.evaluate

            def watched(batches: Any) -> Any:
                if session.run.step == at:
                    session.checkpoints.wait()
                    read.append((directory / "checkpoints" / f"step_{at:08d}").is_dir())
                    if len(read) == 2 and rank == size - 1:
                        session.signals.received = signal.SIGTERM
                return evaluate(batches)

            trainer.evaluate = watched  # type: ignore[method-assign]
            end = [int(session.run_steps()), len(read)]
        release_groups()
        return end

    for name, case in STOPPED.items():
        sections = {key: value for key, value in case.items() if key != "at"}
        live(Path(root) / f"{name} undisturbed", sections)
        found[name] = live(Path(root) / name, sections, case["at"])
        found[f"{name} saved"] = saved.copy()
        found[f"{name} records"] = records(Path(root) / name)
        found[f"{name} again"] = live(Path(root) / name, sections)
    return found


def records(run: Path) -> list[tuple[int, Any]]:
    """The step and the loss, of training or validation, of each line of metrics.jsonl."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(x["step"], x["loss"] if "loss" in x else ("val", x["val_loss"])) for x in lines]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("stopped")
    (root / "text.txt").write_text("one two three four\n" * 2000)
    return root, run_ranks(2, f"{__name__}:evaluated", str(root))


@pytest.mark.parametrize("name", STOPPED)
def test_a_signal_ends_an_evaluation_at_the_same_batch_on_all_ranks_and_nothing_is_lost(
    stopped: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    root, found = stopped
    assert [rank[name] for rank in found] == [[143, 2]] * 2  # of four batches
    step = STOPPED[name]["at"]
    steps = [at for at, _ in found[0][f"{name} records"]]
    assert steps.count(step) == 1 and max(steps) == step  # the evaluation was not logged
    assert found[0][f"{name} saved"] == [bool(STOPPED[name]["checkpoint"]["every"])] * 2
    assert (root / name / "checkpoints" / f"step_{step:08d}").is_dir()
    assert [rank[f"{name} again"] for rank in found] == [[0, 0]] * 2
    assert records(root / name) == records(root / f"{name} undisturbed")
