"""All ranks of a run use the same GEMM algorithms, and rank 0 writes them down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.distributed import run_ranks


def tuned(rank: int, size: int, directory: str) -> list[dict[str, str]]:
    """The choices of a rank of the first and of a second start, in which rank 1 has another GPU."""
    import torch
    import torch.distributed as dist

    from coatlm.config import make_config
    from coatlm.train import gemm_tuning
    from coatlm.train.setup import Launch, start_processes

    config = make_config({"data": {"text": ["-"], "cache_dir": directory}})
    used: list[dict[str, str]] = []

    def tune_layers(layers: Any, tokens: int, dtype: Any, choices: dict[str, str]) -> None:
        assert (layers, tokens) == ([], config.train.micro_batch * config.data.seq_len)
        for kind in ("shared", f"of {rank}"):
            choices.setdefault(kind, f"timed by {rank}")
        used.append(dict(choices))

    gemm_tuning.tune_layers = tune_layers
    torch.cuda.current_device = lambda: 0
    start_processes(Launch.from_environment())
    group = dist.group.WORLD
    assert group is not None
    found = []
    for gpus in (("H100", "H100", "H200"), ("H100", "H200", "H200")):
        gemm_tuning.machine = lambda _, gpus=gpus: gpus[rank]  # type: ignore[misc]
        gemm_tuning.tune_gemms(config, [], torch.float32, group)
        found.append(used[-1])
        dist.barrier()
    dist.destroy_process_group()
    return found


def test_ranks_with_one_kind_of_gpu_agree_and_a_later_start_finds_their_choices(
    tmp_path: Path,
) -> None:
    by_rank = run_ranks(3, f"{__name__}:tuned", str(tmp_path))
    h100 = {"shared": "timed by 0", "of 0": "timed by 0", "of 1": "timed by 1"}
    h200 = {"shared": "timed by 2", "of 2": "timed by 2"}
    assert [first for first, _ in by_rank] == [h100, h100, h200]
    later = h200 | {"of 1": "timed by 1"}
    assert [second for _, second in by_rank] == [h100, later, later]
