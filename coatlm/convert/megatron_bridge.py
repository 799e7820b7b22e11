"""Read what Megatron-Bridge writes beside the tensors of a checkpoint.

    iter_0001000/run_config.yaml    the configuration of the run
    iter_0001000/train_state.pt     its counters at this iteration: tensors `step`,
                                    `consumed_train_samples` and others
    latest_train_state.pt           the counters at the newest iteration

The section `model` of run_config.yaml has the fields of a GPTModelProvider, a subclass of
megatron-core's TransformerConfig. From version 0.7 on it has those of a GPTModelConfig, whose field
`transformer` is the TransformerConfig. The names in the sections optimizer, scheduler and train are
those of Megatron-LM's arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coatlm.config import read_mapping
from coatlm.config.errors import shown
from coatlm.convert.pickles import is_plain, load_pickle

RUN_CONFIG = "run_config.yaml"
TRAIN_STATE = "train_state.pt"
LATEST_STATE = "latest_train_state.pt"
SAMPLES = "consumed_train_samples"
NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "activation_func")
TRAINING_SECTIONS = ("optimizer", "scheduler", "train")
COUNTERS = (torch.int32, torch.int64)  # until version 0.4, and later
SEQUENCE = ("seq_length", "sequence_length")  # fields of section dataset in one version or another


def bridge_arguments(directory: Path) -> dict[str, Any]:
    """The arguments of Megatron that run_config.yaml gives; empty if there is no such file."""
    path = directory / RUN_CONFIG
    return arguments_in(read_mapping(path), path) if path.is_file() else {}


def arguments_in(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The model and the training in the content of a run_config.yaml, under Megatron's names.

    The sequence length is the dataset's; the model's is the longest that it was built for. What
    Megatron-Bridge imports from Hugging Face has an optimizer of defaults without a learning rate,
    of which nothing is taken. Raises ValueError for a section of another type, and for a model that
    lacks a field of NEEDED.
    """
    model = _section(path, content, "model")
    if not model:
        raise ValueError(f"{path}: has no section model")
    given = {name: value for name, value in model.items() if value is not None}
    model = {**model, **_section(path, model, "transformer"), **given}
    if missing := [name for name in NEEDED if model.get(name) is None]:
        raise ValueError(
            f"{path}: {missing[0]} is in neither model nor model.transformer, and the tensors of "
            "the checkpoint do not tell it; add what the run used"
        )
    training = {name: _section(path, content, name) for name in TRAINING_SECTIONS}
    if training["optimizer"].get("lr") is None:
        training["optimizer"] = {}
    dataset = _section(path, content, "dataset")
    lengths = [dataset[name] for name in SEQUENCE if dataset.get(name) is not None]
    found = {k: v for section in training.values() for k, v in section.items() if k not in model}
    return {**found, **model, **({"seq_length": lengths[0]} if lengths else {})}


def consumed_samples(directory: Path, arguments: Mapping[str, Any]) -> int | None:
    """The training samples until this iteration, from train_state.pt or Megatron-LM's arguments.

    None if neither says it. Raises CheckpointError for a damaged file, ValueError as
    `read_counter`.
    """
    path = directory / TRAIN_STATE
    if path.is_file():
        return read_counter(path, SAMPLES)
    samples = arguments.get(SAMPLES)
    return samples if type(samples) is int and samples >= 0 else None


def read_counter(path: Path, name: str) -> int:
    """A counter of train_state.pt. Raises ValueError unless it is a whole number, and as
    `load_pickle`.
    """
    content = load_pickle(path)
    value = content.get(name) if isinstance(content, Mapping) else None
    plain = isinstance(value, Tensor) and is_plain(value)
    if value is None or not plain or value.dtype not in COUNTERS or value.numel() != 1:
        raise ValueError(f"{path}: {name} is not a tensor with one whole number")
    if (number := int(value)) < 0:
        raise ValueError(f"{path}: {name}={number}: a whole number, not below 0")
    return number


def _section(path: Path, content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A mapping in `content`; empty if it is null or missing. Raises ValueError otherwise."""
    section = content.get(name)
    if not isinstance(section, Mapping | None):
        raise ValueError(f"{path}: {name}={shown(section)}: a mapping")
    return section or {}
