"""The lines of a loss study's results: one JSON object per run.

    study recipe seed state overrides ranks protocol device data trunk    what was trained
    val_loss last_loss first_loss bits_per_byte evaluations          nats per token (bits per byte)
    begin tokens steps epochs params eval_tokens skipped             how much
    tokens_per_s peak_gib seconds versions                           how fast, on what
    exit_code last_line                                              of a run that failed

`state` is done or failed. `last_loss` is the mean loss of the last 5 % of the steps, `first_loss`
that of the first step, by which different initial weights can be seen. `begin` is the last step of
the trunk, 0 without one; the seconds in `evaluations` count from it. `tokens_per_s` is the median
over logged lines, of all ranks together; `seconds` is the wall time of the processes, with their
start. `evaluations` has [step, seconds of training, validation loss] of each evaluation; its
seconds are steps times the median step time, so that start, compilation, evaluations and the
GPU's other users do not count.

`protocol` and `data` (a hash of the tokens, `coatlm.data.identity`) say whether two lines may be
compared: lines of other machines and days are pooled if both are equal. `trunk` is a hash of the
trunk's checkpoint. `data` may differ between lines of different trunks, which are never paired. A
trunk's own line has the recipe `trunk`.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coatlm.commands.curves import read_run
from coatlm.config import Config
from coatlm.data.dataset import Datasets, open_datasets
from coatlm.data.tokenizer import make_tokenizer
from coatlm.model.accounting import model_vocab, parameters
from coatlm.train.run_directory import is_value, read_environment, read_metrics

Line = dict[str, Any]
LineKey = tuple[str, int, str | None]  # recipe, seed, trunk
DONE, FAILED = "done", "failed"
LOSSES = ("val_loss", "last_loss")
COMPARED = ("study", "device", "data")  # with protocol: must be equal to be compared


@dataclass(frozen=True)
class Prepared:
    """The data of a study, tokenized before the runs start."""

    fingerprint: str
    windows: int  # samples in an epoch of the training part
    params: int


def prepare(config: Config) -> Prepared:
    """Tokenize the data of a study once, for all runs. Raises ValueError.

    The validation split must have as many samples as an evaluation reads: none counts twice.
    """
    if not config.train.eval_every:
        raise ValueError("train.eval_every=0: a study needs the loss after the last step; give > 0")
    tokenizer = make_tokenizer(config.data.tokenizer)
    data = open_datasets(config.data, tokenizer, seed=config.run.seed)
    held_out = 0 if data.validation is None else sum(s.windows for s in data.validation.streams)
    read = config.train.eval_batches * config.train.global_batch
    if read > held_out:
        raise ValueError(
            f"train.eval_batches={config.train.eval_batches}: an evaluation reads {read} samples, "
            f"the validation split of data.split={list(config.data.split)} has {held_out}"
        )
    return Prepared(
        _fingerprint(data),
        sum(stream.windows for stream in data.train.streams),
        parameters(config.model, model_vocab(config, tokenizer.vocab_size)),
    )


def _fingerprint(data: Datasets) -> str:
    return hashlib.sha256(json.dumps(data.identity(), sort_keys=True).encode()).hexdigest()[:16]


def result(config: Config, ranks: int, prepared: Prepared, *, begin: int = 0) -> Line:
    """What a finished run, which goes on from step `begin`, has logged.

    Raises ValueError if it is not finished or not finite.
    """
    directory, train = config.run.dir, config.train
    records = read_metrics(directory)
    steps = [r for r in records if is_value(r.get("loss", ""))]
    done = steps[-1]["step"] if steps else 0
    evaluated = [r for r in records if "val_loss" in r and r["step"] == train.steps]
    if done != train.steps or not evaluated:
        raise ValueError(f"{directory}: at step {done} of {train.steps}, or no final val_loss")
    val_loss, last = evaluated[-1]["val_loss"], read_run(directory).final
    if val_loss is None or not math.isfinite(last):
        raise ValueError(f"{directory}: its final loss is not finite")
    rates = [r["tokens_per_s_per_gpu"] for r in steps[1:]]  # the first step compiles
    peaks = [r["peak_mem_gib"] for r in steps if r.get("peak_mem_gib") is not None]
    step_s = statistics.median([r["step_ms"] for r in steps[1:] or steps]) / 1000
    env = read_environment(directory)
    return {
        "val_loss": val_loss,
        "last_loss": last,
        "first_loss": steps[0]["loss"] if steps[0]["step"] == 1 else None,
        "begin": begin,
        "bits_per_byte": val_loss / math.log(2) if config.data.tokenizer == "byte" else None,
        "evaluations": [
            [r["step"], round((r["step"] - begin) * step_s, 3), r["val_loss"]]
            for r in records
            if r.get("val_loss") is not None
        ],
        "tokens": steps[-1]["tokens"],
        "steps": train.steps,
        "epochs": round(train.steps * train.global_batch / prepared.windows, 4),
        "params": prepared.params,
        "eval_tokens": train.eval_batches * train.global_batch * config.data.seq_len,
        "skipped": steps[-1]["skipped"],
        "tokens_per_s": round(statistics.median(rates) * ranks, 1) if rates else None,
        "peak_gib": max(peaks, default=None),
        "versions": {
            **env.get("packages", {}),
            **{key: env.get(key) for key in ("git_commit", "python", "cuda", "gpu")},
        },
    }


def read_lines(path: Path) -> list[Line]:
    """Read the lines of a file that this tool wrote; [] if there is none. Raises ValueError."""
    if not path.exists():
        return []
    return list(_parsed(path))


def _parsed(path: Path) -> Iterator[Line]:
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            whole = isinstance(line, dict) and line["state"] in (DONE, FAILED)
            whole &= isinstance(line["protocol"], dict) and isinstance(line["overrides"], list)
            whole &= isinstance(line["recipe"], str) and type(line["seed"]) is int
            whole &= line["state"] == FAILED or all(type(line[key]) is float for key in LOSSES)
        except (ValueError, KeyError, TypeError, RecursionError):
            whole = False
        if not whole:
            raise ValueError(f"{path}, line {number}: not a line of a loss study")
        yield line


def append_line(path: Path, line: Line) -> None:
    """Append one line, which is flushed to the file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def key_of(line: Line) -> LineKey:
    """What identifies the run of a line."""
    return line["recipe"], line["seed"], line.get("trunk")


def newest(lines: Sequence[Line]) -> dict[LineKey, Line]:
    """Each run's line. A later line replaces one that failed.

    Raises ValueError for two finished runs of one recipe, seed and trunk.
    """
    found: dict[LineKey, Line] = {}
    for line in lines:
        key = key_of(line)
        before = found.get(key)
        if before is not None and before["state"] == line["state"] == DONE:
            raise ValueError(f"recipe={key[0]} seed={key[1]}: has two lines of finished runs")
        if before is None or before["state"] == FAILED:
            found[key] = line
    return found


def check_all_comparable(lines: Sequence[Line]) -> None:
    """Raise ValueError unless all lines compare: those of a recipe, and those of all recipes."""
    without_trunk = [x for x in lines if x.get("trunk") is None][:1]
    for line in lines:
        alike = [
            next(x for x in lines if x.get(key) == line.get(key)) for key in ("recipe", "trunk")
        ]
        for other in (*alike, lines[0], *without_trunk):
            check_comparable(other, line)


def check_comparable(line: Line, other: Line) -> None:
    """Raise ValueError with the field's name if the runs of two lines must not be compared."""
    a, b = ({k: x.get(k) for k in COMPARED} | _keys(x["protocol"]) for x in (line, other))
    trunks = {line.get("trunk"), other.get("trunk")}
    if len(trunks) == 2 and None not in trunks:  # which are no pair
        del a["data"], b["data"]
    if line["recipe"] == other["recipe"]:
        for x, line_x in ((a, line), (b, other)):
            x["overrides"], x["ranks"] = line_x["overrides"], line_x.get("ranks")
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key):
            names = " and ".join(f"{x['recipe']}, seed {x['seed']}" for x in (line, other))
            raise ValueError(
                f"{key}: {a.get(key, 'default')} and {b.get(key, 'default')}: lines of different "
                f"protocols or data are not compared ({names}); keep them in different files"
            )


def _keys(protocol: Mapping[str, Any]) -> dict[str, Any]:
    return {f"protocol {key}": value for key, value in protocol.items()}
