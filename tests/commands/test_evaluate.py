"""tools/evaluate.py: the perplexity that transformers computes, the table, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from coatlm import console
from coatlm.commands.evaluate import frequencies_note, main, shortest_with_the_frequencies_of
from coatlm.config import make_config
from coatlm.convert.from_hf import from_huggingface
from coatlm.convert.to_hf import to_huggingface
from tests.hf.models import make_model, save_model
from tests.test_console import Terminal
from tests.train.test_shards import seal

TEXT = "Each token but the first is predicted once, with the tokens before it.\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("evaluate")
    save_model("llama gqa rope3 tied", directory / "hf")
    from_huggingface(directory / "hf", directory / "coatlm", tokenizer="byte")
    (directory / "text.txt").write_text(TEXT)
    return directory


def test_perplexity_is_that_of_transformers(root: Path) -> None:
    options = ["--data", str(root / "text.txt"), "--out", str(root / "out/result.json")]
    assert main([str(root / "coatlm"), *options, "--window", "96", "--stride", "96"]) == 0
    result = json.loads((root / "out/result.json").read_text())
    ids = torch.tensor([list(TEXT.encode())])
    with torch.no_grad():
        logits = make_model("llama gqa rope3 tied")(ids).logits
    expected = F.cross_entropy(logits[0, :-1].double(), ids[0, 1:])
    (row,) = result["results"]
    assert row["loss"] == pytest.approx(float(expected), abs=1e-5)
    assert row["perplexity"] == pytest.approx(math.exp(float(expected)), rel=1e-5)
    scored = len(TEXT) - 1  # bytes, and as many tokens
    assert (result["tokens"], result["bytes"], result["documents"]) == (scored, scored, 1)
    assert (result["step"], result["precision"]) == (0, "fp32")


@pytest.mark.parametrize(
    ("trained", "window", "used"),
    [(64, 65, "long"), (65, 64, "short"), (64, 8, None), (128, 65, None)],
)
def test_windows_with_other_frequencies_than_the_runs_samples_are_named(
    trained: int, window: int, used: str | None
) -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    longrope = {"type": "longrope", "original_max_position_embeddings": 64, **factors}
    sections = {"data": {"text": "x", "seq_len": trained}, "precision": {"recipe": "fp32"}}
    for scaling in (longrope, {"type": "linear", "factor": 2.0}, None):
        model = {"hidden": 64, "heads": 2, "rope_scaling": scaling}
        config = make_config({"model": model, **sections})
        note = frequencies_note(config, window)
        if scaling is not longrope or used is None:
            assert note == ""
        else:
            assert (
                f"windows of {window} tokens have the rotary frequencies of {used}_factor" in note
            )
        shortest = shortest_with_the_frequencies_of(window, config.model.model_dump(mode="json"))
        assert shortest == (65 if scaling is longrope and window > 64 else 1)


def test_the_accuracy_on_a_task_is_that_of_transformers(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    from tests.train.test_tasks import CHOICES, EXAMPLES, write_task

    name = write_task(root, "ends", **CHOICES)
    out = root / "tasks.json"
    assert main([str(root / "coatlm"), "--tasks", name, "--batch", "2", "--out", str(out)]) == 0
    model, right = make_model("llama gqa rope3 tied"), 0
    for example in EXAMPLES:
        start, ends = str(example["start"]).encode(), example["ends"]
        sums = []
        for end in ends:
            ids = torch.tensor([[*start, *end.encode()]])
            with torch.no_grad():
                chosen = (
                    model(ids).logits[0].double().log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])
                )
            sums.append(float(chosen[len(start) - 1 :].sum()))
        right += max(range(len(ends)), key=sums.__getitem__) == example["right"]
    found = json.loads(out.read_text())["tasks"]
    assert found == {"ends/acc": pytest.approx(right / len(EXAMPLES))}
    assert f"ends/acc{found['ends/acc']:>42.4f}" in capsys.readouterr().out


def test_text_or_tasks_have_to_be_given(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(root / "coatlm")]) == 2
    assert capsys.readouterr().err.startswith("error: --data is missing")


def test_table_has_a_row_for_each_cast(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data", str(root / "text.txt"), "--window", "32", "--precision", "bf16"]
    casts = ["--cast", "e4m3", "e5m2", "--scales", "channel", "bias7", "--what", "gemm", "residual"]
    out = ["--out", str(root / "casts.json")]
    assert main([str(root / "coatlm"), *options, *casts, *out]) == 0
    table = capsys.readouterr().out.splitlines()
    results = json.loads((root / "casts.json").read_text())["results"]
    names = [row["cast"] for row in results]
    assert names[0] == "as trained" and "e5m2 bias7 residual" in names and len(names) == 9
    for line, row in zip(table[2:11], results, strict=True):
        assert line.startswith(row["cast"])
        assert f"{row['perplexity']:.4f}" in line
        assert line.endswith("%") == (row is not results[0])
    assert len({row["loss"] for row in results}) == 9
    assert table[0].endswith("window 32, stride 16, batch 8, precision bf16")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--cast", "int8"], "format='int8'"),
        (["--cast", "e4m3", "--scales", "row"], "scales='row'"),
        (["--cast", "e4m3", "--scales", "bias100"], "scales='bias100'"),
        (["--out", "/dev/null/result.json"], "/dev/null/result.json: cannot be written"),
        (["--out", "/dev/full"], "/dev/full: cannot be written: No space left on device"),
        (["--cast", "e4m3", "--what", "all"], "what='all'"),
        (["--window", "1"], "window=1"),
        (["--window", f"{1 << 41}"], "window=2199023255552: must be in 2.."),
        (["--batch", "99999999"], "batch=99999999: must be in 1..65536"),
        (["--stride", "200"], "stride=200"),
        (["--tokenizer", "tiktoken:nothing"], "tiktoken:nothing"),
        (["--prefix", "263"], "--prefix 263: an id of 0 to "),
        (["--data", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(
    root: Path, capsys: pytest.CaptureFixture[str], options: list[str], complaint: str
) -> None:
    assert main([str(root / "coatlm"), "--data", str(root / "text.txt"), *options]) == 2
    error = capsys.readouterr().err
    assert complaint in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("text", [TEXT, "", '{"text": "a"}\n'])
def test_only_an_earlier_result_is_replaced_by_out(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file, link = tmp_path / "valid.txt", tmp_path / "link.json"
    file.write_text(text)
    link.symlink_to(file)
    for out in (file, link):
        arguments = [str(root / "coatlm"), "--data", str(tmp_path / "*.txt"), "--out", str(out)]
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert f"{out}: exists and is no result of coatlm evaluate" in error
        assert len(error.splitlines()) == 1 and file.read_text() == text
    result = ["--data", str(root / "text.txt"), "--out", str(tmp_path / "result.json")]
    for window in ("8", "16"):
        assert main([str(root / "coatlm"), *result, "--window", window]) == 0
        assert json.loads((tmp_path / "result.json").read_text())["window"] == int(window)


@pytest.mark.parametrize(
    ("given", "option", "needed"),
    [
        ("--data", "--scales", "--cast"),
        ("--data", "--what", "--cast"),
        ("--data", "--limit", "--tasks"),
        ("--data", "--shots", "--tasks"),
        ("--data", "--new-tokens", "--tasks"),
        ("--tasks", "--field", "--data"),
        ("--tasks", "--prefix", "--data"),
        ("--tasks", "--stride", "--data"),
    ],
)
def test_an_option_without_effect_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str], given: str, option: str, needed: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(root / "coatlm"), given, "x", option, "1"])
    assert ended.value.code == 2
    assert f"{option} has no effect without {needed}" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [{"layers": 9999}, {"hidden": 2**20, "ffn": 2**21}])
def test_a_configuration_of_another_size_is_refused_before_a_model_is_built(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: dict[str, int]
) -> None:
    path = shutil.copytree(root / "coatlm", tmp_path / "coatlm")
    state = json.loads((path / "state.json").read_text())
    state["config"]["model"] |= sizes
    (path / "state.json").write_text(json.dumps(state))
    seal(path)
    assert main([str(path), "--data", str(root / "text.txt")]) == 2
    error = capsys.readouterr().err
    assert "its weights have 109,440 parameters, its configuration" in error
    assert len(error.splitlines()) == 1


def test_a_window_longer_than_every_document_costs_no_memory(root: Path, tmp_path: Path) -> None:
    results = []
    for window in (len(TEXT), 10**12):
        options = ["--data", str(root / "text.txt"), "--window", str(window)]
        out = tmp_path / f"{window}.json"
        assert main([str(root / "coatlm"), *options, "--out", str(out)]) == 0
        results.append(json.loads(out.read_text())["results"])
    assert results[0] == results[1]


def test_on_a_terminal_conversion_verification_and_evaluation_show_progress(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    for name in ("DELAY", "REDRAW"):
        monkeypatch.setattr(console, name, 0.0)
    monkeypatch.setattr(sys, "stderr", terminal)
    from_huggingface(root / "hf", tmp_path / "coatlm", tokenizer="byte")
    to_huggingface(tmp_path / "coatlm", tmp_path / "hf")
    options = ["--data", str(root / "text.txt"), "--window", "8"]
    assert main([str(tmp_path / "coatlm"), *options, "--cast", "e4m3"]) == 0
    shown = terminal.getvalue()
    casts = ("evaluating", "e4m3 tensor gemm")
    for work in ("converting hf", "converting coatlm", "verifying coatlm", *casts):
        assert f"{work}: 100%" in shown


def test_damaged_checkpoint_ends_with_exit_code_4(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--data", str(root / "text.txt")]) == 4
    assert "holds no checkpoint" in capsys.readouterr().err
