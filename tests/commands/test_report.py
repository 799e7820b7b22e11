"""The report of a run: what it shows, what it escapes, and how a browser shows it."""

from __future__ import annotations

import html
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coatlm.commands.report import main, read, table
from coatlm.commands.report_figures import figures

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HOSTILE = "<img src=x onerror=alert(1)></script>"
STEPS = 12


def make_run(directory: Path, *, loss: float = 2.0, lr: float = 1e-3, tensor: str = "x") -> Path:
    """A run directory with everything that a report shows."""
    directory.mkdir(parents=True)
    records: list[dict[str, Any]] = [
        {"step": step, "loss": loss / step, "grad_norm": 1.0, "lr": lr, "tokens_per_s_per_gpu": 9.0}
        for step in range(1, STEPS + 1)
    ]
    finding = {
        "layer": 2,
        "tensor": "fc2_input",
        "measure": "underflow",
        "value": 0.5,
        "limit": 0.1,
    }
    records += [
        {"step": 6, "val_loss": 3.0},
        {"step": 7, "rolled_back_from": 8, "left_out": [7, 9]},
        {"step": 8, **finding, "action": "bf16"},
    ]
    numerics = [
        {"step": step, "layer": layer, "tensor": tensor, "relative_error": step * layer / 100}
        for step in (2, 4)
        for layer in (1, 2, 10)
    ]
    states = [{"step": 4, "exp_avg_k_p50": 2.0, "exp_avg_k_p05": 1.0, "exp_avg_k_p95": 4.0}]
    for name, lines in (("metrics", records), ("numerics", numerics), ("states", states)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / f"{name}.jsonl").write_text(text)
    (directory / "config.yaml").write_text(f"optim: {{lr: {lr}}}\nrun: {{name: '{HOSTILE}'}}\n")
    (directory / "env.json").write_text(json.dumps({"command": ["coatlm train", HOSTILE]}))
    (directory / "train.log").write_text(
        "2026-11-23 06:49:22,702 INFO step 1/12 | loss 5.9\n"
        "2026-11-23 06:49:23,000 INFO resumed from checkpoints at step 6\n"
        f"2026-11-23 06:49:24,000 WARNING {HOSTILE}\n"
    )
    return directory


def report(*words: object, out: Path) -> str:
    assert main([*map(str, words), "--out", str(out)]) == 0
    return out.read_text()


def body(page: str) -> str:
    """The page without plotly.js and what it draws."""
    return page[page.index("<h1>") :]


def test_a_page_has_results_faults_findings_and_configuration(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    make_run(run / "attempts/2026-11-22T174122Z")
    text = body(report(run, out=tmp_path / "page.html"))
    for cells in (
        ("steps", "12 of ?"),
        ("final loss, mean of the last 5 % of the steps", "0.16667"),
        ("last validation loss", "3"),
        ("earlier attempts", "1"),
        ("8", "2", "fc2_input", "underflow", "0.5", "0.1", "bf16"),
        ("step", "8", "rolled back, without batches [7, 9]"),
        ("2026-11-23 06:49:23,000", "info", "resumed from checkpoints at step 6"),
        ("attempt", "2026-11-22T174122Z", f"{STEPS + 3} records"),
        ("optim.lr", "0.001"),
    ):
        assert "".join(f"<td>{cell}</td>" for cell in cells) in text, cells
    assert "loss 5.9" not in text  # a line per step is no event


def test_heat_maps_have_the_values_of_layers_in_numerical_order(tmp_path: Path) -> None:
    drawn = [
        figure
        for section, figure in figures(read([make_run(tmp_path / "run")]))
        if section == "FP8 tensors, by layer" and figure["data"]
    ]
    (last,), (worst,) = (figure["data"] for figure in drawn)
    assert (last["x"], last["y"], last["z"]) == ([1, 2, 10], ["x"], [[0.04, 0.08, 0.4]])
    assert (worst["x"], worst["y"]) == ([2, 4], [1, 2, 10])
    assert worst["z"] == [[0.02, 0.04], [0.04, 0.08], [0.2, 0.4]]


def test_keys_that_differ_between_runs_come_first_and_are_marked(tmp_path: Path) -> None:
    runs = make_run(tmp_path / "a"), make_run(tmp_path / "b", lr=0.5, loss=4.0)
    text = report(runs[0], "--with", runs[1], out=tmp_path / "page.html")
    settings = text[text.index("<h2>Configuration</h2>") :]
    assert settings.count("class=differs") == 1
    first = "<tr class=differs><td>optim.lr</td><td>0.001</td><td>0.5</td></tr>"
    assert settings.index(first) < settings.index("run.name")
    (difference,) = [
        f for _, f in figures(read(runs)) if "difference" in f["layout"]["title"]["text"]
    ]
    assert difference["data"][1]["y"] == pytest.approx([100.0] * (STEPS // 2 + 1))


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "notes.html"])
def test_a_report_replaces_a_report_only(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    (run / "notes.html").write_text("<!doctype html>\nmine")
    before = (run / name).read_bytes()
    assert main([str(run), "--out", str(run / name)]) == 2
    assert (run / name).read_bytes() == before
    assert f"--out {run / name}: " in capsys.readouterr().err
    assert main([str(run)]) == main([str(run)]) == 0


def test_an_empty_table_is_left_out() -> None:
    assert table(["a"], []) == ""


def test_a_missing_plotly_and_a_missing_run_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["missing"]) == 2
    assert capsys.readouterr().err.startswith("error: missing: no loss in metrics.jsonl")
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    monkeypatch.delitem(sys.modules, "coatlm.commands.report_figures")
    assert main(["missing"]) == 2
    error = capsys.readouterr().err
    assert error == "error: a report needs plotly: pip install 'coatlm[report]'\n"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser of this machine; the driver of playwright brings none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


def test_a_browser_draws_all_figures_and_runs_and_loads_nothing_of_a_hostile_run(
    browser: Any, tmp_path: Path
) -> None:
    hostile = HOSTILE.replace("/", "|")
    runs = make_run(tmp_path / hostile, tensor=HOSTILE), make_run(tmp_path / "b", lr=0.5)
    out = tmp_path / "page.html"
    text = report(runs[0], "--with", runs[1], out=out)
    assert text.count("onerror=alert(1)>") == 0 and html.escape(hostile) in text
    page, requests, problems = browser.new_page(), [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.goto(out.as_uri())
    expected = sum(bool(figure["data"]) for _, figure in figures(read(runs)))
    page.wait_for_function(f"document.querySelectorAll('.gtitle').length == {expected}")
    assert expected == 11 and page.locator(".main-svg .xlines-above, .heatmaplayer").count()
    assert page.title() == hostile and page.locator("img").count() == 0
    assert page.locator(".legendtext", has_text=hostile).count()  # as text, not as markup
    assert problems == [] and requests == [out.as_uri()]
