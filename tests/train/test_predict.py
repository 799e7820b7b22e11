"""Predictions of rows in every layout are those of the definition: softmax and argmax of logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from coatlm.model.loss import IGNORE
from coatlm.train.predict import Row, widths
from tests.distributed import run_ranks
from tests.train.test_resume import LAYOUTS, MODEL

SEQ_LEN, VOCAB = 64, 96
CHOSEN = (
    *("tp2", "tp2 sp", "pp2", "pp2 vpp2", "dp2 zero1", "dp2 zero3", "cp2", "tp2 pp2", "tp2 cp2"),
    *("pp2 dp2", "pp2 dp2 zero3"),
)
LENGTHS = (1, 2, 31, 32, 33, 50, 63, 64, 5, 64, 12)  # of both widths, more than one pass of each


def rows() -> list[Row]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for length in LENGTHS:
        ids = torch.randint(0, VOCAB, (length + 1,), generator=generator).tolist()
        scored = 1 + length // 2
        made.append(Row.of(ids[: -scored or None], ids[-scored:], SEQ_LEN))
    made[3] = Row(made[3].tokens, [IGNORE] * len(made[3].tokens))
    return made


def predictions(rank: int, size: int, layouts: list[str]) -> dict[str, list[Any]]:
    """The predictions of each layout's model, and those of the whole model by definition."""
    from coatlm.config import make_config
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.predict import Predictor
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer

    start_processes(Launch.from_environment())
    found: dict[str, list[Any]] = {}
    for layout in layouts:
        config = make_config(
            {
                "model": MODEL,
                "data": {"text": ["unused"], "seq_len": SEQ_LEN},
                "parallel": {"bucket_size": 20000} | LAYOUTS[layout][1],
                "precision": {"recipe": "fp32"},
                "optim": {"recipe": "adamw-fp32"},
                "train": {"micro_batch": 2, "global_batch": 16},
            }
        )
        groups = make_groups(config.parallel)
        trainer = Trainer(config, groups, vocab=VOCAB)
        predict = Predictor(trainer.chunks, groups, seq_len=SEQ_LEN, micro_batch=2)
        made = predict(rows())
        found[layout] = [list(one) for one in made]
        greedy = [
            Row.of(r.tokens, [p.following], SEQ_LEN) for r, p in zip(rows(), made, strict=True)
        ]
        found[f"{layout} greedy"] = [one.exact for one in predict(greedy)]
        if layout == "dp2 zero1":
            found["definition"] = [defined(trainer.chunks[0], row) for row in rows()]
        release_groups()
    return found


@torch.no_grad()
def defined(model: Any, row: Row) -> list[Any]:
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    tokens[0, : len(row.tokens)] = torch.tensor(row.tokens)
    logits = model(tokens)[0, : len(row.tokens)]
    labels = torch.tensor(row.labels)
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    exact = ((logits.argmax(-1) == labels) | (labels == IGNORE)).all()
    return [float(loss), bool(exact), int(logits[-1].argmax())]


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """All ranks of a layout return the same."""
    results: dict[str, list[Any]] = {}
    for size in (2, 4):
        layouts = [name for name in CHOSEN if LAYOUTS[name][0] == size]
        first, *others = run_ranks(size, f"{__name__}:predictions", layouts)
        assert all(other == first for other in others)
        results |= first
    return results


@pytest.mark.parametrize("layout", CHOSEN)
def test_a_layout_predicts_what_the_definition_says(
    found: dict[str, list[Any]], layout: str
) -> None:
    assert len(found["definition"]) == len(LENGTHS)
    for (loss, *rest), (expected, *others) in zip(found[layout], found["definition"], strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)  # fp32 sums in another order
        assert rest == others
    assert found[f"{layout} greedy"] == [True] * len(LENGTHS)


def test_a_row_scores_the_continuation_and_loses_its_beginning_if_it_is_too_long() -> None:
    row = Row.of([1, 2], [3, 4, 5], 8)
    assert row == Row([1, 2, 3, 4], [IGNORE, 3, 4, 5])
    assert Row.of([1, 2], [3, 4, 5], 3) == Row([2, 3, 4], [3, 4, 5])
    assert Row.of([1], [2, 3, 4], 2) == Row([2, 3], [3, 4])  # the first label has no room
    assert Row.of([1, 2], [], 8) == Row([1], [IGNORE])
    with pytest.raises(ValueError, match="context"):
        Row.of([], [1], 8)


def test_widths_are_halves_of_the_sequence_that_the_layout_can_split() -> None:
    assert widths(256, 2) == [32, 64, 128, 256]
    assert widths(256, 64) == [64, 128, 256]
    assert widths(96, 2) == [48, 96]
    assert widths(90, 4) == [90]
    assert widths(16, 2) == [16]
