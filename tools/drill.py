"""Inject faults into a tiny training run, round after round, and check that it recovers.

    python tools/drill.py --rounds 30
    python tools/drill.py --rounds 1000 --jobs 8 --ranks 2 --out drill
    python tools/drill.py --table drill/*/rounds.jsonl             # the table, in Markdown

A tiny model first trains undisturbed. Each round then lets a job with the same configuration reach
some phase (starting, training, saving), injects a fault (tools/drilling/faults.py), starts the same
command again, and waits for its next step. In every case the run must continue, and the losses that
it logs must equal those of the undisturbed run, bit for bit and each once. A job is one process, R
ranks, or R ranks under torchrun's agent. When a run reaches its last step, another one starts.

OUT/rounds.jsonl gets one line per round: fault, phase, exit codes, seconds from the restart to the
next step, lost steps (done before the fault and repeated after it), verdict. The run of a failed
round is copied to OUT/failed-ROUND. Exit code: 0, 1 if a round failed, 2 for invalid arguments.

For a full disk, a small file system is mounted (as root, or in a user namespace); where that is
not allowed, the size of files is limited instead. Moving the clock needs a C compiler.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from coatlm.console import Parser, fail, local_path, output_path  # noqa: E402
from tools.drilling.report import ROUNDS, markdown, plain, read  # noqa: E402


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; --help prints the module docstring."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=30, help="one fault each (default: %(default)s)")
    add("--seed", type=int, help="seed of faults and phases (default: a random one)")
    add("--ranks", type=int, default=2, help="ranks per job; 1: single processes only (default: 2)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    add("--jobs", type=int, default=1, help="drills in parallel that share the rounds")
    add("--out", type=output_path, help="a directory (default: a new temporary one)")
    add("--faults", nargs="+", metavar="NAME", help="only these faults, named as in the table")
    add(
        "--table", type=local_path, nargs="+", metavar="FILE", help="print rounds.jsonl as Markdown"
    )
    parsed = parser.parse_args(arguments)
    for name in ("rounds", "ranks", "jobs"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name} {getattr(parsed, name)}: at least 1")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the drill and return the exit code."""
    options = parse_arguments(arguments)
    if options.table:
        try:
            print(markdown(read(options.table)))
        except (ValueError, OSError) as error:
            return fail(error)
        return 0
    from tools.drilling.faults import FAULTS

    names = [fault.name for fault in FAULTS]
    if unknown := set(options.faults or ()) - set(names):
        return fail(ValueError(f"--faults {min(unknown)}: one of {', '.join(names)}"))
    options.seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    out = options.out or Path(tempfile.mkdtemp(prefix="coatlm-drill-"))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return fail(ValueError(f"--out {out}: {error.strerror}"))
    print(f"drill: seed {options.seed}, in {out}", flush=True)
    if options.jobs > 1:
        failed = side_by_side(options, out)
        files = sorted(out.glob(f"*/{ROUNDS}"))
    else:
        from tools.drilling.drill import Drill

        try:
            with Drill(options, out) as drill:
                failed = drill.run_rounds()
        except ValueError as error:
            return fail(error)
        files = [out / ROUNDS]
    print(plain(read(files)))
    return 1 if failed else 0


def side_by_side(options: argparse.Namespace, out: Path) -> int:
    """Run drills in parallel, each with its own directory and seed; returns how many failed."""
    share, more = divmod(options.rounds, options.jobs)
    started = []
    for job in range(options.jobs):
        rounds = share + (job < more)
        if not rounds:
            break
        words = [f"--rounds={rounds}", f"--seed={options.seed + job}", f"--out={out / str(job)}"]
        words += [f"--ranks={options.ranks}", f"--device={options.device}"]
        words += ["--faults", *options.faults] if options.faults else []
        command = [sys.executable, __file__, *words]
        (out / str(job)).mkdir(exist_ok=True)
        with (out / str(job) / "drill.log").open("w") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log))
    return sum(drill.wait() != 0 for drill in started)


if __name__ == "__main__":
    process.run(main)
