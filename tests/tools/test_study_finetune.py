"""The fine-tuning study: its tasks, its table, and two tiny recipes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from coatlm.data.tokenizer import ByteTokenizer
from coatlm.evaluation.exact_match import exact_matches
from coatlm.train.checkpoint import named_checkpoint
from tests.forks import Forks
from tools import study_finetune
from tools.studies import tasks
from tools.studies.accuracy_table import markdown, tabulate
from tools.studies.loss_study import read_study

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


# ---- tasks


def closes(text: str) -> bool:
    """Whether every bracket is closed by its own kind."""
    before = ""
    while before != text:
        before = text
        for pair in ("()", "[]", "{}", "<>"):
            text = text.replace(pair, "")
    return not text


def test_every_completion_is_the_right_one() -> None:
    train, test = tasks.draw_pairs(300, 50)
    for pair in train + test:
        kind, _, question = pair.prompt.removesuffix("=").partition(" ")
        if pair.task == "addition":
            assert kind == "add" and int(pair.completion) == sum(map(int, question.split("+")))
        elif pair.task == "sorting":
            assert kind == "sort" and pair.completion == "".join(sorted(question))
        else:
            assert kind == "close" and pair.completion and closes(question + pair.completion)
            assert set(pair.completion) <= set(")]}>")


def test_no_example_of_the_test_is_trained_on_and_tasks_have_equal_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train, test = tasks.draw_pairs(500, 100)
    prompts = [pair.prompt for pair in train + test]
    assert len(set(prompts)) == len(prompts) == 3 * 600
    for part, count in ((train, 500), (test, 100)):
        assert [sum(p.task == task for p in part) for task in tasks.TASKS] == [count] * 3
    assert tasks.draw_pairs(500, 100) == (train, test) != tasks.draw_pairs(500, 100, seed=1)
    monkeypatch.setattr(tasks, "ADDEND", 20)
    with pytest.raises(ValueError, match="addition has fewer prompts"):
        tasks.draw_pairs(300, 101)


# ---- the table


def line(recipe: str, seed: int, *accuracies: float) -> dict[str, Any]:
    names = ("addition", "sorting")
    return {
        **{"study": "s", "recipe": recipe, "seed": seed, "state": "done", "overrides": []},
        **{"protocol": {}, "data": "d", "device": "cpu", "ranks": 1},
        **{
            "val_loss": 1.0,
            "last_loss": 1.0,
            "accuracy": dict(zip(names, accuracies, strict=True)),
        },
    }


def test_means_and_standard_errors_are_over_seeds_and_differences_are_paired() -> None:
    lines = [line("a", 1, 10.0, 20.0), line("a", 2, 12.0, 30.0), line("a", 3, 17.0, 40.0)]
    lines += [line("b", 1, 10.0, 22.0), line("b", 2, 14.0, 34.0), line("b", 4, 90.0, 90.0)]
    first, second = tabulate(lines, "a")
    assert first["accuracy"]["addition"][0] == pytest.approx(13.0)
    assert first["accuracy"]["addition"][1] == pytest.approx(math.sqrt(13.0 / 3))  # sd^2 = 26 / 2
    assert second["difference"] == (pytest.approx(2.0), pytest.approx(1.0))  # of 1 and 3 points
    assert first["overall"][0] == pytest.approx((15.0 + 21.0 + 28.5) / 3)
    rows = list(markdown([first, second]))
    assert rows[2].startswith("| `a` | 3 | 0 | 13.00 +- 2.08 |")
    assert "| +2.00 +- 1.00 |" in rows[3]


# ---- a study

STUDY = """
base:
  data: {{seq_len: 64, split: [80, 20, 0], packing: best-fit, reset_attention_mask: true}}
  precision: {{recipe: fp32}}
  parallel: {{zero: 0, grad_comm: fp32}}
  optim: {{lr: 3.0e-3, warmup_steps: 2}}
  train: {{steps: 60, micro_batch: 8, global_batch: 8, eval_every: 1000, eval_batches: 1}}
  log: {{every: 20}}
seeds: [3, 5]
reference: fp32
recipes:
  fp32: []
  frozen: [optim.lr=1.0e-12, optim.min_lr=1.0e-12]
{}
"""


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on bytes."""
    root = tmp_path_factory.mktemp("pretrained")
    (root / "text.txt").write_text("1 plus 1 is 2\n" * 500)
    words = [f"run.dir={root}/run", f"data.text=[{root}/text.txt]", f"data.cache_dir={root}/cache"]
    words += ["model.layers=1", "model.hidden=64", "model.heads=2", "model.kv_heads=2"]
    words += ["model.ffn=128"]
    words += ["data.seq_len=32", "train.steps=2", "train.eval_every=0", "precision.recipe=fp32"]
    code, output = Forks(root).run(str(ROOT / "configs/quickstart.yaml"), *words)
    assert code == 0, output
    return root / "run"


def test_two_recipes_are_fine_tuned_measured_and_not_repeated(
    pretrained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    study = tmp_path / "tiny.yaml"
    study.write_text(STUDY.format(""))
    words = [str(study), "--checkpoint", str(pretrained), "--runs", str(tmp_path / "runs")]
    words += ["--out", str(tmp_path / "out.jsonl"), "--train", "60", "--test", "20"]
    assert study_finetune.main([*words, "--seeds", "3"]) == 0
    lines = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(x["recipe"], x["seed"], x["state"]) for x in lines] == [
        ("fp32", 3, "done"),
        ("frozen", 3, "done"),
    ]
    assert all(set(x["accuracy"]) == set(tasks.TASKS) for x in lines)
    assert lines[0]["val_loss"] < lines[1]["val_loss"] - 0.5
    assert lines[1]["accuracy"] == dict.fromkeys(tasks.TASKS, 0.0)
    # the weights of the checkpoint, with an optimizer that has taken no step
    assert lines[0]["first_loss"] == pytest.approx(lines[1]["first_loss"], rel=1e-6)
    table = capsys.readouterr().out
    assert "| `frozen` | 1 | 0 |" in table
    assert study_finetune.main([*words, "--seeds", "3"]) == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    assert study_finetune.main([str(study), "--out", words[6], "--report"]) == 0
    assert capsys.readouterr().out.endswith(table[table.index("| recipe") :])
    # runs that began from another checkpoint
    monkeypatch.setattr(study_finetune.study_loss, "fingerprint", lambda path: "another")
    new = [*words[:6], str(tmp_path / "new.jsonl"), *words[7:], "--seeds", "3"]
    assert study_finetune.main(new) == 2
    assert "fp32-3: began from checkpoint " in capsys.readouterr().err
    assert not (tmp_path / "new.jsonl").exists()
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"^data: .*: lines of different protocols"):
        other = ["--train", "60", "--test", "10", "--seeds", "3"]
        check_main([*words[:7], *other])


def check_main(words: list[str]) -> None:
    """Raise what `main` prints."""
    fail, study_finetune.fail = study_finetune.fail, _raise  # type: ignore[assignment]
    try:
        study_finetune.main(words)
    finally:
        study_finetune.fail = fail


def _raise(error: Exception) -> int:
    raise error


def test_accuracy_is_that_of_the_trained_weights(pretrained: Path) -> None:
    """The examples that the model itself decodes are the ones it matches."""
    from coatlm.evaluation.model import open_model
    from coatlm.train.state import read_run_state

    byte = ByteTokenizer()
    checkpoint = named_checkpoint(pretrained, study_finetune.logger)
    saved = read_run_state(checkpoint)["config"]
    with open_model(checkpoint, saved, window=12, precision="fp32") as model:

        def decode(prompt: str, count: int) -> list[int]:
            ids = byte.encode(prompt)
            for _ in range(count):
                padded = torch.zeros(1, 12, dtype=torch.int64)
                padded[0, : len(ids)] = torch.tensor(ids)
                ids.append(int(model(padded)[0, len(ids) - 1].argmax()))
            return ids[len(prompt) :]

        examples = [(byte.encode(p), decode(p, 4)) for p in ("1 plus", "2", "is ")]
        examples += [(p, [*c[:-1], (c[-1] + 1) % 257]) for p, c in examples]
        assert (
            exact_matches(model, examples, window=12, batch=4, device=CPU)
            == [True] * 3 + [False] * 3
        )


def test_what_the_study_cannot_start_from_is_an_error(
    pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "tiny.yaml"
    study.write_text(STUDY.format("trunk: []"))
    out, runs = str(tmp_path / "out.jsonl"), str(tmp_path / "runs")
    words = [str(study), "--out", out, "--runs", runs, "--train", "4", "--test", "2"]
    damaged = tmp_path / "damaged"
    shutil.copytree(pretrained, damaged)
    for state in damaged.glob("checkpoints/*/state.json"):
        state.write_text("{")
    for more, reason in (
        (["--checkpoint", str(damaged)], "state.json"),
        (["--checkpoint", str(pretrained)], "tiny: trunk: a fine-tuning study starts from"),
        (["--checkpoint", str(tmp_path / "missing")], "missing: no such directory"),
    ):
        assert study_finetune.main([*words, *more]) == 2
        assert reason in capsys.readouterr().err


def test_the_shipped_study_reads() -> None:
    study = read_study(ROOT / "configs/studies/finetune.yaml")
    assert len(study.seeds) >= 5 and study.reference == "bf16"
    assert {"te-delayed", "coat", "coat-lean"} <= set(study.recipes)
