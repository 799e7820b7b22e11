"""Convert a checkpoint of coatlm into a Hugging Face directory, one tensor at a time.

The weights are those that the model computed with. If fp32 is requested and the optimizer stored
more precise weights (a master weight, a remainder, the low half of a pair beside each BF16 weight),
those are decoded. config.json, the tokenizer and generation_config.json come from the checkpoint's
own run, or from the Hugging Face model that it was trained from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coatlm.config import Config
from coatlm.console import progress
from coatlm.data.tokenizer import make_tokenizer
from coatlm.files import STATE_PREFIX, read_json, whole_directory
from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.hf.config import check_token_ids, make_hf_config, output_bias, read_model
from coatlm.hf.files import (
    Described,
    Report,
    write_json,
    write_weights,
)
from coatlm.hf.fp8 import Fp8Export
from coatlm.hf.layout import EMBEDDING, Entry, check_layers, entries, is_linear, zero_biases
from coatlm.hf.tokenizer import (
    GENERATION,
    TOKENIZER_FILES,
    add_eos,
    can_export,
    check_files,
    copy_files,
    eos_ids,
    export_tokenizer,
    first_eos,
    has_other_tokenizer,
    spec_in,
    token_ids,
)
from coatlm.optim.recipes import MASTER, find_recipe
from coatlm.train.checkpoint import named_checkpoint, saved_config
from coatlm.train.shards import StoredTensors
from coatlm.train.state import read_run_state

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
SHARD_BYTES = 5 * 10**9
EMBEDDING_KEY = "embedding.word_embeddings.weight"

logger = logging.getLogger("coatlm.hf")


def to_huggingface(
    source: Path,
    destination: Path,
    *,
    dtype: str | None = None,
    like: Path | None = None,
    vocab_size: int | None = None,
    stop_tokens: Sequence[str] = (),
    shard_bytes: int = SHARD_BYTES,
    fp8: Fp8Export | None = None,
) -> Report:
    """Write `destination`, which AutoModelForCausalLM.from_pretrained reads.

    `source` is a checkpoint, or a run, whose newest checkpoint is used; checksums are verified.
    `dtype` is bf16, fp32, fp16, or None for the model's. `like` is a Hugging Face directory or a
    converted checkpoint that gives the family, the tokenizer and fields without effect on the
    logits; the default is `source` itself if it was converted. `vocab_size` is the number of
    embedding rows to write, at least one for every id of the tokenizer; None means that of `like`,
    or more if the run's tokenizer has more ids; without `like`, all rows. `stop_tokens` are added
    to the eos_token_id, at which generation ends: that of a base model is the end of a document,
    where one of conversations writes the end of a turn. `shard_bytes` is the largest file size.
    Raises ValueError with the field that does not fit before anything is written, and
    CheckpointError for a damaged checkpoint.
    """
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype={dtype!r}: one of {', '.join(DTYPES)}")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes}: at least 1")
    checkpoint = named_checkpoint(source, logger)
    state = read_run_state(checkpoint)
    config, fingerprint = saved_config(checkpoint, state), str(state["tokenizer"])
    relative = like or (checkpoint if (checkpoint / "config.json").exists() else None)
    raw = read_json(relative / "config.json") if relative else {}
    weights = CheckpointWeights(checkpoint, config, DTYPES[dtype] if dtype else None)
    least = _rows_in_use(relative, raw, config if fingerprint else None)
    if vocab_size is not None:
        least = max(least, _rows_of_special_tokens(relative, raw, weights.rows))
    theirs = read_model(raw)["vocab"] if raw else None
    rows = _rows(vocab_size, theirs, least, weights.rows)
    if relative is not None:
        check_token_ids(str(relative / "config.json"), raw, weights.rows)
        check_files(relative, (GENERATION, *TOKENIZER_FILES), weights.rows)
    result = make_hf_config(config, rows, dtype=str(weights.dtype).removeprefix("torch."), like=raw)
    plan = list(entries(config.model, rows, result["model_type"]))
    zeros = zero_biases(config.model) if output_bias(result) else {}
    described = _describe(plan, zeros, weights.dtype, fp8)
    size = Report.of(list(described.values()), ()).bytes
    with (
        whole_directory(destination) as directory,
        progress(f"converting {checkpoint.name}", size) as advance,
    ):
        notes = _write_tokenizer(directory, relative, raw, config, fingerprint, result)
        if theirs is not None and rows > theirs and vocab_size is None:
            notes += (f"vocab_size is {rows}, and {theirs} in {relative}: the tokenizer has more",)
        stops = token_ids(directory, stop_tokens, rows)
        add_eos(result, stops)
        if fp8 is not None:
            result["quantization_config"] = fp8.config()
        write_json(directory / "config.json", result)
        if not (directory / GENERATION).exists():
            ids = {n: result[n] for n in ("bos_token_id", "eos_token_id") if result[n] is not None}
            write_json(directory / GENERATION, ids)
        elif stops:
            generation = read_json(directory / GENERATION)
            add_eos(generation, stops if eos_ids(generation) else eos_ids(result))
            write_json(directory / GENERATION, generation)
        tensors = _tensors(plan, zeros, weights, rows, fp8)

        def make(name: str) -> Tensor:
            made, tensor = next(tensors)
            assert made == name, f"produced {made}, but {name} is next in the file"
            advance(tensor.nbytes)
            return tensor

        write_weights(directory, described, make, shard_bytes=shard_bytes)
    return Report.of(list(described.values()), notes)


class CheckpointWeights:
    """The weights of a checkpoint in the dtype of the export.

    Raises ValueError if the checkpoint does not have exactly the tensors of its configuration.
    """

    def __init__(self, checkpoint: Path, config: Config, dtype: torch.dtype | None) -> None:
        self._stored, self._path = StoredTensors(checkpoint), checkpoint
        described = self._stored.described
        if EMBEDDING_KEY not in described:
            raise ValueError(f"{checkpoint}: {EMBEDDING_KEY} is missing")
        own, (self.rows, _) = described[EMBEDDING_KEY]
        self.dtype = dtype or own
        self._recipe = find_recipe(config.optim.recipe).weight
        exact = dtype == torch.float32 and own == torch.bfloat16
        names = [
            key.removeprefix(STATE_PREFIX) for key in described if key.startswith(STATE_PREFIX)
        ]
        check_layers(config.model, described, str(checkpoint))
        masters = [name for name in names if exact and name.startswith(MASTER)]
        plan = {entry.key: entry.shape for entry in entries(config.model, self.rows)}
        self._suffixes = {  # names of the states that the optimizer stores beside each weight
            key: [n[len(MASTER) : -len(key) - 1] for n in masters if n.endswith(f".{key}")]
            for key in plan
        }
        for key, shape in plan.items():
            if key not in described or described[key][1] != shape:
                found = list(described[key][1]) if key in described else "missing"
                raise ValueError(f"{checkpoint}: {key} is {found}, its model has {list(shape)}")
        weights = [key for key in described if not key.startswith(STATE_PREFIX)]
        if extra := sorted(set(weights) - plan.keys()):
            raise ValueError(f"{checkpoint}: {extra[0]} has no place in a Hugging Face model")

    def read(self, key: str) -> Tensor:
        """Read a weight. Raises ValueError if a finite value overflows the dtype."""
        weight = self._stored.read(key)
        if self._suffixes[key]:
            weight = self._decode(key, weight)
        result = weight.to(self.dtype)
        if self.dtype == torch.float16 and bool((result.isinf() & weight.isfinite()).any()):
            raise ValueError(
                f"{self._path}: {key} has values beyond fp16's 65504: choose bf16 or fp32"
            )
        return result

    def _decode(self, key: str, weight: Tensor) -> Tensor:
        """Decode the optimizer's more precise weight."""
        flat = _padded(weight)
        state: dict[str, Tensor] = {}
        for suffix in self._suffixes[key]:
            part = self._stored.read(f"{STATE_PREFIX}{MASTER}{suffix}.{key}")
            if part.numel() == weight.numel():
                state[suffix] = _padded(part)
            elif part.numel() == flat.numel() // SCALE_BLOCK:
                state[suffix] = part.reshape(-1)
            else:
                raise ValueError(
                    f"{self._path}: the scales of the master of {key} are in the order of its "
                    "tensor-parallel ranks, which this conversion cannot decode: choose bf16"
                )
        return self._recipe.decode(flat, state)[: weight.numel()].view(weight.shape)


def _padded(tensor: Tensor) -> Tensor:
    """Flatten and pad with zeros to a multiple of 128, as in the optimizer."""
    flat = tensor.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % SCALE_BLOCK))


def _rows(wanted: int | None, relative: int | None, least: int, stored: int) -> int:
    """The rows to write: `wanted`, else those of `relative` and of all ids that have one."""
    if wanted is None:
        least = min(least, stored)
        wanted = stored if relative is None else max(relative, least)
    if least > stored:
        raise ValueError(
            f"vocab_size={wanted}: the checkpoint's embedding has {stored} rows, and the tokenizer "
            f"has ids up to {least - 1}: leave vocab_size out, or give the run's tokenizer"
        )
    if not least <= wanted <= stored:
        raise ValueError(
            f"vocab_size={wanted}: must be in {least}..{stored}: every id of the tokenizer and of "
            f"special tokens needs a row, and the checkpoint's embedding has {stored} rows"
        )
    return wanted


def _rows_of_special_tokens(relative: Path | None, raw: Mapping[str, Any], stored: int) -> int:
    """The fewest rows that hold every special token of config.json and generation_config.json.

    Ids beyond the `stored` rows, which early models have for a missing padding token, do not count.
    """
    generation = relative / GENERATION if relative is not None else None
    described = [raw, read_json(generation) if generation and generation.is_file() else {}]
    found = [each.get(f"{name}_token_id") for each in described for name in ("bos", "eos", "pad")]
    ids = [each for value in found for each in (value if isinstance(value, list) else [value])]
    return max((token + 1 for token in ids if type(token) is int and token < stored), default=1)


def _rows_in_use(relative: Path | None, raw: Mapping[str, Any], config: Config | None) -> int:
    """The fewest rows that hold every id of the exported tokenizer and of the run's.

    `config` is the run's if it has a tokenizer. Tokenizers that cannot be read do not count.
    """
    rows, specs = [1], [None if config is None else config.data.tokenizer]
    with suppress(ValueError):
        specs.append(None if relative is None else spec_in(relative, first_eos(raw)))
    for spec in filter(None, specs):
        with suppress(ValueError):
            rows.append(make_tokenizer(spec).vocab_size)
    return max(rows)


def _describe(
    plan: list[Entry], zeros: Mapping[str, Any], dtype: torch.dtype, fp8: Fp8Export | None
) -> dict[str, Described]:
    """The dtype and shape of the tensors to write, in the order of `_tensors`."""
    described: dict[str, Described] = {}
    for entry in plan:
        for name, shape in entry.stored.items():
            if fp8 is not None and is_linear(name):
                described |= fp8.describe(name, shape)
            else:
                described[name] = Described(dtype, shape)
    return described | {name: Described(dtype, shape) for name, shape in zeros.items()}


def _tensors(
    plan: list[Entry],
    zeros: Mapping[str, Any],
    weights: CheckpointWeights,
    rows: int,
    fp8: Fp8Export | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor to write, one at a time."""
    for entry in plan:
        whole = weights.read(entry.key)
        if EMBEDDING in entry.stored or entry.key == "output_layer.weight":
            whole = whole[:rows]
        for name, part in zip(entry.stored, entry.split(whole), strict=True):
            if fp8 is not None and is_linear(name):
                yield from fp8.encode(name, part).items()
            else:
                yield name, part
    for name, shape in zeros.items():
        yield name, torch.zeros(shape, dtype=weights.dtype)


def _write_tokenizer(
    directory: Path,
    relative: Path | None,
    raw: Mapping[str, Any],
    config: Config,
    fingerprint: str,
    result: dict[str, Any],
) -> tuple[str, ...]:
    """Write the tokenizer's files: those of `relative`, unless the run has another tokenizer.

    `raw` is the config.json of `relative`. Sets bos and eos ids in `result`, the one to be written,
    to the end of document: those that it lacks, or both if `relative` has another tokenizer, whose
    ids they were.
    """
    spec, other = config.data.tokenizer, False
    if relative is not None and fingerprint:
        other = has_other_tokenizer(relative, raw, spec, fingerprint)
    if relative is not None and not (other and can_export(spec)):
        copy_files(relative, directory, (GENERATION,))
        if copy_files(relative, directory, TOKENIZER_FILES):
            which = f"the tokenizer of {relative} was copied: the run's, {spec}, cannot be exported"
            return (which,) if other else ()
    if not fingerprint:
        return ("no tokenizer was written: the checkpoint has none",)
    eod, note = export_tokenizer(spec, fingerprint, directory)
    for name in ("bos_token_id", "eos_token_id"):
        if result[name] is None or other:
            result[name] = eod
    notes = [f"{relative} has another tokenizer than the run: {spec} was exported"] if other else []
    return (*notes, *([note] if note else []))
