"""Whether two runs are the same, and where they part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coatlm.commands.compare import main

CONFIG = "run: {name: a, dir: DIR}\noptim: {lr: 0.001, betas: [0.9, 0.95]}\n"


def record(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "loss": 5.0 / step, "grad_norm": 1.0, "step_ms": 7.0, **values}


def run_in(directory: Path, records: list[dict[str, Any]], config: str = CONFIG) -> Path:
    directory.mkdir()
    (directory / "config.yaml").write_text(config.replace("DIR", str(directory)))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return directory


@pytest.fixture
def a(tmp_path: Path) -> Path:
    validation = {"step": 2, "val_loss": 3.0, "val_ppl": 20.1}
    return run_in(tmp_path / "a", [record(1), record(2), validation, record(3)])


def compare(
    capsys: pytest.CaptureFixture[str], a: Path, b: Path, *options: str
) -> tuple[int, list[str]]:
    code = main([str(a), str(b), *options])
    return code, capsys.readouterr().out.splitlines()


def test_runs_that_differ_in_clocks_and_place_alone_are_identical(
    tmp_path: Path, a: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [json.loads(line) for line in (a / "metrics.jsonl").open()]
    clocks = {"step_ms": 1e3, "tokens_per_s_per_gpu": 9, "tflops_per_gpu": 2.0}
    clocks |= {"mfu": 0.5, "peak_mem_gib": 1.5, "slowest": {"rank": 1, "ms": 2.0}}
    other = [r | clocks for r in records]
    b = run_in(tmp_path / "b", other, CONFIG.replace("name: a", "name: b"))
    assert compare(capsys, a, b) == (0, ["identical: 4 records"])


def test_the_first_difference_is_named_with_step_key_and_both_values(
    tmp_path: Path, a: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validation = {"step": 2, "val_loss": 3.0, "val_ppl": 20.1}
    records = [record(1), record(2, grad_norm=1.25), validation, record(3, loss=2.0)]
    code, lines = compare(capsys, a, run_in(tmp_path / "b", records))
    assert code == 1 and lines[-1] == "different"
    assert lines[0] == "first difference: metrics.jsonl step 2: grad_norm is 1.0 in A, 1.25 in B"
    assert "  metrics.jsonl grad_norm: 1 records differ, at most 0.2 of the larger value" in lines
    assert any("loss: 1 records differ" in line for line in lines)


def test_a_validation_is_compared_with_the_validation_of_its_step(
    tmp_path: Path, a: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"step": 2, "val_loss": 3.5, "val_ppl": 20.1}
    b = run_in(tmp_path / "b", [record(1), record(2), other, record(3)])
    _, lines = compare(capsys, a, b)
    assert "step 2, validation: val_loss is 3.0 in A, 3.5 in B" in lines[0]


def test_metrics_of_tasks_are_compared_with_those_of_their_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (
        run_in(tmp_path / name, [record(1), {"step": 1, "task/sums/acc": acc}])
        for name, acc in (("x", 0.25), ("y", 0.5))
    )
    _, lines = compare(capsys, a, b)
    assert "step 1, tasks: task/sums/acc is 0.25 in A, 0.5 in B" in lines[0]


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([record(1), record(2)], "step 2, validation: record is a record in A, (nothing) in B"),
        (
            [record(1, loss=None, nonfinite=["loss"])],
            "step 1: loss is 5.0 in A, None in B",
        ),
    ],
)
def test_missing_records_and_losses_that_are_not_finite_are_differences(
    tmp_path: Path,
    a: Path,
    capsys: pytest.CaptureFixture[str],
    records: list[dict[str, Any]],
    told: str,
) -> None:
    code, lines = compare(capsys, a, run_in(tmp_path / "b", records), "--rtol", "0.9")
    assert code == 1 and told in lines[0]


def test_rtol_allows_that_share_of_the_larger_value(
    tmp_path: Path, a: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validation = {"step": 2, "val_loss": 3.0, "val_ppl": 20.1}
    b = run_in(tmp_path / "b", [record(1, loss=4.0), record(2), validation, record(3)])
    assert compare(capsys, a, b, "--rtol", "0.21")[0] == 0
    assert compare(capsys, a, b, "--rtol", "0.19")[0] == 1


def test_config_differences_count_unless_ignored(
    tmp_path: Path, a: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [json.loads(line) for line in (a / "metrics.jsonl").open()]
    config = CONFIG.replace("0.001, betas: [0.9, 0.95]", "0.002, schedule: wsd")
    b = run_in(tmp_path / "b", records, config)
    code, lines = compare(capsys, a, b)
    assert (code, lines[-1]) == (1, "different")
    assert lines[:3] == [
        "config.yaml: optim.lr is 0.001 in A, 0.002 in B",
        "config.yaml: optim.betas is [0.9, 0.95] in A, (nothing) in B",
        "config.yaml: optim.schedule is (nothing) in A, wsd in B",
    ]
    code, lines = compare(capsys, a, b, "--ignore-config")
    assert code == 0 and len(lines) == 4


def test_bytes_of_another_layout_do_not_count_where_configurations_may_differ(
    tmp_path: Path, a: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [json.loads(line) for line in (a / "metrics.jsonl").open()]
    sent = [one | {"comm_bytes_grad": 2048, "comm_bytes_grad_fp8": 512} for one in records]
    b = run_in(tmp_path / "b", sent)
    assert compare(capsys, a, b)[0] == 1
    assert compare(capsys, a, b, "--ignore-config")[0] == 0


def test_numerics_that_both_have_are_compared_by_layer_and_tensor(
    tmp_path: Path, a: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = run_in(tmp_path / "b", [json.loads(line) for line in (a / "metrics.jsonl").open()])
    for run, amax in ((a, 3.0), (b, 4.0)):
        lines = [
            {"step": 1, "layer": layer, "tensor": "gate", "amax": amax if layer else 1.0}
            for layer in (0, 1)
        ]
        (run / "numerics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (a / "states.jsonl").write_text('{"step": 1, "edq": 0.5}\n')  # B has none
    code, lines = compare(capsys, a, b)
    assert code == 1 and len(lines) == 3
    assert "numerics.jsonl step 1, layer 1, tensor gate: amax is 3.0 in A, 4.0 in B" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["a", "missing"], "missing: nothing in metrics.jsonl"),
        (["a", "bare"], "config.yaml: "),
        (["a", "a", "--rtol", "1"], "--rtol 1.0: in [0, 1)"),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(
    tmp_path: Path,
    a: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    (run_in(tmp_path / "bare", [record(1)]) / "config.yaml").unlink()
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_a_key_that_an_earlier_version_did_not_log_is_no_difference(
    tmp_path: Path, a: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [json.loads(line) for line in (a / "metrics.jsonl").open()]
    later = [r | {"loss_mean": 4.0} if "loss" in r else r for r in records]
    b = run_in(tmp_path / "b", later)
    assert compare(capsys, a, b) == (0, ["identical: 4 records"])
    c = run_in(tmp_path / "c", [r | {"loss_mean": 3.0} if "loss" in r else r for r in records])
    code, lines = compare(capsys, b, c)
    assert code == 1 and "loss_mean is 4.0 in A, 3.0 in B" in lines[0]
