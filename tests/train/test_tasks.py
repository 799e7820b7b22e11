"""Tasks of lm-evaluation-harness: what is asked of the model, what is refused, and whole runs."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from coatlm.config import Config, ConfigError, Eval, make_config
from coatlm.config.shipped import shipped_tasks
from coatlm.data.tokenizer import ByteTokenizer
from coatlm.model.loss import IGNORE
from coatlm.train import run_directory
from coatlm.train.evaluations import StoppedError
from coatlm.train.phases import open_tasks
from coatlm.train.predict import Prediction, Row
from tests.train.test_resume import metrics_of, run_config, start_jobs

harness: Any = pytest.importorskip("coatlm.train.harness", exc_type=ImportError)

CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_choice": "ends",
    "doc_to_target": "right",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
ANSWERS = {
    "output_type": "generate_until",
    "doc_to_target": "end",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 5},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
EXAMPLES = [
    {"start": "ab", "ends": ["cd", "xy"], "right": 0, "end": "cde"},
    {"start": "mn", "ends": ["xy", "op"], "right": 1, "end": "opqrs"},
    {"start": "st", "ends": ["uv", "xy"], "right": 1, "end": "uvwxyz"},
]


def write_task(root: Path, name: str, **options: Any) -> str:
    """The path of a task on EXAMPLES; a YAML file may be JSON."""
    data = root / "examples.jsonl"
    if not data.exists():
        data.write_text("".join(json.dumps(example) + "\n" for example in EXAMPLES))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{start}}",
        "target_delimiter": "",
    }
    (root / f"{name}.yaml").write_text(json.dumps(task | options))
    return str(root / f"{name}.yaml")


def alphabet(rows: Sequence[Row]) -> list[Prediction]:
    """A model that is sure of the next byte: the one after the last. A wrong label costs 1."""
    found = []
    for row in rows:
        pairs = zip(row.tokens, row.labels, strict=True)
        wrong = sum(label not in (IGNORE, token + 1) for token, label in pairs)
        found.append(Prediction(float(wrong), not wrong, row.tokens[-1] + 1))
    return found


def model(seq_len: int = 64, new_tokens: int = 256) -> Any:
    return harness.HarnessModel(alphabet, ByteTokenizer(), seq_len=seq_len, new_tokens=new_tokens)


def requests(*arguments: Any) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance("", {}, each, i) for i, each in enumerate(arguments)]


def test_the_log_likelihood_is_that_of_the_continuation_alone() -> None:
    pairs = [("xx ab", "cd"), ("ab", "xd"), ("", "ab"), (" ", "")]
    # spaces at the end of a context are read with the continuation
    assert model().loglikelihood(requests(*pairs)) == [
        (0, True),
        (-2, False),
        (-1, False),
        (-1, False),
    ]


def test_a_long_document_is_scored_once_per_token() -> None:
    text = "abcdefgh" * 3
    whole, cut = (model(n).loglikelihood_rolling(requests((text,)))[0] for n in (64, 7))
    assert whole == cut == -3.0  # the first byte behind end-of-document, and two jumps from h to a
    assert model(7).loglikelihood_rolling(requests(("",), ("a",))) == [0.0, -1.0]


def test_an_answer_ends_at_a_stop_at_the_limit_or_at_the_end_of_the_document() -> None:
    def answer(context: str, seq_len: int = 64, limit: int = 256, **options: Any) -> str:
        (found,) = model(seq_len, limit).generate_until(requests((context, options)))
        return found

    assert answer("a", until=["ef", "z"], max_gen_toks=9) == "bcd"
    assert answer("a", until="d") == "bc"
    assert answer("a", until=[], max_gen_toks=3) == "bcd"
    assert answer("a", limit=2, until=[], max_gen_toks=3) == "bc"
    assert answer("a", seq_len=6, until=[]) == "bcd"  # half of it
    assert answer("xyz" * 9 + "a", seq_len=4, until=[], max_gen_toks=2) == "bc"
    assert answer("~", seq_len=512, until=[]) == "\x7f" + 128 * "\ufffd"  # byte 255, then eod
    padding = harness.HarnessModel(
        lambda rows: [Prediction(0.0, True, 300)], ByteTokenizer(), seq_len=64, new_tokens=256
    )
    assert padding.generate_until(requests(("a", {"until": []}))) == [""]


def test_a_prompt_that_is_too_long_leaves_room_for_the_answer() -> None:
    seen: list[int] = []

    def predict(rows: Sequence[Row]) -> list[Prediction]:
        seen.extend(len(row.tokens) for row in rows)
        return alphabet(rows)

    lm = harness.HarnessModel(predict, ByteTokenizer(), seq_len=16, new_tokens=256)
    lm.generate_until(requests(("x" * 40 + "a", {"until": [], "max_gen_toks": 4})))
    assert seen == [13, 14, 15, 16]


def test_metrics_are_those_of_a_perfect_model_and_generators_are_left_alone(tmp_path: Path) -> None:
    names = [write_task(tmp_path, "ends", **CHOICES), write_task(tmp_path, "answers", **ANSWERS)]
    tasks = harness.Tasks(Eval(tasks=names), ByteTokenizer(), seq_len=64)
    states = [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]
    found = tasks.evaluate(alphabet)
    assert found == {"task/ends/acc": pytest.approx(2 / 3), "task/answers/exact_match": 1 / 3}
    assert tasks.evaluate(alphabet) == found
    after = [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]
    assert after == states
    limited = Eval(tasks=names, tasks_limit=1, tasks_new_tokens=2)
    few = harness.Tasks(limited, ByteTokenizer(), seq_len=64).evaluate(alphabet)
    assert few == {"task/ends/acc": 1.0, "task/answers/exact_match": 0.0}


def test_a_signal_after_a_forward_pass_ends_the_evaluation_of_tasks(tmp_path: Path) -> None:
    names = [write_task(tmp_path, "ends", **CHOICES), write_task(tmp_path, "answers", **ANSWERS)]
    tasks = harness.Tasks(Eval(tasks=names), ByteTokenizer(), seq_len=64)
    passes: list[int] = []

    def predict(rows: Sequence[Row]) -> list[Prediction]:
        passes.append(len(rows))
        raise StoppedError(signal.SIGTERM)

    before = random.getstate()
    with pytest.raises(StoppedError, match="SIGTERM"):
        tasks.evaluate(predict)
    assert len(passes) == 1 and random.getstate() == before
    assert tasks.evaluate(alphabet)["task/ends/acc"] == pytest.approx(2 / 3)


def test_solved_examples_stand_before_each_prompt_the_same_ones_every_time(tmp_path: Path) -> None:
    name = write_task(tmp_path, "ends", fewshot_split="test", **CHOICES)
    tasks = harness.Tasks(Eval(tasks=(name,), tasks_shots=1), ByteTokenizer(), seq_len=64)
    asked: list[list[bytes]] = []

    def predict(rows: Sequence[Row]) -> list[Prediction]:
        asked.append([bytes(row.tokens) for row in rows])
        return alphabet(rows)

    tasks.evaluate(predict)
    tasks.evaluate(predict)
    assert asked[0] == asked[1] and all(b"\n\n" in text for text in asked[0])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"generation_kwargs": {"until": ["."], "do_sample": True}}, "do_sample: true"),
        ({"generation_kwargs": {"until": ["."], "max_gen_toks": 0}}, "max_gen_toks: 0: must be"),
        (
            {"generation_kwargs": {"until": ["."], "max_new_tokens": -1}},
            "max_gen_toks: -1: must be",
        ),
        ({"unsafe_code": True}, "runs code"),
        ({"doc_to_text": "{{start"}, "TemplateSyntaxError"),
        ({"dataset_kwargs": {"data_files": {"test": "nowhere.jsonl"}}}, "nowhere.jsonl"),
        ({"test_split": "validation"}, "KeyError"),
    ],
)
def test_a_task_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], complaint: str
) -> None:
    name = write_task(tmp_path, "answers", **(ANSWERS | options))
    with pytest.raises(ValueError, match="answers") as error:
        harness.Tasks(Eval(tasks=(name,)), ByteTokenizer(), seq_len=64)
    assert str(error.value).startswith("eval.tasks") and complaint in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("place", ["beside [1] it*", "working"])
def test_relative_data_are_beside_the_file_or_else_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    for name in ("beside [1] it*", "working"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "working")
    (tmp_path / place / "own.jsonl").write_text(json.dumps(EXAMPLES[0]) + "\n")
    if place != "working":
        (tmp_path / "working/own.jsonl").write_text("of no use\n")
    data = {"dataset_kwargs": {"data_files": {"test": ["own.jsonl"]}}}
    name = write_task(tmp_path / "beside [1] it*", "ends", **CHOICES, **data)
    found = harness.Tasks(Eval(tasks=(name,)), ByteTokenizer(), seq_len=64).evaluate(alphabet)
    assert found == {"task/ends/acc": 1.0}


def test_a_shipped_task_has_a_name_that_a_file_takes_precedence_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("python-lines", "python-words")  # that the texts of --keys and --help list
    assert tuple(shipped_tasks()) == names
    found = harness.Tasks(Eval(tasks=names), ByteTokenizer(), seq_len=64).evaluate(alphabet)
    assert {key.split("/")[1] for key in found} == set(names)
    Path(write_task(tmp_path, "ends", **CHOICES)).rename("python-lines")
    found = harness.Tasks(Eval(tasks=names[:1]), ByteTokenizer(), seq_len=64).evaluate(alphabet)
    assert found.keys() == {"task/ends/acc"}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the index of named tasks; that of the harness itself has 15,000 files."""
    own = partial(harness.TaskManager, include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr(harness, "TaskManager", lambda include_defaults: own())
    return tmp_path


def test_an_unknown_name_is_refused_and_a_similar_one_suggested(index: Path) -> None:
    write_task(index, "answers", **ANSWERS)
    with pytest.raises(ValueError, match=r"'answer' is no task .* did you mean answers\?"):
        harness.Tasks(Eval(tasks=("answer",)), ByteTokenizer(), seq_len=64)
    with pytest.raises(ValueError, match=r"did you mean python-lines"):
        harness.Tasks(Eval(tasks=("python-line",)), ByteTokenizer(), seq_len=64)
    assert harness.Tasks(Eval(tasks=("answers",)), ByteTokenizer(), seq_len=64).evaluate(alphabet)


def test_a_group_has_a_score_of_its_own(index: Path) -> None:
    names = ["ends", "more"]
    for name in names:
        write_task(index, name, **CHOICES)
    mean = {"metric": "acc", "aggregation": "mean", "weight_by_size": True}
    group = {"group": "both", "task": names, "aggregate_metric_list": [mean]}
    (index / "both.yaml").write_text(json.dumps(group))
    found = harness.Tasks(Eval(tasks=("both",)), ByteTokenizer(), seq_len=64).evaluate(alphabet)
    keys = [f"task/{name}/acc" for name in (*names, "both")]
    assert found == dict.fromkeys(keys, pytest.approx(2 / 3))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'coatlm\[eval\]'"):
        open_tasks(Eval(tasks=("lambada",)), ByteTokenizer(), 64)
    assert open_tasks(Eval(), ByteTokenizer(), 64) is None


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"eval": {"tasks_limit": 5}}, "eval: tasks_limit=5 needs tasks"),
        ({"eval": {"tasks": ["a", "a"]}}, "each at most once"),
        ({"eval": {"tasks": ["a"], "tasks_every": 0}}, "eval.tasks_every"),
        (
            {
                "eval": {"tasks": "a"},
                "model": {"spec": "te"},
                "precision": {"recipe": "te-delayed"},
            },
            "te-current or te-blockwise",
        ),
    ],
)
def test_wrong_options_are_refused(sections: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_config(sections)
    assert complaint in str(error.value)


def delayed(root: Path, name: str, layout: str = "single", **options: Any) -> Config:
    """Four steps in FP8 with delayed scales, which an evaluation could disturb."""
    return run_config(
        root / name,
        layout,
        model={"hidden": 128, "heads": 8, "ffn": 128, "layers": 2},
        precision={"recipe": "coat", "scaling": "delayed"},
        optim={"recipe": "coat-lean", "warmup_steps": 0},
        train={"steps": 4, "eval_every": 0},
        eval=options,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without tasks, and runs with tasks after each second step."""
    root = tmp_path_factory.mktemp("runs")
    (root / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(6000)))
    names = [write_task(root, "ends", **CHOICES), write_task(root, "answers", **ANSWERS)]
    options = {"tasks": names, "tasks_every": 2}
    start_jobs(1, [delayed(root, "without"), delayed(root, "with", **options)])
    start_jobs(2, [delayed(root, "two", "dp2 zero1", **options)])
    return root


def test_losses_with_and_without_tasks_are_equal_bit_by_bit(root: Path) -> None:
    from coatlm.train.checkpoint import tensor_checksums

    without, evaluated = metrics_of(root / "without"), metrics_of(root / "with")
    assert [line for line in evaluated if "loss" in line] == without and len(without) == 4
    final = Path("checkpoints/step_00000004")
    assert tensor_checksums(root / "with" / final) == tensor_checksums(root / "without" / final)
    states = [
        json.loads((root / name / final / "state.json").read_text()) for name in ("with", "without")
    ]
    assert states[0]["gradient_amaxes"] == states[1]["gradient_amaxes"] != {}


@pytest.mark.parametrize("name", ["with", "two"])
def test_metrics_of_tasks_are_logged_and_plotted(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = [line for line in metrics_of(root / name) if "loss" not in line]
    assert [line["step"] for line in scores] == [2, 4]
    assert all(
        set(line) == {"step", "task/ends/acc", "task/answers/exact_match"} for line in scores
    )
    log = (root / name / "train.log").read_text()
    assert f"step 4/4 | ends/acc {scores[1]['task/ends/acc']:.4f} | answers/exact_match 0.0" in log
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    monkeypatch.setattr(run_directory, "whole_file", contextlib.nullcontext)
    run_directory.loss_plot(root / name)
    lines = {line.get_label(): line for line in drawn[0].axes[1].get_lines()}
    assert lines.keys() == {"ends/acc", "answers/exact_match"}
    for key, line in lines.items():
        assert list(line.get_xdata()) == [2, 4]
        assert list(line.get_ydata()) == [record[f"task/{key}"] for record in scores]
