"""Benchmarks: `python tools/bench.py NAME [options]` prints a table and writes JSON with --out.

Every row is measured in a process of its own, so that no row inherits another's memory or caches;
peers that are not installed are left out and named. Times are medians over steps, by CUDA events or
with the device synchronised. Compare ratios within one run: machines differ.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = {  # name -> module with `rows(options) -> names` and `measure(name, options)`
    "end-to-end": "tools.benchmarks.end_to_end",
    "layer-kernels": "tools.benchmarks.layer_kernels",
    "optimizer": "tools.benchmarks.optimizer",
    "quantize": "tools.benchmarks.quantize",
    "reduce": "tools.benchmarks.reduce",
}
RESULT = "RESULT "  # a row's process prints its record behind this


def main() -> None:
    """Run one benchmark, or (--row) one row of it in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", choices=BENCHMARKS, help="all of them unless given")
    parser.add_argument(
        "--only", nargs="*", default=[], help="rows whose name contains one of these"
    )
    parser.add_argument("--out", type=Path, help="write the records here as JSON")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", metavar="key=value", help="what the benchmark takes")
    args = parser.parse_intermixed_args()
    options = dict(option.split("=", 1) for option in args.options)
    if args.row:
        benchmark = importlib.import_module(BENCHMARKS[args.name])
        print(RESULT + json.dumps(benchmark.measure(args.row, options)), flush=True)
        return
    found = {}
    for name in [args.name] if args.name else BENCHMARKS:
        found[name] = run_benchmark(name, args.only, args.options)
        print_table(found[name])
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def run_benchmark(name: str, only: list[str], options: list[str]) -> list[dict[str, Any]]:
    """The records of all rows, or of those whose name contains one of `only`."""
    benchmark = importlib.import_module(BENCHMARKS[name])
    rows = benchmark.rows(dict(option.split("=", 1) for option in options))
    records = []
    for row in rows:
        if only and not any(word in row for word in only):
            continue
        for record in run_row(name, row, options):
            records.append(record)
            print(json.dumps(record), flush=True)
    return records


def run_row(benchmark: str, row: str, options: list[str]) -> list[dict[str, Any]]:
    """The records of a row (most have one), or why there is none."""
    command = [sys.executable, str(Path(__file__)), benchmark, "--row", row, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            found = json.loads(line.removeprefix(RESULT))
            return found if isinstance(found, list) else [{"row": row, **found}]
    reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return [{"row": row, "missing": reason[:300]}]


def print_table(records: list[dict[str, Any]]) -> None:
    """Markdown, a row a record, columns in the order in which they first appear."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    print("\n| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for record in records:
        print("| " + " | ".join(str(record.get(column, "")) for column in columns) + " |")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
