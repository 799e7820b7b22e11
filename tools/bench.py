"""Benchmarks: `python tools/bench.py NAME [options]` prints a table and writes JSON with --out.

Rows are measured one after the other, each in its own process, so that no row inherits memory or
caches of another; processes of later rows import their libraries meanwhile. (The rows of `reduce`
use several GPUs, are short and share one set of processes.) Peers that are not installed are
skipped and named. Times are medians over steps, from CUDA events or with a synchronized device.
Compare ratios within one run, because machines differ.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import argparse
import importlib
import json
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from coatlm.config.urls import WRITTEN_HERE, is_url
from coatlm.console import Parser, fail, output_path
from coatlm.files import check_output, whole_file

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = {  # name -> module, which has OPTIONS (names of options), `rows(options)` (names of
    # its rows), `gpus(options)` (GPUs that it needs) and `measure(row, options)`, which returns one
    # record or several. Optional: `prepare(row)` imports what a row needs, `summary(records)`
    # adds a table, TOGETHER joins the names of all rows, which one process then measures, and
    # `text(records, options)` is what --out writes in place of JSON, if it is the only benchmark
    "attention": "tools.benchmarks.attention",
    "context": "tools.benchmarks.context",
    "data": "tools.benchmarks.data",
    "documents": "tools.benchmarks.documents",
    "end-to-end": "tools.benchmarks.end_to_end",
    "gradients": "tools.benchmarks.gradients",
    "layer": "tools.benchmarks.layer",
    "layer-kernels": "tools.benchmarks.layer_kernels",
    "layouts": "tools.benchmarks.layouts",
    "memory": "tools.benchmarks.memory",
    "optimizer": "tools.benchmarks.optimizer",
    "output-layer": "tools.benchmarks.output_layer",
    "quantize": "tools.benchmarks.quantize",
    "rates": "tools.benchmarks.rates",
    "reduce": "tools.benchmarks.reduce",
}
COUNTS = (  # integer options of any benchmark
    *("batch", "document", "ffn", "gpus", "hidden", "layers", "mb", "mbs", "microbatches"),
    *("ranks", "reps", "seq", "steps", "tokens", "values", "vocab"),
)
LARGEST = 1 << 34
FLAGS = ("first", "graph", "profile", "smoke")  # --profile is the option profile=1
RESULT = "RESULT "  # prefix of a record in the output of a row's process
EXCEPTION = re.compile(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception|Exit|Interrupt)\b")
AHEAD = 2  # processes that import their libraries while another row is measured


def main() -> None:
    """Run one benchmark, or (--row) one row of it in this process."""
    parser = Parser(__doc__)
    parser.add_argument("name", nargs="?", choices=BENCHMARKS, help="default: all of them")
    parser.add_argument(
        "--only", nargs="*", default=[], help="rows whose name contains one of these"
    )
    parser.add_argument(
        "--out", type=output_path, help="write the records here as JSON, after each row"
    )
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds; no row starts later"
    )
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument(
        "options", nargs="*", metavar="key=value", help="see the benchmark's module"
    )
    flags = [word for word in sys.argv[1:] if word.startswith("--") and word[2:] in FLAGS]
    args = parser.parse_intermixed_args([word for word in sys.argv[1:] if word not in flags])
    names = [args.name] if args.name else list(BENCHMARKS)
    args.options += [f"{flag[2:]}=1" for flag in flags]
    if args.row:
        run_in_this_process(args.name, args.row, parse(args.name, args.options))
        return
    try:
        rows = {name: choose(name, args.only, args.options) for name in names}
        if not args.budget >= 0:
            raise ValueError(f"--budget {args.budget}: seconds, at least 0")
        if not any(rows.values()):
            only = " ".join(args.only)
            raise ValueError(f"--only {only}: no row of {', '.join(names)} contains that")
        check_gpus(names, args.options)
        if args.out:
            check_output(args.out)
    except ValueError as error:
        sys.exit(fail(error))
    found: dict[str, list[dict[str, Any]]] = {}
    deadline = time.monotonic() + args.budget
    for name in names:
        found[name] = []
        for records in run_benchmark(name, rows[name], args.options, deadline):
            found[name] += records
            if args.out and not whole_text(name):
                save(found, args.out, args.options)
        print_table(found[name])
        summary = getattr(importlib.import_module(BENCHMARKS[name]), "summary", None)
        if summary is not None:
            print_table(summary(found[name]))
        if args.out:
            save(found, args.out, args.options)


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


def save(found: dict[str, list[dict[str, Any]]], path: Path, options: list[str]) -> None:
    """Write the records measured so far. Exits with one line if the disk is full."""
    text = json.dumps(found, indent=1) + "\n"
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


def choose(name: str, only: list[str], options: list[str]) -> list[str]:
    """The rows whose names contain one of `only`. Raises ValueError as `parse` does."""
    rows: list[str] = importlib.import_module(BENCHMARKS[name]).rows(parse(name, options))
    return [row for row in rows if not only or any(word in row for word in only)]


def run_in_this_process(name: str, row: str, options: dict[str, str]) -> None:
    """Import, wait for a line on stdin, which means that the device is free, and measure."""
    benchmark = importlib.import_module(BENCHMARKS[name])
    if hasattr(benchmark, "prepare"):
        benchmark.prepare(row)
    if not sys.stdin.readline():
        return  # the parent has exited
    measured = benchmark.measure(row, options)
    for record in [{"row": row, **measured}] if isinstance(measured, dict) else measured:
        print(RESULT + json.dumps(record), flush=True)


def whole_text(name: str) -> bool:
    """Whether --out of a benchmark is made of all its records, rather than row by row."""
    return hasattr(importlib.import_module(BENCHMARKS[name]), "text")


def run_benchmark(
    name: str, rows: list[str], options: list[str], deadline: float = float("inf")
) -> Iterator[list[dict[str, Any]]]:
    """Measure `rows` and yield the records of each; none starts after `deadline`, monotonic."""
    benchmark = importlib.import_module(BENCHMARKS[name])
    if hasattr(benchmark, "TOGETHER") and rows:
        rows = [benchmark.TOGETHER.join(rows)]
    waiting: deque[RowProcess] = deque()
    for number in range(len(rows)):
        while len(waiting) <= AHEAD and number + len(waiting) < len(rows):
            waiting.append(RowProcess(name, rows[number + len(waiting)], options))
        process = waiting.popleft()
        records = process.measure() if time.monotonic() < deadline else process.leave_out()
        for record in records:
            print(json.dumps(record), flush=True)
        yield records


class RowProcess:
    """The process of a row. It starts and imports immediately, and measures on demand."""

    def __init__(self, benchmark: str, row: str, options: list[str]) -> None:
        self.row = row
        command = [sys.executable, str(Path(__file__)), benchmark, "--row", row, *options]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def leave_out(self) -> list[dict[str, Any]]:
        """End the process; returns a record with the reason."""
        self.process.communicate("")
        return [{"row": self.row, "missing": "no time left"}]

    def measure(self) -> list[dict[str, Any]]:
        """Measure; returns the row's records, and after a failure one with the reason."""
        output, errors = self.process.communicate("go\n")
        records = []
        for line in output.splitlines():
            if line.startswith(RESULT):
                records.append(json.loads(line.removeprefix(RESULT)))
        if self.process.returncode or not records:
            records.append({"row": self.row, "missing": last_error(errors)[:300]})
        return records


def last_error(errors: str) -> str:
    """The last line of `errors` that starts with the name of an exception, else the last line.

    At exit libraries may print warnings after a traceback.
    """
    lines = errors.strip().splitlines() or ["no output"]
    return next((line for line in reversed(lines) if EXCEPTION.match(line)), lines[-1])


def print_table(records: list[dict[str, Any]]) -> None:
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
    sys.path.insert(0, str(ROOT))
    process.run(main)
