"""Batch scripts for SLURM: what is asked for, what is refused, and real jobs that restart."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from coatlm.commands import slurm_script
from coatlm.commands import submit as submit_slurm
from coatlm.commands.entry import ROOT
from coatlm.config import load_config
from coatlm.config.run import RESUMED
from coatlm.train.faults import ExitCode
from tests.distributed import free_port, python_path
from tests.forks import Forks

pytestmark = pytest.mark.slow

SMALL: dict[str, dict[str, Any]] = {
    "model": {"layers": 2, "hidden": 64, "heads": 4, "ffn": 96},
    "data": {"seq_len": 32},
    "precision": {"recipe": "fp32"},
    "train": {"steps": 16, "micro_batch": 4, "global_batch": 128, "eval_every": 0},
    "checkpoint": {"every": 0},  # what a restart finds was saved by the signal
    "log": {"every": 1},
}
NODE = ("--nodes=1", "--gpus-per-node=2", "--cpu")


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A small run with a text of its own."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(3000)))
    sections = json.loads(json.dumps(SMALL))
    sections["run"] = {"dir": str(tmp_path / "run"), "name": "trial"}
    sections["data"] |= {"text": [str(text)], "cache_dir": str(tmp_path / "cache")}
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(sections))
    return str(path)


def script(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What --dry-run prints; bash must understand it."""
    assert submit_slurm.main([*arguments, "--dry-run"]) == 0
    text = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text


def options(text: str) -> list[str]:
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("#SBATCH")]


def test_a_key_that_a_resumed_run_takes_from_its_checkpoint_is_not_given_for_it(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit_slurm, "submit", lambda *_: 0)
    assert submit_slurm.main([config, *NODE]) == 0
    loaded = load_config(config)
    path = tmp_path / "run/slurm/config.yaml"
    assert not {*RESUMED} & load_config(path).data.model_fields_set
    assert load_config(path) == loaded
    chosen = load_config(config, ["data.reset_attention_mask=true"])
    assert "reset_attention_mask: true" in chosen.to_yaml(to_start=True)
    assert "reset_position_ids" not in chosen.to_yaml(to_start=True)
    assert "reset_position_ids: false" in loaded.to_yaml()  # the resolved configuration of a run


def test_a_dry_run_prints_the_script_and_writes_nothing(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--nodes=4", "--gpus-per-node=8", "--time=1-00:00:00", "--partition=gpu")
    text = script(capsys, config, *arguments, "--account=me", "--cpus-per-rank=6")
    assert options(text) == [
        "--job-name=trial",
        "--nodes=4",
        "--ntasks-per-node=8",
        "--cpus-per-task=6",
        "--gpus-per-node=8",
        "--partition=gpu",
        "--account=me",
        "--time=1-00:00:00",
        "--signal=USR1@300",
        "--requeue",
        "--open-mode=append",
        f"--output={tmp_path}/run/slurm/%j.log",
        f"--chdir={Path.cwd()}",
    ]
    assert text.splitlines()[1].startswith("# 32 ranks, data-parallel size 32;")
    assert f"{ROOT}/pretrain.py" in text
    assert not (tmp_path / "run").exists()


def test_a_run_that_chooses_its_layout_does_so_in_the_job(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    automatic = ("parallel.layout=auto", "train.micro_batch=auto")
    text = script(capsys, config, *NODE, *automatic)
    decided = "parallel.layout=auto and train.micro_batch=auto: decided when the run starts"
    assert text.splitlines()[1] == f"# 2 ranks, {decided}; made by coatlm submit"


def test_torchrun_is_one_task_a_node_with_a_rendezvous(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--nodes=2", "--gpus-per-node=4", "--cpus-per-rank=6", "--launcher=torchrun")
    text = script(capsys, config, *arguments, "--max-restarts=5")
    assert {"--ntasks-per-node=1", "--gpus-per-node=4", "--cpus-per-task=24"} <= set(options(text))
    for word in ("--nnodes=2", "--nproc-per-node=4", "--max-restarts=5", '"$head:$port"'):
        assert word in text


def test_restarts_are_an_array_of_which_one_runs_at_a_time(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script(capsys, config, *NODE, "--restarts=4")
    asked = options(text)
    assert "--array=0-4%1" in asked and "--no-requeue" in asked and "--requeue" not in asked
    assert f"--output={tmp_path}/run/slurm/%A_%a.log" in asked
    assert "scontrol requeue" not in text
    assert "    0 | 2 | 3 | 4 | 130) scancel --state=PENDING" in text


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        ("pyxis", ["--container-image=i.sqsh", "--container-mounts=", "/data:/data"]),
        ("apptainer", ["apptainer", "exec", "--nv", "/data", "i.sqsh"]),
    ],
)
def test_ranks_run_in_a_container(
    config: str, capsys: pytest.CaptureFixture[str], runtime: str, words: list[str]
) -> None:
    arguments = ("--nodes=1", "--gpus-per-node=2", "--container=i.sqsh", "--mount=/data")
    text = script(capsys, config, *arguments, f"--container-runtime={runtime}", "--python=python")
    place = 0
    for word in [*words, "python", "pretrain.py"]:  # in this order
        place = text.index(word, place)


def test_setup_lines_and_variables_come_before_the_ranks(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--setup=module load cuda", "--env=WORDS=a 'b'", "--sbatch=--exclusive")
    text = script(capsys, config, *NODE, *arguments)
    assert "--exclusive" in options(text)
    assert text.index("export WORDS=") < text.index("module load cuda") < text.index("srun")
    line = next(line for line in text.splitlines() if line.startswith("export WORDS="))
    shell = subprocess.run(["bash", "-c", f'{line}; echo "$WORDS"'], capture_output=True, text=True)
    assert shell.stdout == "a 'b'\n"


def test_only_a_fresh_start_is_told_what_to_resume_from(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for resume in ("auto", "/other"):  # the run's own checkpoints come first in any case
        assert "checkpoint.resume" not in script(
            capsys, config, *NODE, f"checkpoint.resume={resume}"
        )
    assert "checkpoint.resume=$resume" in script(capsys, config, *NODE, "checkpoint.resume=none")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--nodes=3"], "train.global_batch=128 is not a multiple"),
        (["parallel.tp=4", "model.vocab=384"], "2 processes cannot hold"),
        (["train.stesp=1"], "train.stesp: unknown key"),
        (["--time=soon"], "--time=soon"),
        (["--time=5"], "--time=5 is less than twice --save-before=300"),
        (["--env=1=2"], "--env=1=2"),
        (["--mount=/data"], "--mount=/data needs --container"),
        (["--container-runtime=apptainer"], "--container-runtime=apptainer needs --container"),
        (["--env=RANK=3"], "--env=RANK=3: SLURM or torchrun sets RANK; give --nodes"),
        (["--env=SLURM_NTASKS=1"], "--env=SLURM_NTASKS=1: SLURM or torchrun sets SLURM_NTASKS"),
        (
            ["--launcher=torchrun", "--env=MASTER_PORT=1"],
            "--env=MASTER_PORT=1: torchrun sets MASTER_PORT; only srun leaves it",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(
    config: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    assert submit_slurm.main([config, *NODE, *arguments]) == 2
    assert f"error: {reason}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("--time=5", "--time; give --time"),
        ("--nodes=9", "--nodes; give --nodes"),
        ("--array=0-3", "--array; give --restarts"),
        ("--signal=USR2@9", "--signal; give --save-before"),
        ("--no-requeue", "--no-requeue; give --restarts"),
        (
            "--ntasks-per-node=1",
            "--ntasks-per-node; give --gpus-per-node",
        ),
        (
            "--gpus-per-node=h100:3",
            "--gpus-per-node; give --gpus-per-node",
        ),
        ("--output=x", "--output; the log is in slurm/ of run.dir"),
        ("--chdir=/", "--chdir; run coatlm submit in that directory"),
        ("--export=NONE", "--export; give --env"),
        (
            "--wrap=true",
            "--wrap; coatlm submit writes the script of the job",
        ),
        ("--test-only", "--test-only; give --dry-run"),
        ("--sig=USR2", "--signal; give --save-before"),
    ],
)
def test_options_that_the_script_sets_are_refused_to_sbatch(
    config: str, capsys: pytest.CaptureFixture[str], option: str, instead: str
) -> None:
    assert submit_slurm.main([config, *NODE, f"--sbatch={option}"]) == 2
    name, _, advice = instead.partition("; ")
    said = f"error: --sbatch={option}: {name} is for coatlm submit to set; {advice}\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("option", ["-t5", "-N2", "-a0-3", "-ox", "-D/"])
def test_short_options_of_sbatch_are_refused(
    config: str, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert submit_slurm.main([config, *NODE, f"--sbatch={option}"]) == 2
    assert "give one option, --NAME or --NAME=VALUE" in capsys.readouterr().err


def test_every_option_that_the_script_sets_is_owned(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--time=60", "--partition=a", "--account=b", "--cpus-per-rank=2", "--restarts=1")
    for arguments in ((), more):
        text = script(capsys, config, "--nodes=1", "--gpus-per-node=2", *arguments)
        names = {option.removeprefix("--").partition("=")[0] for option in options(text)}
        assert names <= slurm_script.OWNED.keys()


def test_sbatch_may_name_the_type_of_the_gpus(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = "--gpus-per-node=h100:2"
    text = script(capsys, config, "--nodes=1", "--gpus-per-node=2", f"--sbatch={typed}")
    assert options(text)[-1] == typed


def test_home_directories_are_expanded_before_the_script_quotes_them(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    home = ("--python=~/bin/python", "--container=~/i.sqsh", "--mount=~/data:/data")
    text = script(capsys, config, *NODE, *home)
    for word in ("/home/me/bin/python", "/home/me/i.sqsh", "/home/me/data:/data"):
        assert word in text
    assert "~" not in text
    with pytest.raises(SystemExit):
        submit_slurm.main([config, *NODE, "--python=~nobody-here/x"])
    assert "--python: ~nobody-here/x: ~ is no home directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("2:00:05", 7205),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("2-00:00:01", 172801),
        ("UNLIMITED", float("inf")),
        ("0", float("inf")),
        ("0:00:00", float("inf")),
    ],
)
def test_time_limits_are_read_as_sbatch_does(limit: str, value: float) -> None:
    assert submit_slurm.seconds(limit) == value


def test_the_guide_shows_the_script_as_it_is(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (ROOT / "docs/guides/slurm.md").read_text()
    shown = guide.split("## What the script does\n\n```\n")[1].split("```")[0]
    lines = script(capsys, config, "--nodes=1", "--gpus-per-node=2").splitlines()
    for line in shown.splitlines():
        if "..." not in line:  # stands for paths
            assert line in lines


def test_attempts_end_with_the_codes_that_another_would_repeat() -> None:
    final = {int(code) for code in slurm_script.FINAL.split(" | ")}
    assert final - {138} == set(ExitCode) - {ExitCode.HANG}


class Cluster:
    """SLURM's commands."""

    def submit(self, *arguments: str) -> str:
        """The job's id."""
        command = [sys.executable, str(ROOT / "tools" / "submit_slurm.py")]
        done = subprocess.run(
            [*command, *arguments, f"--env=PYTHONPATH={python_path()}"],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[1].rstrip(":")

    def signal(self, job: str, *arguments: str) -> None:
        subprocess.run(["scancel", *arguments, job], check=True)

    def active(self, job: str) -> bool:
        command = ["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}"]
        states = subprocess.run(command, capture_output=True, text=True).stdout.split()
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return bool(states) and not all(state in ended for state in states)


def until(condition: Any, log: Path, timeout: float = 300.0) -> None:
    """Wait; on a timeout the job's log says why."""
    end = time.monotonic() + timeout
    while not condition():
        text = log.read_text(errors="replace") if log.exists() else "no log"
        assert time.monotonic() < end, text[-4000:]
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a configuration on two ranks without SLURM and gives its lines."""
    forks = Forks(tmp_path_factory.mktemp("output"))

    def run(config: str, directory: Path) -> list[Any]:
        size = {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
        each = [size | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        ranks = [forks.start(config, f"run.dir={directory}", env=env) for env in each]
        assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].text()
        return losses(directory)

    return run


def losses(directory: Path) -> list[Any]:
    lines = map(json.loads, (directory / "metrics.jsonl").open())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


@pytest.mark.slurm
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_job_saves_on_usr1_requeues_itself_and_ends_with_the_same_losses(
    config: str, tmp_path: Path, undisturbed: Any, launcher: str
) -> None:
    cluster, run = Cluster(), tmp_path / "run"
    job = cluster.submit(config, *NODE, f"--launcher={launcher}")
    log = run / "slurm" / f"{job}.log"
    until(lambda: log.exists() and "step 2/" in log.read_text(), log)
    cluster.signal(job, "--signal=USR1")
    until(lambda: not cluster.active(job), log)
    text = log.read_text()
    assert "SIGUSR1: saved step" in text and "restart 1 on" in text and "resumed from" in text
    assert "done: step 16" in text
    assert losses(run) == undisturbed(config, tmp_path / "undisturbed")


@pytest.mark.slurm
@pytest.mark.parametrize("arguments", [[], ["--signal=INT"]])
def test_a_cancelled_job_saves_and_stays_away(
    arguments: list[str], config: str, tmp_path: Path
) -> None:
    cluster, run = Cluster(), tmp_path / "run"
    job = cluster.submit(config, *NODE)
    log = run / "slurm" / f"{job}.log"
    until(lambda: log.exists() and "step 2/" in log.read_text(), log)
    cluster.signal(job, *arguments)
    until(lambda: not cluster.active(job), log)
    assert f"{'SIGINT' if arguments else 'SIGTERM'}: saved step" in log.read_text()
    assert (run / "checkpoints" / "latest").exists()
    time.sleep(1)
    assert not cluster.active(job), "it was requeued"
