"""Converting a model of 1.2 billion parameters takes little memory, in both directions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coatlm.config import Model
from coatlm.hf.files import Described, write_json, write_weights
from coatlm.hf.layout import entries
from tests.distributed import ROOT, python_path

pytestmark = pytest.mark.slow

LIMIT = 2_000_000_000  # bytes
CONFIG = {  # the shape of configs/llama-1b.yaml
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "intermediate_size": 8192,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}
MEASURE = """
import resource, sys
from coatlm.commands.convert import main
code = main(sys.argv[1:])
print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def convert(*arguments: object) -> int:
    """Peak memory of a process that converts, bytes."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    code, kilobytes = done.stdout.split()[-2:]
    assert code == "0", done.stderr
    return int(kilobytes) * 1024


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """pytest keeps the directories of three sessions; these are 7 GB."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_one_billion_parameters_convert_both_ways_in_less_than_2_gb(directory: Path) -> None:
    source, checkpoint, back = (directory / name for name in ("hf", "coatlm", "back"))
    source.mkdir()
    write_json(source / "config.json", CONFIG)
    model = Model(layers=16, hidden=2048, heads=16, ffn=8192)
    shapes = {n: s for e in entries(model, 32000) for n, s in e.stored.items()}
    described = {name: Described(torch.bfloat16, shape) for name, shape in shapes.items()}
    noise = torch.randint(-(2**15), 2**15, (32000 * 2048 + 1000,), dtype=torch.int16)

    def make(name: str) -> Tensor:
        start = list(described).index(name)  # so that no two tensors of a shape are alike
        size = torch.Size(shapes[name]).numel()
        return noise[start : start + size].view(torch.bfloat16).view(shapes[name])

    write_weights(source, described, make, shard_bytes=2 * 10**9)
    total = sum(d.nbytes for d in described.values())
    assert total > 1.1 * LIMIT
    index = json.loads((source / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2

    there = ["--from", "hf", "--to", "coatlm", source, checkpoint, "--tokenizer", "byte"]
    peaks = [convert(*there)]
    shards = ["--max-shard-size", "2GB"]
    peaks.append(convert("--from", "coatlm", "--to", "hf", checkpoint, back, *shards))
    print("peaks in MB:", [peak // 10**6 for peak in peaks])
    assert max(peaks) < LIMIT
    for file in set(index["weight_map"].values()):
        assert same_bytes(source / file, back / file)


def same_bytes(a: Path, b: Path) -> bool:
    with a.open("rb") as first, b.open("rb") as second:
        while block := first.read(1 << 24):
            if block != second.read(1 << 24):
                return False
        return not second.read(1)
