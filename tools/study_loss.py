"""Compare the losses of recipes over many seeds, each with the standard error of its difference.

    python tools/study_loss.py configs/studies/small.yaml --runs runs/small --out small.jsonl
    python tools/study_loss.py configs/studies/small.yaml --out small.jsonl --report

A study trains each of its recipes with each of its seeds; tools/studies/loss_study.py describes its
file. Runs with the same seed have the same initial weights and data. Overrides key=value apply to
all runs, for example data.text. The runs of the first seed start first, and the reference's before
the others', so that pairs are complete early. --per-gpu runs share a GPU, or the CPU if there is no
GPU. --recipes and --seeds choose some of the runs; the reference's runs are always included.

If the study has a trunk, the trunk's run is trained first, and all others continue from its last
checkpoint; --trunk-ranks trains it on several GPUs. Each --runs directory has a trunk of its own,
also on another machine, and only runs from the same trunk are paired.

A run is a directory in --runs, with its log in jobs/. When it ends, one line about it is appended
to --out, and it is not repeated, unless it failed and --retry is given. --minutes after the start
of the tool, or at a signal, the runs save checkpoints; the same command continues them. A line
contains the protocol and a hash of the data; lines in which these differ cannot be compared, so
--out of another study is refused. --report and --pool take lines of other data from other trunks.

Prints a table in Markdown with the differences to the reference in % of its loss, paired by seed,
as mean +- standard error, and writes it as JSON and as a plot beside --out (*.json, *.png). If the
runs have several evaluations, a second table (*-time.json, *-time.png) has the seconds of training
until the reference's final validation loss. --report trains nothing and does only this. --pool adds
the lines of other files, for example of other machines.

Exit code: 0 all runs of the call have finished; 1 some have failed; 2 an error, which one line
explains; 85 some are unfinished.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import argparse
import hashlib
import json
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from coatlm.config import Config
from coatlm.config.errors import one_line
from coatlm.config.load import read_mapping
from coatlm.console import Parser, fail, local_path, output_path
from coatlm.files import check_output, whole_file
from coatlm.train.changes import CONTENT, changed_keys
from coatlm.train.checkpoint import CHECKPOINTS
from coatlm.train.faults import ExitCode
from coatlm.train.manifest import MANIFEST, step_name
from coatlm.train.run_directory import METRICS, write_atomically

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]  # the repository

from tools.studies import loss_time  # noqa: E402
from tools.studies.loss_lines import (  # noqa: E402
    DONE,
    FAILED,
    Line,
    Prepared,
    append_line,
    check_comparable,
    key_of,
    newest,
    prepare,
    read_lines,
    result,
)
from tools.studies.loss_runs import CPU, Ended, Places, StudyJob, gpus, run_jobs  # noqa: E402
from tools.studies.loss_study import MOST_RANKS, TRUNK, LossStudy, read_study  # noqa: E402
from tools.studies.loss_table import as_json, draw, markdown, tabulate  # noqa: E402

UNFINISHED = int(ExitCode.REQUEUE)
MOST_PER_GPU = 256
MOST_MINUTES = 1e6


class Session:
    """One call of the tool that trains."""

    def __init__(self, study: LossStudy, options: argparse.Namespace) -> None:
        self.study, self.out = study, options.out
        names = gpus()
        self.places = Places.of(names, options.per_gpu)
        first = sorted(study.recipes.items(), key=lambda row: row[0] != study.reference)
        self.jobs = [
            StudyJob(recipe, seed, study.config(options.runs, recipe, seed), row.ranks)
            for seed in study.seeds
            for recipe, row in first
        ]
        self.trunk: StudyJob | None = None
        if study.trunk is not None:
            trunk = study.trunk_config(options.runs)
            ranks = options.trunk_ranks or study.recipes[study.reference].ranks
            self.trunk = StudyJob(TRUNK, trunk.run.seed, trunk, ranks)
        for job in (*self.jobs, *filter(None, [self.trunk])):
            self.places.check(job)
            _check_directory(job.config)
        self.prepared: Prepared = prepare(self.jobs[0].config)
        self.origin = "new weights"  # of the first run: the trunk, or all runs without one
        self.common: Line = {
            "study": study.name,
            "protocol": study.protocol(),
            "device": "cpu" if CPU in names else "cuda",
            "data": self.prepared.fingerprint,
        }

    def run(self, end: float | None, *, retry: bool) -> int:
        """Train what has no line yet until `end`, see `deadline`; returns the exit code."""
        lines = read_lines(self.out)
        for line in lines:
            job = next((job for job in self.jobs if job.recipe == line["recipe"]), self.jobs[0])
            check_comparable(self._line(job), line)
        if self.trunk is not None and not self._run_trunk(self.trunk, end):
            return UNFINISHED
        done = newest(read_lines(self.out))
        kept = {key for key, x in done.items() if x["state"] == DONE or not retry}
        missing = [job for job in self.jobs if key_of(self._line(job)) not in kept]
        for job in missing:
            self._check_start(job)
        left = [job for job in missing if not self._already(job)]
        finished = run_jobs(left, self.places, self._end, end=end)
        chosen = {key_of(self._line(job)) for job in self.jobs}
        states = [x["state"] for key, x in newest(read_lines(self.out)).items() if key in chosen]
        return UNFINISHED if not finished else int(FAILED in states)

    def _run_trunk(self, trunk: StudyJob, end: float | None) -> bool:
        """Train the trunk, unless that is done; whether it is. Later lines have its fingerprint."""
        ended: list[Ended] = []
        self._check_start(trunk)
        manifest = last_checkpoint(trunk.config) / MANIFEST
        if not manifest.exists():
            if (early := next(filter(_has_begun, self.jobs), None)) is not None:
                directory = early.config.run.dir
                raise ValueError(f"{directory}: began before {TRUNK}: give another --runs")
            if not run_jobs([trunk], self.places, lambda _, how: ended.append(how), end=end):
                return False
            if not manifest.exists():
                (how,) = ended
                raise ValueError(f"{TRUNK}: failed with exit code {how.code}: {how.last_line}")
        self.common["trunk"] = fingerprint(manifest.parent)
        line = self._line(trunk)
        if key_of(line) not in newest(read_lines(self.out)):
            self._append(line | self._result(trunk))
        return True

    def _line(self, job: StudyJob) -> Line:
        """The part of a job's line that is known before it runs."""
        row = self.study.recipes.get(job.recipe)
        overrides = list(self.study.trunk or () if row is None else row.overrides)
        own = {"recipe": job.recipe, "seed": job.seed, "overrides": overrides, "ranks": job.ranks}
        return self.common | own

    def _begin(self, job: StudyJob) -> int:
        """The step from which the run goes on: the trunk's last, 0 without one."""
        return 0 if self.trunk is None or job is self.trunk else self.trunk.config.train.steps

    def _check_start(self, job: StudyJob) -> None:
        """Raise ValueError if the run has begun from other weights or with other data; note these
        otherwise."""
        trunk = None if job is self.trunk else self.common.get(TRUNK)
        origin = self.origin if trunk is None else f"{TRUNK} {trunk}"
        path, start = Path(f"{job.files}.start"), f"{origin}, data {self.prepared.fingerprint}"
        before = path.read_text(encoding="utf-8") if path.exists() else "what is not recorded"
        if _has_begun(job) and before != start:
            raise ValueError(
                f"{job.config.run.dir}: began from {before}, now {start}: give another --runs"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, start)

    def _already(self, job: StudyJob) -> bool:
        """Whether the run had finished, and its call had no time for the line; writes the line."""
        try:
            found = self._result(job)
        except ValueError:
            return False
        self._append(self._line(job) | found)
        return True

    def _result(self, job: StudyJob) -> Line:
        """What a line says of a run that has finished. Raises ValueError if it has not."""
        found = result(job.config, job.ranks, self.prepared, begin=self._begin(job))
        return {"state": DONE, "seconds": sum(job.pieces())} | found

    def _end(self, job: StudyJob, ended: Ended) -> None:
        """Write the line of a job that has ended."""
        line = self._line(job) | {"seconds": round(sum(job.pieces()), 3)}
        try:
            if ended.code:
                raise ValueError(ended.last_line)
            begin = self._begin(job)
            line |= {"state": DONE, **result(job.config, job.ranks, self.prepared, begin=begin)}
        except ValueError as error:
            line |= {"state": FAILED, "exit_code": ended.code, "last_line": one_line(error)}
        self._append(line)

    def _append(self, line: Line) -> None:
        append_line(self.out, line)
        if line["state"] == DONE:
            what = f"val_loss {line['val_loss']:.4f} | {line['seconds']:.0f} s"
        else:
            what = f"failed with exit code {line['exit_code']}: {line['last_line']}"
        print(f"{line['recipe']} seed {line['seed']} | {what}", flush=True)


def _has_begun(job: StudyJob) -> bool:
    return any((job.config.run.dir / name).exists() for name in (CHECKPOINTS, METRICS))


def last_checkpoint(config: Config) -> Path:
    """The checkpoint of a run's last step."""
    return config.run.dir / CHECKPOINTS / step_name(config.train.steps)


def fingerprint(checkpoint: Path) -> str:
    """A hash of the checkpoint's manifest, which identifies the weights that runs start from."""
    return hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()[:16]


def _check_directory(config: Config) -> None:
    """Raise ValueError if the run directory belongs to a run with other options."""
    path = config.run.dir / "config.yaml"
    if not path.exists():
        return
    changed = changed_keys(read_mapping(path), config)
    for key, (old, new) in changed.items():
        if key not in CONTENT:  # the tokens are compared instead
            raise ValueError(f"{path}: {key}={old}, now {new}: give another --runs")


def report(study: LossStudy, out: Path, pool: Iterable[Path]) -> None:
    """Print the table and write it as JSON and as a plot. Raises ValueError."""
    lines = [line for path in (out, *pool) for line in read_lines(path)]
    if not lines:
        print("no run has ended yet")
        return
    rows = tabulate(lines, study.reference)
    with whole_file(out.with_suffix(".json")) as file:
        file.write_text(json.dumps(as_json(rows), indent=1) + "\n", encoding="utf-8")
    draw(rows, out.with_suffix(".png"))
    print("\n".join(markdown(rows)))
    try:
        times = loss_time.tabulate(lines, study.reference)
    except ValueError as error:
        print(f"\nno table over time: {error}")
        times = []
    path = out.with_name(f"{out.stem}-time.json")
    if not times:  # nor files of an earlier call
        path.unlink(missing_ok=True)
        path.with_suffix(".png").unlink(missing_ok=True)
    else:
        with whole_file(path) as file:
            file.write_text(json.dumps([vars(row) for row in times], indent=1) + "\n")
        loss_time.draw(lines, study.reference, path.with_suffix(".png"))
        print()
        print("\n".join(loss_time.markdown(times)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = parse(arguments)
    end = deadline(options.minutes)  # before the text is tokenized, which may take minutes
    # megatron-core warns on import of optional packages
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    try:
        chosen = {"recipes": options.recipes, "seeds": options.seeds}
        study = read_study(options.study, options.overrides, **chosen)
        for path in options.pool:
            if not path.exists():
                raise ValueError(f"--pool {path}: no such file")
        check_output(options.out)
        code = 0
        if not options.report:
            code = Session(study, options).run(end, retry=options.retry)
        report(study, options.out, options.pool)
    except (ValueError, OSError) as error:
        return fail(error)
    return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; a mistake ends the process with exit code 2."""
    parser = Parser(__doc__)
    add_options(parser)
    parser.add_argument("--trunk-ranks", type=int, metavar="N", help="default: the reference's")
    parser.add_argument("--pool", type=local_path, nargs="+", default=[], metavar="FILE.jsonl")
    options = parser.parse_intermixed_args(arguments)
    check_options(parser, options, needed=("runs",))
    if options.trunk_ranks is not None and not 1 <= options.trunk_ranks <= MOST_RANKS:
        parser.error(f"--trunk-ranks {options.trunk_ranks}: 1 to {MOST_RANKS}")
    return options


def deadline(minutes: float | None) -> float | None:
    """The time of time.monotonic() at which the runs stop if `minutes` begin now; None: never."""
    return None if minutes is None else time.monotonic() + 60 * minutes


def add_options(parser: Parser) -> None:
    """Add the options of every tool that runs a study."""
    parser.add_argument("study", type=local_path, metavar="STUDY.yaml")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--runs", type=output_path, help="directory of the runs' directories")
    parser.add_argument("--out", type=output_path, required=True, help="*.jsonl, a line per run")
    parser.add_argument("--recipes", nargs="+", metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N")
    parser.add_argument("--per-gpu", type=int, default=1, help="runs at once (default: 1)")
    parser.add_argument("--minutes", type=float, help="after which runs stop (default: never)")
    parser.add_argument("--retry", action="store_true", help="repeat runs that failed")
    parser.add_argument("--report", action="store_true", help="only print the table")


def check_options(parser: Parser, options: argparse.Namespace, *, needed: Sequence[str]) -> None:
    """Check the options that `add_options` added; `needed` are those that only --report lacks."""
    if options.out.suffix != ".jsonl":
        parser.error(f"--out {options.out}: must end in .jsonl")
    for name in needed:
        if getattr(options, name) is None and not options.report:
            parser.error(f"--{name} is missing; only --report needs none")
    if not 1 <= options.per_gpu <= MOST_PER_GPU:
        parser.error(f"--per-gpu {options.per_gpu}: 1 to {MOST_PER_GPU}")
    if options.minutes is not None and not 0 < options.minutes <= MOST_MINUTES:
        parser.error(f"--minutes {options.minutes}: above 0, at most {MOST_MINUTES}")


if __name__ == "__main__":
    process.run(main)
