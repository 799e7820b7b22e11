"""`coatlm prepare --pack` says what packing would cost; tests/data/ has the rest of the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from coatlm.commands.prepare import main, parse_arguments
from coatlm.data.manifest import SUFFIXES, suffixed


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of `coatlm prepare WORDS`."""
    monkeypatch.setattr(sys, "argv", ["prepare", *words])
    try:
        return main()
    except SystemExit as stop:
        return int(stop.code or 0)


def test_the_cost_of_packing_is_printed_and_nothing_of_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = ["a" * 8, "b" * 4, "c" * 3, "d" * 11]  # each gets an end-of-document token
    Path("x.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    words = ["--input", "x.jsonl", "--workers=1", "--output-prefix"]
    assert run(monkeypatch, *words, "plain") == 0
    (written,) = capsys.readouterr().out.splitlines()
    for _ in range(2):  # the second call finds the dataset
        assert run(monkeypatch, *words, "out", "--pack", "8") == 0
        said, packed, plain = capsys.readouterr().out.splitlines()
        assert said.partition(" in ")[0] == written.partition(" in ")[0].replace("plain", "out")
        assert packed == (
            "out: data.seq_len=8 data.packing=best-fit: 4 samples, 13.89 % padding, 1 documents cut"
        )
        assert plain.startswith("out: data.seq_len=8 data.packing=concat: 3 samples, 0.00 % pad")
    for suffix in SUFFIXES:
        pair = [suffixed(Path(name), suffix).read_bytes() for name in ("out", "plain")]
        assert pair[0] == pair[1]
    assert len(list(tmp_path.iterdir())) == 1 + 2 * len(SUFFIXES)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--pack", "1"], "--pack 1: must be in 2..134217728, as data.seq_len"),
        (["--pack", "134217729"], "--pack 134217729: must be in 2..134217728, as data.seq_len"),
        (["--pack", "-9" + "9" * 5000], "argument --pack: invalid int value: '-99999"),
        (["--pack", "8k"], "argument --pack: invalid int value: '8k'"),
        (["--pack"], "argument --pack: expected one argument"),
        (["--pack", "8", "--verify", "x"], "--pack has no effect with --verify"),
    ],
)
def test_a_length_that_no_sample_has_is_refused_before_any_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    inputs = [] if "--verify" in words else ["--input", "missing.txt", "--output-prefix", "out"]
    assert run(monkeypatch, *inputs, *words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {reason}") and captured.err.count("\n") == 1
    assert captured.out == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        ("", "argument --output-prefix: '': a path has at least 1 character"),
        ("x.txt/a", "argument --output-prefix: x.txt/a: x.txt is a file, not a directory"),
        (".", "--output-prefix .: give the beginning of the names of files, such as data/corpus"),
    ],
)
def test_a_prefix_that_names_no_files_is_refused_before_any_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prefix: str,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text("text")
    assert run(monkeypatch, "--input", "x.txt", "--output-prefix", prefix) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {reason}") and captured.err.count("\n") == 1
    assert captured.out == "" and [path.name for path in tmp_path.iterdir()] == ["x.txt"]


@pytest.mark.parametrize(
    ("words", "option", "with_"),
    [
        (["--chat", "--field", "body"], "--field", "--chat"),
        (["--chat", "--field=text"], "--field", "--chat"),  # as by default, and ignored too
        (["--chat", "--column", "body"], "--column", "--chat"),
        *(
            (["--verify", "x", *words], words[0].replace("--no-", "--"), "--verify")
            for words in (
                ["--tokenizer", "byte"],
                ["--field", "text"],
                ["--column", "text"],
                ["--chat"],
                ["--chat-template", "none"],
                ["--append-eod"],
                ["--no-append-eod"],
                ["--shard-mb", "64"],
                ["--max-expansion", "1000"],
                ["--max-record-mb", "128"],
                ["--overwrite"],
            )
        ),
    ],
)
def test_an_option_without_effect_is_refused_before_any_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    option: str,
    with_: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    inputs = [] if "--verify" in words else ["--input", "missing.txt", "--output-prefix", "out"]
    assert run(monkeypatch, *inputs, *words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {option} has no effect with {with_}")
    assert captured.err.count("\n") == 1
    assert captured.out == "" and list(tmp_path.iterdir()) == []


def test_options_that_are_not_given_have_the_defaults_of_the_help() -> None:
    given = ["--input", "x", "--output-prefix", "y"]
    defaults = {
        "tokenizer": "byte",
        "field": "text",
        "column": "text",
        "chat": False,
        "chat_template": None,
        "append_eod": True,
        "shard_mb": 64,
        "max_expansion": 1000.0,
        "max_record_mb": 128,
        "pack": None,
        "overwrite": False,
    }
    assert vars(parse_arguments(given)).items() >= defaults.items()
    assert parse_arguments([*given, "--no-append-eod"]).append_eod is False


def test_verify_takes_a_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text("text")
    assert run(monkeypatch, "--input", "x.txt", "--output-prefix", "out") == 0
    assert run(monkeypatch, "--verify", "out", "--workers", "2") == 0
    assert "out: intact, 10 bytes of tokens" in capsys.readouterr().out
