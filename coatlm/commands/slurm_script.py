"""Generate the batch script that `coatlm submit` submits with sbatch.

    #SBATCH options      read by sbatch, which has its own quoting rules
    export, --setup      run before the ranks
    srun ...             starts the ranks, and restarts them after one was lost
    scontrol requeue     or another action, depending on the exit code

Configurations, paths and names are quoted for the program that reads the line, so they are never
executed. Words that the shell of the job expands are `Shell`; only --setup lines come from the user
unquoted.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from coatlm.commands.entry import IS_CHECKOUT, ROOT, entry, torchrun
from coatlm.config import Config

SBATCH_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)  # words that need no quotes for sbatch
OWNED = {  # options of sbatch on which the script relies -> what to give instead
    "account": "give --account",
    "array": "give --restarts",
    "chdir": "run coatlm submit in that directory",
    "cpus-per-task": "give --cpus-per-rank",
    "export": "give --env",
    "export-file": "give --env",
    "gpus": "give --nodes and --gpus-per-node",
    "gpus-per-node": "give --gpus-per-node",
    "job-name": "give --job-name",
    "no-requeue": "give --restarts",
    "nodes": "give --nodes",
    "ntasks": "give --nodes and --gpus-per-node",
    "ntasks-per-gpu": "give --gpus-per-node",
    "ntasks-per-node": "give --gpus-per-node",
    "open-mode": "restarts append to one log",
    "output": "the log is in slurm/ of run.dir",
    "partition": "give --partition",
    "requeue": "jobs requeue themselves without --restarts",
    "signal": "give --save-before",
    "test-only": "give --dry-run",
    "time": "give --time",
    "wrap": "coatlm submit writes the script of the job",
}
# Variables that the ranks or the script take from SLURM or torchrun (coatlm.train.setup), or with
# which srun would start another number of ranks.
LAUNCHED = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_ARRAY_JOB_ID", "SLURM_RESTART_COUNT"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES"),
        *("SLURM_NTASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"),
        *("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE"),
        "TORCHELASTIC_USE_AGENT_STORE",
    )
)
STRAGGLERS_S = 120  # seconds for the other ranks to exit after the first one has
# exit codes (coatlm.train.faults.ExitCode) after which another attempt would end the same way
FINAL = "0 | 2 | 3 | 4 | 85 | 129 | 130 | 138 | 143"
# rendezvous of torchrun over several nodes; one port per job, so that two jobs can share a node
RENDEZVOUS = (
    'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    "port=$((29500 + SLURM_JOB_ID % 1000))",
)


class Shell(str):
    """A word that the shell of the job expands. Every other word is quoted."""


def slurm_directory(config: Config) -> Path:
    return config.run.dir.absolute() / "slurm"


def log_name(args: argparse.Namespace) -> str:
    """The name of the log with sbatch's placeholders for the job, or the array and its element."""
    return "%A_%a.log" if args.restarts else "%j.log"


def script(args: argparse.Namespace, config: Config) -> str:
    """The whole batch script."""
    world = args.nodes * args.gpus_per_node
    layout = f"{config.undecided}: decided when the run starts"
    if not config.undecided:
        layout = f"data-parallel size {config.data_parallel_size(world)}"
    head = [
        "#!/usr/bin/env bash",
        f"# {world} ranks, {layout}; made by coatlm submit",
        *(f"#SBATCH {quote_option(option)}" for option in options(args, config)),
        "",
        "trap : TERM  # on scancel, wait for the ranks: they save and leave",
        "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}",
        *(f"export {quote_value(item)}" for item in args.env),
        *args.setup,
        "set -u",  # only now: the user's lines may use variables that are not set
    ]
    return "\n".join([*head, "", *attempts(args, config), "", *ending(args), ""])


def quote_value(item: str) -> str:
    name, _, value = item.partition("=")
    return f"{name}={shlex.quote(value)}"


def quote_option(option: str) -> str:
    """Quote a word of an #SBATCH line.

    sbatch splits the line at blanks, starts a comment at `#`, and treats a backslash as an escape,
    also within quotes of either kind. It expands nothing.
    """
    if SBATCH_PLAIN.fullmatch(option):
        return option
    return '"' + re.sub(r'(["\\])', r"\\\1", option) + '"'


def options(args: argparse.Namespace, config: Config) -> Iterator[str]:
    """Yield the options for sbatch."""
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
    yield f"--output={str(slurm_directory(config)).replace('%', '%%')}/{log_name(args)}"
    yield f"--chdir={Path.cwd()}"
    yield from args.sbatch


def cpus(args: argparse.Namespace) -> int:
    """Cores per task, 0 for the cluster's default.

    With torchrun, one task per node runs all ranks of the node.
    """
    ranks = args.gpus_per_node if args.launcher == "torchrun" else 1
    unless_given = 1 if args.cpu and args.launcher == "torchrun" else 0
    return ranks * (args.cpus_per_rank or unless_given)


def attempts(args: argparse.Namespace, config: Config) -> Iterator[str]:
    """Yield the lines that start the ranks, and restart them after one was lost."""
    words = [*launcher(args), str(slurm_directory(config) / "config.yaml")]
    resume: list[str] = []
    if config.checkpoint.resume == "none":
        words.append(Shell('"checkpoint.resume=$resume"'))
        resume = list(fresh_until_saved(config))
    report = "job $SLURM_JOB_ID restart ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST"
    if args.launcher == "torchrun":
        if args.nodes > 1:
            yield from RENDEZVOUS
        yield f'echo "$(date) {report}"'
        yield from resume
        yield from command(words)
        yield "code=$?"
        return
    yield f"for attempt in $(seq 0 {args.max_restarts}); do"
    yield f'    echo "$(date) {report} attempt $attempt"'
    yield from (f"    {line}" for line in (*resume, *command(words)))
    yield "    code=$?"
    yield f"    case $code in {FINAL}) break ;; esac"
    yield "done"


def fresh_until_saved(config: Config) -> Iterator[str]:
    """Yield lines that set `resume` to none until this job has a checkpoint, then to auto.

    A checkpoint belongs to this job if it is newer than the files written at its submission.
    """
    slurm = slurm_directory(config)
    latest, submitted = slurm.parent / "checkpoints" / "latest", slurm / "config.yaml"
    yield "resume=none"
    yield f"[[ {shlex.quote(str(latest))} -nt {shlex.quote(str(submitted))} ]] && resume=auto"


def launcher(args: argparse.Namespace) -> list[str]:
    """The command up to the configuration: srun, the container, the launcher and its ranks."""
    words = ["srun", f"--wait={STRAGGLERS_S}"]
    if cpus(args):
        words.append(f"--cpus-per-task={cpus(args)}")
    mounts = [*(path for _, path in mounted()), *args.mount]
    if args.container and args.container_runtime != "apptainer":
        words += [
            f"--container-image={args.container}",
            f"--container-mounts={','.join(m if ':' in m else f'{m}:{m}' for m in mounts)}",
            f"--container-workdir={Path.cwd()}",
        ]
    elif args.container:
        gpus = [] if args.cpu else ["--nv"]
        words += ["apptainer", "exec", *gpus, f"--bind={','.join(mounts)}"]
        words += [f"--pwd={Path.cwd()}", args.container]
    if args.launcher != "torchrun":
        return [*words, args.python, *entry("train")]
    options = [f"--nproc-per-node={args.gpus_per_node}", f"--max-restarts={args.max_restarts}"]
    options += (
        ["--standalone"]
        if args.nodes == 1
        else [
            f"--nnodes={args.nodes}",
            "--rdzv-backend=c10d",
            Shell('--rdzv-endpoint="$head:$port"'),
            Shell('--rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"'),
        ]
    )
    return [*words, *torchrun(args.python, *options)]


def mounted() -> Iterator[tuple[str, str]]:
    """Yield the names and paths of the directories that a job needs in its container."""
    yield "the working directory", str(Path.cwd())
    if IS_CHECKOUT:
        yield "the checkout", str(ROOT)


def command(words: Sequence[str]) -> Iterator[str]:
    """Yield one command over several lines, one word per line."""
    for index, word in enumerate(words):
        text = word if isinstance(word, Shell) else shlex.quote(word)
        yield ("" if index == 0 else "    ") + text + (" \\" if index < len(words) - 1 else "")


def ending(args: argparse.Namespace) -> Iterator[str]:
    """Yield the lines that act on the exit code."""
    if args.restarts:
        yield "# done, would fail again, or ended by SIGINT: the rest of the array is not needed"
        yield "case $code in"
        yield '    0 | 2 | 3 | 4 | 130) scancel --state=PENDING "$SLURM_ARRAY_JOB_ID" ;;'
        yield "esac"
        yield 'exit "$code"'
        return
    yield 'state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)'
    yield 'case "$code $state" in'
    yield "    # saved on SIGUSR1; 138: it came before the first step, when nothing could be saved"
    yield '    "85 "* | "138 "*) scontrol requeue "$SLURM_JOB_ID" ;;'
    yield "    # saved on SIGTERM: a warning of preemption; after scancel the job is COMPLETING"
    yield '    "143 RUNNING") scontrol requeue "$SLURM_JOB_ID" ;;'
    yield "esac"
    yield 'exit "$code"'
