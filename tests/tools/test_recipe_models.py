"""One model in one process: what is loaded, and what a microbatch yields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from coatlm.data.batches import Microbatch
from tests.tools.stressed import BATCH, SEQ, Opened, open_stressed, relative
from tools.studies.recipe_models import Result

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    with open_stressed(tmp_path_factory.mktemp("models")) as found:
        yield found


def test_gradients_are_those_of_the_mean_loss(opened: Opened) -> None:
    opened.model.load(opened.weights)
    once = opened.model.run(opened.batch)
    twice = Microbatch(
        tokens=opened.batch["tokens"].repeat(2, 1),
        labels=opened.batch["labels"].repeat(2, 1),
        loss_mask=opened.batch["loss_mask"].repeat(2, 1),
        document_bounds=None,
    )
    again = opened.model.run(twice)
    assert once.losses.shape == (BATCH * SEQ,) and again.losses.shape == (2 * BATCH * SEQ,)
    for key, gradient in once.gradients.items():
        assert gradient.any(), key
        assert relative(again.gradients[key], gradient) < 1e-5, key  # sums of fp32


def test_tokens_that_the_mask_leaves_out_have_no_loss(opened: Opened) -> None:
    opened.model.load(opened.weights)
    whole = opened.model.run(opened.batch).losses.view(BATCH, SEQ)
    mask = torch.ones(BATCH, SEQ)
    mask[:, SEQ // 2 :] = 0.0
    part = opened.model.run(Microbatch(**{**opened.batch, "loss_mask": mask})).losses
    torch.testing.assert_close(part.view(BATCH, -1), whole[:, : SEQ // 2])


def test_tokens_do_not_attend_to_other_documents(opened: Opened) -> None:
    opened.model.load(opened.weights)
    bounds = torch.tensor([[0, SEQ // 2, SEQ]] * BATCH, dtype=torch.int32)
    split = Microbatch(**{**opened.batch, "document_bounds": bounds})
    whole = opened.model.run(opened.batch).losses.view(BATCH, SEQ)
    parts = opened.model.run(split).losses.view(BATCH, SEQ)
    first, second = parts.split(SEQ // 2, dim=1)
    torch.testing.assert_close(first, whole[:, : SEQ // 2], rtol=1e-4, atol=1e-5)
    assert relative(second, whole[:, SEQ // 2 :]) > 1e-3
    seen = [opened.model.activations([batch]).stream for batch in (opened.batch, split)]
    last = "decoder.final_layernorm.weight"
    assert relative(seen[1][last], seen[0][last]) > 1e-3


def test_weights_that_do_not_fit_are_refused(opened: Opened) -> None:
    with pytest.raises(ValueError, match=r"linear_qkv\.weight: in the checkpoint or in the model"):
        opened.model.load({key: w for key, w in opened.weights.items() if key != QKV})
    with pytest.raises(ValueError, match=r"\[3, 64\] in the checkpoint, \[128, 64\] in the model"):
        opened.model.load({**opened.weights, QKV: torch.zeros(3, 64)})


def test_scales_settle_when_a_repeated_microbatch_has_the_same_gradient(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def run_with(sizes: list[float]) -> Callable[[Microbatch], Result]:
        def run(_: Microbatch) -> Result:
            size = sizes[min(len(seen), len(sizes) - 1)]
            seen.append(size)
            return Result(torch.zeros(1), {QKV: torch.full((2, 2), size)})

        return run

    parameters = {QKV: torch.zeros(2, 2)}
    monkeypatch.setattr(opened.model, "parameters", parameters)
    for sizes, repetitions in (
        ([0.0, 0.0, 0.0, 3.0, 2.0, 2.001], 6),  # zeros have not settled: they are below the scale
        ([2.0, 2.1, 2.2, 2.3, 2.3], 5),
        ([math.nan], 8 * 3 + 2),
    ):
        seen.clear()
        monkeypatch.setattr(opened.model, "run", run_with(sizes))
        opened.model.settle(opened.batch)
        assert len(seen) == repetitions, sizes
