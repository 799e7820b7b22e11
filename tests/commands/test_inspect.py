"""What a checkpoint holds, whether it is whole, how two differ."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.commands import inspect as inspect_checkpoint
from coatlm.commands.inspect import main
from coatlm.train.checkpoint import Checkpointer
from coatlm.train.shards import StoredTensors
from tests.train.layouts import flip, pieces_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE: dict[str, Any] = {
    "step": 30,
    "tokens": 491520,
    "updates": 29,
    "skipped": 1,
    "tokenizer": "1c31",
    "config": {
        "model": {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 48},
        "data": {"tokenizer": "byte"},
        "parallel": {"tp": 2, "pp": 1, "vpp": 1, "cp": 1, "zero": 1},
        "precision": {"recipe": "bf16"},
        "optim": {"recipe": "coat"},
    },
}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "decoder.layers.0.fc1.weight": draw(8, 16).bfloat16(),
        "norm.weight": draw(16).bfloat16(),
        "optimizer.state.exp_avg.decoder.layers.0.fc1.weight": draw(8, 16).to(torch.uint8),
        "optimizer.state.exp_avg.scale.decoder.layers.0.fc1.weight": draw(1),
        "optimizer.state.exp_avg.scale.norm.weight": draw(1),
    }


def saved(run: Path, whole: dict[str, Tensor], step: int = 30, layout: str = "copies") -> Path:
    """A checkpoint in a run directory."""
    saver = Checkpointer(run / "checkpoints", keep=5, async_save=False)
    saver.save(step, pieces_of(whole, layout), STATE | {"step": step})
    return run / f"checkpoints/step_{step:08d}"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return saved(tmp_path / "a", tensors())


def run(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0
) -> tuple[list[str], list[str]]:
    assert main(list(map(str, arguments))) == code
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err.splitlines()


def test_step_model_layout_and_bytes_by_kind_are_told(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, _ = run(capsys, checkpoint, "--tensors")
    told = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line}
    assert told["step"] == "30, 491,520 tokens seen"
    assert told["updates"] == "29, 1 steps skipped"
    assert told["model"] == "layers 2, hidden 16, heads 4, kv_heads 2, ffn 48"
    assert told["parameters"] == "144"
    assert told["layout"] == "tp 2, pp 1, vpp 1, cp 1, zero 1; files of 1 ranks"
    assert (told["precision"], told["optimizer"]) == ("bf16", "coat")
    assert told["weights"] == "bfloat16 2 144 288 B"
    assert told["exp_avg"] == "uint8 1 128 128 B"
    assert told["exp_avg.scale"] == "float32 2 2 8 B"
    assert told["all"] == "5 424 B"
    assert told["norm.weight"] == "bfloat16 [16]"


def test_a_run_directory_means_its_newest_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "a", tensors(), step=20)  # went back to an earlier step: newer
    lines, _ = run(capsys, tmp_path / "a")
    assert lines[0].endswith("step_00000020 (the 2nd of its run)")


def test_describing_reads_no_tensor(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(StoredTensors, "read", None)
    assert run(capsys, checkpoint)[0]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "name", "told"),
    [
        (flip, "__0_0.distcp", "is damaged: its checksum differs"),
        (flip, "state.json", "is damaged: its checksum differs"),
        (truncate, "__0_0.distcp", "bytes, "),
        (Path.unlink, ".metadata", ".metadata is missing"),
        (Path.unlink, "manifest.json", "manifest.json: No such file"),
    ],
)
def test_verify_finds_a_flipped_byte_a_short_and_a_missing_file(
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    name: str,
    told: str,
) -> None:
    lines, _ = run(capsys, checkpoint, "--verify")
    assert lines[0].startswith("intact: ")
    damage(checkpoint / name)
    lines, errors = run(capsys, checkpoint, "--verify", code=1)
    assert lines == [] and len(errors) == 1
    assert errors[0].startswith("damaged: ") and told in errors[0] and name in errors[0]


def test_a_checkpoint_of_another_program_is_named_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/.metadata").touch()
    for words in ([tmp_path / "d"], [tmp_path / "d", "--verify"]):
        lines, (error,) = run(capsys, *words, code=2)
        assert lines == [] and error.startswith(
            f"error: {tmp_path}/d: has .metadata but neither manifest.json nor state.json"
        )
    (tmp_path / "d/state.json").touch()  # one of coatlm that has lost its manifest
    _, (error,) = run(capsys, tmp_path / "d", code=1)
    assert error == f"damaged: {tmp_path}/d/manifest.json: No such file or directory"


def test_diff_of_equal_tensors_in_another_layout_is_empty(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = saved(tmp_path / "b", tensors(), layout="rows")
    lines, _ = run(capsys, "--diff", checkpoint, other)
    assert lines[2:] == ["5 of 5 tensors are equal"]


def test_diff_gives_share_largest_and_relative_difference(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tensors()
    scale = whole["optimizer.state.exp_avg.scale.norm.weight"]
    norm = whole["norm.weight"]
    norm.fill_(1.0)
    a = saved(tmp_path / "c", whole)
    norm[0], norm[1] = 1.5, 0.75
    scale.view(torch.int32).add_(1)  # one unit in the last place
    whole["optimizer.state.exp_avg.decoder.layers.0.fc1.weight"][0, :4] ^= 1
    lines, _ = run(capsys, "--diff", a, saved(tmp_path / "d", whole), code=1)
    told = dict(line.split(": ", 1) for line in lines if ": " in line)
    # sqrt(0.25 + 0.0625) / sqrt(16)
    assert told["norm.weight"] == "differing 12.5 %, max abs 0.5, relative 0.1398"
    codes = told["optimizer.state.exp_avg.decoder.layers.0.fc1.weight"]
    assert codes == "differing 3.125 %"  # 4 of 128
    assert "differing 100 %" in told["optimizer.state.exp_avg.scale.norm.weight"]
    assert lines[-1] == "2 of 5 tensors are equal"


def test_diff_names_what_is_missing_and_other_shapes_and_types(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tensors()
    del whole["optimizer.state.exp_avg.scale.norm.weight"]
    whole["extra.weight"] = torch.ones(3)
    whole["norm.weight"] = whole["norm.weight"].float()
    whole["decoder.layers.0.fc1.weight"] = torch.ones(4, 16)
    lines, _ = run(capsys, "--diff", checkpoint, saved(tmp_path / "b", whole), code=1)
    told = dict(line.split(": ", 1) for line in lines if ": " in line)
    assert told["optimizer.state.exp_avg.scale.norm.weight"] == "only in A"
    assert told["extra.weight"] == "only in B"
    assert told["norm.weight"].startswith("bfloat16 [16] in A, float32 [16] in B; differing 0 %")
    assert told["decoder.layers.0.fc1.weight"] == "bfloat16 [8, 16] in A, float32 [4, 16] in B"


def test_diff_holds_one_tensor_of_each_at_a_time(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = saved(tmp_path / "b", tensors())
    read, alive = StoredTensors.read, weakref.WeakSet[Any]()
    most = 0

    def counted(self: StoredTensors, key: str) -> Tensor:
        nonlocal most
        tensor = read(self, key)
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(inspect_checkpoint.StoredTensors, "read", counted)
    run(capsys, "--diff", checkpoint, other)
    assert most == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["missing"], "missing: no such directory"),
        (["."], "no checkpoint here"),
        (["a", "a"], "2 paths: one, or two with --diff"),
        (["--diff", "a"], "1 paths: one, or two with --diff"),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    _, errors = run(capsys, *arguments, code=2)
    assert len(errors) == 1 and complaint in errors[0]


@pytest.mark.parametrize(
    "state",
    [{}, {"config": "x", "tokens": "y"}, {"config": {"model": [], "optim": 3, "parallel": None}}],
)
def test_a_state_that_says_other_things_is_shown_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: dict[str, Any]
) -> None:
    saver = Checkpointer(tmp_path / "checkpoints", keep=5, async_save=False)
    saver.save(30, pieces_of(tensors(), "copies"), state)
    capsys.readouterr()
    out, err = run(capsys, tmp_path)
    assert "optimizer   unknown" in out and "layout      unknown; files of 1 ranks" in out
    assert err == []
