"""The first lines of a run: what is trained, and what to expect of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coatlm.model.decide import Gpu
from coatlm.model.memory import GIB
from tests.distributed import gloo_threads, run_ranks
from tests.train.test_resume import run_config

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
GPUS = {"h100": H100, "a100": A100, "cpu": None}  # run -> GPU, as a CPU can pretend it


def start_and_resume(rank: int, size: int, root: str) -> dict[str, Any]:
    """For each of GPUS what a start of 5 steps, its continuation to 8, and one more start log.

    And the number of gloo's threads after each of them, under "threads".
    """
    import functools
    from contextlib import ExitStack

    from coatlm.parallel.groups import release_groups
    from coatlm.train import phases, start
    from coatlm.train.setup import Launch

    phases.start_processes = functools.cache(phases.start_processes)  # joined once for all
    start.environment_warnings = lambda config, ranks: [f"{ranks} ranks of {config.run.name}"]
    said: dict[str, list[str]] = {}
    threads: list[int] = []
    for name, gpu in GPUS.items():
        found = None if gpu is None else Gpu(gpu, 80 * GIB)
        start.gpu_of_all = lambda *_, found=found: (found, 80 * GIB)
        log = Path(root) / name / "train.log"
        said[name] = []
        for steps in (5, 8, 8):
            seen = len(log.read_text()) if log.exists() else 0
            train = {"steps": steps, "eval_every": 0}
            with ExitStack() as stack:
                session = start.set_up(
                    run_config(log.parent, "single", train=train), Launch(), stack
                )
                if session is not None:
                    assert session.run_steps() == 0
            session = None  # it holds the groups of its model
            release_groups()
            threads.append(gloo_threads())
            said[name].append(log.read_text()[seen:])
    return {"said": said, "threads": threads}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("starts")
    text = "".join(f"def f{i}(x):\n    return x * {i} + {i * i}\n\n" for i in range(2000))
    (root / "text.txt").write_text(text)
    (found,) = run_ranks(1, f"{__name__}:start_and_resume", str(root))
    return found


@pytest.fixture(scope="module")
def said(found: dict[str, Any]) -> dict[str, list[str]]:
    return {name: [" ".join(log.split()) for log in logs] for name, logs in found["said"].items()}


def test_threads_of_released_groups_end(found: dict[str, Any]) -> None:
    """Those that stay are the process's own. A run has eighteen groups, of three threads each."""
    assert max(found["threads"]) < min(found["threads"]) + 3 * 3, found["threads"]


def in_order(text: str, *parts: str) -> bool:
    """Whether each part is once in `text`, and after the part before it."""
    places = [text.find(part) for part in parts]
    return all(text.count(part) == 1 for part in parts) and places == sorted(places)


def test_a_start_says_what_to_expect_before_the_tables_and_the_model(
    said: dict[str, list[str]],
) -> None:
    sentences = ["run trains ", "Formats", "Layout: ", f"Expected on 1 x {H100}: "]
    after = [" tokens/s per GPU, ", " GiB; 5 steps of ", "memory GiB on", "step 1/5 | "]
    assert in_order(said["h100"][0], *sentences, *after)
    assert " remaining steps" not in said["h100"][0]


def test_a_warning_of_the_environment_is_logged_once_per_start_on_a_gpu(
    said: dict[str, list[str]],
) -> None:
    for name, logs in said.items():
        for log in logs:
            assert log.count("WARNING 1 ranks of run") == (name != "cpu"), name


def test_a_resumed_run_says_first_the_time_of_all_steps_and_then_of_those_that_are_left(
    said: dict[str, list[str]],
) -> None:
    whole, resumed, rest = " GiB; 8 steps of ", " at step 5", " GiB; 3 remaining steps of "
    assert in_order(said["h100"][1], whole, "memory GiB on", resumed, rest, "step 6/8 | ")


def test_a_run_without_steps_left_expects_no_others(said: dict[str, list[str]]) -> None:
    assert "nothing to train" in said["h100"][2] and " remaining steps" not in said["h100"][2]


def test_on_a_gpu_without_rates_every_start_says_once_how_to_measure_them(
    said: dict[str, list[str]],
) -> None:
    note = f"Speed and time on {A100} are not predicted"
    for log in said["a100"]:
        assert in_order(log, "Layout: ", note, "`python tools/bench.py rates --out ", "memory GiB")
        assert "Expected on" not in log


def test_on_a_cpu_nothing_is_said_of_speed(said: dict[str, list[str]]) -> None:
    for log in said["cpu"]:
        assert in_order(log, "Layout: ", "memory GiB on")
        assert "Expected on" not in log and "not predicted" not in log
