"""With data.loss_mask=completion every layout trains on the mean over the completions' tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coatlm.config import Config
from tests.distributed import run_ranks
from tests.train.test_resume import LAYOUTS, metrics_of, run_config, start_jobs, step_five

SEQ_LEN = 32
LONG = {1: "single", 2: "dp2 zero1"}
ONE_SAMPLE = {"micro_batch": 1, "global_batch": 2, "eval_every": 1, "eval_batches": 8}
CHOSEN = ("single", "dp2 zero1", "cp2", "pp2", "tp2 sp")


def write_data(root: Path) -> None:
    """Pairs of very different lengths, so that ranks and microbatches count different numbers.

    Prompts of the second dataset fill many samples, in which no token counts.
    """
    rng = np.random.default_rng(0)
    sums = []
    for a, b in rng.integers(0, 1000, (600, 2)).tolist():
        completion = " ".join([str(a + b)] * int(rng.integers(1, 6)))
        sums.append({"prompt": f"{a}+{b}=", "completion": completion})
    write_pairs(root / "sums", sums)
    lengths = rng.integers(4 * SEQ_LEN, 20 * SEQ_LEN, 200).tolist()
    write_pairs(root / "long", [{"prompt": "?" * n, "completion": "yes"} for n in lengths])


def write_pairs(prefix: Path, pairs: list[dict[str, str]]) -> None:
    from coatlm.data.chat import ChatFormat
    from coatlm.data.preprocess import preprocess
    from coatlm.data.token_shard import Options

    source = prefix.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    preprocess([str(source)], prefix, Options(chat=ChatFormat("")), workers=1)


def sft_config(root: Path, name: str, layout: str, pairs: str = "sums", **changes: Any) -> Config:
    data = {"text": [], "paths": [str(root / pairs)], "seq_len": SEQ_LEN, "split": [8, 2, 0]}
    masked = {"loss_mask": "completion", "packing": "best-fit", "reset_attention_mask": True}
    return run_config(root / name, layout, data=data | masked, **changes)


def first_loss(rank: int, size: int, directory: str) -> dict[str, float]:
    """The first loss by definition: losses of single tokens, summed where the label is learned."""
    from contextlib import ExitStack

    import torch

    from coatlm.data.batches import microbatches
    from coatlm.train import start
    from coatlm.train.setup import Launch

    config = sft_config(Path(directory), "definition", "single")
    found = {}
    with ExitStack() as stack:
        session = start.set_up(config, Launch(), stack)
        assert session is not None and session.data.validation is not None
        (chunk,) = session.trainer.chunks
        for name, part in (("train", session.data.train), ("val", session.data.validation)):
            total = count = 0.0
            for i in range(config.train.global_batch):
                ids = torch.from_numpy(part[i])[None]
                tokens, labels = ids[:, :-1], ids[:, 1:]
                documents = torch.from_numpy(part.documents(i))[None, :-1]
                changes = documents[0].diff().nonzero().flatten() + 1
                bounds = torch.tensor([[0, *changes.tolist(), SEQ_LEN]], dtype=torch.int32)
                with torch.no_grad():
                    losses = chunk.module(tokens, labels, bounds)
                for at in range(SEQ_LEN):
                    text = bytes(ids[0, : at + 1][documents[0, : at + 1] == documents[0, at]] % 256)
                    # a completion follows `=`; its end is the one eod of its document
                    learned = b"=" in text and int(tokens[0, at]) != 256
                    total += float(losses[0, at]) * learned
                    count += learned
            found[name], found[f"{name} share"] = total / count, count / (16 * SEQ_LEN)
        share = {"global_batch": 16, "micro_batch": 2, "dp_rank": 0, "dp_size": 1}
        batches = list(microbatches(session.data.validation, 0, **share))
        found["evaluate"] = float(session.trainer.evaluate(session.trainer.place(batches)))
    return found


def validation(rank: int, size: int, directory: str) -> list[int]:
    """The counted tokens of each batch of a validation whose batches have losses 1, 2 and 4."""
    from contextlib import ExitStack

    import torch

    from coatlm.train import start
    from coatlm.train.setup import Launch

    losses = iter((1.0, 2.0, 4.0))

    class Trainer(start.Trainer):
        def evaluate(self, batches: Any) -> torch.Tensor:
            return torch.tensor(next(losses))

    start.Trainer = Trainer  # type: ignore[misc]
    small = {"steps": 1, "micro_batch": 1, "global_batch": 2, "eval_every": 1, "eval_batches": 3}
    config = sft_config(Path(directory), "validated", "dp2 zero1", train=small)
    with ExitStack() as stack:
        session = start.set_up(config, Launch.from_environment(), stack)
        assert session is not None and session.data.validation is not None
        assert session.run_steps() == 0
        counted = [session.data.validation.counted(sample) for sample in range(6)]
    tokens = [int(sample[1:].sum()) for sample in counted if sample is not None]
    return [a + b for a, b in zip(tokens[::2], tokens[1::2], strict=True)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all layouts, and one that was resumed."""
    root = tmp_path_factory.mktemp("runs")
    write_data(root)
    for size in (1, 2):
        jobs = [sft_config(root, name, name) for name in CHOSEN if LAYOUTS[name][0] == size]
        if size == 1:
            resume = {"resume": step_five(root / "single")}
            jobs.append(sft_config(root, "resumed", "single", checkpoint=resume))
            jobs.append(sft_config(root, "small", "single", train={"micro_batch": 1}))
        jobs.append(sft_config(root, f"long {size}", LONG[size], "long", train=ONE_SAMPLE))
        few = ONE_SAMPLE | {"eval_batches": 1, "steps": 1}
        jobs.append(sft_config(root, f"long, few {size}", LONG[size], "long", train=few))
        start_jobs(size, jobs)
    return root


def test_the_loss_is_the_mean_over_tokens_of_completions(root: Path) -> None:
    (expected,) = run_ranks(1, "tests.train.test_loss_mask:first_loss", str(root))
    assert 0.2 < expected["train share"] < 0.8
    first = metrics_of(root / "single")[0]
    assert first["loss"] == pytest.approx(expected["train"], rel=1e-5)
    assert expected["evaluate"] == pytest.approx(expected["val"], rel=1e-5)


@pytest.mark.parametrize("layout", [*(name for name in CHOSEN if name != "single"), "small"])
def test_layouts_and_microbatches_train_like_one_process(root: Path, layout: str) -> None:
    expected, actual = metrics_of(root / "single"), metrics_of(root / layout)
    assert len(actual) == len(expected) == 12
    for line, other in zip(actual, expected, strict=True):
        for key in ("loss", "grad_norm", "val_loss"):  # fp32 sums in another order
            if key in other:
                assert line[key] == pytest.approx(other[key], rel=1e-5)


def test_a_validation_is_the_mean_over_the_tokens_of_all_its_batches(root: Path) -> None:
    tokens, other = run_ranks(2, "tests.train.test_loss_mask:validation", str(root))
    assert tokens == other and len(tokens) == 3 and len(set(tokens)) > 1
    (found,) = [line["val_loss"] for line in metrics_of(root / "validated") if "val_loss" in line]
    expected = float(np.average([1.0, 2.0, 4.0], weights=tokens))
    assert found == pytest.approx(expected, rel=1e-6) != pytest.approx(7 / 3, rel=1e-3)


def test_a_resumed_run_is_the_same_run(root: Path) -> None:
    later = [line for line in metrics_of(root / "single") if line["step"] > 5]
    assert len(later) == 6 and metrics_of(root / "resumed") == later


@pytest.mark.parametrize("size", LONG)
def test_a_batch_in_which_no_token_counts_has_no_loss(root: Path, size: int) -> None:
    lines = [line for line in metrics_of(root / f"long {size}") if "loss" in line]
    empty = [line for line in lines if line["loss"] is None]
    assert empty and len(empty) < len(lines)
    assert all(line["grad_norm"] == 0 and line["loss_mean"] is None for line in empty)
    assert all(line["loss"] > 1 and line["grad_norm"] > 0 for line in lines if line not in empty)
    evaluations = [
        line["val_loss"] for line in metrics_of(root / f"long {size}") if "val_loss" in line
    ]
    assert all(value > 1 for value in evaluations)
    log = (root / f"long {size}" / "train.log").read_text()
    assert log.count("no token of the batch counts (data.loss_mask)") == 1


@pytest.mark.parametrize("size", LONG)
def test_an_evaluation_in_which_no_token_counts_has_no_loss(root: Path, size: int) -> None:
    directory = root / f"long, few {size}"
    (found,) = [line["val_loss"] for line in metrics_of(directory) if "val_loss" in line]
    assert found is None
    assert "no token counts in the 2 validation samples" in (directory / "train.log").read_text()
