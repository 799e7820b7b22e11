"""Tasks of lm-evaluation-harness (the package lm_eval), evaluated on a model of coatlm.

The harness makes prompts from the examples of a task and metrics from the answers; between them it
asks a model for log-likelihoods of continuations or for generated text. `HarnessModel` answers
with a `train.predict.Predictor`, and with the tokenizer of the run.

    loglikelihood            a row of context and continuation: its loss, and whether it is greedy
    loglikelihood_rolling    disjoint windows of a document: the sum of their losses
    generate_until           greedy decoding; each token takes a forward pass over the whole text

All ranks load the same tasks and compute the same metrics, so ranks synchronize only in forward
passes. Only this module imports lm_eval, which takes seconds.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import io
import random
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from coatlm.config import Eval
from coatlm.config.errors import one_line
from coatlm.config.shipped import shipped_tasks, task_file
from coatlm.data.tokenizer import Tokenizer
from coatlm.model.loss import IGNORE
from coatlm.train.predict import Prediction, Row

SEED = 1234  # of the choice of solved examples, the same in every evaluation
BUILDERS = ("arrow", "csv", "json", "parquet", "text")  # dataset_path of data that are files
Predict = Callable[[Sequence[Row]], list[Prediction]]


class HarnessModel(TemplateLM):
    """A model as the harness sees it. Texts longer than `seq_len` tokens lose their beginning."""

    def __init__(
        self, predict: Predict, tokenizer: Tokenizer, *, seq_len: int, new_tokens: int
    ) -> None:
        super().__init__()
        self.predict, self.text, self.seq_len = predict, tokenizer, seq_len
        self.new_tokens = new_tokens

    @property
    def eot_token_id(self) -> int:
        """End-of-document, which also stands in for a missing context, as in training."""
        return self.text.eod

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The ids of a text; nothing is added."""
        return self.text.encode(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        rows = [
            Row.of(context or [self.text.eod], continuation, self.seq_len)
            for _, context, continuation in requests
        ]
        return [(-found.loss, found.exact) for found in self.predict(rows)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each document; every token has at least one token of context."""
        rows: list[Row] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            windows = get_rolling_token_windows(
                self.text.encode(request.args[0]),
                prefix_token=self.text.eod,
                max_seq_len=self.seq_len,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, windows):
                rows.append(Row.of(context, continuation, self.seq_len))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, found in zip(owners, self.predict(rows), strict=True):
            totals[owner] -= found.loss
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Decode greedily up to a stop sequence, end-of-document or the limit of new tokens."""
        answers = [self._begin(*request.args) for request in requests]
        while unfinished := [answer for answer in answers if not answer.done]:
            found = self.predict([Row(a.ids, [IGNORE] * len(a.ids)) for a in unfinished])
            for answer, prediction in zip(unfinished, found, strict=True):
                answer.add(prediction.following, self.text)
        return [answer.text for answer in answers]

    def _begin(self, context: str, options: dict[str, Any]) -> _Answer:
        chosen = normalize_gen_kwargs(options, self.new_tokens)
        # half of the length stays for the prompt, also where a task sets no limit of its own
        left = min(chosen["max_gen_toks"], self.new_tokens, self.seq_len // 2)
        prompt = self.text.encode(context)[-(self.seq_len - left + 1) :] or [self.text.eod]
        return _Answer(prompt, left, [stop for stop in chosen["until"] if stop])


class _Answer:
    """A text that is being generated: the prompt's ids and the new ones."""

    def __init__(self, prompt: list[int], left: int, stops: list[str]) -> None:
        self.ids, self.prompt, self.left, self.stops = prompt, len(prompt), left, stops
        self.text, self.done = "", False

    def add(self, token: int, tokenizer: Tokenizer) -> None:
        """Append a token; an id of the vocabulary's padding ends the text like end-of-document."""
        self.left -= 1
        if token == tokenizer.eod or token >= tokenizer.vocab_size:
            self.done = True
            return
        self.ids = [*self.ids, token]
        text = tokenizer.decode(self.ids[self.prompt :])
        ends = [text.index(stop) for stop in self.stops if stop in text]
        self.text = text[: min(ends)] if ends else text
        self.done = bool(ends) or self.left == 0


class Tasks:
    """The tasks that `eval.tasks` names, loaded.

    Raises ValueError for a task that does not exist, cannot be loaded or is not supported.
    """

    def __init__(self, options: Eval, tokenizer: Tokenizer, *, seq_len: int) -> None:
        self.options, self.tokenizer, self.seq_len = options, tokenizer, seq_len
        with _undisturbed():
            self.loaded = _load(options.tasks)
            for name, task in self.loaded["tasks"].items():
                _prepare(name, task, options)

    def evaluate(self, predict: Predict) -> dict[str, float]:
        """The metrics of all tasks, by the keys `task/NAME/METRIC` of metrics.jsonl.

        The score of a group of tasks has the name of the group. A metric of another filter than
        the harness's default is named METRIC,FILTER.
        """
        model = HarnessModel(
            predict, self.tokenizer, seq_len=self.seq_len, new_tokens=self.options.tasks_new_tokens
        )
        for task in self.loaded["tasks"].values():
            task.set_fewshot_seed(seed=SEED)
        with _undisturbed():
            results = lm_eval.evaluate(
                model,
                self.loaded,
                limit=self.options.tasks_limit,
                bootstrap_iters=0,
                log_samples=False,
            )["results"]
        return {
            f"task/{name}/{metric.removesuffix(',none')}": float(value)
            for name, found in results.items()
            for metric, value in found.items()
            if "," in metric and "_stderr," not in metric and isinstance(value, Real)
        }


def _load(names: Sequence[str]) -> Any:
    """Load tasks by file or name. The index of the harness's tasks is read only for their names."""
    paths = {name: task_file(name) for name in names}
    named = [name for name, path in paths.items() if not path.is_file()]
    manager = TaskManager(include_defaults=bool(named))
    for name in named:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, [*shipped_tasks(), *manager.all_tasks], 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(
                f"eval.tasks: {name!r} is no task of lm-evaluation-harness and no YAML file{hint}"
            )
    try:
        return manager.load([name if name in named else _specified(paths[name]) for name in names])
    except Exception as error:  # the harness, its tasks and datasets raise many types
        raise ValueError(
            f"eval.tasks={list(names)}: cannot be loaded: {type(error).__name__}: {one_line(error)}"
        ) from error


def _specified(path: Path) -> str | dict[str, Any]:
    """What the harness loads for a file: its path, or its content with the paths of data beside it.

    The harness itself takes relative data files from the working directory, which stays so for
    those that are not beside the task's file. Raises what the harness raises for a damaged file.
    """
    task: dict[str, Any] = load_yaml(path)
    options = task.get("dataset_kwargs") or {}
    if "group" in task or task.get("dataset_path") not in BUILDERS or "data_files" not in options:
        return str(path)
    found = _beside(path.parent, options["data_files"])
    return task | {"dataset_kwargs": options | {"data_files": found}}


def _beside(directory: Path, files: Any) -> Any:
    """`data_files`, which are names, lists of names, or either by split, where they exist."""
    if isinstance(files, dict):
        return {split: _beside(directory, inner) for split, inner in files.items()}
    if isinstance(files, list):
        return [_beside(directory, inner) for inner in files]
    if isinstance(files, str) and (directory / files).is_file():
        return glob.escape(str(directory / files))  # datasets takes names for patterns
    return files


def _prepare(name: str, task: Any, options: Eval) -> None:
    """Apply the options to a task and make the requests of its first example.

    Raises ValueError if the task is not supported or this fails.
    """
    where = f"eval.tasks: {name}"
    if getattr(task, "UNSAFE_CODE", False):
        raise ValueError(f"{where} runs code that the model writes, which is not supported")
    if getattr(task, "MULTIMODAL", False):
        raise ValueError(f"{where} has inputs other than text, which are not supported")
    generation = task.get_config("generation_kwargs") or {}
    if task.OUTPUT_TYPE == "generate_until" and generation.get("do_sample"):
        raise ValueError(f"{where} has do_sample: true; only greedy decoding is supported")
    if task.OUTPUT_TYPE == "generate_until":
        limit = normalize_gen_kwargs(dict(generation), 1)["max_gen_toks"]
        if limit < 1:
            raise ValueError(f"{where} has max_gen_toks: {limit}: must be at least 1")
    shots = task.get_config("num_fewshot")
    if shots is None or (options.tasks_shots is not None and shots != 0):
        task.set_config(key="num_fewshot", value=options.tasks_shots or 0)
    task.set_fewshot_seed(seed=SEED)
    try:
        task.build_all_requests(limit=1)
    except Exception as error:  # of any type, from the task's own templates and functions
        raise ValueError(
            f"{where}: no prompt for its first example: {type(error).__name__}: {one_line(error)}"
        ) from error


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Silence progress bars, and restore the state of all global random generators at the end.

    Tasks may draw from these generators; their seeds make all ranks draw the same.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(SEED)
    np.random.seed(SEED)
    torch.default_generator.manual_seed(SEED)  # torch.manual_seed would seed the GPU as well
    datasets.disable_progress_bars()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
