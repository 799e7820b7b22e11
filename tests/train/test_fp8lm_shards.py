"""FP8-LM's states over two ranks are those of one process, in every bit, also where shards cut.

A step has two microbatches: one process adds their gradients in fp32, and so do two ranks with one
each. Without clipping, which depends on the order of the norm's sum, the gradients are the same
numbers, and so must be all that follows from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coatlm.train.checkpoint import tensor_checksums
from tests.train.test_resume import metrics_of, run_config, start_jobs, step_five

STAGES = ("zero1", "zero2", "zero3", "whole tensors")
FINAL = Path("checkpoints") / "step_00000010"


def config(directory: Path, stage: str, **checkpoint: Any) -> Any:
    parallel: dict[str, Any] = {"partition": "whole-tensor"} if stage == "whole tensors" else {}
    if stage.startswith("zero"):
        parallel = {"zero": int(stage[4:])}
    return run_config(
        directory,
        "single",
        parallel=parallel,
        precision={"recipe": "bf16"},
        optim={"recipe": "fp8lm", "clip_grad": 0.0},
        train={"micro_batch": 2, "global_batch": 4, "eval_every": 0},
        checkpoint=checkpoint,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fp8lm")
    (root / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(6000)))
    start_jobs(2, [config(root / stage, stage) for stage in STAGES])
    one = [config(root / "single", "single")]
    one.append(config(root / "resumed", "single", resume=step_five(root / "zero2")))
    start_jobs(1, one)
    return root


@pytest.mark.parametrize("run", [*STAGES, "resumed"])
def test_weights_and_states_are_those_of_one_process(runs: Path, run: str) -> None:
    expected = tensor_checksums(runs / "single" / FINAL)
    assert len(expected) == 7 * (4 * 6 + 3)  # weights; codes and scales of three states
    assert tensor_checksums(runs / run / FINAL) == expected


@pytest.mark.parametrize("stage", STAGES)
def test_losses_are_those_of_one_process(runs: Path, stage: str) -> None:
    expected, found = (
        [line["loss"] for line in metrics_of(runs / name) if "loss" in line]
        for name in ("single", stage)
    )
    assert found == pytest.approx(expected, rel=1e-6)  # fp32 sums over ranks
