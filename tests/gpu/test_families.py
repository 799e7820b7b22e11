"""Families with windows, soft caps and norms of their own on a GPU, against transformers in fp32.

BF16 takes other kernels than fp32: FlashAttention with a window, FlexAttention with a soft cap.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from coatlm.evaluation.model import open_model
from coatlm.train.checkpoint import read_state

pytestmark = pytest.mark.gpu

NAMES = ("mistral window", "phi4-mini long", "olmo3", "gemma2", "gemma3")


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from coatlm.convert.from_hf import from_huggingface
    from tests.hf.models import WINDOW, save_model, theirs, tokens

    model = save_model(name, tmp_path / "hf")
    from_huggingface(tmp_path / "hf", tmp_path / "coatlm", tokenizer="byte")
    saved, ids = read_state(tmp_path / "coatlm")["config"], tokens()
    expected = theirs(model, ids)
    labels = ids.roll(-1, 1)
    logits = model(ids).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    gradient = model.model.layers[0].mlp.down_proj.weight.grad
    for precision, tolerance in (("fp32", 1e-3), ("bf16", 0.1)):  # of BF16 some 2^-8 per operation
        options = {"window": WINDOW, "precision": precision}
        with open_model(tmp_path / "coatlm", saved, **options) as own:
            with torch.no_grad():
                assert relative(own(ids.cuda()).cpu(), expected) < tolerance
            own.requires_grad_(True)
            own(ids.cuda(), labels.cuda()).mean().backward()
            found = own.decoder.layers[0].mlp.linear_fc2.weight.grad
            assert found is not None
            assert relative(found.cpu(), gradient) < 2 * tolerance
