"""Files that are written one tensor at a time are what the safetensors library reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coatlm.hf.files import Described, WeightFiles, write_weights

TENSORS = {
    "a": torch.randn(3, 5),
    "b.weight": torch.randn(2, 4).bfloat16(),
    "empty": torch.empty(0, 3),
    "c": torch.randn(7).to(torch.float8_e4m3fn),
    "d": torch.randn(4, 4).half().t(),  # not contiguous
    "scalar": torch.tensor(3.0),
}


def described(tensors: dict[str, Tensor]) -> dict[str, Described]:
    return {name: Described(t.dtype, tuple(t.shape)) for name, t in tensors.items()}


@pytest.mark.parametrize("shard_bytes", [1, 64, 10**9])
def test_library_reads_what_is_written(tmp_path: Path, shard_bytes: int) -> None:
    write_weights(tmp_path, described(TENSORS), TENSORS.__getitem__, shard_bytes=shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    read = {name: t for file in files for name, t in load_file(file).items()}
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert torch.equal(read[name].float(), tensor.float())
    weights = WeightFiles.open(tmp_path)
    assert weights.describe() == described(TENSORS)
    assert all(torch.equal(weights.read(n).float(), t.float()) for n, t in TENSORS.items())


def test_no_file_is_larger_than_asked_unless_one_tensor_is(tmp_path: Path) -> None:
    tensors = {str(i): torch.randn(n) for i, n in enumerate((10, 10, 10, 100, 5))}
    write_weights(tmp_path, described(tensors), tensors.__getitem__, shard_bytes=80)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards: dict[str, list[str]] = {}
    for name, file in index["weight_map"].items():
        shards.setdefault(file, []).append(name)
    assert list(shards.values()) == [["0", "1"], ["2"], ["3"], ["4"]]
    assert index["metadata"]["total_size"] == 4 * 135


def test_damage_is_reported_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor"):
        WeightFiles.open(tmp_path)
    write_weights(tmp_path, described(TENSORS), TENSORS.__getitem__, shard_bytes=64)
    file = sorted(tmp_path.glob("*.safetensors"))[0]
    content = file.read_bytes()
    file.write_bytes(content[:-4])
    with pytest.raises(ValueError, match=f"{file.name}: not a safetensors file"):
        WeightFiles.open(tmp_path).describe()
    file.unlink()
    with pytest.raises(ValueError, match=file.name):
        WeightFiles.open(tmp_path).describe()
    save_file({"other": torch.ones(1)}, file)
    with pytest.raises(ValueError, match=f"{file.name}: has no a, which model.safetensors.index"):
        WeightFiles.open(tmp_path).describe()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(ValueError, match="is not a file's name"):
        WeightFiles.open(tmp_path)


def test_an_index_of_no_tensors_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ValueError, match=r"index\.json: weight_map is empty: must name the file"):
        WeightFiles.open(tmp_path)


@pytest.mark.parametrize("name", ["..", "", "../x", "/x", "a\0b"])
def test_an_index_names_only_files_of_its_directory(tmp_path: Path, name: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match="is not a file's name"):
        WeightFiles.open(tmp_path)


def test_a_pipe_in_place_of_the_weights_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is not a regular file"):
        WeightFiles.open(tmp_path)
