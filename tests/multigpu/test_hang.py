"""A hang in NCCL leaves stacks and the record of collectives that torchfrtrace compares."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coatlm.train.faults import ExitCode
from tests.distributed import ROOT

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
ONE_HANGS = """
import sys, time
from pathlib import Path
from coatlm.train.faults import FLIGHT, HangWatchdog
from coatlm.train.setup import record_collectives, recorded_collectives
rank, run = int(sys.argv[1]), Path(sys.argv[2])
record_collectives(run / FLIGHT)
import torch
import torch.distributed as dist
gpu = torch.device("cuda", rank)
torch.cuda.set_device(gpu)
store = dist.FileStore(str(run / "store"), 2)
dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
dist.all_reduce(torch.ones(5, device=gpu))
torch.cuda.synchronize()
watchdog = HangWatchdog(4.0 + 4 * rank, run_dir=run, rank=rank, flight=recorded_collectives)
if rank == 1:
    time.sleep(60)
dist.all_reduce(torch.ones(7, device=gpu))
torch.cuda.synchronize()
"""


def test_a_hang_leaves_stacks_and_collectives_of_each_rank(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_HANGS, str(rank), str(tmp_path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [ExitCode.HANG] * 2, said
    assert "synchronize" in (tmp_path / "hang_rank0.txt").read_text()
    records = [pickle.loads((tmp_path / f"flight_rank_{rank}").read_bytes()) for rank in range(2)]
    sizes = [[entry["input_sizes"] for entry in record["entries"]] for record in records]
    assert sizes == [[[[5]], [[7]]], [[[5]]]]  # rank 1 never came to the second
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path)]
    shown = subprocess.run(
        [*command, "--prefix", "flight_rank_"], capture_output=True, text=True, timeout=120
    )
    assert shown.returncode == 0, shown
