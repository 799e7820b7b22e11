"""What a run on a GPU chooses at its start, and what it says about it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coatlm.model.rates import rates_of
from tests.distributed import ROOT

pytestmark = pytest.mark.gpu


def test_a_run_on_a_gpu_with_rates_chooses_and_predicts(tmp_path: Path) -> None:
    name = torch.cuda.get_device_name()
    if rates_of(name) is None:
        pytest.skip(f"no rates of {name}")
    words = ["parallel.layout=auto", "train.micro_batch=auto", "train.global_batch=64"]
    words += [f"run.dir={tmp_path / 'run'}", "train.steps=2", "train.eval_every=0"]
    done = subprocess.run(
        [sys.executable, "pretrain.py", "configs/quickstart.yaml", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = " ".join(done.stdout.split())
    chosen = re.search(r"on 1 x (.*?): one rank, .*?, micro_batch (\d+) \(", said)
    assert chosen is not None and chosen[1] == name, said
    assert f"microbatches: {64 // int(chosen[2])} of {chosen[2]} per rank" in said
    assert f"Expected on 1 x {name}: " in said and "; 2 steps of " in said
