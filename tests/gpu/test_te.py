"""TransformerEngine's layers train like coatlm's own, and its FP8 weights follow the updates."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from coatlm.config import make_config
from tests.distributed import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="needs transformer_engine"
    ),
]
STEPS = 6
RATE = 1e-4  # at ten times this rate the loss of one batch jumps up and down
RECIPES = {  # name -> model.spec, precision.recipe, relative tolerance of the loss
    "local": ("local", "bf16", 0.0),
    "te": ("te", "bf16", 0.01),  # BF16 rounds at other places
    "te-delayed": ("te", "te-delayed", 0.05),  # E4M3 has 4 bits: a layer is off by some percent
    "te-current": ("te", "te-current", 0.05),
    "te-blockwise": ("te", "te-blockwise", 0.05),
}


def train_recipes(rank: int, size: int, _: Any) -> dict[str, list[tuple[float, float]]]:
    """Loss and norm of each step, always on the same batch."""
    from coatlm.parallel.groups import make_groups, release_groups
    from coatlm.train.setup import Launch, start_processes
    from coatlm.train.step import Trainer

    start_processes(Launch())
    tokens = torch.randint(0, 1000, (4, 513), generator=torch.Generator().manual_seed(0)).cuda()
    curves = {}
    for name, (spec, recipe, _tolerance) in RECIPES.items():
        config = make_config(
            {
                "model": {"spec": spec, "hidden": 512, "layers": 4, "heads": 8, "ffn": 1408},
                "data": {"text": ["unused"], "seq_len": 512},
                "precision": {"recipe": recipe},
                "train": {"micro_batch": 2, "global_batch": 4},
            }
        )
        trainer = Trainer(config, make_groups(config.parallel), vocab=1024)
        batches = [
            {
                "tokens": part[:, :-1].contiguous(),
                "labels": part[:, 1:].contiguous(),
                "loss_mask": torch.ones(2, 512, device="cuda"),
                "document_bounds": None,
            }
            for part in tokens.chunk(2)
        ]
        placed = trainer.place(batches)
        steps = [trainer.train_step(placed, lr=RATE) for _step in range(STEPS)]
        curves[name] = [(float(loss), float(norm)) for loss, norm in steps]
        release_groups()
    return curves


def test_te_recipes_follow_bf16() -> None:
    curves = run_ranks(1, "tests.gpu.test_te:train_recipes")[0]
    for name, (_, _, tolerance) in RECIPES.items():
        actual, expected = ([loss for loss, _ in curves[key]] for key in (name, "local"))
        assert actual == pytest.approx(expected, rel=tolerance), name
        assert actual[-1] < actual[0] - 1.0, (name, curves[name])  # each recipe learns the batch
