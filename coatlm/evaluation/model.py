"""Load a whole model from a checkpoint into this process for evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coatlm.config import Config, Model, make_config
from coatlm.files import STATE_PREFIX
from coatlm.model.accounting import parameters
from coatlm.model.builder import Llama, build_model
from coatlm.parallel.groups import make_groups, release_groups
from coatlm.parallel.regions import sharded_tensors
from coatlm.train.setup import Launch, start_processes
from coatlm.train.shards import StoredTensors

EMBEDDING = "embedding.word_embeddings.weight"
PRECISIONS = ("fp32", "bf16")  # supported without TransformerEngine


@contextmanager
def open_model(
    checkpoint: Path, saved: dict[str, Any], *, window: int, precision: str
) -> Iterator[Llama]:
    """Load the model of a checkpoint, for sequences of `window` tokens, on this process's device.

    `saved` is the configuration in the checkpoint's state. `precision` is fp32 or bf16 and may
    differ from the checkpoint's. torch.distributed must not be initialized. Raises ValueError if
    the weights do not fit the configuration, and CheckpointError if they cannot be read.
    """
    config = _evaluation_config(saved, window, precision)
    stored = StoredTensors(checkpoint)
    if EMBEDDING not in stored.described:
        raise ValueError(f"{checkpoint}: {EMBEDDING} is missing")
    vocab = stored.described[EMBEDDING][1][0]
    _check_parameters(checkpoint, config.model, stored, vocab)
    start_processes(Launch())
    try:
        groups = make_groups(config.parallel)
        (model,) = build_model(config, groups, vocab)
        model.eval()
        model.requires_grad_(False)
        load_weights(model, checkpoint)
        yield model
    finally:
        release_groups()
        torch.distributed.destroy_process_group()


@torch.no_grad()
def load_weights(model: Llama, checkpoint: Path) -> None:
    """Copy the weights of a checkpoint into a whole model, converted to the model's dtype."""
    stored = StoredTensors(checkpoint)
    key, whole = "", torch.empty(0)
    for _, item in sharded_tensors(model):
        assert item.data is not None
        if item.key != key:
            if item.key not in stored.described:
                raise ValueError(f"{checkpoint}: {item.key} is missing")
            key, whole = item.key, stored.read(item.key)
        if whole.shape != item.global_shape:
            raise ValueError(
                f"{checkpoint}: {key} is {list(whole.shape)}, its model has "
                f"{list(item.global_shape)}"
            )
        item.data.copy_(_part(whole, item.global_offset, item.local_shape))


def _check_parameters(checkpoint: Path, model: Model, stored: StoredTensors, vocab: int) -> None:
    """Raise ValueError if the stored weights do not have the model's number of parameters."""
    described, wanted = 0, parameters(model, vocab)
    for key, (_, shape) in stored.described.items():
        if not key.startswith(STATE_PREFIX):
            described += math.prod(shape)
    if described != wanted:
        raise ValueError(
            f"{checkpoint}: its weights have {described:,} parameters, its configuration {wanted:,}"
        )


def _part(whole: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def _evaluation_config(saved: dict[str, Any], window: int, precision: str) -> Config:
    """The saved configuration's model with coatlm's own layers; all other sections are default."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: one of {', '.join(PRECISIONS)}")
    return make_config(
        {
            "model": {**saved["model"], "spec": "local"},
            "data": {"text": "python-stdlib", "seq_len": window},
            "precision": {"recipe": precision},
        }
    )
