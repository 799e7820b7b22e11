"""The wheel works without the checkout: one command, shipped files by name, completion."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from coatlm.__main__ import COMMANDS, launches
from coatlm.config.shipped import config_file, shipped
from tests.distributed import ROOT

pytestmark = pytest.mark.slow

SOURCES = ("coatlm", "configs", "pyproject.toml", "README.md", "LICENSE")
TEXT = "".join(f"{i} times {i} is {i * i}.\n" for i in range(2000))
SMALL = ("model={layers: 1, hidden: 32, ffn: 48}", "data.seq_len=32", "data.text=[text.txt]")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the installed wheel, built from a copy of the sources."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir=wheel", "."], cwd=source, check=True)
    (wheel,) = (source / "wheel").iterdir()
    subprocess.run([*pip, "install", "--no-deps", f"--target={target}", str(wheel)], check=True)
    shutil.rmtree(source)
    return target


def required(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """The distributions that one needs here, with what these need, by their normalized names."""
    found: dict[str, frozenset[str]] = {}
    waiting = [(name, extras)]
    while waiting:
        name, extras = waiting.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if extras <= found.get(key, frozenset()) and key in found:
            continue
        found[key] = found.get(key, frozenset()) | extras
        for text in metadata.distribution(name).requires or ():
            need = Requirement(text)
            asked = [{"extra": extra} for extra in ("", *extras)]
            if need.marker is None or any(map(need.marker.evaluate, asked)):
                waiting.append((need.name, frozenset(need.extras)))
    return set(found)


def link(site: Path, names: set[str]) -> None:
    """Make distributions importable from `site`, by links to their files here."""
    packages = {
        (Path(str(metadata.distribution(name).locate_file(""))), str(file).split("/")[0])
        for name in names
        for file in metadata.distribution(name).files or ()
    }
    for source, top in packages:
        if top not in ("..", "__pycache__") and not (site / top).exists():
            (site / top).symlink_to(source / top)


@pytest.fixture(scope="module")
def bare(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that finds the wheel and the dependencies that it declares, and no others."""
    home = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    link(site, required("coatlm") - {"coatlm"})
    for entry in installed.iterdir():
        if entry.name != "bin":
            (site / entry.name).symlink_to(entry)
    return home / "bin/python"


def call_bare(
    bare: Path, cwd: Path, words: str, *, extra: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`coatlm WORDS` of `bare` in `cwd`; `extra` is a directory of packages to add."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(bare.parents[2])}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment |= {} if extra is None else {"PYTHONPATH": str(extra)}
    command = [str(bare), "-m", "coatlm", *shlex.split(words)]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def trained(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a run of one step, trained with the declared dependencies."""
    root = tmp_path_factory.mktemp("trained")
    (root / "text.txt").write_text(TEXT)
    (root / "short.txt").write_text(TEXT[:200])
    done = call_bare(bare, root, f"train quickstart {shlex.join(SMALL)} train.steps=1")
    assert done.returncode == 0 and "done: step 1" in done.stdout, done.stdout + done.stderr
    return root


USES = {  # of commands, and what they print
    "prepare --input text.txt --output-prefix tokens --tokenizer byte": "1 documents, 52,318 tok",
    "convert --from coatlm --to hf runs/quickstart exported": "exported: 12 tensors",
    "inspect runs/quickstart --verify": "by every size and checksum",
    "evaluate runs/quickstart --data short.txt": "199 tokens predicted of 199 bytes",
    "plot runs/quickstart --out losses.png": "| quickstart |",
    "compare runs/quickstart runs/quickstart": "identical: 2 records",
    "estimate llama2-7b --ranks=8": "Peak in GiB by optimizer recipe",
    "plan llama3-8b --gpus=8 --gpu=h100 --keep": "As overrides: parallel.tp=1",
    "submit llama3-8b --nodes=2 --gpus-per-node=8 --dry-run": "#SBATCH --nodes=2",
}


@pytest.mark.parametrize("words", USES, ids=lambda words: words.split()[0])
def test_the_declared_dependencies_suffice(bare: Path, trained: Path, words: str) -> None:
    done = call_bare(bare, trained, words)
    assert done.returncode == 0, done.stderr
    assert USES[words] in done.stdout
    if not words.startswith("prepare"):  # which shows its progress
        assert done.stderr == ""


def test_every_command_is_used_with_the_declared_dependencies(bare: Path) -> None:
    assert {words.split()[0] for words in USES} | {"train", "report"} == set(COMMANDS)
    missing = subprocess.run([str(bare), "-c", "import pytest"], capture_output=True, text=True)
    assert "No module named 'pytest'" in missing.stderr


def test_a_report_needs_its_extra_and_names_it(bare: Path, trained: Path, tmp_path: Path) -> None:
    done = call_bare(bare, trained, "report runs/quickstart")
    told = "error: a report needs plotly: pip install 'coatlm[report]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)
    link(tmp_path, required("coatlm", frozenset({"report"})) - required("coatlm"))
    done = call_bare(bare, trained, "report runs/quickstart", extra=tmp_path)
    assert done.stdout == "runs/quickstart/report.html\n", done.stderr
    assert "<h1>quickstart</h1>" in (trained / "runs/quickstart/report.html").read_text()


def test_a_shipped_task_is_evaluated_by_its_name(bare: Path, trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    link(tmp_path, required("coatlm", frozenset({"eval"})) - required("coatlm"))
    words = "evaluate runs/quickstart --tasks python-lines python-words --limit 1 --new-tokens 1"
    done = call_bare(bare, trained, words, extra=tmp_path)
    assert done.returncode == 0, done.stderr
    scores = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    lines = ["python-lines/acc", "python-lines/acc_norm"]
    assert scores == [*lines, "python-words/exact_match"]


def call(
    installed: Path, cwd: Path, *words: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`coatlm WORDS` of the wheel in `cwd`, where neither the checkout nor its tools are found."""
    environment = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"} | (env or {})
    command = [sys.executable, str(installed / "bin/coatlm"), *words]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


def test_a_run_is_trained_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "random.py").write_text("raise ImportError('a file of the working directory')\n")
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    done = call(installed, tmp_path, "train", "quickstart", *SMALL, "train.steps=2", env=no_gpu)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("+ -P -m coatlm.commands.train quickstart") and "done: step 2" in last
    assert (tmp_path / "runs/quickstart/checkpoints/latest").exists()


def test_a_shipped_configuration_is_submitted_by_its_name(installed: Path, tmp_path: Path) -> None:
    options = ("llama3-8b", "--nodes=4", "--gpus-per-node=8", "--launcher=torchrun", "--dry-run")
    script = call(installed, tmp_path, "submit", *options).stdout
    words = " ".join(line.strip(" \\") for line in script.splitlines())
    assert "-P -m coatlm.commands.elastic --nproc-per-node=8" in words
    assert f"--no-python {sys.executable} -u -P -m coatlm.commands.train {tmp_path}" in words
    assert list(tmp_path.iterdir()) == []


def test_help_names_the_command_and_loads_no_torch(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')\n")
    env = {"PYTHONPATH": f"{tmp_path}:{installed}"}
    shown = call(installed, tmp_path, "--help", env=env).stdout
    assert all(f"\n    {name} " in shown for name in COMMANDS)
    without_torch = ("train", "convert", "compare", "evaluate", "submit")
    for name in COMMANDS:
        own = env if name in without_torch else {}
        done = call(installed, tmp_path, name, "--help", env=own)
        assert done.stdout.startswith(f"usage: coatlm {name} "), done.stderr
        assert f"\n    coatlm {name} " in done.stdout and "tools/" not in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trian"], "error: no command 'trian'; do you mean train?"),
        (["zzz"], "error: no command 'zzz'; one of train, prepare,"),
        (["train", "lama"], "error: lama: no such configuration file; do you mean llama-3b or "),
        (["train", "tinny"], "file; coatlm train --help lists the names that coatlm has"),
        (["train", "quickstart", "--zzz"], "see coatlm train --help"),
        (["train", "quickstart", "--dry-run", "zzz.zzz=1"], "; coatlm train --keys lists"),
        (["convert", "--zzz"], "(coatlm convert --help lists the options)"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_command(
    installed: Path, tmp_path: Path, words: Sequence[str], told: str
) -> None:
    done = call(installed, tmp_path, *words)
    assert done.returncode == 2
    assert told in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("coatlm pre", {"prepare"}),
        ("coatlm train quick", {"quickstart"}),
        ("coatlm train m", {"mine.yaml"}),
        ("coatlm train quickstart optim.warm", {"optim.warmup_steps="}),
        ("coatlm convert --from meg", {"megatron"}),
        ("coatlm prepare --ver", {"--verify"}),
    ],
)
def test_a_shell_completes(installed: Path, tmp_path: Path, line: str, expected: set[str]) -> None:
    (tmp_path / "mine.yaml").write_text("{}\n")
    answer = tmp_path / "answer"
    asked = {
        **{"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)},
        **{"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"},
    }
    call(installed, tmp_path, env=asked)
    assert {word.strip() for word in answer.read_text().split("\n")} == expected


def test_a_rank_of_torchrun_or_srun_trains_and_launches_nothing() -> None:
    assert launches(["quickstart"], {}) and launches(["quickstart", "--preset", "bf16"], {})
    assert launches(["quickstart"], {"SLURM_PROCID": "0"})  # the shell of a batch job
    assert not launches(["quickstart"], {"RANK": "0"})
    assert not launches(["quickstart"], {"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n1"})
    assert not launches([], {}) and not launches(["quickstart", "--dry-run"], {})


def test_a_file_comes_before_a_shipped_configuration_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-1b").mkdir()
    assert config_file("llama-1b") == shipped()["llama-1b"]
    Path("quickstart").write_text("{}\n")
    assert config_file("quickstart") == Path("quickstart")
