"""What a run does when it ends."""

from __future__ import annotations

from pathlib import Path

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
