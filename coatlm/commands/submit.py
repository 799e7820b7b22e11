"""Write a batch script for SLURM and submit it: `coatlm submit CONFIG ...`.

    coatlm submit llama3-8b --nodes 4 --gpus-per-node 8 \\
        --partition gpu --time 24:00:00 log.hang_timeout=600
    coatlm submit ... --dry-run        # print the script, write nothing

The configuration is checked for nodes * gpus-per-node processes first. The job uses the resolved
configuration, which is written to RUN/slurm/config.yaml beside the script and the logs, so later
changes of the YAML file do not affect restarts.

SIGUSR1 before the time limit makes the ranks save and exit with 85; the job then requeues itself
and resumes. --restarts K is for clusters that do not allow this: an array of K + 1 jobs that run
one after the other, each resuming where the previous one stopped.

Configurations, paths and names are quoted for the shell and for sbatch, and are errors if they
cannot be. Only --setup lines are executed by the shell.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import argparse
import contextlib
import math
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path

from coatlm.commands.arguments import add_config
from coatlm.commands.slurm_script import (
    LAUNCHED,
    OWNED,
    log_name,
    mounted,
    script,
    slurm_directory,
)
from coatlm.config import Config, ConfigError
from coatlm.console import Parser, local_text
from coatlm.hf.run_config import load_run_config

TIME = re.compile(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", re.ASCII)  # sbatch's
ENVIRONMENT = re.compile(r"[A-Za-z_]\w*=.*", re.ASCII)
SBATCH_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?:=(.*))?")
# Characters that a mounted path cannot have. pyxis separates mounts by commas and writes each to a
# line of fstab, where blanks separate, backslashes escape, and variables are replaced. apptainer
# separates at commas and carets, treats backslashes as escapes, and parses the value as CSV.
UNMOUNTABLE = {"pyxis": ", \\$", "apptainer": ',^\\"'}


def main(arguments: list[str] | None = None) -> int:
    """Check, write, submit. Returns 2 for an error, or sbatch's exit code if sbatch fails."""
    args = parse(arguments)
    try:
        config = load_run_config(args.config, args.overrides)
        check(args, config)
        text = script(args, config)
        if args.dry_run:
            print(text, end="")
            return 0
        write(config, {"config.yaml": config.to_yaml(to_start=True), "job.sbatch": text})
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    return submit(slurm_directory(config), log_name(args))


def write(config: Config, files: Mapping[str, str]) -> None:
    """Replace the files of the slurm directory, all or none. Raises ConfigError on failure."""
    directory = slurm_directory(config)
    made = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    temporary = {directory / f".{name}.tmp": directory / name for name in files}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in zip(temporary, files.values(), strict=True):
            path.write_text(text, encoding="utf-8")
        for path, final in temporary.items():
            os.replace(path, final)
    except OSError as error:
        for remove in (*(path.unlink for path in temporary), *(path.rmdir for path in made)):
            with contextlib.suppress(OSError):  # it was not created, or is in use
                remove()
        raise ConfigError(
            f"run.dir={shown(config.run.dir)}: cannot be written to: {error.strerror}"
        ) from error


def submit(directory: Path, log: str) -> int:
    """Submit the script in `directory` with sbatch and print the result; returns the exit code."""
    path = directory / "job.sbatch"
    command = ["sbatch", "--parsable", str(path)]
    where = f"the script is {shown(path, limit=200)}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        print(f"error: sbatch: {error.strerror}; {where}", file=sys.stderr)
        return 2
    if done.returncode:
        lines = [line.removeprefix("sbatch: ").strip() for line in done.stderr.splitlines()]
        reason = "; ".join(line.removeprefix("error: ") for line in lines if line)
        print(f"error: sbatch: {shown(reason, limit=150)}; {where}", file=sys.stderr)
        return done.returncode
    job = done.stdout.strip().partition(";")[0]  # JOB;CLUSTER if there are several clusters
    log = log.replace("%j", job).replace("%A_%a", f"{job}_*")
    print(f"submitted {job}: {path}, log {directory / log}")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(__doc__, "submit")
    add = parser.add_argument
    add_config(parser)
    add("--nodes", type=positive, required=True)
    add(
        "--gpus-per-node",
        type=positive,
        required=True,
        help="ranks per node; each has a GPU unless --cpu",
    )
    add("--cpu", action="store_true", help="ranks without GPUs")
    add("--cpus-per-rank", type=positive, help="cores per rank; the cluster's default otherwise")
    add("--job-name", help="run.name otherwise")
    add("--partition")
    add("--account")
    add("--time", help="limit in sbatch's forms, for example 24:00:00")
    other = "any other as one word, repeatedly: --sbatch=--constraint=h100"
    add("--sbatch", action="append", default=[], metavar="--OPTION[=VALUE]", help=other)
    add("--launcher", choices=("srun", "torchrun"), default="srun", help="who starts the ranks")
    again = "how many times to restart the ranks after one was lost (default 3)"
    add("--max-restarts", type=natural, default=3, help=again)
    chain = "submit an array of K + 1 jobs, each resuming the previous one, instead of requeueing"
    add("--restarts", type=natural, default=0, metavar="K", help=chain)
    add("--save-before", type=positive, default=300, help="seconds before the time limit (300)")
    add(
        "--python",
        type=expanded,
        default=sys.executable,
        help="interpreter on the nodes or in the container",
    )
    setup = "a line that the shell of the job runs unchanged before the ranks; repeatable"
    add("--setup", action="append", default=[], metavar="LINE", help=setup)
    variable = "an exported variable, repeatable; the value is not expanded"
    add("--env", action="append", default=[], metavar="NAME=VALUE", help=variable)
    add("--container", type=at_home, metavar="IMAGE")
    runtime = "of --container (default: pyxis)"
    add("--container-runtime", choices=("pyxis", "apptainer"), help=runtime)
    mount = "a mount in the container, repeatable"
    add(
        "--mount",
        type=expanded,
        action="append",
        default=[],
        metavar="PATH[:PATH[:FLAGS]]",
        help=mount,
    )
    add("--dry-run", action="store_true", help="check and print the script, submit nothing")
    return parser.parse(arguments)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative")
    return number


def at_home(text: str) -> str:
    """`text` with a leading ~ or ~NAME expanded, which would be literal in the quotes of the script
    and behind the `=` of an option."""
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise argparse.ArgumentTypeError(f"{shown(text)}: ~ is no home directory; write ./~ for ~")
    return path


def expanded(text: str) -> str:
    """The `type` of an option that names a path of the nodes, not a URL."""
    return at_home(local_text(text))


def check(args: argparse.Namespace, config: Config) -> None:
    """Raise ConfigError for errors that would otherwise appear only when the job runs."""
    if not config.undecided:
        config.data_parallel_size(args.nodes * args.gpus_per_node)
    if args.time is not None and seconds(args.time) < 2 * args.save_before:
        raise ConfigError(
            f"--time={args.time} is less than twice --save-before={args.save_before} seconds: the "
            "job would have to save before it has trained"
        )
    for name, value in texts(args, config):
        check_text(name, value)
    for item in args.env:
        if not ENVIRONMENT.fullmatch(item):
            raise ConfigError(f"--env={shown(item)}: give NAME=VALUE")
        check_variable(item, args.launcher)
    for item in args.sbatch:
        check_sbatch(item, args.gpus_per_node)
    for name, value in (("python", args.python), ("container", args.container)):
        if value is not None and value.startswith("-"):
            raise ConfigError(f"--{name}={shown(value)}: would be read as an option")
    if "\\" in str(slurm_directory(config)):
        raise ConfigError(
            f"run.dir={shown(config.run.dir)}: a path with a backslash, below which SLURM cannot "
            "write a log"
        )
    if args.mount and not args.container:
        raise ConfigError(f"--mount={shown(args.mount[0])} needs --container")
    if args.container_runtime and not args.container:
        raise ConfigError(f"--container-runtime={args.container_runtime} needs --container")
    if args.container:
        runtime = args.container_runtime or "pyxis"
        for name, path in mounted():
            check_mount(name, path, runtime, parts=1)
        for item in args.mount:
            check_mount("--mount", item, runtime, parts=3)


def check_variable(item: str, launcher: str) -> None:
    """Raise ConfigError for a variable that SLURM or torchrun sets. With srun, MASTER_ADDR and
    MASTER_PORT move the rendezvous."""
    name = item.partition("=")[0]
    if name in LAUNCHED:
        raise ConfigError(
            f"--env={shown(item)}: SLURM or torchrun sets {name}; give --nodes, --gpus-per-node "
            "and --launcher"
        )
    if launcher == "torchrun" and name in ("MASTER_ADDR", "MASTER_PORT"):
        raise ConfigError(f"--env={shown(item)}: torchrun sets {name}; only srun leaves it")


def check_sbatch(item: str, gpus_per_node: int) -> None:
    """Raise ConfigError for what is no long option of sbatch, and for one that the script sets,
    which sbatch also takes abbreviated. --gpus-per-node may add the type of the GPUs."""
    match = SBATCH_OPTION.fullmatch(item)
    if not match:
        raise ConfigError(f"--sbatch={shown(item)}: give one option, --NAME or --NAME=VALUE")
    name, value = match.groups(default="")
    if name == "gpus-per-node" and value.endswith(f":{gpus_per_node}"):
        return
    if owned := [option for option in OWNED if option.startswith(name)]:
        raise ConfigError(
            f"--sbatch={shown(item)}: --{owned[0]} is for coatlm submit to set; {OWNED[owned[0]]}"
        )


def texts(args: argparse.Namespace, config: Config) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the options that the script quotes."""
    yield "run.dir", str(config.run.dir)
    yield "run.name", config.run.name
    for name in ("job-name", "partition", "account", "python", "container"):
        value = getattr(args, name.replace("-", "_"))
        if value is not None:
            yield f"--{name}", value
    for name in ("sbatch", "env", "mount"):
        for value in getattr(args, name):
            yield f"--{name}", value
    yield from mounted()


def check_text(name: str, value: str) -> None:
    """Raise ConfigError for values that a script cannot contain.

    These are control characters, and bytes that are not UTF-8, which Python reads as surrogates.
    """
    if not value:
        raise ConfigError(f"{name} is empty")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
        raise ConfigError(f"{name}={shown(value)}: control characters are not allowed")


def check_mount(name: str, value: str, runtime: str, *, parts: int) -> None:
    """Raise ConfigError for a mount with more than `parts` parts or unsupported characters."""
    paths = value.split(":")
    if len(paths) > parts or not all(paths):
        form = "PATH[:PATH[:FLAGS]]" if parts == 3 else "a path without a colon"
        raise ConfigError(f"{name}={shown(value)}: --container needs {form}")
    if wrong := [character for character in UNMOUNTABLE[runtime] if character in value]:
        raise ConfigError(
            f"{name}={shown(value)}: --container-runtime={runtime} cannot mount a path with "
            f"{wrong[0]!r}"
        )


def shown(value: object, *, limit: int = 120) -> str:
    """A value for a message, shortened and without control characters."""
    text = str(value)
    if not text.isprintable():
        text = ascii(text)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def seconds(limit: str) -> float:
    """Parse sbatch's --time: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S or UNLIMITED, into seconds.

    To SLURM a limit of 0 means UNLIMITED. Raises ConfigError.
    """
    if limit == "UNLIMITED":
        return math.inf
    match = TIME.fullmatch(limit)
    if not match:
        raise ConfigError(
            f"--time={shown(limit)}: minutes, [days-]hours:minutes:seconds or UNLIMITED"
        )
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    units = [3600, 60, 1] if days is not None or len(numbers) == 3 else [60, 1]
    parts = zip(numbers, units, strict=False)  # missing parts are 0
    return 86400 * int(days or 0) + sum(number * unit for number, unit in parts) or math.inf


if __name__ == "__main__":
    process.run(main)
