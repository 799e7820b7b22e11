"""Write a batch script for SLURM and submit it: `python tools/submit_slurm.py CONFIG.yaml ...`.

    python tools/submit_slurm.py configs/llama3-8b.yaml --nodes 4 --gpus-per-node 8 \\
        --partition gpu --time 24:00:00 parallel.tp=4
    python tools/submit_slurm.py ... --dry-run        # print the script, write nothing

The configuration is checked for nodes * gpus-per-node processes first. What was checked is what
runs: it goes, resolved, to RUN/slurm/config.yaml beside the script and the logs, and later changes
of the YAML do not reach restarts.

SIGUSR1 ahead of the time limit lets the ranks save and leave with 85; the job then requeues itself
and goes on from there. --restarts K is for clusters where jobs may not: an array of K + 1 jobs, one
after the other, each going on where the one before stopped.
"""

from __future__ import annotations

from coatlm import console

if __name__ == "__main__":  # before the imports that take seconds
    console.listen()

import argparse
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from coatlm.config import Config, ConfigError, load_config

ROOT = Path(__file__).resolve().parent.parent
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")  # sbatch --time
ENVIRONMENT = re.compile(r"[A-Za-z_]\w*=.*")
STRAGGLERS_S = 120  # seconds that the other ranks have once the first one has left
# Codes after which another attempt would end alike; coatlm.train.faults.ExitCode
FINAL = "0 | 2 | 3 | 4 | 85 | 129 | 130 | 138 | 143"


def main(arguments: list[str] | None = None) -> int:
    """Check, write, submit. Returns 2 for what cannot be submitted, sbatch's code if it refuses."""
    args = parse(arguments)
    try:
        config = load_config(args.config, args.overrides)
        check(args, config)
        text = script(args, config)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    if args.dry_run:
        print(text, end="")
        return 0
    directory = slurm_directory(config)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(config.to_yaml())
    path = directory / "job.sbatch"
    path.write_text(text)
    try:
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    except FileNotFoundError:
        print(f"error: no sbatch here; the script is {path}", file=sys.stderr)
        return 2
    if done.returncode:
        print(f"error: sbatch: {done.stderr.strip()}; the script is {path}", file=sys.stderr)
        return done.returncode
    job = done.stdout.strip().partition(";")[0]  # JOB;CLUSTER where there are several
    log = log_name(args, config).replace("%j", job).replace("%A_%a", f"{job}_*")
    print(f"submitted {job}: {path}, log {log}")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("config", help="a YAML file; every key is in coatlm/config.py")
    add("overrides", nargs="*", metavar="key=value", help="for example optim.lr=1e-4")
    add("--nodes", type=positive, required=True)
    add("--gpus-per-node", type=positive, required=True, help="ranks a node, each with a GPU")
    add("--cpu", action="store_true", help="ranks without GPUs")
    add("--cpus-per-rank", type=positive, help="cores a rank; the cluster's default otherwise")
    add("--job-name", help="run.name otherwise")
    add("--partition")
    add("--account")
    add("--time", help="limit in sbatch's forms, for example 24:00:00")
    add("--sbatch", action="append", default=[], metavar="OPTION", help="any other, repeatedly")
    add("--launcher", choices=("srun", "torchrun"), default="srun", help="who starts the ranks")
    add("--max-restarts", type=natural, default=3, help="attempts more after a lost rank (3)")
    add("--restarts", type=natural, default=0, help="an array of so many more jobs, no requeue")
    add("--save-before", type=positive, default=300, help="seconds before the time limit (300)")
    add("--python", default=sys.executable, help="interpreter on the nodes or in the container")
    add("--setup", action="append", default=[], metavar="LINE", help="shell, before the ranks")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="exported, repeatedly")
    add("--container", metavar="IMAGE")
    add("--container-runtime", choices=("pyxis", "apptainer"), default="pyxis")
    add("--mount", action="append", default=[], metavar="PATH[:PATH]", help="into the container")
    add("--dry-run", action="store_true", help="check and print the script, submit nothing")
    return parser.parse_intermixed_args(arguments)


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


def check(args: argparse.Namespace, config: Config) -> None:
    """Raise ConfigError for what would fail or go wrong only once the job runs or restarts."""
    config.data_parallel_size(args.nodes * args.gpus_per_node)
    if args.time is not None and seconds(args.time) < 2 * args.save_before:
        raise ConfigError(
            f"--time={args.time} is less than twice --save-before={args.save_before} seconds: the "
            "job would be told to save before it has trained"
        )
    for item in args.env:
        if not ENVIRONMENT.fullmatch(item):
            raise ConfigError(f"--env={item}: give NAME=VALUE")
    if args.mount and not args.container:
        raise ConfigError(f"--mount={args.mount[0]} needs --container")
    latest = config.run.dir / "checkpoints" / "latest"
    if config.checkpoint.resume != "auto" and latest.exists():
        raise ConfigError(
            f"checkpoint.resume={config.checkpoint.resume}, but {latest} exists and a restart "
            "would take that: use checkpoint.resume=auto or another run.dir"
        )


def seconds(limit: str) -> float:
    """sbatch's --time: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S or UNLIMITED. Raises ConfigError."""
    if limit == "UNLIMITED":
        return math.inf
    match = TIME.fullmatch(limit)
    if not match:
        raise ConfigError(f"--time={limit}: minutes, [days-]hours:minutes:seconds or UNLIMITED")
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    units = [3600, 60, 1] if days is not None or len(numbers) == 3 else [60, 1]
    parts = zip(numbers, units, strict=False)  # what is not given is 0
    return 86400 * int(days or 0) + sum(number * unit for number, unit in parts)


def slurm_directory(config: Config) -> Path:
    return config.run.dir.absolute() / "slurm"


def log_name(args: argparse.Namespace, config: Config) -> str:
    """The log's path with sbatch's placeholders: job, or array and element."""
    return str(slurm_directory(config) / ("%A_%a.log" if args.restarts else "%j.log"))


def script(args: argparse.Namespace, config: Config) -> str:
    """The whole batch script."""
    world = args.nodes * args.gpus_per_node
    head = [
        "#!/usr/bin/env bash",
        f"# {world} ranks, data-parallel size {config.data_parallel_size(world)}; "
        "made by tools/submit_slurm.py",
        *(f"#SBATCH {option}" for option in options(args, config)),
        "",
        "set -u",
        "trap : TERM  # on scancel, wait for the ranks: they save and leave",
        "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}",
        *(f"export {quote_value(item)}" for item in args.env),
        *args.setup,
    ]
    return "\n".join([*head, "", *attempts(args, config), "", *ending(args), ""])


def quote_value(item: str) -> str:
    name, _, value = item.partition("=")
    return f"{name}={shlex.quote(value)}"


def options(args: argparse.Namespace, config: Config) -> Iterator[str]:
    """What sbatch is asked for."""
    tasks = args.gpus_per_node if args.launcher == "srun" else 1
    yield f"--job-name={args.job_name or config.run.name}"
    yield f"--nodes={args.nodes}"
    yield f"--ntasks-per-node={tasks}"
    if cpus(args):
        yield f"--cpus-per-task={cpus(args)}"
    if not args.cpu:
        yield f"--gpus-per-node={args.gpus_per_node}"
    for name in ("partition", "account", "time"):
        if getattr(args, name):
            yield f"--{name}={getattr(args, name)}"
    yield f"--signal=USR1@{args.save_before}"  # to the ranks, not to this script
    yield f"--array=0-{args.restarts}%1" if args.restarts else "--requeue"
    if args.restarts:
        yield "--no-requeue"
    yield "--open-mode=append"
    yield f"--output={log_name(args, config)}"
    yield f"--chdir={Path.cwd()}"
    yield from args.sbatch


def cpus(args: argparse.Namespace) -> int:
    """Cores a task, 0 for the cluster's default: a torchrun has the ranks of a node in one task."""
    ranks = args.gpus_per_node if args.launcher == "torchrun" else 1
    unless_given = 1 if args.cpu and args.launcher == "torchrun" else 0
    return ranks * (args.cpus_per_rank or unless_given)


def attempts(args: argparse.Namespace, config: Config) -> Iterator[str]:
    """The lines that start the ranks, again after a lost one."""
    words = [*launcher(args), str(slurm_directory(config) / "config.yaml")]
    if config.checkpoint.resume != "auto":
        latest = config.run.dir.absolute() / "checkpoints" / "latest"
        yield "later=()"
        yield f"[[ -e {shlex.quote(str(latest))} ]] &&"
        yield "    later=(checkpoint.resume=auto checkpoint.weights_only=false)"
        words.append('"${later[@]}"')
    report = "job $SLURM_JOB_ID restart ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST"
    if args.launcher == "torchrun":
        yield 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        yield "port=$((29500 + SLURM_JOB_ID % 1000))"
        yield f'echo "$(date) {report}"'
        yield from command(words)
        yield "code=$?"
        return
    yield f"for attempt in $(seq 0 {args.max_restarts}); do"
    yield f'    echo "$(date) {report} attempt $attempt"'
    yield from (f"    {line}" for line in command(words))
    yield "    code=$?"
    yield f"    case $code in {FINAL}) break ;; esac"
    yield "done"


def launcher(args: argparse.Namespace) -> list[str]:
    """srun, the container and what it starts, up to the configuration."""
    words = ["srun", f"--wait={STRAGGLERS_S}"]
    if cpus(args):
        words.append(f"--cpus-per-task={cpus(args)}")
    mounts = [str(Path.cwd()), str(ROOT), *args.mount]
    if args.container and args.container_runtime == "pyxis":
        words += [
            f"--container-image={args.container}",
            f"--container-mounts={','.join(m if ':' in m else f'{m}:{m}' for m in mounts)}",
            f"--container-workdir={Path.cwd()}",
        ]
    elif args.container:
        gpus = [] if args.cpu else ["--nv"]
        words += ["apptainer", "exec", *gpus, f"--bind={','.join(mounts)}"]
        words += [f"--pwd={Path.cwd()}", args.container]
    words.append(args.python)
    if args.launcher == "torchrun":
        words += [
            str(ROOT / "tools" / "elastic.py"),
            f"--nnodes={args.nodes}",
            f"--nproc-per-node={args.gpus_per_node}",
            f"--max-restarts={args.max_restarts}",
            "--rdzv-backend=c10d",
            '--rdzv-endpoint="$head:$port"',
            '--rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"',
        ]
    return [*words, str(ROOT / "pretrain.py")]


def command(words: Sequence[str]) -> Iterator[str]:
    """One command over several lines, a word a line."""
    for index, word in enumerate(words):
        text = word if "$" in word else shlex.quote(word)
        yield ("" if index == 0 else "    ") + text + (" \\" if index < len(words) - 1 else "")


def ending(args: argparse.Namespace) -> Iterator[str]:
    """What follows from the exit code."""
    if args.restarts:
        yield "case $code in  # done or of no use to go on: the rest of the array is not needed"
        yield '    0 | 2 | 3 | 4) scancel --state=PENDING "$SLURM_ARRAY_JOB_ID" ;;'
        yield "esac"
        yield "exit $code"
        return
    yield 'state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)'
    yield 'case "$code $state" in'
    yield "    # saved on SIGUSR1; 138: it came before the first step, when nothing could be saved"
    yield '    "85 "* | "138 "*) scontrol requeue "$SLURM_JOB_ID" ;;'
    yield "    # saved on SIGTERM: a warning of preemption; after scancel the job is COMPLETING"
    yield '    "143 RUNNING") scontrol requeue "$SLURM_JOB_ID" ;;'
    yield "esac"
    yield "exit $code"


if __name__ == "__main__":
    console.run(main)
