"""What launchers start on the pages of the guides: torchrun, tools/elastic.py, srun and sbatch.

Each line is planned as it stands, with its own sizes and number of ranks, and then run small.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from coatlm.commands.train import main as command
from coatlm.config import load_config
from coatlm.config.shipped import config_file
from tests.commands.test_slurm_script import RECORDER
from tests.commands.test_slurm_script import run as run_script
from tests.distributed import free_port
from tests.forks import pretrain
from tests.guide_runs import call, coatlm, finish, process, ranks, small

MOST_RANKS = 8  # of a job of SLURM
REAL_RANKS = 2  # a rank of torchrun imports torch, which takes seconds; a fork has it
PORTS = range(29500, 30500)  # that coatlm derives from SLURM_JOB_ID


def planned(arguments: Sequence[str], ranks: int) -> None:
    """Plan the command as the page has it."""
    assert command([*arguments, "--dry-run", "--ranks", str(ranks)]) == 0, shlex.join(arguments)


def torchrun_parser() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def srun_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("srun", allow_abbrev=False)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ntasks-per-node", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def options(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """What a launcher reads; AssertionError if it would refuse its options."""
    try:
        found = parser.parse_args(words)
    except SystemExit as error:
        raise AssertionError(f"{parser.prog}: refuses {shlex.join(words)}") from error
    if hasattr(found, "nproc_per_node"):
        found.nproc_per_node = int(found.nproc_per_node)
        assert found.nnodes == "1:1", "a guide starts torchrun on one node"
    return found


def launch(words: Sequence[str]) -> None:
    """torchrun or srun."""
    shown, on_slurm = shlex.join(words), words[0] == "srun"
    assert words[0] in ("srun", "torchrun", ".venv/bin/torchrun"), shown
    found = options(srun_parser() if on_slurm else torchrun_parser(), words[1:])
    if on_slurm:
        started = list(found.command)
        if started[0] != "coatlm":
            assert started.pop(0) == ".venv/bin/python", shown
    else:
        started = [found.training_script, *found.training_script_args]
        assert found.no_python == (started[0] == "coatlm"), f"{shown}: --no-python is for coatlm"
    begin = 2 if started[0] == "coatlm" else 1
    assert started[:begin] in (["coatlm", "train"], ["pretrain.py"]), shown
    arguments = started[begin:]
    if on_slurm:
        planned(arguments, found.nodes * found.ntasks_per_node)
        environments = slurm_environments(found.nodes, MOST_RANKS // found.nodes)
    else:
        planned(arguments, found.nproc_per_node)
        environments = torchrun_environments(found.nproc_per_node)
    adapted = small(arguments, len(environments))
    if not on_slurm and found.nproc_per_node <= REAL_RANKS:
        program = str(Path(sys.executable).parent / "torchrun")
        at = words.index(started[0]) + begin
        process(shown, [program, *words[1:at], *adapted])
    elif begin == 2:
        ranks(shown, coatlm, ["train", *adapted], environments)
    else:
        ranks(shown, pretrain, adapted, environments)


def train(arguments: Sequence[str]) -> None:
    """coatlm train, which starts one process per GPU where there are several."""
    shown = shlex.join(["coatlm", "train", *arguments])
    given = [word for word in arguments[1:] if "=" in word and not word.startswith("-")]
    parallel = load_config(config_file(arguments[0]), given).parallel
    size = parallel.tp * parallel.pp * parallel.cp
    if size == 1 or "--dry-run" in arguments:
        finish(shown, coatlm, ["train", *small(arguments)])
    else:
        ranks(shown, coatlm, ["train", *small(arguments, size)], torchrun_environments(size))


def elastic(arguments: Sequence[str]) -> None:
    """tools/elastic.py, which takes torchrun's options, itself."""
    found = options(torchrun_parser(), arguments)
    planned(found.training_script_args, found.nproc_per_node)
    at = arguments.index(found.training_script) + 1
    adapted = small(found.training_script_args, found.nproc_per_node)
    tool = [sys.executable, "tools/elastic.py"]
    process(shlex.join(arguments), [*tool, *arguments[:at], *adapted])


def torchrun_environments(size: int) -> list[dict[str, str]]:
    """What torchrun sets for each of `size` ranks of one node."""
    port = free_port()
    return [
        {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)},
            **{"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"},
            "MASTER_PORT": str(port),
        }
        for rank in range(size)
    ]


def slurm_environments(nodes: int, tasks: int) -> list[dict[str, str]]:
    """What srun sets for each task; the first of the nodes is this host."""
    job = next(port for port in iter(free_port, None) if port in PORTS) - PORTS.start
    return [
        {
            **{"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(nodes * tasks)},
            **{"SLURM_LOCALID": str(rank % tasks), "SLURM_JOB_ID": str(job)},
            "SLURM_STEP_NODELIST": "localhost" if nodes == 1 else f"localhost,node[2-{nodes}]",
            "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})",
        }
        for rank in range(nodes * tasks)
    ]


def submit(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """tools/submit_slurm.py CONFIG ..., and what its job starts."""
    tool = "tools/submit_slurm.py"
    assert call(tool, [*arguments, "--dry-run"], monkeypatch) == 0
    fake = Path("slurm").absolute()
    recorded = fake / "words"
    fake.mkdir(exist_ok=True)
    recorded.unlink(missing_ok=True)
    for name in ("sbatch", "srun", "scontrol", "squeue", "scancel"):
        (fake / name).write_text(RECORDER)
        (fake / name).chmod(0o755)
    parser = argparse.ArgumentParser(tool)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--gpus-per-node", type=int)
    asked, _ = parser.parse_known_args(arguments)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
        patch.setenv("WORDS", str(recorded))
        adapted = small(arguments, asked.nodes * asked.gpus_per_node)
        assert call(tool, adapted, monkeypatch) == 0
    _, option, job, _ = recorded.read_text().split("\0")  # the name comes first, a line end last
    assert option == "--parsable"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if check := shutil.which("shellcheck", path=path):
        process(f"shellcheck {job}", [check, job])
    (started,) = run_script(Path(job).read_text(), fake, Path.cwd())["srun"]
    at = next(i for i, word in enumerate(started) if word.endswith("pretrain.py"))
    assert started[at - 1] == sys.executable
    tasks = min(MOST_RANKS // asked.nodes, asked.gpus_per_node)
    environments = slurm_environments(asked.nodes, tasks)
    ranks(shlex.join(arguments), pretrain, started[at + 1 :], environments)
