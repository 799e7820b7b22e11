"""Evaluation on a GPU: casts give the bits of the CPU, and logits are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coatlm.evaluation.cast import Cast, casting
from coatlm.evaluation.model import load_weights, open_model
from coatlm.evaluation.perplexity import Document, score
from coatlm.train.checkpoint import read_state

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", ["tensor", "channel", "bias9"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_casts_give_the_bits_of_the_cpu(fmt: str, scales: str, dtype: torch.dtype) -> None:
    how = Cast(fmt, scales)
    x = torch.randn(33, 3, 5, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    for view in (x, x.transpose(0, 1), x[0, 0]):
        assert torch.equal(how(view.cuda()).cpu(), how(view))


def test_evaluation_agrees_with_transformers_and_casts_disturb_it_little(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from coatlm.convert.from_hf import from_huggingface
    from tests.hf.models import WINDOW, save_model, theirs, tokens

    model = save_model("qwen3", tmp_path / "hf")
    from_huggingface(tmp_path / "hf", tmp_path / "coatlm", tokenizer="byte")
    saved = read_state(tmp_path / "coatlm")["config"]
    expected = theirs(model, tokens())
    documents = [Document(tuple(range(3, 203)), 200)]
    device = torch.device("cuda", 0)
    losses = {}
    for precision, tolerance in (("fp32", 1e-3), ("bf16", 0.3)):  # BF16: 2^-8 of sums of ~5, thrice
        options = {"window": WINDOW, "precision": precision}
        with open_model(tmp_path / "coatlm", saved, **options) as own:
            with torch.no_grad():
                actual = own(tokens().cuda()).float().cpu()
            torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)
            sizes = {"window": WINDOW, "stride": 48, "batch": 2}
            losses[precision] = score(own, documents, **sizes, device=device).loss
            for what in ("gemm", "residual"):
                load_weights(own, tmp_path / "coatlm")
                with casting(own, Cast("e4m3", "channel", what)):
                    losses[f"{precision} {what}"] = score(
                        own, documents, **sizes, device=device
                    ).loss
    assert all(loss == pytest.approx(losses["fp32"], rel=0.1) for loss in losses.values())
    assert len(set(losses.values())) == 6
