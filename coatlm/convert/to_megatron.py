"""Convert a checkpoint of coatlm into one of Megatron-LM, one tensor at a time.

The result is a directory as Megatron-LM's `--load` takes it: `latest_checkpointed_iteration.txt`
and an iteration in megatron-core's `torch_dist` format, with one tensor per layer and the arguments
of the model in common.pt. `content_metadata` there tells megatron-core which names to ask for. The
states of `optim.recipe=adamw-fp32` become those of Megatron's distributed optimizer in its
`fully_reshardable` format; other recipes have other formats, and only weights are written. Weights
alone at step 0 are a `release`, of which Megatron-LM loads the weights without further flags;
before megatron-core 0.16 it refuses an iteration 0.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coatlm.config import Config
from coatlm.console import progress
from coatlm.convert.from_hf import LARGEST_MULTIPLE
from coatlm.convert.megatron_args import write_arguments, write_schedule
from coatlm.convert.megatron_files import LATEST, RELEASE
from coatlm.convert.to_hf import CheckpointWeights
from coatlm.files import STATE_PREFIX, whole_directory
from coatlm.hf.files import Described, Report
from coatlm.hf.layout import entries
from coatlm.hf.new_rows import with_rows
from coatlm.optim.recipes import MASTER, M, V
from coatlm.train.checkpoint import named_checkpoint, saved_config
from coatlm.train.manifest import write_file
from coatlm.train.shards import StoredTensors, write_layout, write_one_by_one
from coatlm.train.state import read_run_state

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
EXTRA = (  # modules of a layer with an extra state
    *("self_attention.linear_qkv", "self_attention.core_attention", "self_attention.linear_proj"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
)
NORMS = ("self_attention.q_layernorm", "self_attention.k_layernorm")
NAMES = {MASTER: "param", M: "exp_avg", V: "exp_avg_sq"}  # in the fully_reshardable format

logger = logging.getLogger("coatlm.convert")


def to_megatron(
    source: Path,
    destination: Path,
    *,
    dtype: str | None = None,
    vocab_multiple: int = 1,
    weights_only: bool = False,
) -> Report:
    """Write `destination`, a directory for Megatron-LM's --load.

    `source` is a checkpoint, or a run, whose newest checkpoint is used; checksums are verified.
    `dtype` is bf16, fp32, or None for the model's; another than the model's leaves out optimizer
    states, as `weights_only` does. Rows of zeros pad the vocabulary to a multiple of
    `vocab_multiple`, which Megatron derives from --make-vocab-size-divisible-by and its
    tensor-parallel size. Raises ValueError, and CheckpointError for a damaged checkpoint.
    """
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype={dtype!r}: one of {', '.join(DTYPES)}")
    if not 1 <= vocab_multiple <= LARGEST_MULTIPLE:
        raise ValueError(f"vocab_multiple={vocab_multiple}: from 1 to {LARGEST_MULTIPLE}")
    checkpoint = named_checkpoint(source, logger)
    state = read_run_state(checkpoint)
    config = saved_config(checkpoint, state)
    weights = CheckpointWeights(checkpoint, config, DTYPES[dtype] if dtype else None)
    stored = StoredTensors(checkpoint)
    rows = weights.rows + -weights.rows % vocab_multiple
    plan = {entry.key: entry.shape for entry in entries(config.model, weights.rows)}
    same = weights.dtype == stored.described[VOCABULARY[0]][0]
    states = {} if weights_only or not same else _states(config, stored, plan)
    described = {key: _described(key, shape, weights.dtype, rows) for key, shape in plan.items()}
    for name, (_, key) in states.items():
        described[name] = _described(key, plan[key], torch.float32, rows)
    iteration = int(state["step"])
    latest = str(iteration) if states or iteration else RELEASE
    notes = _notes(rows - weights.rows, bool(states), latest)
    report = Report.of(list(described.values()), notes)

    def make(name: str) -> Tensor:
        ours, key = states.get(name, (name, name))
        tensor = stored.read(ours) if name in states else weights.read(key)
        tensor = with_rows(tensor, described[name].shape[0])
        advance(tensor.nbytes)
        return tensor

    with (
        whole_directory(destination) as directory,
        progress(f"converting {checkpoint.name}", report.bytes) as advance,
    ):
        inner = directory / (latest if latest == RELEASE else f"iter_{iteration:07d}")
        inner.mkdir()
        write_layout(inner, _common(config, state, rows, states=bool(states)))
        write_one_by_one(inner, described, make, nothing=_extra_states(config))
        write_file(directory / LATEST, f"{latest}\n".encode())
    return report


def _notes(added: int, states: bool, latest: str) -> tuple[str, ...]:
    notes = [f"{added} rows of zeros were added"] if added else []
    if not states:
        flags = ": load with --finetune or --no-load-optim"
        notes.append("weights only" + (flags if latest != RELEASE else ""))
    return tuple(notes)


def _states(
    config: Config, stored: StoredTensors, plan: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    """Megatron's name of each optimizer state -> coatlm's, and the weight's; empty without.

    An fp32 weight has no other copy in coatlm; for Megatron it is also the optimizer's.
    """
    first = f"{STATE_PREFIX}{M}.{next(iter(plan))}"
    if config.optim.recipe != "adamw-fp32" or first not in stored.described:
        return {}
    found: dict[str, tuple[str, str]] = {}
    for ours, theirs in NAMES.items():
        for key in plan:
            state = f"{STATE_PREFIX}{ours}.{key}"
            own = ours == MASTER and state not in stored.described
            found[f"{STATE_PREFIX}{theirs}.{key}"] = (key if own else state, key)
    return found


def _extra_states(config: Config) -> list[str]:
    """The keys of the extra states that modules of megatron-core and TransformerEngine ask for.

    They hold scales of FP8 layers; None leaves those of a module as they are.
    """
    modules = [*EXTRA, *(NORMS if config.model.qk_norm else ())]
    names = [f"layers.{i}.{module}" for i in range(config.model.layers) for module in modules]
    return [f"decoder.{name}._extra_state/shard_0_1" for name in [*names, "final_layernorm"]]


def _described(key: str, shape: tuple[int, ...], dtype: torch.dtype, rows: int) -> Described:
    return Described(dtype, (rows, *shape[1:]) if key in VOCABULARY else shape)


def _common(
    config: Config, state: Mapping[str, Any], vocab: int, *, states: bool
) -> dict[str, Any]:
    """The content of common.pt: what Megatron-LM reads besides tensors."""
    step, samples = int(state["step"]), int(state.get("samples") or 0)
    metadata: dict[str, Any] = {
        "non_homogeneous_layers": True,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    arguments = write_arguments(config, vocab=vocab, iteration=step, samples=samples, states=states)
    common: dict[str, Any] = {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": step,
        "content_metadata": metadata,
    }
    if states:
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        groups = [_group(config, state["updates"], decay) for decay in (1.0, 0.0)]
        common["optimizer"] = {
            "optimizer": {"param_groups": groups},
            "param_state_sharding_type": "fully_reshardable",
        }
        common["opt_param_scheduler"] = write_schedule(arguments)
    return common


def _group(config: Config, updates: int, decay: float) -> dict[str, Any]:
    """A group of parameters of Megatron's Adam: with weight decay (1.0) or without (0.0)."""
    o = config.optim
    return {
        "wd_mult": decay,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": o.lr,
        "min_lr": o.min_lr,
        "lr": o.lr,
        "betas": tuple(o.betas),
        "eps": o.eps,
        "weight_decay": o.weight_decay * decay,
        "bias_correction": True,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
        "step": updates,
    }
