"""A small model with random gains, biases and tied embeddings, as a checkpoint that has data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from coatlm.convert.from_hf import from_huggingface
from coatlm.data.batches import Microbatch
from coatlm.platform import device
from coatlm.train.checkpoint import saved_config
from coatlm.train.setup import quiet_megatron
from coatlm.train.state import read_run_state
from tests.hf.models import save_model
from tests.train.test_shards import seal
from tools import study_outliers
from tools.studies.outliers import EMBEDDING, Activations, Stress, Weights
from tools.studies.recipe_models import RecipeModel, config_of, one_process, read_weights

SEQ, BATCH = 32, 8


def make_checkpoint(directory: Path, model: str = "llama gqa rope3 tied") -> Path:
    """A converted model of tests/hf, with text to validate on; its units of width are of 16."""
    save_model(model, directory / "hf")
    from_huggingface(directory / "hf", directory / "coatlm", tokenizer="byte")
    text = directory / "text.txt"
    text.write_text("".join(f"{i * i} is the square of {i}.\n" for i in range(2000)))
    path = directory / "coatlm" / "state.json"
    state = json.loads(path.read_text())
    state["config"]["data"] |= {
        "text": [str(text)],
        "cache_dir": str(directory / "cache"),
        "seq_len": SEQ,
        "split": [50, 50, 0],
    }
    state["config"]["train"] |= {"micro_batch": BATCH, "global_batch": BATCH}
    path.write_text(json.dumps(state))
    seal(path.parent)
    return path.parent


@dataclass(frozen=True)
class Opened:
    """The fp32 model of the checkpoint, and what stresses are made of."""

    model: RecipeModel
    weights: Weights
    seen: Activations
    calibration: list[Microbatch]
    batch: Microbatch

    def losses(self, weights: Weights) -> Tensor:
        self.model.load(weights)
        return self.model.run(self.batch).losses.double()

    def inputs(self, stress: Stress, factor: int) -> Activations:
        self.model.load(stress.weights(factor))
        return self.model.activations([self.batch])


@contextmanager
def open_stressed(directory: Path) -> Iterator[Opened]:
    """The checkpoint's fp32 model, with 8 microbatches for calibration and another one."""
    quiet_megatron()
    path = make_checkpoint(directory)
    state = read_run_state(path)
    saved = saved_config(path, state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_outliers, "CALIBRATION", 8 * BATCH * SEQ)
        batches, calibration = study_outliers.read_batches(saved, state["tokenizer"], 1)
    with one_process() as groups:
        weights = read_weights(path, device())
        model = RecipeModel(config_of(saved, "fp32"), groups, len(weights[EMBEDDING]))
        model.load(weights)
        yield Opened(model, weights, model.activations(calibration), calibration, batches[0])


def relative(got: Tensor, wanted: Tensor) -> float:
    """||got - wanted|| / ||wanted||."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())
