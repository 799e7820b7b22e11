"""Fine-tune a pretrained checkpoint on synthetic tasks with each recipe, and compare accuracies.

    python tools/study_finetune.py configs/studies/finetune.yaml --checkpoint runs/trunk \\
        --runs runs/finetune --out finetune.jsonl
    python tools/study_finetune.py configs/studies/finetune.yaml --out finetune.jsonl --report

This is COAT's table 4 (arXiv 2410.19313) with tasks that need no download: addition, sorting and
closing of brackets (tools/studies/tasks.py), as prompts and completions in bytes. --checkpoint is a
checkpoint, or a run, whose newest one is read; its tokenizer must be `byte`. All runs start from
its weights and have its section `model`. The file of the study is one of tools/study_loss.py
(tools/studies/loss_study.py describes it) without `trunk`; seeds differ in the order of samples
only. Only completions count in the loss (data.loss_mask=completion).

When a run ends, this process evaluates it in fp32: the share of test examples whose completion
greedy decoding reproduces exactly (coatlm/evaluation/exact_match.py). Test examples are never
trained on. One line about the run is then appended to --out. Runs are stopped, continued and
retried as by tools/study_loss.py.

Prints a table in Markdown with accuracies as mean +- standard error over seeds, and with their
differences to the reference, paired by seed; writes it as JSON beside --out. --report trains
nothing and does only this.

Exit code: 0 all runs of the call have finished; 1 some have failed; 2 an error, which one line
explains; 85 some are unfinished.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import argparse
import dataclasses
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coatlm.console import Parser, fail, local_path
from coatlm.data.chat import ChatFormat
from coatlm.data.preprocess import preprocess
from coatlm.data.token_shard import Options
from coatlm.data.tokenizer import ByteTokenizer
from coatlm.evaluation.exact_match import exact_matches
from coatlm.evaluation.model import open_model
from coatlm.files import check_output, whole_file
from coatlm.platform import device
from coatlm.train.checkpoint import CheckpointError, named_checkpoint, saved_config
from coatlm.train.state import read_run_state

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]  # the repository

from tools import study_loss  # noqa: E402
from tools.studies.accuracy_table import markdown, tabulate  # noqa: E402
from tools.studies.loss_lines import DONE, Line, read_lines  # noqa: E402
from tools.studies.loss_study import LossStudy, read_study  # noqa: E402
from tools.studies.tasks import TASKS, TaskExample, draw_pairs, write_pairs  # noqa: E402

logger = logging.getLogger("study_finetune")

BATCH = 256  # test examples per forward pass
MOST_EXAMPLES = 100_000
LAST = 1 << 30  # steps between checkpoints: only the last step, which is evaluated, has one
BYTE = ByteTokenizer()


class FinetuneSession(study_loss.Session):
    """One call of the tool that trains. A line has the accuracy of each task too."""

    def __init__(
        self, study: LossStudy, options: argparse.Namespace, test: Sequence[TaskExample], start: str
    ) -> None:
        super().__init__(study, options)
        self.test, self.origin = test, f"checkpoint {start}"
        self.common["protocol"] |= {"checkpoint": start, "train": options.train, "test": len(test)}

    def _append(self, line: Line) -> None:
        if line["state"] == DONE:
            jobs = {(job.recipe, job.seed): job for job in self.jobs}
            directory = jobs[line["recipe"], line["seed"]].config.run.dir
            line = line | {"accuracy": accuracies(directory, self.test)}
        super()._append(line)


def accuracies(run: Path, test: Sequence[TaskExample]) -> dict[str, float]:
    """Task -> % of its examples that the newest checkpoint of a run decodes exactly."""
    checkpoint = named_checkpoint(run, logger)
    examples = [
        (BYTE.encode(pair.prompt), [*BYTE.encode(pair.completion), BYTE.eod]) for pair in test
    ]
    window = max(len(prompt) + len(completion) - 1 for prompt, completion in examples)
    saved = read_run_state(checkpoint)["config"]
    with open_model(checkpoint, saved, window=window, precision="fp32") as model:
        right = exact_matches(model, examples, window=window, batch=BATCH, device=device())
    found = {}
    for task in TASKS:
        mine = [ok for ok, pair in zip(right, test, strict=True) if pair.task == task]
        found[task] = 100.0 * sum(mine) / len(mine)
    return found


def fine_tuning(study: LossStudy, checkpoint: Path, prefix: Path) -> LossStudy:
    """The study that starts from a checkpoint's weights, on the tasks prepared at `prefix`.

    Raises ValueError for a study with a trunk, and for a checkpoint with another tokenizer;
    CheckpointError for one that cannot be read.
    """
    if study.trunk is not None:
        raise ValueError(f"{study.name}: trunk: a fine-tuning study starts from --checkpoint")
    config = saved_config(checkpoint, read_run_state(checkpoint))
    if config.data.tokenizer != BYTE.spec:
        raise ValueError(
            f"{checkpoint}: data.tokenizer={config.data.tokenizer}: the tasks are written in bytes"
        )
    base: dict[str, Any] = {**study.base}  # of sections, and perhaps a preset
    base["model"] = config.model.model_dump(mode="json")
    fixed = {"text": [], "paths": [str(prefix)], "tokenizer": BYTE.spec, "loss_mask": "completion"}
    base["data"] = base.get("data", {}) | fixed
    start = {"resume": str(checkpoint.absolute()), "weights_only": True, "every": LAST}
    base["checkpoint"] = base.get("checkpoint", {}) | start
    return dataclasses.replace(study, base=base)


def prepare_tasks(runs: Path, train: int, test: int) -> tuple[Path, list[TaskExample]]:
    """Write the examples below `runs`/tasks; returns the dataset's prefix and the test examples."""
    taught, asked = draw_pairs(train, test)
    directory = runs / "tasks"
    directory.mkdir(parents=True, exist_ok=True)
    source, prefix = directory / f"train-{train}-{test}.jsonl", directory / f"train-{train}-{test}"
    if not source.exists():  # a new mtime would be other input
        with whole_file(source) as file:
            write_pairs(taught, file)
    preprocess([str(source)], prefix, Options(chat=ChatFormat("")), workers=1)
    return prefix.absolute(), asked


def report(reference: str, out: Path) -> None:
    """Print the table and write it as JSON. Raises ValueError."""
    lines = read_lines(out)
    if not lines:
        print("no run has ended yet")
        return
    if any("accuracy" not in line for line in lines if line["state"] == DONE):
        raise ValueError(f"{out}: holds lines of tools/study_loss.py, without accuracies")
    rows = tabulate(lines, reference)
    with whole_file(out.with_suffix(".json")) as file:
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print("\n".join(markdown(rows)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = parse(arguments)
    end = study_loss.deadline(options.minutes)
    # megatron-core warns on import of optional packages
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    try:
        chosen = {"recipes": options.recipes, "seeds": options.seeds}
        study = read_study(options.study, options.overrides, **chosen)
        check_output(options.out)
        code = 0
        if not options.report:
            checkpoint = named_checkpoint(options.checkpoint, logger)
            prefix, test = prepare_tasks(options.runs, options.train, options.test)
            study = fine_tuning(study, checkpoint, prefix)
            session = FinetuneSession(study, options, test, study_loss.fingerprint(checkpoint))
            code = session.run(end, retry=options.retry)
        report(study.reference, options.out)
    except (ValueError, OSError, CheckpointError) as error:
        return fail(error)
    return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; a mistake ends the process with exit code 2."""
    parser = Parser(__doc__)
    study_loss.add_options(parser)
    parser.add_argument("--checkpoint", type=local_path, help="a run or a checkpoint to start from")
    parser.add_argument("--train", type=int, default=20_000, help="examples per task (%(default)s)")
    parser.add_argument("--test", type=int, default=1_000, help="examples per task (%(default)s)")
    options = parser.parse_intermixed_args(arguments)
    study_loss.check_options(parser, options, needed=("runs", "checkpoint"))
    for name in ("train", "test"):
        if not 1 <= getattr(options, name) <= MOST_EXAMPLES:
            parser.error(f"--{name} {getattr(options, name)}: 1 to {MOST_EXAMPLES}")
    return options


if __name__ == "__main__":
    process.run(main, hint="the same command continues")
