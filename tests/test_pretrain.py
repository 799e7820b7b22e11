"""The command line as a user meets it: what it prints, its exit codes, and what survives a kill."""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from coatlm.commands import train as pretrain
from coatlm.config import ConfigError
from coatlm.train.checkpoint import tensor_checksums
from coatlm.train.lock import BEAT_S, Holder
from coatlm.train.run_directory import prepare_directory
from tests.distributed import ROOT, free_port
from tests.forks import Child, Forks

SMALL = {
    "model": {"layers": 2, "hidden": 64, "heads": 4, "ffn": 96},
    "data": {"seq_len": 32},
    "precision": {"recipe": "fp32"},
    "optim": {"recipe": "adamw-fp32"},
    "train": {"steps": 6, "micro_batch": 4, "global_batch": 8, "eval_every": 3, "eval_batches": 1},
    "checkpoint": {"every": 2},
    "log": {"every": 1},
}
KILLS = 20


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Forks:
    return Forks(tmp_path_factory.mktemp("output"))


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A small run on a text of its own; YAML is a superset of JSON."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(3000)))
    sections = json.loads(json.dumps(SMALL))
    sections["run"] = {"dir": str(tmp_path / "run")}
    sections["data"] |= {"text": [str(text)], "cache_dir": str(tmp_path / "cache")}
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(sections))
    return str(path)


def test_a_run_leaves_what_the_readme_promises(forks: Forks, config: str, tmp_path: Path) -> None:
    code, output = forks.run(config)
    assert code == 0, output
    run = tmp_path / "run"
    for name in ("config.yaml", "env.json", "metrics.jsonl", "train.log", "loss.png"):
        assert (run / name).stat().st_size > 0
    assert (run / "checkpoints" / "latest").read_text().strip() == "step_00000006"
    assert "step 6/6 | loss " in output and "| val_loss " in output
    assert "done: step 6" in output.splitlines()[-1]


def test_the_resolved_config_gives_the_same_run(forks: Forks, config: str, tmp_path: Path) -> None:
    assert forks.run(config)[0] == 0
    again = tmp_path / "again"
    code, output = forks.run(str(tmp_path / "run" / "config.yaml"), f"run.dir={again}")
    assert code == 0, output
    losses = [
        [line.get("loss") for line in map(json.loads, (d / "metrics.jsonl").open())]
        for d in (tmp_path / "run", again)
    ]
    assert losses[0] == losses[1]


def test_an_automatic_microbatch_is_told_and_the_size_of_a_resumed_run(
    forks: Forks, config: str, tmp_path: Path
) -> None:
    code, output = forks.run(config, "train.micro_batch=auto", f"run.dir={tmp_path / 'new'}")
    assert code == 0, output
    assert "Chosen for train.micro_batch=auto on a CPU: one rank" in output
    assert "microbatches: 8 of 1 per rank" in output and "Expected on" not in output
    assert forks.run(config, "train.steps=2")[0] == 0
    code, output = forks.run(config, "train.micro_batch=auto")
    assert code == 0, output
    assert "microbatches: 2 of 4 per rank" in output and "changed since step 2: tr" in output
    assert "train.micro_batch:" not in output and "all logits" not in output


def test_srun_needs_no_torchrun(forks: Forks, config: str, tmp_path: Path) -> None:
    size = {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        forks.start(config, env=size | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)})
        for r in range(2)
    ]
    codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0], ranks[0].text()
    assert "2 = tp 1 x pp 1 x cp 1 x dp 2" in ranks[0].text()
    assert ranks[1].text() == ""  # rank 0 speaks for all


def test_the_profiler_leaves_a_trace(forks: Forks, config: str, tmp_path: Path) -> None:
    code, output = forks.run(config, "log.profile=[2,3]")
    assert code == 0, output
    trace = json.loads(next((tmp_path / "run/traces").glob("*.json")).read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert sum(name.startswith("ProfilerStep#") for name in names) == 2  # steps 2 and 3
    assert any("scaled_dot_product" in name for name in names)


def test_a_run_that_resumes_after_the_profiled_steps_leaves_no_trace(
    forks: Forks, config: str, tmp_path: Path
) -> None:
    assert forks.run(config, "checkpoint.every=2", "train.steps=2")[0] == 0
    code, output = forks.run(config, "checkpoint.every=2", "log.profile=[1,2]")
    assert code == 0, output
    assert "resumed" in output and not (tmp_path / "run/traces").exists()


def test_dry_run_prints_config_and_plan_and_writes_nothing(
    forks: Forks, config: str, tmp_path: Path
) -> None:
    code, output = forks.run(config, "--dry-run", "--ranks", "2")
    assert code == 0
    assert "recipe: adamw-fp32" in output and "parameters" in output and "dp 2" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("optim.learning_rate=1", "optim.learning_rate: unknown key; do you mean optim.lr?"),
        ("train.steps=many", "train.steps='many'"),
        ("parallel.tp=3", "model.heads=4 is not a multiple of parallel.tp=3"),
        ("train.global_batch=6", "train.global_batch=6 is not a multiple"),
        ("parallel.pp=2", "1 processes cannot hold"),
        ("data.text=[/nonexistent.txt]", "/nonexistent.txt"),
        ("data.tokenizer=hf:/nonexistent.json", "/nonexistent.json"),
        ("model.vocab=128", "model.vocab=128"),
        ("data.seq_len=100000", "data.seq_len + 1"),
        ("run.dir=/proc/run", "run.dir=/proc/run"),
        ("data.split=[1,0,0]", "train.eval_every"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    forks: Forks, config: str, override: str, reason: str
) -> None:
    code, output = forks.run(config, override)
    assert code == 2, output
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and reason in errors[0]
    assert "Traceback" not in output and "| loss" not in output


def test_a_model_beyond_the_memory_is_refused_before_anything_is_built(
    forks: Forks, config: str, tmp_path: Path
) -> None:
    code, output = forks.run(config, "model={layers: 10000, hidden: 65536, ffn: 262144}")
    assert code == 2, output
    (line,) = output.splitlines()
    assert line.startswith("error: model.layers=10000, model.hidden=65536: weights, gradients and")
    assert "GiB per rank, and this host has " in line and len(line) <= 400
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--dry-run", "--ranks", "0"], "--ranks 0: 1 to 1,048,576 processes"),
        (["--dry-run", "--ranks", "-8"], "--ranks -8: 1 to 1,048,576 processes"),
        (["--dry-run", "--ranks", str(10**30)], "1 to 1,048,576 processes"),
        (["--dry-run", "--ranks", "many"], "argument --ranks: invalid int value: 'many'"),
        (["--ranks", "8"], "--ranks 8 needs --dry-run"),
        (["--gpu", "h100"], "--gpu h100 needs --dry-run"),
        (["--dry-run", "--gpu", "a100"], "--gpu a100: must be one of h100, h200"),
        (["--dry-run", "--rank-count", "8"], "unrecognized arguments: --rank-count"),
        (["--dry-run", "model.layers=1000000"], "model.layers=1000000: "),
        (["--dry-run", f"run.seed={2**64}"], f"run.seed={2**64}: "),
        (["--dry-run", "log.hang_timeout=1e300"], "log.hang_timeout=1e+300: "),
        (["--keys", "trian"], "--keys trian: no such section or key; the sections are run, model"),
        (["--preset", "fp4"], "argument --preset: invalid choice: 'fp4'"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    config: str, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert pretrain.main([config, *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == "" and len(output.err.splitlines()) == 1
    assert output.err.startswith("error: ") and told in output.err


def test_a_missing_configuration_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: CONFIG is missing: ") and error.endswith(
        "coatlm train --help\n"
    )


def test_a_preset_is_an_option_or_an_override(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ("--dry-run", "precision.recipe=bf16")
    assert pretrain.main([config, *plain, "--preset", "fp8-states"]) == 0
    option = capsys.readouterr().out
    assert pretrain.main([config, *plain, "preset=fp8-states"]) == 0
    assert option == capsys.readouterr().out and "  recipe: coat-lean\n" in option


def test_keys_need_no_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain.main(["--keys"]) == 0
    everything = capsys.readouterr().out
    assert pretrain.main(["--keys", "optim"]) == 0
    assert capsys.readouterr().out.strip() in everything
    assert "\noptim.lr " in everything and "\nlog.hang_timeout " in everything


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("train.log", "train.log cannot be written to: Is a directory"),
        ("metrics.jsonl", "metrics.jsonl cannot be written to: Is a directory"),
        ("states.jsonl", "states.jsonl cannot be written to: Is a directory"),
        ("numerics.jsonl", "numerics.jsonl cannot be written to: Is a directory"),
        ("config.yaml", "config.yaml cannot be written to: Is a directory"),
        ("env.json", "env.json cannot be written to: Is a directory"),
        (".", "cannot be written to: it is a file"),
        ("checkpoints", "checkpoints is not a directory"),
    ],
)
def test_a_file_of_the_run_that_cannot_be_written_is_named(
    tmp_path: Path, name: str, reason: str
) -> None:
    run = tmp_path / "run"
    if name in (".", "checkpoints"):
        run.joinpath(name).parent.mkdir(exist_ok=True)
        run.joinpath(name).touch()
    else:
        (run / name).mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        prepare_directory(run)
    assert str(caught.value) == f"run.dir={run}: {reason}"


def test_wandb_without_a_login_is_one_line_before_anything_starts(
    forks: Forks, config: str, tmp_path: Path
) -> None:
    pytest.importorskip("wandb")
    home = {"WANDB_MODE": "online", "HOME": str(tmp_path), "NETRC": "", "WANDB_API_KEY": ""}
    code, output = forks.run(config, "log.wandb_project=p", env=home)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1, output
    assert "log.wandb_project=p" in errors[0] and "WANDB_MODE=offline" in errors[0]
    assert "Traceback" not in output and "parameters" not in output


@pytest.mark.parametrize("path", ["{tmp}/nonexistent", "{tmp}"])
def test_a_path_to_resume_that_has_no_checkpoint_is_bad_input(
    forks: Forks, config: str, tmp_path: Path, path: str
) -> None:
    asked = path.format(tmp=tmp_path)
    code, output = forks.run(config, f"checkpoint.resume={asked}")
    assert code == 2, output
    assert f"error: checkpoint.resume={asked}: {asked}" in output and "parameters" not in output


def test_a_checkpoint_that_was_asked_for_must_be_whole(
    forks: Forks, config: str, tmp_path: Path
) -> None:
    assert forks.run(config)[0] == 0
    broken = tmp_path / "run" / "checkpoints" / "step_00000002"
    data = next(broken.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    elsewhere = f"run.dir={tmp_path / 'elsewhere'}"  # a run's own checkpoints would come first
    code, output = forks.run(config, f"checkpoint.resume={broken}", elsewhere)
    assert code == 4, output
    assert "step_00000002" in output and "| loss" not in output


def test_auto_names_a_broken_newest_checkpoint_and_uses_the_one_before(
    forks: Forks, config: str, tmp_path: Path
) -> None:
    assert forks.run(config)[0] == 0
    data = next((tmp_path / "run/checkpoints/step_00000006").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    code, output = forks.run(config, "train.steps=8")
    assert code == 0, output
    assert "step_00000006" in output and "resumed from" in output and "at step 4" in output


def test_a_checkpoint_of_another_model_is_refused(
    forks: Forks, config: str, tmp_path: Path
) -> None:
    assert forks.run(config)[0] == 0
    code, output = forks.run(config, "model.ffn=128", "train.steps=8")
    assert code == 4 and "model.ffn is 96 in the checkpoint and 128 in" in output


def test_weights_only_starts_a_new_run(forks: Forks, config: str, tmp_path: Path) -> None:
    assert forks.run(config)[0] == 0
    old, new = tmp_path / "run", tmp_path / "new"
    arguments = (f"run.dir={new}", f"checkpoint.resume={old}", "checkpoint.weights_only=true")
    code, output = forks.run(config, *arguments)
    assert code == 0, output
    first, started = (json.loads((d / "metrics.jsonl").open().readline()) for d in (old, new))
    assert started["step"] == 1 and started["loss"] < first["loss"] - 0.1


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 85), (signal.SIGHUP, 129)],
)
def test_a_signal_saves_and_exits_with_its_code(
    forks: Forks, config: str, tmp_path: Path, number: int, code: int
) -> None:
    child = forks.start(config, "train.steps=100000", "checkpoint.every=0")
    wait_for_line(child.output, "step 2/")
    child.kill(number)
    assert child.wait() == code, child.text()
    name = signal.Signals(number).name
    assert child.text().count(f"{name}: finishing this step, then saving") == 1
    assert not (tmp_path / "run/lock.json").exists()
    latest = (tmp_path / "run/checkpoints/latest").read_text().strip()
    last_step = int(latest.removeprefix("step_"))
    code, output = forks.run(config, f"train.steps={last_step + 2}")
    assert code == 0 and f"at step {last_step}" in output


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138), (signal.SIGHUP, 129)],
)
def test_a_signal_during_imports_is_one_line_and_its_code(
    config: str, tmp_path: Path, number: int, code: int
) -> None:
    environment = os.environ | {"RANK": "0"}
    process = subprocess.Popen(
        [sys.executable, "pretrain.py", config],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        env=environment,
    )
    status, caught = Path(f"/proc/{process.pid}/status"), 0
    while not caught >> (signal.SIGUSR1 - 1) & 1:  # pretrain.py has listened, and imports
        assert process.poll() is None
        (line,) = [line for line in status.read_text().splitlines() if "SigCgt" in line]
        caught = int(line.split()[1], 16)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.decode().startswith(f"error: interrupted by {signal.Signals(number).name}")
    assert said.count(b"\n") == 1 and not (tmp_path / "run").exists()


def test_a_signal_while_ranks_wait_for_each_other_is_one_line_and_its_code(
    forks: Forks, config: str, tmp_path: Path
) -> None:
    """Rank 1 never comes, and rank 0 waits for it."""
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    child = forks.start(config, env=group)
    wait_for_line(child.output, "waiting for rank 1 of 2")
    child.kill(signal.SIGTERM)
    assert child.wait() == 143
    assert "Traceback" not in child.text()
    assert child.text().count("error: interrupted by SIGTERM") == 1


def test_a_second_run_in_a_run_directory_is_refused_with_the_name_of_the_first(
    forks: Forks, config: str, tmp_path: Path
) -> None:
    first = forks.start(config, "train.steps=100000", "checkpoint.every=0", "train.eval_every=0")
    wait_for_line(first.output, "step 2/")
    before = (tmp_path / "run/env.json").read_bytes()
    code, output = forks.run(config)
    assert code == 2
    (line,) = output.splitlines()
    holder = f"in use by pid {first.process.pid} on {platform.node()} since 20"
    assert line.startswith(f"error: run.dir={tmp_path}/run: {holder}")
    assert (tmp_path / "run/env.json").read_bytes() == before
    first.kill()
    first.wait()
    code, output = forks.run(config)  # what is left of a killed run is taken over at once
    assert code == 0 and f"took over the run directory from pid {first.process.pid}" in output
    assert not (tmp_path / "run/lock.json").exists()


def test_ranks_whose_directory_was_taken_over_end_and_write_nothing_more(
    forks: Forks, config: str, tmp_path: Path
) -> None:
    """The test takes over as a run on another host would while this one is suspended."""
    size = {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    overrides = ("train.steps=100000", "checkpoint.every=0", "train.eval_every=0")
    ranks = [
        forks.start(config, *overrides, env=size | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    wait_for_line(ranks[0].output, "step 2/")
    ranks[0].kill(signal.SIGSTOP)
    run = tmp_path / "run"
    other = Holder("there", "another boot", 1, "1", "now")
    (run / "new").write_bytes(other.encode())
    os.replace(run / "new", run / "lock.json")
    before = (run / "metrics.jsonl").read_bytes()
    time.sleep(2 * BEAT_S + 0.5)
    ranks[0].kill(signal.SIGCONT)
    assert [rank.wait() for rank in ranks] == [4, 4], ranks[0].text() + ranks[1].text()
    assert "lock.json is missing or names another run" in ranks[0].text()
    assert "Traceback" not in ranks[0].text() + ranks[1].text()
    assert (run / "metrics.jsonl").read_bytes() == before
    assert not (run / "checkpoints/latest").exists()
    assert (run / "lock.json").read_bytes() == other.encode()


def test_training_goes_on_when_nobody_reads_its_output_any_more(
    forks: Forks, config: str, tmp_path: Path
) -> None:
    """Its reader goes away, as `head` does in `2>&1 | head`."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    child = Child(forks.into(fifo, config, "train.steps=30"), fifo)
    end = time.monotonic() + 120
    text = b""
    while b"step 2/" not in text:
        assert time.monotonic() < end
        with suppress(BlockingIOError):
            text += os.read(reader, 65536)
        time.sleep(0.02)
    os.close(reader)
    assert child.wait() == 0
    run = tmp_path / "run"
    assert (run / "checkpoints/latest").read_text().strip() == "step_00000030"
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 30
    assert "done: step 30" in (run / "train.log").read_text()


def test_nan_losses_are_skipped_and_end_the_run(forks: Forks, config: str) -> None:
    # some weights are Inf, and Inf * 0 is NaN
    code, output = forks.run(config, "model.init_std=1e38", "train.steps=50", "train.max_skipped=3")
    assert code == 3, output
    assert "train.max_skipped=3" in output


@contextmanager
def mounted(path: Path, options: str) -> Iterator[None]:
    """A file system of its own at `path`."""
    path.mkdir()
    if os.system(f"mount -t tmpfs -o {options} tmpfs {path} 2>/dev/null"):
        pytest.skip("cannot mount here")
    try:
        yield
    finally:
        os.system(f"umount -l {path}")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_keeps_the_old_checkpoint(forks: Forks, config: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with mounted(run, "size=4m"):
        sizes = ("train.steps=40", "checkpoint.keep=50")
        code, output = forks.run(config, *sizes)
        assert code == 4 and "No space left" in output
        latest = run / "checkpoints" / (run / "checkpoints/latest").read_text().strip()
        from coatlm.train.checkpoint import verify

        assert verify(latest) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_fills_up_between_checkpoints_is_named(
    forks: Forks, config: str, tmp_path: Path
) -> None:
    with mounted(tmp_path / "run", "size=96k"):
        code, output = forks.run(config, "train.steps=100000", "checkpoint.every=0")
    assert code == 4, output
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"run.dir={tmp_path}/run: No space left" in errors[0]
    assert "Traceback" not in output


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_of_the_cache_is_told_from_that_of_the_run(
    forks: Forks, config: str, tmp_path: Path
) -> None:
    with mounted(tmp_path / "cache", "size=64k"):
        code, output = forks.run(config)
    assert code == 4, output
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"data.cache_dir={tmp_path}/cache: No space left" in errors[0]
    assert "run.dir" not in errors[0] and "Traceback" not in output


def test_damage_to_the_data_ends_a_run_in_one_line(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from coatlm.commands import train as pretrain
    from coatlm.data.checksums import DatasetError
    from coatlm.train import start

    def damaged(*_: object) -> None:
        raise DatasetError("data/train.bin: damaged between bytes 0 and 16384")

    monkeypatch.setattr(start, "train", damaged)
    assert pretrain.main([config]) == 2
    assert capsys.readouterr().err == "error: data/train.bin: damaged between bytes 0 and 16384\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_read_only_run_directory_is_refused_before_anything_starts(
    forks: Forks, config: str, tmp_path: Path
) -> None:
    with mounted(tmp_path / "run", "ro"):
        code, output = forks.run(config)
    assert code == 2, output
    assert f"run.dir={tmp_path}/run: cannot be written to: Read-only file system" in output
    assert "parameters" not in output


def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(
    forks: Forks, config: str, tmp_path: Path
) -> None:
    """Each life is killed at a random moment of training or saving; the next one must go on."""
    moments = random.Random(0)
    resumed = 0
    for _ in range(KILLS):
        child = forks.start(
            config, "train.steps=100000", "checkpoint.every=1", "train.eval_every=0"
        )
        wait_for_line(child.output, " | loss ")
        time.sleep(moments.uniform(0.0, 0.5))
        child.kill()
        assert child.wait() == -signal.SIGKILL, child.text()
        assert "no intact checkpoint" not in child.text()
        resumed += "resumed from" in child.text()
    assert resumed >= KILLS - 2  # all but the first, and one killed before its first checkpoint
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").open()]
    assert steps == sorted(set(steps)) and len(steps) >= KILLS


def test_a_killed_run_with_offloaded_states_goes_on_with_the_losses_of_an_undisturbed_one(
    forks: Forks, config: str, tmp_path: Path
) -> None:
    words = ("optim.offload=states", "optim.recipe=coat-lean", "precision.recipe=bf16")
    words += ("train.steps=100", "checkpoint.every=10", "train.eval_every=0", "log.every=1")
    code, output = forks.run(config, *words, f"run.dir={tmp_path / 'undisturbed'}")
    assert code == 0, output
    child = forks.start(config, *words)
    wait_for_line(child.output, "saved step_00000020")
    child.kill()
    assert child.wait() == -signal.SIGKILL, child.text()
    code, output = forks.run(config, *words)
    assert code == 0 and "resumed from" in output, output
    losses = {}
    for name in ("undisturbed", "run"):
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").open())
        losses[name] = {line["step"]: line["loss"] for line in lines}
    assert losses["run"] == losses["undisturbed"] and len(losses["run"]) == 100
    checksums = [tensor_checksums(tmp_path / name / "checkpoints/step_00000100") for name in losses]
    assert checksums[0] == checksums[1]


def wait_for_line(path: Path, text: str, timeout: float = 60.0) -> None:
    """Until `text` appears in the file."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if path.exists() and text in path.read_text(errors="replace"):
            return
        time.sleep(0.02)
    raise AssertionError(f"{text!r} did not appear:\n{path.read_text() if path.exists() else ''}")
