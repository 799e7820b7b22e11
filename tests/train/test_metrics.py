"""Records, their repair on resume, the console, trackers, the clock and the plot."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatlm.config import Config, load_config, make_config
from coatlm.train import run_directory
from coatlm.train.guard import Finding
from coatlm.train.metrics import MetricsLogger, Throughput

H200 = "NVIDIA H200"
KEYS = ["step", "loss", "loss_mean", "grad_norm", "lr", "tokens", "step_ms", "tokens_per_s_per_gpu"]
KEYS += ["tflops_per_gpu", "mfu", "peak_mem_gib", "skipped"]


def config(**log: Any) -> Config:
    data = {"text": "x", "seq_len": 256}
    return make_config(
        {"run": {"name": "trial"}, "data": data, "train": {"steps": 150}, "log": log}
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_logger(run_dir: Path, resume_step: int = 0, **options: Any) -> MetricsLogger:
    fields = {
        **{"config": config(), "rank": 0, "world_size": 4, "flops_per_token": 40e9},
        **{"device_name": H200, "stream": io.StringIO()},
    }
    return MetricsLogger(run_dir, resume_step=resume_step, **{**fields, **options})


def log(logger: MetricsLogger, step: int, loss: float = 3.4021) -> None:
    logger.advance()
    given = {"grad_norm": 1.919, "lr": 5e-4, "skipped": 2, "peak_mem_gib": 31.2}
    logger.log_step(step, loss=loss, loss_mean=loss, tokens=4096 * step, **given)


def on_disk(run_dir: Path) -> list[dict[str, Any]]:
    """Every line, by a parser that refuses what JSON does not have."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


# metrics.jsonl


def test_a_step_line_holds_the_keys_and_the_rates(tmp_path: Path) -> None:
    now, logger = [0.0], open_logger(tmp_path)
    logger.throughput = Throughput(clock=lambda: now[0])
    for seconds in (30.0, *[0.5] * 9):  # the first step compiles
        now[0] += seconds
        logger.advance()
    given = {
        "loss": 2.0,
        "loss_mean": 2.5,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "tokens": 123_456,  # counted by the run, whose batch may have changed
        "skipped": 0,
        "peak_mem_gib": 8.0,
    }
    logger.log_step(10, **given)
    (record,) = on_disk(tmp_path)
    assert list(record) == KEYS
    assert record | given == record
    assert record["step_ms"] == 500.0
    assert record["tokens_per_s_per_gpu"] == 16 * 256 / 0.5 / 4
    assert record["tflops_per_gpu"] == 2048 * 40e9 / 1e12
    assert record["mfu"] == pytest.approx(81.92 / 989, rel=1e-12)  # float rounding only


def test_every_line_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    log(logger, 1)
    logger.log_eval(1, 2.0)
    train, val = on_disk(tmp_path)
    assert train["step"] == 1
    assert val == {"step": 1, "val_loss": 2.0, "val_ppl": math.exp(2.0)}


def test_a_finding_of_the_guard_is_a_line_of_its_own_and_no_step(tmp_path: Path) -> None:
    stream = io.StringIO()
    logger = open_logger(tmp_path, config=config(tensorboard=True), stream=stream)
    logger.log_guard(7, [Finding(3, "fc2_input", "underflow", 0.5, 0.0864, "bf16")])
    logger.close()
    (line,) = on_disk(tmp_path)
    expected = {"layer": 3, "tensor": "fc2_input", "measure": "underflow", "value": 0.5}
    assert line == {"step": 7, **expected, "limit": 0.0864, "action": "bf16"}
    (events,) = (tmp_path / "tb").iterdir()
    assert b"train/guard_layer3_fc2_input_underflow" in events.read_bytes()
    assert "guard" not in stream.getvalue()


def test_counts_of_the_guard_are_in_a_step_line(tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    logger.advance()
    counts = {"guard_bf16_layers": 2, "guard_findings": 1}
    logger.log_step(1, loss=2.0, loss_mean=2.0, grad_norm=1.0, lr=1e-3, tokens=4096, guard=counts)
    (record,) = on_disk(tmp_path)
    assert record | counts == record and list(record) == [*KEYS, *counts]


def test_nan_and_inf_become_null_and_are_named(tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    logger.advance()
    logger.log_step(1, loss=math.nan, loss_mean=2.0, grad_norm=math.inf, lr=1e-3, tokens=4096)
    logger.log_eval(1, 1000.0)
    train, val = on_disk(tmp_path)
    assert train["loss"] is None and train["grad_norm"] is None
    assert train["nonfinite"] == ["loss", "grad_norm"]
    assert train["peak_mem_gib"] is None  # not known is not the same
    assert val["val_ppl"] is None and val["nonfinite"] == ["val_ppl"]


def test_resume_drops_later_steps_and_a_torn_line_and_appends(tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    for step in range(1, 8):
        log(logger, step)
    logger.log_eval(5, 2.0)
    logger.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "loss": 3.')  # the process died here
    logger = open_logger(tmp_path, resume_step=5)
    assert [r["step"] for r in on_disk(tmp_path)] == [1, 2, 3, 4, 5, 5]
    log(logger, 6, loss=1.0)
    records = on_disk(tmp_path)
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert records[-1]["loss"] == 1.0


def test_repair_leaves_a_whole_file_untouched(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n')
    before = path.stat()
    assert run_directory.repair_metrics(path, 2) == 0
    assert path.stat().st_ino == before.st_ino and path.stat().st_mtime_ns == before.st_mtime_ns


@given(cut=st.integers(0, 60), last=st.integers(0, 4))
def test_whatever_a_crash_cuts_off_whole_lines_up_to_the_step_remain(
    tmp_path_factory: pytest.TempPathFactory, cut: int, last: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.5 * step}) for step in range(1, 5)]
    text = "\n".join(lines) + "\n"
    left = text[: len(text) - cut]
    path.write_text(left)
    run_directory.repair_metrics(path, last)
    whole = [line for line in left.split("\n") if line in lines][:last]
    assert path.read_text() == "".join(line + "\n" for line in whole)


def test_lines_that_are_no_records_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\xff\n[1]\n{"loss": 1}\n{"step": 2}\n')
    assert run_directory.repair_metrics(path, 2) == 3
    assert run_directory.read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    logger = open_logger(tmp_path / "run", rank=1)
    log(logger, 1)
    logger.log_eval(1, 2.0)
    logger.close()
    assert not (tmp_path / "run").exists()


# console and train.log


def test_the_console_line_has_the_documented_shape() -> None:
    record = {
        **{
            "step": 10,
            "loss": 9.9,
            "loss_mean": 3.40213,
            "grad_norm": 1.9199,
            "lr": 5e-4,
            "mfu": 0.5211,
        },
        **{"tokens_per_s_per_gpu": 12345.6, "tflops_per_gpu": 512.3, "peak_mem_gib": 31.24},
    }
    assert run_directory.step_line(record, 150) == (
        "step 10/150 | loss 3.4021 | grad_norm 1.92 | lr 5.0e-04 | 12.3k tok/s/gpu | "
        "512 TFLOP/s/gpu | mfu 52.1% | mem 31.2 GiB"
    )
    cpu = {**record, "tokens_per_s_per_gpu": 950.4, "tflops_per_gpu": 0.03127}
    cpu |= {"mfu": None, "peak_mem_gib": None, "loss_mean": math.nan}
    assert run_directory.step_line(cpu, 150) == (
        "step 10/150 | loss nan | grad_norm 1.92 | lr 5.0e-04 | 950 tok/s/gpu | 0.0313 TFLOP/s/gpu"
    )
    val = {"step": 50, "val_loss": 3.2, "val_ppl": 24.5325}
    assert run_directory.step_line(val, 150) == "step 50/150 | val_loss 3.2000 | val_ppl 24.53"
    tasks = {"step": 50, "task/sums/acc": 0.25, "task/words/exact_match": 1.0}
    line = "step 50/150 | sums/acc 0.2500 | words/exact_match 1.0000"
    assert run_directory.step_line(tasks, 150) == line
    many = {"step": 50} | {f"task/mmlu_{i}/acc": 0.5 for i in range(11)}
    line = run_directory.step_line(many, 150)
    assert line.endswith("| mmlu_7/acc 0.5000 | 3 more in metrics.jsonl") and "mmlu_8" not in line


@pytest.mark.parametrize(
    ("step_ms", "told"),
    [
        (0.1, "0 s left"),
        (890, "89 s left"),
        (900, "2 min left"),
        (29_800, "50 min left"),
        (36_000, "1 h 0 min left"),
        (75_000, "2 h 5 min left"),
        (863_900, "24 h 0 min left"),
        (2_000_000, "2 d 8 h left"),
    ],
)
def test_the_time_to_the_end_has_two_units_at_most(step_ms: float, told: str) -> None:
    assert run_directory.time_left({"step": 50, "step_ms": step_ms}, 150) == told


def test_lines_tell_the_time_to_the_end_but_for_the_first_and_the_last(tmp_path: Path) -> None:
    stream = io.StringIO()
    run_directory.start_logging(tmp_path, 0, stream=stream)
    logger = open_logger(tmp_path, stream=stream)
    for step in (1, 2, 150):
        log(logger, step)
    logger.log_eval(150, 2.0)
    logger.close()
    ends = ["left" in line for line in stream.getvalue().splitlines()]
    assert ends == [False, True, False, False]


def test_without_a_terminal_each_record_is_one_line_also_in_train_log(tmp_path: Path) -> None:
    stream = io.StringIO()
    run_directory.start_logging(tmp_path, 0, stream=stream)
    logger = open_logger(tmp_path, stream=stream)
    log(logger, 1)
    logger.log_eval(1, 2.0)
    logger.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 1/150 | loss 3.4021 | ")
    assert lines[1] == "step 1/150 | val_loss 2.0000 | val_ppl 7.39"
    logged = (tmp_path / "train.log").read_text().splitlines()
    assert [line.split(" INFO ")[1] for line in logged] == lines


def test_on_a_terminal_a_bar_takes_the_place_of_step_lines(tmp_path: Path) -> None:
    stream = Terminal()
    run_directory.start_logging(tmp_path, 0, stream=stream)
    logger = open_logger(tmp_path, resume_step=40, stream=stream)
    log(logger, 41)
    logger.log_eval(41, 2.0)
    logger.log_tasks(41, {"task/sums/acc": 0.5})
    logging.getLogger("coatlm").warning("a checkpoint was late")
    logger.close()
    shown = stream.getvalue()
    assert "| 41/150 [" in shown and "loss 3.4021, " in shown
    assert "step 41/150 | loss" not in shown
    assert "step 41/150 | sums/acc 0.5000" in shown
    assert "step 41/150 | val_loss" in shown and "a checkpoint was late" in shown
    assert "step 41/150 | loss" in (tmp_path / "train.log").read_text()


def test_other_ranks_log_warnings_to_stderr_with_their_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_directory.start_logging(tmp_path / "run", 3)
    logging.getLogger("coatlm").info("unheard")
    logging.getLogger("coatlm.data").warning("heard")
    logging.getLogger("coatlm.run").warning("what rank 0 says for all")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "[rank 3] WARNING heard\n")
    assert not (tmp_path / "run").exists()
    run_directory.start_logging(tmp_path, 0)
    logging.getLogger("coatlm.run").warning("for all")
    assert capsys.readouterr().out == "for all\n"


def test_starting_logging_twice_does_not_double_lines(tmp_path: Path) -> None:
    stream = io.StringIO()
    for _ in range(2):
        run_directory.start_logging(tmp_path, 0, stream=stream)
    logging.getLogger("coatlm").info("once")
    assert stream.getvalue() == "once\n"


# trackers


def test_tensorboard_holds_the_scalars_and_hides_steps_after_the_checkpoint(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume, loss in ((0, 3.0), (1, 2.0)):
        logger = open_logger(tmp_path, resume, config=config(tensorboard=True))
        for step in range(resume + 1, 4):
            log(logger, step, loss=loss)
        logger.log_eval(3, loss)
        logger.log_tasks(3, {"task/sums/acc": 0.5})
        logger.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    losses = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert losses == [(1, 3.0), (2, 2.0), (3, 2.0)]
    assert [e.value for e in events.Scalars("val/loss")] == [2.0]
    assert [(e.step, e.value) for e in events.Scalars("task/sums/acc")] == [(3, 0.5)]
    unlogged = {"step"}
    assert {f"train/{k}" for k in KEYS if k not in unlogged} <= set(events.Tags()["scalars"])


def test_wandb_works_offline_and_a_restart_keeps_the_run_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for resume in (0, 1):
        logger = open_logger(tmp_path, resume, config=config(wandb_project="trials"))
        log(logger, resume + 1)
        logger.log_eval(resume + 1, 2.0)
        logger.log_guard(resume + 1, [Finding(3, "fc2_input", "underflow", 0.5, 0.09, "bf16")])
        logger.close()
    run_id = (tmp_path / "wandb_id.txt").read_text().strip()
    runs = list((tmp_path / "wandb").glob("offline-run-*"))
    assert {run.name.split("-")[3] for run in runs} == {run_id}  # -1: both in one second
    written = b"".join(path.read_bytes() for run in runs for path in run.glob("*.wandb"))
    assert b"train/loss" in written and b"val/ppl" in written
    assert b"guard_layer3_fc2_input_underflow" in written


@pytest.mark.parametrize(
    ("module", "option", "field"),
    [
        ("torch.utils.tensorboard", {"tensorboard": True}, r"log\.tensorboard=true"),
        ("wandb", {"wandb_project": "p"}, r"log\.wandb_project=p"),
    ],
)
def test_a_missing_tracker_names_the_option_and_the_extra(
    module: str, option: dict[str, Any], field: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    with pytest.raises(ValueError, match=field + r" needs .*pip install 'coatlm\[tracking\]'"):
        open_logger(tmp_path, config=config(**option))


# the clock


def test_evaluation_and_warmup_are_not_in_step_times() -> None:
    now, waits = [0.0], []
    meter = Throughput(synchronize=lambda: waits.append(now[0]), clock=lambda: now[0])

    def run(steps: int, seconds: float) -> None:
        for _ in range(steps):
            now[0] += seconds
            meter.step()

    run(1, 30.0)  # compilation
    assert waits == [30.0]
    assert meter.lap() == 30.0  # all that is known
    run(4, 0.5)
    with meter.paused():
        now[0] += 100.0
    assert waits == [30.0, 32.0]
    run(4, 0.5)
    assert meter.lap() == 0.5
    run(8, 0.25)
    assert meter.lap() == 0.25
    assert meter.mean == (8 * 0.5 + 8 * 0.25) / 16
    assert len(waits) == 2  # no waiting on ordinary steps


# the rest of the run directory


def test_config_yaml_loads_to_the_same_run(tmp_path: Path) -> None:
    original = config(every=3)
    run_directory.write_config(tmp_path, original)
    assert load_config(tmp_path / "config.yaml") == original


def test_env_json_names_versions_device_and_command(tmp_path: Path) -> None:
    import torch

    run_directory.write_environment(tmp_path, device_name=H200)
    env = json.loads((tmp_path / "env.json").read_text())
    installed = importlib.metadata.version("torch")  # __version__ may add the build: 2.13.0+cu130
    assert env["packages"]["torch"] == installed and torch.__version__.startswith(installed)
    assert set(env["packages"]) == set(run_directory.PACKAGES)
    assert env["gpu"] == H200 and env["command"] == sys.argv and env["host"]
    assert env["git_commit"] is None or len(env["git_commit"].removesuffix("-dirty")) == 40


def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    run_directory.write_atomically(path, "old")
    monkeypatch.setattr(run_directory.os, "fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_directory.write_atomically(path, "new")
    assert path.read_text() == "old"


def test_loss_plot_draws_a_run_with_gaps_and_is_none_without_one(tmp_path: Path) -> None:
    assert run_directory.loss_plot(tmp_path) is None
    logger = open_logger(tmp_path)
    for step, loss in enumerate((5.0, math.nan, 4.0), start=1):
        log(logger, step, loss=loss)
    logger.log_eval(3, 4.2)
    path = run_directory.loss_plot(tmp_path)
    assert path == tmp_path / "loss.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_loss_plot_has_an_axis_for_the_metrics_of_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    monkeypatch.setattr(run_directory, "whole_file", contextlib.nullcontext)
    logger = open_logger(tmp_path)
    for step, acc in ((1, 0.25), (2, 0.5)):
        log(logger, step)
        logger.log_tasks(step, {"task/sums/acc": acc, "task/words/acc": 1.0})
    run_directory.loss_plot(tmp_path)
    upper, middle, _ = drawn[0].axes
    assert middle.get_ylabel() == "tasks" and len(upper.get_lines()) == 2
    lines = {line.get_label(): list(line.get_ydata()) for line in middle.get_lines()}
    assert lines == {"sums/acc": [0.25, 0.5], "words/acc": [1.0, 1.0]}
