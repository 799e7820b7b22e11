"""FP8-LM's three scalings on gradients of known kind, and the whole tool on a small run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tools.studies.gradient_sums import RankGradients, SumErrors, study
from tools.study_reduction import main

BLOCKS = 64


def made(ranks: int, *, alike: float) -> RankGradients:
    """Normal gradients of two matrices; `alike` of each rank's is common to all."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(BLOCKS * 128, generator=generator)
    own = torch.randn(ranks, BLOCKS * 128, generator=generator)
    values = (alike * common + (1 - alike) * own) * 1e-4
    owner = torch.arange(2, dtype=torch.int32).repeat_interleave(BLOCKS // 2)
    amax = values.abs().view(ranks, 2, -1).amax(-1)
    return RankGradients(values, amax, owner, ["a", "b"])


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, int], SumErrors]:
    return {(f.how, f.ranks): f for f in study(made(32, alike=0.9), [8, 32])}


@pytest.mark.parametrize("ranks", [8, 32])
def test_gradients_that_agree_overflow_when_divided_after(found: object, ranks: int) -> None:
    assert isinstance(found, dict)
    assert found["post-scaling", ranks].overflow > 0.1
    assert found["post-scaling", ranks].snr < 10
    assert found["auto-scaling", ranks].overflow <= 1e-5
    assert found["pre-scaling", ranks].overflow <= 1e-3  # the largest, rounded to MAX


def test_gradients_divided_before_underflow_with_many_ranks() -> None:
    few, many = (
        {f.how: f for f in study(made(64, alike=0.0), [n])}["pre-scaling"] for n in (4, 64)
    )
    assert many.underflow > 2 * few.underflow and many.snr < few.snr


@pytest.mark.parametrize("ranks", [8, 32])
def test_sums_in_fp32_are_the_best_and_do_not_depend_on_ranks(found: object, ranks: int) -> None:
    assert isinstance(found, dict)
    block = found["fp8-a2a, block", ranks]
    assert block.snr > max(f.snr for f in found.values() if f.overflow is not None) + 3
    assert block.relative_error < 0.027 and block.overflow is None
    assert block.snr > found["fp8-a2a, e5m2", ranks].snr + 5  # one bit: 6 dB
    assert found["fp8-a2a, e3m4", ranks].snr > block.snr + 5


def test_sums_in_one_byte_lose_more_with_every_microbatch_and_least_in_e4m3(found: object) -> None:
    """Gradients that agree: each of N roundings errs by 0.037 of the sum so far, or by less."""
    assert isinstance(found, dict)
    for ranks in (8, 32):
        e4m3 = found["accumulated, e4m3", ranks].relative_error
        assert 0.027 < e4m3 < 0.037 * (ranks / 3 + 1) ** 0.5 * 1.05
        assert 1.5 < found["accumulated, e5m2", ranks].relative_error / e4m3 < 2.2
        assert found["accumulated, bf16", ranks].relative_error < e4m3 / 4


def test_a_run_is_trained_captured_and_replayed(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{i} + {i} = {2 * i}\n" for i in range(2000)))
    config = tmp_path / "run.yaml"
    config.write_text(
        f"""
run: {{dir: {tmp_path}/run}}
model: {{layers: 1, hidden: 64, heads: 2, ffn: 96}}
data: {{text: [{tmp_path}/text.txt], seq_len: 16, cache_dir: {tmp_path}/cache}}
precision: {{recipe: fp32}}
train: {{steps: 2, micro_batch: 1, global_batch: 2, eval_every: 0}}
checkpoint: {{every: 0}}
"""
    )
    out = tmp_path / "study"
    call = [sys.executable, "-m", "tools.study_reduction", str(config), "--ranks", "2", "4"]
    root = Path(__file__).parents[2]
    subprocess.run([*call, "--out", str(out)], check=True, capture_output=True, cwd=root)
    first = json.loads((out / "reduction.json").read_text())
    assert [f["ranks"] for f in first] == [2] * 11 + [4] * 11
    assert (out / "reduction.png").stat().st_size > 10000
    assert main(["--gradients", str(out / "gradients.pt"), "--out", str(out), "--ranks", "4"]) == 0
    again = json.loads((out / "reduction.json").read_text())
    assert again == [f for f in first if f["ranks"] == 4]


def test_a_run_that_is_finished_has_no_gradients_to_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("coatlm.train.start.set_up", lambda *_: None)
    words = ["configs/quickstart.yaml", f"run.dir={tmp_path}/run", "--out", str(tmp_path / "o")]
    assert main(words) == 2
    assert f"run.dir={tmp_path}/run: the run is finished" in capsys.readouterr().err


def test_a_run_that_a_signal_stops_gives_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = SimpleNamespace(run_steps=lambda: 130)
    monkeypatch.setattr("coatlm.train.start.set_up", lambda *_: session)
    with pytest.raises(SystemExit) as ended:
        main(["configs/quickstart.yaml", f"run.dir={tmp_path}/run", "--out", str(tmp_path / "o")])
    assert ended.value.code == 130
    assert not (tmp_path / "o/reduction.json").exists()


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(4, alike=0.5).save(tmp_path / "g.pt")
    assert main(["--gradients", str(tmp_path / "g.pt"), "--ranks", "8"]) == 2
    assert "ranks=[8]: from 2 to the 4" in capsys.readouterr().err
    assert main(["--out", str(tmp_path)]) == 2
    assert "either CONFIG or --gradients" in capsys.readouterr().err
    one_byte = ["configs/quickstart.yaml", "parallel.main_grads=fp8", f"run.dir={tmp_path}/run"]
    assert main([*one_byte, "--out", str(tmp_path)]) == 2
    assert "parallel.main_grads=fp8: the study takes" in capsys.readouterr().err
    assert main(["x.yaml", "--ranks", "1", "--out", str(tmp_path)]) == 2
    assert "--ranks 1 --elements 4194304: at least 2 and 128" in capsys.readouterr().err


class Code:
    """Unpickled without care, it runs a command."""

    def __reduce__(self) -> tuple[object, ...]:
        return print, ("code ran",)


@pytest.mark.parametrize(
    "content",
    [
        Code(),
        {"values": Code(), "amax": 1, "owner": 1, "names": []},
        {"values": torch.ones(2, 130), "amax": torch.ones(2, 1), "owner": torch.zeros(1).int()},
        {"names": ["w"], "values": "x", "amax": torch.ones(2, 1), "owner": torch.zeros(1).int()},
        b"",
    ],
)
def test_a_file_that_is_no_gradients_is_refused_without_advice_to_trust_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: object
) -> None:
    path = tmp_path / "g.pt"
    torch.save(content, path)
    if content == b"":
        path.write_bytes(b"")
    assert main(["--gradients", str(path), "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"error: {path}: not gradients.pt of this tool\n"
    assert captured.out == "" and not (tmp_path / "out").exists()
