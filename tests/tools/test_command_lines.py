"""Every tool answers a wrong call with one line and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

CALLS: dict[str, list[str]] = {  # tool -> a call whose input is missing
    "bench": ["layer", "--smoke", "--only", "missing"],
    "compare_runs": ["missing", "missing2"],
    "convert_checkpoint": ["--from", "coatlm", "--to", "hf", "missing", "out"],
    "estimate_memory": ["missing.yaml"],
    "evaluate": ["missing", "--data", "missing.txt", "--out", "out/result.json"],
    "inspect_checkpoint": ["missing"],
    "mutate": ["missing.py", "test_missing.py"],
    "plan": ["missing.yaml", "--gpus", "8"],
    "plot_run": ["missing", "--out", "out/picture.png"],
    "preprocess_data": ["--input", "missing.txt", "--output-prefix", "out/data"],
    "study_loss": ["missing.yaml", "--runs", "runs", "--out", "out.jsonl"],
    "study_finetune": ["missing.yaml", "--out", "out.jsonl", "--checkpoint", "x", "--runs", "out"],
    "study_outliers": ["missing", "--out", "out"],
    "study_rounding": ["missing", "--out", "out"],
    "study_ranges": ["--gradients", "missing", "--out", "out"],
    "study_reduction": ["missing.yaml", "--out", "out"],
    "study_states": ["missing", "--out", "out"],
}


DOORS = {  # tool -> its module in coatlm/commands/
    "compare_runs": "compare",
    "convert_checkpoint": "convert",
    "estimate_memory": "estimate",
    "evaluate": "evaluate",
    "inspect_checkpoint": "inspect",
    "plan": "plan",
    "plot_run": "plot",
    "preprocess_data": "prepare",
}


def module_of(tool: str) -> Any:
    name = f"coatlm.commands.{DOORS[tool]}" if tool in DOORS else f"tools.{tool}"
    return importlib.import_module(name)


def run(monkeypatch: pytest.MonkeyPatch, tool: str, *words: str) -> int:
    """The exit code of `python tools/TOOL.py WORDS`, in this process."""
    monkeypatch.setattr(sys, "argv", [f"{tool}.py", *words])
    try:
        return int(module_of(tool).main() or 0)
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.parametrize("tool", list(CALLS))
@pytest.mark.parametrize("wrong", ["option", "input"])
def test_a_wrong_call_is_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tool: str,
    wrong: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--no-such-option"] if wrong == "option" else []
    assert run(monkeypatch, tool, *CALLS[tool], *words) == 2
    captured = capsys.readouterr()
    named = "--no-such-option" if words else "missing"
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert named in captured.err and captured.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "attention: needs 1 GPU, this machine has 0"),
        (["documents"], "documents: needs 1 GPU, this machine has 0"),
        (["attention", "sizes=64,0"], "2048:8:32:32:0: must be S:B:heads:kv_heads:size"),
        (["attention", "cases=8:1"], "8:1:64: must be S:B:heads:kv_heads:size"),
        (["attention", "cases=" + "9" * 50 + ":1:1:1"], "whole numbers from 1 to 4194303"),
        (["layer"], "layer: needs 1 GPU, this machine has 0; `layer --smoke` runs on a CPU"),
        (["memory", "model=tiny"], "memory: needs 1 GPU"),
        (["quantize"], "quantize: needs 1 GPU"),
        (["optimizer", "--out", "out/x.json"], "optimizer: needs 1 GPU"),
        (["layer-kernels"], "layer-kernels: needs 1 GPU"),
        (["reduce"], "reduce: needs 2 GPUs"),
        (["end-to-end", "gpus=4"], "end-to-end: needs 4 GPUs"),
        (["end-to-end", "gpus=x"], "gpus=x: a whole number"),
        (["layer", "--smoke", "batch=0"], "batch=0: a whole number from 1"),
        (["layer", "--smoke", "steps=" + "9" * 50], "a whole number from 1"),
        (["layer", "--smoke", "shapes=64"], "shapes=64: hidden:seq, two whole numbers"),
        (["layer", "--smoke", "shapes=65:32"], "shapes=65:32: hidden is one of 4096, 2048, 64"),
        (["reduce", "pieces=2^99999999999"], "pieces=2^99999999999: a number of elements, or 2^k"),
        (["layer", "--smoke", "--budget", "nan"], "--budget nan: seconds"),
    ],
)
def test_a_benchmark_that_cannot_be_measured_here_ends_at_once_and_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert run(monkeypatch, "bench", *words) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1 and list(tmp_path.iterdir()) == []
