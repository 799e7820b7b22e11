"""Benchmarks: `python tools/bench.py NAME [options]` prints a table and writes JSON with --out.

Rows are measured one after the other, each in its own process, so that no row inherits memory or
caches of another; processes of later rows import their libraries meanwhile. (The rows of `reduce`
use several GPUs, are short and share one set of processes.) Peers that are not installed are
skipped and named. Times are medians over steps, from CUDA events or with a synchronized device.
Compare ratios within one run, because machines differ.

Rows of `layouts` and `restart` have predicted seconds, which --list prints: a row that would not
end within --budget is left out, and one that takes much longer than predicted is killed. After a
call that was killed, the same call with --resume measures what is missing in --out.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import argparse
import importlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coatlm.config.urls import WRITTEN_HERE, is_url
from coatlm.console import Parser, fail, output_path
from coatlm.files import check_output, whole_file

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from tools.benchmarks.ranks import end_tree  # noqa: E402
from tools.benchmarks.row_process import (  # noqa: E402
    NO_TIME,
    RESULT,
    RowProcess,
    end_with_parent,
)

BENCHMARKS = {  # name -> module, which has OPTIONS (names of options), `rows(options)` (names of
    # its rows), `gpus(options)` (GPUs that it needs) and `measure(row, options)`, which returns one
    # record or several. Optional: `prepare(row)` imports what a row needs, `ready(row, options)`
    # starts its processes as well and returns what measures, `summary(records)` adds a table,
    # `seconds(row, options)` predicts what a row takes, TOGETHER joins the names of all rows, which
    # one process then measures, and `text(records, options)` is what --out writes in place of
    # JSON, if it is the only benchmark
    "attention": "tools.benchmarks.attention",
    "context": "tools.benchmarks.context",
    "data": "tools.benchmarks.data",
    "documents": "tools.benchmarks.documents",
    "end-to-end": "tools.benchmarks.end_to_end",
    "gemms": "tools.benchmarks.gemms",
    "gradients": "tools.benchmarks.gradients",
    "layer": "tools.benchmarks.layer",
    "layer-kernels": "tools.benchmarks.layer_kernels",
    "layouts": "tools.benchmarks.layouts",
    "memory": "tools.benchmarks.memory",
    "nodes": "tools.benchmarks.nodes",
    "optimizer": "tools.benchmarks.optimizer",
    "output-layer": "tools.benchmarks.output_layer",
    "quantize": "tools.benchmarks.quantize",
    "rates": "tools.benchmarks.rates",
    "reduce": "tools.benchmarks.reduce",
    "restart": "tools.benchmarks.restart",
}
RowRecord = dict[str, Any]
COUNTS = (  # integer options of any benchmark
    *("batch", "document", "every", "ffn", "gpus", "hidden", "latency_us", "layers", "mb", "mbit"),
    *("mbs", "microbatches", "ranks", "reps", "seq", "steps", "tokens", "values", "vocab"),
    *("warmup",),
)
LARGEST = 1 << 34
FLAGS = ("first", "graph", "profile", "smoke")  # --profile is the option profile=1
GRACE, BEYOND = 60.0, 30.0  # seconds beyond twice the predicted ones, and beyond --budget
AHEAD = 2  # processes that import their libraries while another row is measured


def main() -> None:
    """Run one benchmark, or (--row) one row of it in this process."""
    args = arguments()
    names = [args.name] if args.name else list(BENCHMARKS)
    if args.row:
        run_in_this_process(args.name, args.row, parse(args.name, args.options))
        return
    found: dict[str, list[RowRecord]] = {}
    try:
        rows = {name: choose(name, args.only, args.options) for name in names}
        if not args.budget >= 0:
            raise ValueError(f"--budget {args.budget}: seconds, at least 0")
        for word in args.only:
            if not any(word in row for chosen in rows.values() for row in chosen):
                raise ValueError(f"--only {word}: no row of {', '.join(names)} contains that")
        if args.list:
            for name in names:
                print_table(listed(name, rows[name], parse(name, args.options)))
            return
        check_gpus(names, args.options)
        if args.out:
            check_output(args.out)
        if args.resume:
            found = earlier(args.out, args.options)
    except ValueError as error:
        sys.exit(fail(error))
    deadline = time.monotonic() + args.budget
    for name in names:
        found.setdefault(name, [])
        missing = unmeasured(rows[name], found[name])
        for records in run_benchmark(name, missing, args.options, deadline):
            found[name] = merged(found[name], records)
            if args.out and not whole_text(name):
                save(found, args.out, args.options)
        print_table(found[name])
        summary = getattr(importlib.import_module(BENCHMARKS[name]), "summary", None)
        if summary is not None:
            print_table(summary(found[name]))
        if args.out:
            save(found, args.out, args.options)


def arguments() -> argparse.Namespace:
    """The command line, with flags among the options."""
    parser = Parser(__doc__)
    parser.add_argument("name", nargs="?", choices=BENCHMARKS, help="default: all of them")
    parser.add_argument(
        "--only", nargs="*", default=[], help="rows whose name contains one of these"
    )
    parser.add_argument(
        "--out", type=output_path, help="write the records here as JSON, after each row"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=float("inf"),
        help="seconds; no row starts later, or earlier if it is predicted to end later",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the rows and their predicted seconds only"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the records of --out, and measure rows without one, then those that failed",
    )
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument(
        "options", nargs="*", metavar="key=value", help="see the benchmark's module"
    )
    flags = [word for word in sys.argv[1:] if word.startswith("--") and word[2:] in FLAGS]
    args = parser.parse_intermixed_args([word for word in sys.argv[1:] if word not in flags])
    args.options += [f"{flag[2:]}=1" for flag in flags]
    if args.resume and not args.out:
        parser.error("--resume: needs --out, the file to continue")
    return args


def parse(name: str, options: list[str]) -> dict[str, str]:
    """Parse options key=value. Raises ValueError for options that the benchmark does not have."""
    allowed = importlib.import_module(BENCHMARKS[name]).OPTIONS
    found = {}
    for option in options:
        key, separator, value = option.partition("=")
        if not separator or ("SECTION.KEY" if "." in key else key) not in allowed:
            takes = ", ".join(f"{key}=" for key in allowed)
            raise ValueError(f"{option}: {name} takes {takes}")
        if key == "trace" and is_url(value):
            raise ValueError(f"{option}: {WRITTEN_HERE}")
        if key in COUNTS and not (value.isdecimal() and 1 <= int(value[:12]) <= LARGEST):
            raise ValueError(f"{option}: a whole number from 1 to {LARGEST}")
        found[key] = value
    return found


def check_gpus(names: list[str], options: list[str]) -> None:
    """Raise ValueError if a benchmark needs more GPUs than there are.

    On a CPU the benchmark would take hours, and much memory.
    """
    here = torch.cuda.device_count()
    for name in names:
        needed = importlib.import_module(BENCHMARKS[name]).gpus(parse(name, options))
        if needed > here:
            raise ValueError(
                f"{name}: needs {needed} GPU{'s' if needed > 1 else ''}, this machine has {here}; "
                "`layer --smoke` runs on a CPU"
            )


def save(found: dict[str, list[RowRecord]], path: Path, options: list[str]) -> None:
    """Write the records measured so far. Exits with one line if the disk is full."""
    text = json.dumps({**found, "options": options}, indent=1) + "\n"
    if len(found) == 1:
        ((name, records),) = found.items()
        if whole_text(name):
            benchmark = importlib.import_module(BENCHMARKS[name])
            text = benchmark.text(records, parse(name, options))
    try:
        with whole_file(path) as file:
            file.write_text(text, encoding="utf-8")
    except ValueError as error:
        sys.exit(fail(error))


def earlier(path: Path, options: list[str]) -> dict[str, list[RowRecord]]:
    """The records that an earlier call wrote. Raises ValueError for a call with other options."""
    if not path.exists():
        return {}
    try:
        written: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        written = None
    if not isinstance(written, dict) or not all(
        isinstance(records, list) and all(isinstance(record, dict) for record in records)
        for name, records in written.items()
        if name != "options"
    ):
        raise ValueError(f"--resume: {path} has no records of a benchmark")
    if written.pop("options", None) != options:
        raise ValueError(f"--resume: {path} was written by a call with other options")
    return written


def unmeasured(rows: list[str], records: list[RowRecord]) -> list[str]:
    """The rows without a measurement: those that were not tried, then those that failed."""
    reasons: dict[str, str | None] = {}
    for record in records:  # a row may have several, and is measured if all are
        row, reason = record.get("row", ""), record.get("missing")
        reasons[row] = reason if reason is not None else reasons.get(row)
    untried = [row for row in rows if reasons.get(row, NO_TIME) == NO_TIME]
    return untried + [row for row in rows if row not in untried and reasons[row] is not None]


def merged(records: list[RowRecord], measured: list[RowRecord]) -> list[RowRecord]:
    """`records` with those of newly measured rows in place of earlier ones of the same rows."""
    rows = {record["row"] for record in measured if "row" in record}
    return [record for record in records if record.get("row") not in rows] + measured


def listed(name: str, rows: list[str], options: dict[str, str]) -> list[RowRecord]:
    """The rows with the predicted seconds of each and up to its end, and its time limit."""
    found, total = [], 0.0
    for row in rows:
        record: RowRecord = {"row": row}
        seconds = predicted_seconds(name, row, options)
        if seconds is not None:
            total += seconds
            record |= {"seconds": round(seconds), "until": round(total)}
            record["limit"] = round(time_limit(seconds))
        found.append(record)
    return found


def predicted_seconds(name: str, row: str, options: dict[str, str]) -> float | None:
    """What a row is predicted to take; None if the benchmark predicts nothing."""
    predict = getattr(importlib.import_module(BENCHMARKS[name]), "seconds", None)
    return None if predict is None else float(predict(row, options))


def time_limit(seconds: float) -> float:
    """The seconds after which a row is killed that was predicted to take `seconds`."""
    return 2 * seconds + GRACE


def choose(name: str, only: list[str], options: list[str]) -> list[str]:
    """The rows whose names contain one of `only`. Raises ValueError as `parse` does."""
    rows: list[str] = importlib.import_module(BENCHMARKS[name]).rows(parse(name, options))
    return [row for row in rows if not only or any(word in row for word in only)]


def run_in_this_process(name: str, row: str, options: dict[str, str]) -> None:
    """Import, wait for a line on stdin, which means that the device is free, and measure."""
    benchmark = importlib.import_module(BENCHMARKS[name])
    end_with_parent()
    if hasattr(benchmark, "prepare"):
        benchmark.prepare(row)
    measure = partial(benchmark.measure, row, options)
    if hasattr(benchmark, "ready"):
        measure = benchmark.ready(row, options)
    if not sys.stdin.readline():  # the parent has exited, or leaves the row out
        end_tree(os.getpid())
    measured = measure()
    named = {} if hasattr(benchmark, "TOGETHER") else {"row": row}
    for record in [measured] if isinstance(measured, dict) else measured:
        print(RESULT + json.dumps({**named, **record}), flush=True)


def whole_text(name: str) -> bool:
    """Whether --out of a benchmark is made of all its records, rather than row by row."""
    return hasattr(importlib.import_module(BENCHMARKS[name]), "text")


def run_benchmark(
    name: str, rows: list[str], options: list[str], deadline: float = float("inf")
) -> Iterator[list[RowRecord]]:
    """Measure `rows` and yield the records of each; none starts after `deadline`, monotonic."""
    benchmark = importlib.import_module(BENCHMARKS[name])
    if hasattr(benchmark, "TOGETHER") and rows:
        rows = [benchmark.TOGETHER.join(rows)]
    waiting: deque[RowProcess] = deque()
    for number, row in enumerate(rows):
        while len(waiting) <= AHEAD and number + len(waiting) < len(rows):
            waiting.append(RowProcess(name, rows[number + len(waiting)], options))
        process = waiting.popleft()
        seconds = predicted_seconds(name, row, parse(name, options))
        left = deadline - time.monotonic()
        limit = None if seconds is None else min(time_limit(seconds), left + BEYOND)
        records = process.measure(limit) if left > (seconds or 0) else process.leave_out()
        for record in records:
            print(json.dumps(record), flush=True)
        yield records


def print_table(records: list[RowRecord]) -> None:
    """Print Markdown with one line per record and columns in the order of their first use.

    Records with a key `table` are printed first, in a table with that title.
    """
    titles = {record["table"]: None for record in records if "table" in record}
    for title in titles:
        print(f"\n{title}:")
        print_table(
            [
                {key: value for key, value in record.items() if key != "table"}
                for record in records
                if record.get("table") == title
            ]
        )
    records = [record for record in records if "table" not in record]
    if not records:
        return
    columns = list(dict.fromkeys(key for record in records for key in record))
    print("\n| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for record in records:
        print("| " + " | ".join(str(record.get(column, "")) for column in columns) + " |")


if __name__ == "__main__":
    process.run(main)
