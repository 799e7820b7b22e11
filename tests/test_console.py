"""What tools print besides results: errors of one line, and progress that a log file survives."""

from __future__ import annotations

import errno
import io
import os
import warnings
from pathlib import Path

import pytest

from coatlm import console
from coatlm.config.errors import LONGEST, one_line
from coatlm.console import Parser, fail, ignore_library_warnings, in_bytes, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_error_of_the_system_names_the_path_and_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/out.json")
    assert fail(full) == 2
    assert fail(ValueError("lr=0: above 0\nseed=-1: at least 0"), 4, label="damaged") == 4
    assert capsys.readouterr().err.splitlines() == [
        "error: /data/out.json: No space left on device",
        "damaged: lr=0: above 0",
        "damaged: seed=-1: at least 0",
    ]


def test_what_a_strangers_file_holds_is_printed_shortened_and_escaped() -> None:
    assert one_line("a\x1b[31mb\udc80\n c") == "a\\x1b[31mb\\udc80 c"
    assert len(one_line("x" * 10**6)) == LONGEST


def test_an_unknown_option_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("What it does.")
    parser.add_argument("--steps", type=int, choices=[1, 2], help="a long list of choices")
    for words in (["--nope"], ["--steps", "x"], ["more"]):
        with pytest.raises(SystemExit) as stop:
            parser.parse_args(words)
        error = capsys.readouterr().err
        assert stop.value.code == 2
        assert error.startswith("error: ") and error.count("\n") == 1 and words[-1] in error


def test_an_option_of_several_values_adds_to_what_was_given_and_replaces_its_default() -> None:
    parser, default = Parser("What it does."), ["a"]
    parser.add_argument("--with", nargs="+", default=default)
    assert parser.parse_args([]).__dict__["with"] == ["a"]
    words = ["--with", "b", "c", "--with", "d"]
    assert parser.parse_args(words).__dict__["with"] == ["b", "c", "d"] and default == ["a"]


def test_the_home_directory_is_known_where_a_shell_leaves_its_sign(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert console.output_path("~/x") == console.local_path("~/x") == Path("/home/me/x")
    assert console.tokenizer_spec("hf:~/t.json") == "hf:/home/me/t.json"
    assert console.tokenizer_spec("byte") == "byte"
    assert console.local_path("~no-such-user/x") == Path("~no-such-user/x")


def test_an_output_has_a_name_and_is_not_below_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    parser = Parser("What it does.")
    parser.add_argument("--out", type=console.output_path)
    for word, told in (
        ("", "'': a path has at least 1 character"),
        (
            f"{tmp_path}/file/a/b",
            f"{tmp_path}/file/a/b: {tmp_path}/file is a file, not a directory",
        ),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(["--out", word])
        assert capsys.readouterr().err.startswith(f"error: argument --out: {told} (")
    with pytest.raises(SystemExit):
        parser.parse_args(["--out", f"{tmp_path}/{'a' * 300}/b"])
    assert "File name too long" in capsys.readouterr().err
    assert parser.parse_args(["--out", f"{tmp_path}/new/a"]).out == tmp_path / "new/a"


def test_a_refused_url_is_named_without_its_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("What it does.")
    parser.add_argument("run", type=console.local_path)
    for url in ("https://host/run?signature=SECRET", "s3://key:SECRET@bucket/run"):
        with pytest.raises(SystemExit):
            parser.parse_args([url])
        error = capsys.readouterr().err
        assert error.startswith(f"error: argument run: {url.split(':')[0]}://")
        assert "SECRET" not in error and "a path on this machine" in error


def test_sizes_have_four_digits_and_a_binary_unit() -> None:
    assert [in_bytes(n) for n in (0, 1023, 1024, 1.2345 * 2**30, 2**50)] == [
        *("0 B", "1023 B", "1 KiB", "1.234 GiB", "1024 TiB"),
    ]


def test_progress_on_a_terminal_is_a_bar_that_is_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "DELAY", 0.0)
    stream = Terminal()
    with progress("verifying", 4 << 20, stream=stream) as advance:
        for _ in range(4):
            advance(1 << 20)
    assert "verifying: " in stream.getvalue() and "4.00M" in stream.getvalue()
    assert stream.getvalue().split("\r")[-1].strip() == ""


def test_short_work_shows_no_bar() -> None:
    stream = Terminal()
    with progress("verifying", 10, stream=stream) as advance:
        advance(10)
    assert "verifying" not in stream.getvalue()


def test_progress_without_a_terminal_is_a_rare_line() -> None:
    now, stream = [0.0], io.StringIO()
    with progress(
        "evaluating", 200, unit="windows", stream=stream, clock=lambda: now[0]
    ) as advance:
        for _ in range(200):
            now[0] += 1.0
            advance(1)
    assert stream.getvalue().splitlines() == [
        "evaluating: 30%",
        "evaluating: 60%",
        "evaluating: 90%",
    ]


def test_a_process_that_does_not_report_prints_nothing() -> None:
    now, stream = [0.0], Terminal()
    with progress("x", 9, show=False, stream=stream, clock=lambda: now[0]) as advance:
        now[0] += 1000.0
        advance(9)
    assert stream.getvalue() == ""


def test_warnings_that_are_of_no_use_to_users_are_not_shown() -> None:
    shown = ["backend_options._timeout was specified, but", "what a user should know"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ignore_library_warnings()
        for text in shown:
            warnings.warn(text, UserWarning, stacklevel=1)
        warnings.warn_explicit("deprecated", UserWarning, "x.py", 1, module="megatron.core.x")
    assert [str(warning.message) for warning in caught] == shown[1:]
