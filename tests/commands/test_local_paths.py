"""A URL where only a path of this machine works is refused as it was typed, before any work."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from coatlm.commands import evaluate
from coatlm.console import local_path, output_path

ROOT = Path(__file__).parents[2]
URL = "s3://bucket/place/x.jsonl"
READ = "a path on this machine; a URL is not read here"
WRITTEN = "a path on this machine; write there, then copy the result to the URL"
CONVERT = ["--from", "hf", "--to", "coatlm"]
PREPARE = ["--input", "missing.txt", "--output-prefix", "out"]
LOSS = ["study.yaml", "--runs", "runs", "--out", "out.jsonl"]
READS: list[tuple[str, list[str], str]] = [  # command, its words, the argument that is a URL
    ("train", [URL], "CONFIG"),
    ("train", [URL, "--dry-run"], "CONFIG"),
    ("estimate", [URL], "CONFIG"),
    ("plan", [URL, "--gpus", "8"], "CONFIG"),
    ("submit", [URL, "--nodes=1", "--gpus-per-node=1"], "CONFIG"),
    ("submit", ["x", "--nodes=1", "--gpus-per-node=1", f"--python={URL}"], "--python"),
    ("submit", ["x", "--nodes=1", "--gpus-per-node=1", f"--mount={URL}:/x"], "--mount"),
    ("submit", ["x", "--nodes=1", "--gpus-per-node=1", f"--mount=/x:{URL}"], "--mount"),
    ("prepare", ["--verify", "data", URL], "--verify"),
    ("prepare", [*PREPARE, "--tokenizer", f"hf:{URL}"], "--tokenizer"),
    ("prepare", [*PREPARE, "--chat", "--chat-template", URL], "--chat-template"),
    ("convert", [*CONVERT, URL, "out"], "source"),
    ("convert", [*CONVERT, "x", "out", "--tokenizer", "hf://a/b/tokenizer.json"], "--tokenizer"),
    ("convert", [*CONVERT, "x", "out", "--config", URL], "--config"),
    ("convert", ["--from", "coatlm", "--to", "hf", "x", "out", "--like", URL], "--like"),
    ("inspect", [URL], "PATH"),
    ("inspect", ["--diff", "x", URL], "PATH"),
    ("evaluate", [URL, "--data", "x"], "checkpoint"),
    ("evaluate", ["x", "--data", "x", "--tokenizer", f"sentencepiece:{URL}"], "--tokenizer"),
    ("evaluate", ["x", "--tasks", "lambada_openai", URL], "--tasks"),
    ("plot", ["x", URL, "--out", "x.png"], "RUN_DIR"),
    ("compare", [URL, "x"], "A"),
    ("compare", ["x", URL], "B"),
    ("report", [URL], "RUN"),
    ("report", ["x", "--with", "y", URL], "--with"),
    ("tools.drill", ["--table", "x", URL], "--table"),
    ("tools.mutate", [URL, "tests"], "FILE"),
    ("tools.mutate", ["x.py", "tests", "--root", URL], "--root"),
    ("tools.study_finetune", [*LOSS, "--checkpoint", URL], "--checkpoint"),
    ("tools.study_loss", [URL, *LOSS[1:]], "STUDY.yaml"),
    ("tools.study_loss", [*LOSS, "--pool", "x", URL], "--pool"),
    ("tools.study_outliers", [URL], "CHECKPOINT"),
    ("tools.study_rounding", [URL], "CHECKPOINT"),
    ("tools.study_reduction", [URL], "CONFIG"),
    ("tools.study_reduction", ["--gradients", URL], "--gradients"),
    ("tools.study_states", [URL], "CHECKPOINT"),
]
WRITES: list[tuple[str, list[str], str]] = [
    ("prepare", ["--input", "text.txt", "--output-prefix", URL], "--output-prefix"),
    ("convert", [*CONVERT, "x", URL], "destination"),
    ("evaluate", ["x", "--data", "text.txt", "--out", URL], "--out"),
    ("plot", ["x", "--out", URL], "--out"),
    ("report", ["x", "--out", URL], "--out"),
    ("tools.bench", ["layer", "--smoke", "--out", URL], "--out"),
    ("tools.drill", ["--out", URL], "--out"),
    ("tools.study_finetune", ["x", "--runs", "runs", "--out", URL, "--checkpoint", "x"], "--out"),
    ("tools.study_loss", ["x", "--runs", URL, "--out", "out.jsonl"], "--runs"),
    ("tools.study_loss", ["x", "--runs", "runs", "--out", URL], "--out"),
    ("tools.study_outliers", ["x", "--out", URL], "--out"),
    ("tools.study_rounding", ["x", "--out", URL], "--out"),
    ("tools.study_ranges", ["--out", URL, "--gradients", "missing"], "--out"),
    ("tools.study_reduction", ["x", "--out", URL], "--out"),
    ("tools.study_states", ["x", "--out", URL], "--out"),
]
CALLS = [(*call, READ) for call in READS] + [(*call, WRITTEN) for call in WRITES]


def run(monkeypatch: pytest.MonkeyPatch, command: str, *words: str) -> int:
    """The exit code of `coatlm COMMAND WORDS`, or of a module of tools/, in this process."""
    name = command if "." in command else f"coatlm.commands.{command}"
    module: Any = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [command, *words])
    try:
        return int(module.main() or 0)
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.parametrize(
    ("command", "words", "argument", "allowed"), CALLS, ids=[f"{c[0]} {c[2]}" for c in CALLS]
)
def test_a_url_is_refused_in_one_line_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    words: list[str],
    argument: str,
    allowed: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("text")
    assert run(monkeypatch, command, *words) == 2
    captured = capsys.readouterr()
    (value,) = (word.removeprefix(f"{argument}=") for word in words if "://" in word)
    assert captured.err.startswith(f"error: argument {argument}: {value}: {allowed}")
    assert captured.err.count("\n") == 1 and captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_the_traces_of_a_benchmark_are_written_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "tools.bench", "end-to-end", f"trace={URL}") == 2
    assert capsys.readouterr().err == f"error: trace={URL}: {WRITTEN}\n"
    assert list(tmp_path.iterdir()) == []


def test_every_argument_that_is_a_path_refuses_urls() -> None:
    files = [*(ROOT / "coatlm/commands").glob("*.py"), *(ROOT / "tools").glob("*.py")]
    bare = [path.name for path in files if re.search(r"type=(pathlib\.)?Path\b", path.read_text())]
    assert len(files) > 30 and bare == []


def test_inputs_at_urls_are_read_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.jsonl").write_text(json.dumps({"text": "abc"}))
    words = ["--input", f"file://{tmp_path}/*.jsonl", "--output-prefix", "out", "--workers=1"]
    assert run(monkeypatch, "prepare", *words) == 0
    assert "out: 1 documents, 4 tokens" in capsys.readouterr().out
    assert evaluate.parse_arguments(["run", "--data", URL]).data == [URL]


def test_a_path_stays_the_same_place_and_becomes_no_url_behind_hf() -> None:
    for kind in (local_path, output_path):
        assert kind("//data/x") == Path("/data/x") and not str(kind("//data")).startswith("//")
        assert kind("a:b/c//d") == Path("a:b/c/d") and kind("s3:/b") == Path("s3:/b")
