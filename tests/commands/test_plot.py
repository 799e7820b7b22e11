"""Curves and the table of several runs."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coatlm.commands.curves import LoggedRun, difference, read_run, read_runs, smoothing
from coatlm.commands.plot import GROUPS, draw, main
from tests.test_files import small_disk


def run_in(directory: Path, losses: Sequence[float | None], *, val: float | None = None) -> Path:
    directory.mkdir()
    records: list[dict[str, Any]] = [
        {"step": step, "loss": loss, "skipped": step // 50} for step, loss in enumerate(losses, 1)
    ]
    if val is not None:
        records += [{"step": 1, "val_loss": 9.0}, {"step": len(losses), "val_loss": val}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return directory


def test_final_loss_is_the_mean_of_the_last_twentieth_of_the_steps(tmp_path: Path) -> None:
    run = read_run(run_in(tmp_path / "a", [*[100.0] * 95, 1.0, 2.0, None, 4.0, 5.0]))
    assert run.final == 3.0  # 96 to 100 without the one that is not finite


def test_difference_is_smoothed_over_the_common_steps() -> None:
    run = LoggedRun({1: 2.0, 2: 2.2, 3: 2.4, 4: 2.0, 9: 7.0}, 0, None)
    baseline = LoggedRun({step: 2.0 for step in range(1, 7)}, 0, None)
    assert difference(run, baseline, smooth=2) == pytest.approx({2: 5.0, 3: 15.0, 4: 10.0})
    assert difference(run, baseline, smooth=5) == {}


def test_the_difference_of_short_runs_is_smoothed_over_fewer_steps(tmp_path: Path) -> None:
    read = read_runs([run_in(tmp_path / name, [2.0] * 13) for name in "ab"])
    assert smoothing(read, "a", 20) == 6 and smoothing(read, "a", 4) == 4
    panel = draw(read, "a", smooth=20).axes[1]
    assert "mean of 6 logged steps" in panel.get_ylabel()
    assert [len(line.get_xdata()) for line in panel.get_lines()] == [8, 8]
    one = read_runs([run_in(tmp_path / name, [2.0]) for name in "cd"])
    (_, point) = draw(one, "c", smooth=20).axes[1].get_lines()
    assert list(point.get_ydata()) == [0.0] and point.get_marker() == "."  # a line would be unseen


def test_a_loss_that_is_not_finite_is_left_out_of_the_difference() -> None:
    run = LoggedRun({1: 2.2, 2: math.nan, 3: 2.2, 4: 2.2}, 0, None)
    baseline = LoggedRun({step: 2.0 for step in range(1, 5)}, 0, None)
    assert difference(run, baseline, smooth=2) == pytest.approx({3: 10.0, 4: 10.0})


def test_the_loss_is_the_mean_of_its_window_where_that_was_logged(tmp_path: Path) -> None:
    run = run_in(tmp_path / "a", [9.0, 9.0])
    later = {"step": 3, "loss": 9.0, "loss_mean": 4.0}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(later) + "\n" + json.dumps(later | {"loss_mean": "x", "step": 4}))
    assert read_run(run).loss == {1: 9.0, 2: 9.0, 3: 4.0, 4: 9.0}


@pytest.mark.parametrize("kind", ["png", "svg", "html"])
def test_names_with_markup_and_without_glyphs_are_drawn_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    names = [
        "$x^{2",
        "lr=$5 or $6$",
        "_hidden",
        "r\u00e9sum\u00e9 \u8a13\u7df4 \U0001f525",
        "a|b",
        "a\nb",
        "%s {} \\frac",
    ]
    runs = [str(run_in(tmp_path / name, [2.0] * 9)) for name in names]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main([*runs, "--out", str(tmp_path / f"out.{kind}")]) == 0
    output = capsys.readouterr()
    assert output.err == "" and "| a\\|b | 2.0000 |" in output.out and "| a?b |" in output.out
    assert len(output.out.splitlines()) == 2 + len(names)
    read = read_runs(list(map(Path, runs)))
    legend = draw(read, next(iter(read)), smooth=1).axes[0].get_legend()
    assert legend is not None and len(legend.get_texts()) == len(names)


def test_each_metric_of_a_task_has_a_panel(tmp_path: Path) -> None:
    for name, acc in (("a", 0.25), ("b", 0.5)):
        run = run_in(tmp_path / name, [2.0] * 9)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 9, "task/sums/acc": acc, "task/sums/f1": 0.0}) + "\n")
    read = read_runs([tmp_path / "a", tmp_path / "b"])
    axes = draw(read, "a", smooth=1, only=["tasks"]).axes
    assert [ax.get_ylabel() for ax in axes] == ["sums/acc", "sums/f1"]
    assert [list(line.get_ydata()) for line in axes[0].get_lines()] == [[0.25], [0.5]]
    assert len(draw(read_runs([tmp_path / "a"]), "a", smooth=1).axes) == 4  # and an empty place


def test_a_full_disk_is_one_line_and_leaves_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path / "a", [2.0] * 30)
    for name in ("new/out.png", "out.html"):
        with small_disk(1000):
            assert main([str(run), "--out", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert error == f"error: {tmp_path / name}: cannot be written: File too large\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_table_and_picture_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_in(tmp_path / "coat", [2.02] * 120), run_in(tmp_path / "bf16", [2.0] * 80, val=2.5)]
    out = tmp_path / "pictures/loss.png"
    assert main([*map(str, runs), "--out", str(out), "--baseline", "bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| coat | 2.0200 | +1.000 % | 2 |  |"
    assert lines[3] == "| bf16 | 2.0000 | +0.000 % | 1 | 2.5000 |"
    assert out.read_bytes().startswith(b"\x89PNG")


def write(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def with_health(run: Path, *, error: float) -> Path:
    """states.jsonl and numerics.jsonl beside metrics.jsonl."""
    moments = {"exp_avg_k_p05": 1.0, "exp_avg_k_p50": 2.0, "exp_avg_k_p95": 3.0}
    write(run / "states.jsonl", [{"step": s, "edq_ratio": 0.9, **moments} for s in (10, 20)])
    lines = [
        {"step": 10, "layer": layer, "tensor": tensor, "amax": 2.0, "relative_error": error * layer}
        for layer in (1, 3, 2)
        for tensor in ("gate", "up")
    ]
    write(run / "numerics.jsonl", [*lines, {**lines[0], "step": 20, "relative_error": None}])
    return run


def labels(runs: Sequence[Path], *only: str) -> dict[str, list[str]]:
    """The names of the curves in each panel, by the label of its y axis."""
    read = read_runs(runs)
    figure = draw(read, next(iter(read)), smooth=1, only=only or GROUPS)
    return {
        ax.get_ylabel(): [str(line.get_label()) for line in ax.get_lines()]
        for ax in figure.axes
        if ax.get_visible()
    }


def test_earlier_attempts_are_drawn_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path / "a", [3.0, 2.0])
    (run / "attempts").mkdir()
    run_in(run / "attempts" / "2026-03-01T120000Z", [3.0, 2.5])
    out = ["--out", str(tmp_path / "a.png")]
    assert main([str(run), *out]) == 0
    assert "2026" not in capsys.readouterr().out
    assert main([str(run), *out, "--attempts"]) == 0
    assert "| a 2026-03-01T120000Z | 2.5000 | +25.000 % |" in capsys.readouterr().out


def test_panels_are_those_that_the_runs_have_something_for(tmp_path: Path) -> None:
    bare = run_in(tmp_path / "bare", [2.0] * 30)
    assert list(labels([bare])) == ["loss (nats per token)"]
    full = with_health(run_in(tmp_path / "full", [2.0] * 30), error=0.1)
    panels = labels([bare, full])
    assert list(panels)[2:] == [
        "EDQ / |update|",
        "k: median, 5 to 95 % of blocks",
        "relative error, worst layer",
        "largest magnitude",
    ]
    assert panels["EDQ / |update|"] == ["full"]
    assert panels["k: median, 5 to 95 % of blocks"] == ["full: m"]
    assert list(labels([full], "states")) == list(panels)[2:4]


def test_one_run_shows_every_tensor_and_several_the_worst(tmp_path: Path) -> None:
    a, b = (with_health(run_in(tmp_path / name, [2.0] * 30), error=0.1) for name in "ab")
    assert labels([a])["relative error, worst layer"] == ["a: gate", "a: up"]
    assert labels([a, b])["relative error, worst layer"] == ["a", "b"]


def test_activations_are_those_of_the_worst_layer_and_null_is_worst(tmp_path: Path) -> None:
    run = read_run(with_health(run_in(tmp_path / "a", [2.0] * 30), error=0.25))
    curve = run.curves["numerics.relative_error.gate"]
    assert curve[10] == 0.75 and math.isnan(curve[20])


def test_norm_and_throughput_have_panels_of_their_own(tmp_path: Path) -> None:
    run = tmp_path / "a"
    run.mkdir()
    logged = {"loss": 2.0, "grad_norm": 1.0, "tokens_per_s_per_gpu": 5.0, "mfu": None}
    write(run / "metrics.jsonl", [{"step": step, **logged} for step in range(1, 9)])
    assert list(labels([run])) == ["loss (nats per token)", "gradient norm", "tokens/s per GPU"]


def test_a_page_holds_curves_and_table_and_needs_no_other_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run_in(tmp_path / name, [2.0] * 30, val=2.5) for name in ("a", "<b>")]
    out = tmp_path / "page.html"
    assert main([*map(str, runs), "--out", str(out)]) == 0
    page = out.read_text()
    assert page.startswith("<!doctype html>") and page.count("<svg") == page.count("</svg>") == 1
    assert "<td>&lt;b&gt;</td><td>2.0000</td><td>+0.000 %</td>" in page and "<b>" not in page
    assert not re.search(r"<script|<link|<img|(?:src|href)=[\"'](?!#)http", page)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["missing"], "no loss in metrics.jsonl"),
        (["a", "--baseline", "b"], "baseline=b: one of a"),
        (["a", "--smooth", "0"], "smooth=0: at least 1"),
        (["a", "a"], "a second run named a"),
        (["a", "--only", "states"], "only=states: the runs have logged nothing of it"),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    complaint: str,
) -> None:
    run_in(tmp_path / "a", [1.0] * 30)
    monkeypatch.chdir(tmp_path)
    assert main([*options, "--out", "loss.png"]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("out", "complaint"),
    [
        ("", "argument --out: '': a path has at least 1 character"),
        ("loss", "--out loss: must end with .html, .avif, "),
        ("loss.txt", "--out loss.txt: must end with .html, "),
        ("loss.pgf", "--out loss.pgf: must end with .html, "),
        ("file/loss.png", "argument --out: file/loss.png: file is a file, not a directory"),
        ("dir.png", "dir.png: cannot be written: Is a directory"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_runs_are_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    out: str,
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("dir.png").mkdir()
    try:
        code = main(["no run", "--out", out])
    except SystemExit as stop:
        code = int(stop.code or 0)
    error = capsys.readouterr().err
    assert code == 2 and error.startswith(f"error: {complaint}") and error.count("\n") == 1
