"""Convert a Megatron checkpoint into a checkpoint of coatlm, one tensor at a time.

Names and fused tensors of the two are the same (see `megatron_files`), so values are copied bit by
bit unless another dtype is requested. Optimizer states of a torch_dist checkpoint are taken over as
those of `optim.recipe=adamw-fp32`: Megatron's moments and master weights are fp32 as well. States
in flat buckets are only if a layout is found that fits all weights (see `megatron_buckets`). A run
then continues at the iteration of the checkpoint; otherwise one starts from the weights alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coatlm.config import Config, dump_yaml, make_config, read_mapping
from coatlm.console import progress
from coatlm.convert.from_hf import DTYPES, LARGEST_MULTIPLE, NO_TOKENIZER
from coatlm.convert.megatron_args import left_out, read_arguments
from coatlm.convert.megatron_bridge import bridge_arguments, consumed_samples
from coatlm.convert.megatron_files import (
    Header,
    RankFiles,
    TorchDist,
    find_iteration,
    open_megatron,
)
from coatlm.convert.megatron_split import EMBEDDING, HEAD
from coatlm.data.tokenizer import make_tokenizer
from coatlm.files import STATE_PREFIX, whole_directory
from coatlm.hf.files import Described, Report
from coatlm.hf.layout import check_layers, entries
from coatlm.hf.new_rows import with_rows
from coatlm.hf.tokenizer import check_rows
from coatlm.optim.recipes import MASTER, M, V
from coatlm.train.manifest import STATE, describe, write_file, write_manifest
from coatlm.train.shards import write_layout, write_one_by_one

SECTIONS = ("model", "data", "optim", "train")


def from_megatron(
    source: Path,
    destination: Path,
    *,
    dtype: str | None = None,
    tokenizer: str = NO_TOKENIZER,
    config: Path | None = None,
    vocab_multiple: int = 1,
    seq_len: int | None = None,
    weights_only: bool = False,
) -> Report:
    """Write `destination`, a checkpoint, from a directory of Megatron-LM or Megatron-Bridge.

    `source` is an iteration, or a directory with several, whose newest is used. `config` is a YAML
    file of coatlm whose keys of model, data, optim and train replace what the checkpoint says; one
    that megatron-core wrote without a program around it says nothing. `tokenizer` is a spec, or
    `none`. `dtype` is that of the weights: bf16, fp32, or None for the stored dtype; fp32 reads the
    optimizer's fp32 weights if there are any. Rows of zeros pad the embedding to a multiple of
    `vocab_multiple`. `weights_only` leaves out optimizer states.
    Raises ValueError with the name of what does not fit before anything is written, and
    CheckpointError for a damaged checkpoint.
    """
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype={dtype!r}: coatlm trains in {' or '.join(DTYPES)}")
    if not 1 <= vocab_multiple <= LARGEST_MULTIPLE:
        raise ValueError(f"vocab_multiple={vocab_multiple}: from 1 to {LARGEST_MULTIPLE}")
    stored = open_megatron(source)
    if EMBEDDING not in stored.described or len(stored.described[EMBEDDING].shape) != 2:
        raise ValueError(f"{source}: {EMBEDDING} is missing: not a GPT model of megatron-core")
    kind = _common_type(source, stored, dtype)
    rows = stored.described[EMBEDDING].shape[0]
    padded = rows + -rows % vocab_multiple
    newest = find_iteration(source)
    arguments = {**stored.header.arguments, **bridge_arguments(newest)}
    samples = consumed_samples(newest, arguments)
    sections = _sections(newest, arguments, config)
    run = _config(sections, tokenizer, padded, seq_len, kind)
    check_layers(run.model, stored.described, str(source))
    plan = {entry.key: entry.shape for entry in entries(run.model, rows)}
    if isinstance(stored, TorchDist) and not (weights_only and kind != torch.float32):
        stored.find_bucketed(plan)
    states = {} if weights_only else _states(source, stored, plan, kind)
    exact = _masters(stored, plan) if kind == torch.float32 else {}
    _check(source, stored, plan, states | {name: plan[key] for key, name in exact.items()})
    fingerprint = _fingerprint(tokenizer, padded)
    described = {key: Described(kind, shape) for key, shape in plan.items()}
    described |= {key: Described(torch.float32, shape) for key, shape in states.items()}
    sizes = {key: _padded(key, d, padded) for key, d in described.items()}
    state = _state(run, fingerprint, stored.header, samples, bool(states))
    notes = _notes(stored, states, left_out(arguments), padded - rows, tokenizer)
    report = Report.of(list(sizes.values()), notes)

    def make(key: str) -> Tensor:
        wanted = sizes[key]
        tensor = with_rows(stored.read(exact.get(key, key)).to(wanted.dtype), wanted.shape[0])
        advance(tensor.nbytes)
        return tensor

    with (
        whole_directory(destination) as directory,
        progress(f"converting {source.name}", report.bytes) as advance,
    ):
        write_layout(directory)
        write_one_by_one(directory, sizes, make)
        write_file(directory / STATE, state)
        start = _start_yaml(run, sections, destination, bool(fingerprint), bool(states))
        write_file(directory / "config.yaml", start)
        files = {p.name: describe(p) for p in directory.iterdir()}
        write_manifest(directory, destination.parent, files)
    return report


def _sections(
    directory: Path, arguments: Mapping[str, Any], file: Path | None
) -> dict[str, dict[str, Any]]:
    """What Megatron's arguments say about the run, replaced by what `file` says."""
    if not arguments and file is None:
        raise ValueError(
            f"{directory}: says nothing about its model: no arguments in it and no "
            "run_config.yaml; describe the model with --config FILE.yaml"
        )
    found = read_arguments(arguments)
    given = read_mapping(file) if file is not None else {}
    for name in SECTIONS:
        section = given.get(name) or {}
        if not isinstance(section, Mapping):
            raise ValueError(f"{file}: {name} is not a mapping")
        found[name] |= section
    return found


def _config(
    sections: Mapping[str, Mapping[str, Any]],
    tokenizer: str,
    vocab: int,
    seq_len: int | None,
    kind: torch.dtype,
) -> Config:
    data = {k: v for k, v in sections["data"].items() if k == "seq_len"}
    data |= {} if seq_len is None else {"seq_len": seq_len}
    data |= {} if tokenizer == NO_TOKENIZER else {"tokenizer": tokenizer}
    return make_config(
        {
            "model": {**sections["model"], "vocab": vocab},
            "data": {"text": "python-stdlib", **data},
            "optim": {**sections["optim"], "recipe": "adamw-fp32"},
            "train": sections["train"],
            "precision": {"recipe": "fp32" if kind == torch.float32 else "bf16"},
        }
    )


def _common_type(source: Path, stored: TorchDist | RankFiles, wanted: str | None) -> torch.dtype:
    """The type of the weights. Raises ValueError if they have several and none is wanted."""
    if wanted is not None:
        return DTYPES[wanted]
    found = {d.dtype for key, d in stored.described.items() if not key.startswith(STATE_PREFIX)}
    if len(found) == 1 and found <= set(DTYPES.values()):
        return found.pop()
    names = ", ".join(sorted(map(_name, found)))
    raise ValueError(f"{source}: the weights are {names}: choose --dtype bf16 or fp32")


def _masters(stored: TorchDist | RankFiles, plan: Mapping[str, Any]) -> dict[str, str]:
    """The weights in less than fp32 that have an fp32 one in the optimizer -> its key."""
    names = {key: f"{STATE_PREFIX}{MASTER}.{key}" for key in plan if key in stored.described}
    return {
        key: name
        for key, name in names.items()
        if name in stored.described and stored.described[key].dtype != torch.float32
    }


def _states(
    source: Path, stored: TorchDist | RankFiles, plan: Mapping[str, Any], kind: torch.dtype
) -> dict[str, tuple[int, ...]]:
    """The optimizer states to take over: all that `adamw-fp32` has, or none.

    Raises ValueError if some are missing or not fp32.
    """
    names = [M, V] if kind == torch.float32 else [MASTER, M, V]
    wanted = {f"{STATE_PREFIX}{n}.{key}": plan[key] for n in names for key in plan}
    present = [key for key in wanted if key in stored.described]
    if not present:
        return {}
    if missing := [key for key in wanted if key not in stored.described]:
        raise ValueError(f"{source}: {missing[0]} is missing; choose --weights-only")
    for key in wanted:
        found = stored.described[key].dtype
        if found != torch.float32:
            raise ValueError(f"{source}: {key} is {_name(found)}, not fp32; choose --weights-only")
    return wanted


def _check(
    source: Path,
    stored: TorchDist | RankFiles,
    plan: Mapping[str, tuple[int, ...]],
    states: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise ValueError unless the checkpoint has exactly the tensors of the model."""
    for key, shape in {**plan, **states}.items():
        if key not in stored.described:
            raise ValueError(f"{source}: {key} is missing")
        if stored.described[key].shape != shape:
            found = list(stored.described[key].shape)
            raise ValueError(f"{source}: {key} is {found}, its model has {list(shape)}")
    weights = [key for key in stored.described if not key.startswith(STATE_PREFIX)]
    extra = [key for key in weights if key not in plan]
    if HEAD in extra:  # of a tied embedding, stored by the last pipeline stage
        if not torch.equal(stored.read(HEAD), stored.read(EMBEDDING)):
            raise ValueError(f"{source}: {HEAD} differs from {EMBEDDING}, and the model ties them")
        extra.remove(HEAD)
    if extra:
        raise ValueError(f"{source}: {extra[0]} has no place in coatlm's model")


def _padded(key: str, described: Described, rows: int) -> Described:
    vocabulary = key.endswith((EMBEDDING, HEAD))
    return Described(described.dtype, (rows, *described.shape[1:])) if vocabulary else described


def _fingerprint(tokenizer: str, rows: int) -> str:
    if tokenizer == NO_TOKENIZER:
        return ""
    made = make_tokenizer(tokenizer)
    check_rows(made, rows)
    return made.fingerprint


def _notes(
    stored: TorchDist | RankFiles,
    states: Mapping[str, Any],
    unfollowed: str,
    added: int,
    tokenizer: str,
) -> tuple[str, ...]:
    notes = [f"{added} rows of zeros were added to the vocabulary"] if added else []
    if tokenizer == NO_TOKENIZER:
        notes.append("no tokenizer: a run from this checkpoint has to name data.tokenizer")
    if states:
        notes.append(
            f"optimizer states of {stored.header.updates} steps were taken over; a run continues "
            "with coatlm's own order of samples"
        )
        if unfollowed:
            notes.append(f"not taken over: {unfollowed}; set the keys of optim that replace them")
    else:
        why = f" ({stored.unread})" if stored.unread else ""
        notes.append(f"weights only: no optimizer states were taken over{why}")
    return tuple(notes)


def _state(
    config: Config, fingerprint: str, header: Header, samples: int | None, states: bool
) -> bytes:
    """state.json: at the iteration of the checkpoint with optimizer states, else at step 0."""
    step = header.iteration if states else 0
    if samples is None or not states:
        samples = step * config.train.global_batch
    state = {
        "step": step,
        "tokens": samples * config.data.seq_len,
        "samples": samples,
        "updates": header.updates if states else 0,
        "skipped": 0,
        "tokenizer": fingerprint,
        "config": config.model_dump(mode="json"),
    }
    return json.dumps(state, indent=1).encode()


def _start_yaml(
    config: Config,
    sections: Mapping[str, Mapping[str, Any]],
    destination: Path,
    tokenized: bool,
    states: bool,
) -> bytes:
    """A config.yaml for runs from the checkpoint, without `data.text` or `data.paths`."""
    resolved = config.model_dump(mode="json")
    data = {"tokenizer": config.data.tokenizer if tokenized else None}  # None: an error until given
    keys = {
        "model": resolved["model"],
        "data": data | {"seq_len": config.data.seq_len},
        "precision": {"recipe": config.precision.recipe},
        "optim": {n: resolved["optim"][n] for n in ("recipe", *sections["optim"])},
        "train": {name: resolved["train"][name] for name in sections["train"]},
        "checkpoint": {"resume": str(destination), "weights_only": not states},
    }
    return dump_yaml({name: values for name, values in keys.items() if values}).encode()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
