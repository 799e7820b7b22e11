"""Compare the logged values and the configurations of two runs.

    coatlm compare runs/undisturbed runs/resumed
    coatlm compare runs/one-gpu runs/two-gpus --ignore-config --rtol 1e-3

Every record of metrics.jsonl, and of the other *.jsonl files that both runs have, is compared with
the record of the same step and kind. All values must be equal; with --rtol, numbers may differ by
that share of the larger one. Times and memory (milliseconds, rates per second, GiB, mfu, the
slowest rank) always differ and are not compared. config.yaml is compared key by key, except
run.name, run.dir and data.cache_dir.

Prints the first difference (file, step, key, both values) and for each key how many records differ
and by how much. Exit code: 0 identical, 1 different, 2 for an error, which one line explains.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coatlm.config import dotted, read_mapping
from coatlm.config.errors import printable
from coatlm.console import Parser, fail, local_path
from coatlm.train.run_directory import METRICS, Record, is_value, read_records, task_scores

# keys whose values differ between any two runs
TIMING = re.compile(r"(^|_)(ms|s|seconds|gib)$|_per_gpu$|^(mfu|slowest)$")
PLACES = {"run.name", "run.dir", "data.cache_dir"}  # paths and names, which are not compared
SENT = "comm_bytes_"  # bytes that a rank sent, which depend on the layout
ADDED = {"loss_mean"}  # keys that older versions did not log; compared if both runs have them
NOTHING = "(nothing)"


@dataclass(frozen=True)
class Difference:
    """A value that differs."""

    where: str  # a file, and the step of a record
    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return printable(f"{self.where}: {self.key} is {_show(self.a)} in A, {_show(self.b)} in B")

    @property
    def relative(self) -> float:
        """|a - b| / max(|a|, |b|); inf if one of the two is not a finite number."""
        if not (_number(self.a) and _number(self.b)):
            return math.inf
        return abs(self.a - self.b) / max(abs(self.a), abs(self.b))


def compare_records(
    a: Sequence[Record],
    b: Sequence[Record],
    *,
    file: str,
    rtol: float = 0.0,
    ignore: tuple[str, ...] = (),
) -> Iterator[Difference]:
    """Yield the differences of two files by step; of records with one identity the last counts.

    Keys that begin with one of `ignore` do not count.
    """
    ours, theirs = ({identity(record): record for record in records} for records in (a, b))
    logged = [{key for record in records for key in record} for records in (a, b)]
    later = ADDED - (logged[0] & logged[1])
    for name in sorted(ours.keys() | theirs.keys()):
        where = f"{file} step {name[0]}" + "".join(f", {part}" for part in name[1:] if part)
        if name not in ours or name not in theirs:
            here, there = ("a record", NOTHING) if name in ours else (NOTHING, "a record")
            yield Difference(where, "record", here, there)
            continue
        left, right = ours[name], theirs[name]
        for key in dict.fromkeys([*left, *right]):
            x, y = left.get(key, NOTHING), right.get(key, NOTHING)
            found = Difference(where, key, x, y)
            if (
                key not in later
                and not TIMING.search(key)
                and not key.startswith(ignore)
                and x != y
                and not found.relative <= rtol
            ):
                yield found


def identity(record: Record) -> tuple[Any, ...]:
    """The identity of a record: its step, its kind of evaluation, its layer and its names."""
    names = [f"{k} {v}" for k, v in record.items() if k == "layer" or isinstance(v, str)]
    kind = "validation" if "val_loss" in record else "tasks" if task_scores(record) else ""
    return record["step"], kind, *sorted(names)


def compare_configs(a: Path, b: Path) -> list[Difference]:
    """The keys that differ in two config.yaml. Raises ValueError if one cannot be read."""
    ours, theirs = (dict(dotted(_config(run))) for run in (a, b))
    return [
        Difference("config.yaml", key, ours.get(key, NOTHING), theirs.get(key, NOTHING))
        for key in dict.fromkeys([*ours, *theirs])
        if key not in PLACES and ours.get(key, NOTHING) != theirs.get(key, NOTHING)
    ]


def compare_logs(
    a: Path, b: Path, *, rtol: float, ignore: tuple[str, ...] = ()
) -> tuple[int, list[Difference]]:
    """The number of compared records and their differences, those of metrics.jsonl first.

    Raises ValueError if one of the runs has logged nothing.
    """
    for run in (a, b):
        if not read_records(run / METRICS):
            raise ValueError(f"{run}: nothing in {METRICS}, or no such run directory")
    others = {path.name for path in a.glob("*.jsonl")} & {path.name for path in b.glob("*.jsonl")}
    count = 0
    differences: list[Difference] = []
    for name in [METRICS, *sorted(others - {METRICS})]:
        left, right = read_records(a / name), read_records(b / name)
        count += len(left)
        differences += compare_records(left, right, file=name, rtol=rtol, ignore=ignore)
    return count, differences


def summary(differences: Sequence[Difference]) -> Iterator[str]:
    """Yield one line per key: in how many records it differs, and by how much at most."""
    keys: dict[str, list[Difference]] = {}
    for difference in differences:
        keys.setdefault(f"{difference.where.split()[0]} {difference.key}", []).append(difference)
    for key, found in keys.items():
        finite = [d.relative for d in found if d.relative < math.inf]
        most = f", at most {max(finite):.3g} of the larger value" if finite else ""
        yield f"  {printable(key)}: {len(found)} records differ{most}"


def _config(run: Path) -> Any:
    return read_mapping(run / "config.yaml")


def _number(value: Any) -> bool:
    return value is not None and is_value(value)


def _show(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(__doc__, "compare")
    parser.add_argument("a", type=local_path, metavar="A", help="a run directory")
    parser.add_argument("b", type=local_path, metavar="B", help="another one")
    parser.add_argument("--rtol", type=float, default=0.0, help="relative tolerance (default: 0)")
    parser.add_argument(
        "--ignore-config",
        action="store_true",
        help="print keys of the configurations that differ, but do not count them, nor the bytes "
        f"that ranks have sent ({SENT}*)",
    )
    options = parser.parse(arguments)
    try:
        if not 0 <= options.rtol < 1:
            raise ValueError(f"--rtol {options.rtol}: in [0, 1)")
        ignore = (SENT,) if options.ignore_config else ()
        count, logged = compare_logs(options.a, options.b, rtol=options.rtol, ignore=ignore)
        configured = compare_configs(options.a, options.b)
    except (ValueError, OSError) as error:
        return fail(error)
    for difference in configured:
        print(difference)
    if logged:
        print(f"first difference: {logged[0]}", *summary(logged), sep="\n")
    same = not logged and (options.ignore_config or not configured)
    print(f"identical: {count} records" if same else "different")
    return 0 if same else 1


if __name__ == "__main__":
    process.run(main)
