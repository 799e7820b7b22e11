"""Write a run as one HTML page, which needs no network and no other file.

    coatlm report runs/quickstart                       # writes runs/quickstart/report.html
    coatlm report runs/coat --with runs/bf16 runs/fp32 --out compared.html

The page has what the run has logged: the loss and its difference to that of the other runs, norms,
throughput, memory, the errors of FP8 states and tensors, these also by layer (log.numerics_every),
what precision.guard found, warnings, starts and earlier attempts, and the configuration, with the
keys in which the runs differ. Figures can be zoomed, and show the values under the pointer.

It needs plotly (pip install 'coatlm[report]'), whose 4.8 MB of code become part of the page.
Whatever comes from a run is escaped, and the page may neither load nor send anything.

Exit code: 0, or 2 for an error, which one line explains.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import html
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coatlm.commands.curves import LoggedRun, read_runs
from coatlm.config import ConfigError, dotted, read_mapping
from coatlm.config.errors import printable
from coatlm.console import Parser, fail, local_path, output_path
from coatlm.files import check_output, check_replaced, whole_file
from coatlm.train.run_directory import (
    NUMERICS,
    Record,
    earlier_attempts,
    is_value,
    read_environment,
    read_metrics,
    read_records,
)

MOST_EVENTS = 200  # rows of a table; the last ones are shown
# lines of train.log besides warnings and errors
EVENT = re.compile(r"(\S+ \S+) (WARNING|ERROR|INFO) (.*)")
TOLD = re.compile(r"resumed from|stopped at|done: step|weights of|SIG\w+: saved")
FOUND = ("layer", "tensor", "measure", "value", "limit", "action")  # of a finding of the guard
TableRows = Iterable[Sequence[object]]

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline';
 style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; margin: 1em auto; max-width: 100em; padding: 0 1em }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(36em, 1fr)) }}
.scroll {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-size: 90% }}
td, th {{ border-bottom: 1px solid #ddd; padding: .2em 1em .2em 0; text-align: left }}
.differs {{ background: #fff3cd }}
</style>
<script>{plotly}</script>
<h1>{title}</h1>
{body}
</html>
"""
BEGIN = PAGE[: PAGE.index("{title}")]


@dataclass(frozen=True)
class ReportedRun:
    """A run directory, read: its curves and what only the report shows."""

    name: str
    directory: Path
    logged: LoggedRun
    metrics: Sequence[Record]
    numerics: Sequence[Record]
    environment: Mapping[str, Any]
    config: Mapping[str, Any]  # dotted key -> value


def read(directories: Sequence[Path]) -> list[ReportedRun]:
    """Read run directories. Raises ValueError if one has no logged loss, or for equal names."""
    return [
        ReportedRun(
            name,
            directory,
            logged,
            read_metrics(directory),
            read_records(directory / NUMERICS),
            read_environment(directory),
            configuration(directory),
        )
        for (name, logged), directory in zip(
            read_runs(directories).items(), directories, strict=True
        )
    ]


def configuration(directory: Path) -> dict[str, Any]:
    """The keys of config.yaml; empty if it cannot be read."""
    try:
        return dict(dotted(read_mapping(directory / "config.yaml")))
    except ConfigError:
        return {}


def page(runs: Sequence[ReportedRun], plotly: str, figures: Mapping[str, Sequence[str]]) -> str:
    """The page of the first run and those it is compared with.

    `plotly` is JavaScript; `figures` has the HTML of the figures of each section.
    """
    sections = {"Summary": table(["", *(run.name for run in runs)], summary(runs))}
    for name, drawn in figures.items():
        sections[name] = f"<div class='figures'>{''.join(drawn)}</div>"
    first = runs[0]
    sections["FP8 guard"] = table(["step", *FOUND], findings(first))
    sections["Faults and restarts"] = table(["", "", ""], events(first))
    sections["Configuration"] = table(["", *(run.name for run in runs)], settings(runs), mark=True)
    body = "\n".join(f"<h2>{name}</h2>\n{text}" for name, text in sections.items() if text)
    return PAGE.format(title=html.escape(first.name), plotly=plotly, body=body)


def table(head: Sequence[str], rows: TableRows, *, mark: bool = False) -> str:
    """An HTML table; empty without rows. `mark` colors rows whose columns differ."""
    lines = []
    for name, *values in rows:
        differs = mark and len(set(map(str, values))) > 1
        cells = "".join(f"<td>{cell(value)}</td>" for value in (name, *values))
        lines.append(f"<tr{' class=differs' if differs else ''}>{cells}</tr>")
    if not lines:
        return ""
    titles = "".join(f"<th>{cell(title)}</th>" for title in head)
    return f"<div class='scroll'><table><tr>{titles}</tr>\n" + "\n".join(lines) + "</table></div>"


def cell(value: object) -> str:
    """A value in HTML: numbers in 5 digits, text escaped, nothing for None."""
    if value is None:
        return ""
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return html.escape(printable(text))


def summary(runs: Sequence[ReportedRun]) -> Iterator[Sequence[object]]:
    """Yield rows of the first table: results, then where the run was made."""
    columns = [dict(results(run)) for run in runs]
    for name in dict.fromkeys(name for column in columns for name in column):
        yield name, *(column.get(name) for column in columns)


def results(run: ReportedRun) -> Iterator[tuple[str, object]]:
    last = [record for record in run.metrics if is_value(record.get("loss", ""))][-1]
    yield "steps", f"{last['step']} of {run.config.get('train.steps', '?')}"
    yield "tokens", f"{last['tokens']:,}" if type(last.get("tokens")) is int else None
    yield "final loss, mean of the last 5 % of the steps", run.logged.final
    yield "last validation loss", run.logged.val_loss
    yield "skipped steps", run.logged.skipped
    for key, name in (("tokens_per_s_per_gpu", "tokens/s per GPU, median"), ("mfu", "mfu, median")):
        yield name, middle(run.logged.curves.get(f"metrics.{key}", {}).values())
    memory = run.logged.curves.get("metrics.peak_mem_gib", {}).values()
    yield "peak memory (GiB)", max((value for value in memory if value == value), default=None)
    yield "earlier attempts", len(earlier_attempts(run.directory))
    yield "precision.recipe", run.config.get("precision.recipe")
    yield "optim.recipe", run.config.get("optim.recipe")
    for key in ("started", "host", "gpu", "git_commit", "command"):
        value = run.environment.get(key)
        yield key, " ".join(map(str, value)) if isinstance(value, list) else value
    packages = run.environment.get("packages")
    if isinstance(packages, Mapping):
        yield "packages", ", ".join(f"{k} {v}" for k, v in packages.items() if v is not None)


def middle(values: Iterable[float]) -> float | None:
    """The median of the values that are not NaN; None without any."""
    known = [value for value in values if value == value]
    return statistics.median(known) if known else None


def findings(run: ReportedRun) -> TableRows:
    """What precision.guard found."""
    found = [record for record in run.metrics if "measure" in record and "limit" in record]
    return [(r["step"], *(r.get(key) for key in FOUND)) for r in found[-MOST_EVENTS:]]


def events(run: ReportedRun) -> TableRows:
    """Starts, stops, warnings and errors of train.log, rollbacks, and earlier attempts."""
    rows: list[Sequence[object]] = [
        ("attempt", path.name, f"{len(read_metrics(path))} records")
        for path in earlier_attempts(run.directory)
    ]
    for record in run.metrics:
        if "rolled_back_from" in record:
            what = f"rolled back, without batches {record.get('left_out')}"
            rows.append(("step", record["rolled_back_from"], what))
    try:
        text = (run.directory / "train.log").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return rows[-MOST_EVENTS:]
    for found in filter(None, map(EVENT.match, text.splitlines())):
        time, level, what = found.groups()
        if level != "INFO" or TOLD.match(what):
            rows.append((time, level.lower(), what))
    return rows[-MOST_EVENTS:]


def settings(runs: Sequence[ReportedRun]) -> Iterator[Sequence[object]]:
    """Yield a row per key of the configurations: first those in which the runs differ."""
    rows = [
        (key, *(run.config.get(key, "") for run in runs))
        for key in dict.fromkeys(key for run in runs for key in run.config)
    ]
    yield from sorted(rows, key=lambda row: len(set(map(str, row[1:]))) == 1)


def check_page(out: Path) -> None:
    """Raise ValueError unless `out` is *.html, and no file yet or a report to be replaced."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out {out}: must end with .html")
    check_replaced(out, BEGIN, "report")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(__doc__, "report")
    parser.add_argument("run", type=local_path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--with",
        dest="others",
        nargs="+",
        type=local_path,
        default=[],
        metavar="RUN",
        help="compare",
    )
    parser.add_argument("--out", type=output_path, help="*.html (default: RUN/report.html)")
    options = parser.parse(arguments)
    out = options.out or options.run / "report.html"
    try:
        from coatlm.commands.report_figures import draw, plotly_js
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("plotly"):
            raise
        return fail(ValueError("a report needs plotly: pip install 'coatlm[report]'"))
    try:
        check_page(out)
        check_output(out)
        runs = read([options.run, *options.others])
        text = page(runs, plotly_js(), draw(runs))
        with whole_file(out) as file:
            file.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        return fail(error)
    print(out)
    return 0


if __name__ == "__main__":
    process.run(main)
