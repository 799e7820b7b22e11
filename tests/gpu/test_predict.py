"""On a GPU predictions are those of the logits, and leave replayed training alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.distributed import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SEQ_LEN, VOCAB = 256, 128
LENGTHS = (1, 17, 40, 128, 200, 256)


def rows() -> list[Any]:
    from coatlm.train.predict import Row

    generator = torch.Generator("cpu").manual_seed(5)
    ids = [torch.randint(0, VOCAB, (n + 1,), generator=generator).tolist() for n in LENGTHS]
    return [Row.of(row[:1], row[1:], SEQ_LEN) for row in ids]


def train(rank: int, size: int, sections: dict[str, Any]) -> list[Any]:
    """Five steps with predictions before two of them and without; then a row's definition."""
    from coatlm.config import make_config
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.predict import Predictor
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer
    from tests.parallel.test_parity import batches

    start_processes(Launch.from_environment())
    curves, found, expected = [], [], []
    for predicting in (False, True):
        config = make_config(
            {
                "model": {"layers": 2, "hidden": 256, "heads": 2, "ffn": 704},
                "data": {"text": ["unused"], "seq_len": SEQ_LEN},
                "train": {"micro_batch": 2, "global_batch": 6, "cuda_graphs": True},
                **sections,
            }
        )
        groups = make_groups(config.parallel)
        trainer = Trainer(config, groups, vocab=VOCAB)
        predict = Predictor(trainer.chunks, groups, seq_len=SEQ_LEN, micro_batch=2)
        curve = []
        for step in range(5):
            if predicting and step in (1, 4):  # before the capture and after it
                found = [list(one) for one in predict(rows())]
                expected = [defined(trainer.chunks[0], row) for row in rows()]
            placed = trainer.place(batches(config, groups, step))
            loss, norm = trainer.train_step(placed, lr=1e-3)
            curve.append([float(loss), float(norm)])
        curves.append(curve)
        trainer.close()
        release_groups()
    return [*curves, found, expected]


@torch.no_grad()
def defined(model: Any, row: Any) -> list[Any]:
    """A row's loss and its last logits, from the logits of a sample of full length."""
    tokens = torch.zeros(2, SEQ_LEN, dtype=torch.int64, device="cuda")
    tokens[0, : len(row.tokens)] = torch.tensor(row.tokens)
    logits = model(tokens)[0, : len(row.tokens)].float()
    loss = F.cross_entropy(logits, torch.tensor(row.labels, device="cuda"), reduction="sum")
    return [float(loss), logits[-1].tolist()]


@pytest.mark.parametrize(
    "precision", [{"recipe": "bf16"}, {"recipe": "coat", "scaling": "delayed"}], ids=str
)
def test_predictions_are_those_of_logits_and_disturb_no_captured_training(
    precision: dict[str, str],
) -> None:
    (results,) = run_ranks(1, f"{__name__}:train", {"precision": precision})
    without, with_predictions, found, expected = results
    # gradients of the embedding and of attention are summed in any order
    torch.testing.assert_close(
        torch.tensor(with_predictions), torch.tensor(without), rtol=2e-3, atol=0
    )
    for (loss, _, following), (whole, logits) in zip(found, expected, strict=True):
        # other shapes choose other kernels of attention: a bit of BF16 (2^-8) in some logits
        assert loss == pytest.approx(whole, rel=1e-2)
        assert logits[following] >= max(logits) - 2**-5 * max(map(abs, logits))
