"""Convert a Hugging Face directory into a checkpoint of coatlm, one tensor at a time.

Values are copied bit by bit unless another dtype is requested. The checkpoint holds global tensors,
so it loads into any layout. It has weights but no optimizer states; a run starts from it with
`checkpoint.resume=PATH checkpoint.weights_only=true`. It also has config.json, the tokenizer files
and generation_config.json of the directory, all listed in the manifest, and a config.yaml with the
keys for a run that starts from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coatlm.config import Config, Data, dump_yaml
from coatlm.console import progress
from coatlm.data.tokenizer import make_tokenizer
from coatlm.files import read_json, whole_directory
from coatlm.hf.config import TOKEN_IDS, check_token_ids, output_bias, read_model, run_config
from coatlm.hf.files import Described, Report, WeightFiles, write_json
from coatlm.hf.layout import EMBEDDING, HEAD, Entry, check_layers, entries
from coatlm.hf.new_rows import with_rows
from coatlm.hf.stored import COMPUTED, check_stored
from coatlm.hf.tokenizer import (
    GENERATION,
    TOKENIZER_FILES,
    check_files,
    check_rows,
    copy_files,
    has_other_tokenizer,
    moved,
    tokenizer_of,
)
from coatlm.train.manifest import STATE, describe, write_file, write_manifest
from coatlm.train.shards import write_layout, write_one_by_one

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # what coatlm trains in
LARGEST_MULTIPLE = 1 << 16  # the largest --vocab-multiple
NO_TOKENIZER = "none"  # --tokenizer
SEQ_LEN = 2048  # if config.json does not give it


def from_huggingface(
    source: Path,
    destination: Path,
    *,
    dtype: str | None = None,
    tokenizer: str | None = None,
    vocab_multiple: int = 1,
    seq_len: int | None = None,
) -> Report:
    """Write `destination`, a checkpoint, from a directory with config.json and safetensors.

    `dtype` is bf16, fp32, or None for the stored dtype. `tokenizer` is a spec as in
    `data.tokenizer` that replaces the directory's, or `none`: the checkpoint then belongs to no
    tokenizer, and a run from it names its own. The embedding is padded to a multiple of
    `vocab_multiple`: with the mean of its rows for each id that the tokenizer has beyond them, and
    with rows of zeros, each of which adds exp(0) to the softmax. `seq_len` is for later runs; None
    means the longest that the model supports. Raises ValueError with the field that does not fit
    before anything is written, and CheckpointError if writing fails.
    """
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype={dtype!r}: coatlm trains in {' or '.join(DTYPES)}")
    if not 1 <= vocab_multiple <= LARGEST_MULTIPLE:
        raise ValueError(f"vocab_multiple={vocab_multiple}: from 1 to {LARGEST_MULTIPLE}")
    raw = read_json(source / "config.json")
    model = read_model(raw)
    rows = model["vocab"] + -model["vocab"] % vocab_multiple
    copied = ("config.json", GENERATION, *(() if tokenizer else TOKENIZER_FILES))
    check_token_ids(str(source / "config.json"), raw, model["vocab"])
    check_files(source, copied, model["vocab"])
    spec, fingerprint, ids = _tokenizer(source, raw, tokenizer, rows)
    given = tokenizer is not None and bool(fingerprint)
    replaced = given and has_other_tokenizer(source, raw, spec, fingerprint)
    notes = _notes(model["vocab"], ids, rows, tokenized=tokenizer != NO_TOKENIZER)
    weights = WeightFiles.open(source)
    stored = weights.describe()
    kind = _common_type(stored, dtype)
    if seq_len is None:
        seq_len = int(raw.get("max_position_embeddings") or SEQ_LEN)
    config = run_config(
        {**model, "vocab": rows},
        tokenizer=spec if tokenizer else moved(spec, source, destination),
        seq_len=seq_len,
        precision="fp32" if kind == torch.float32 else "bf16",
    )
    check_layers(config.model, stored, str(source / "config.json"))
    plan = {entry.key: entry for entry in entries(config.model, model["vocab"], raw["model_type"])}
    check_stored(weights, stored, plan, biases=output_bias(raw), model=config.model)
    described = {key: (kind, _shape(entry, rows)) for key, entry in plan.items()}

    written = [Described(*d) for d in described.values()]
    report = Report.of(written, notes)

    def make(key: str) -> Tensor:
        parts = [weights.read(name).to(kind) for name in plan[key].stored]
        whole = with_rows(plan[key].join(parts), described[key][1][0], ids)
        advance(whole.nbytes)
        return whole

    with (
        whole_directory(destination) as directory,
        progress(f"converting {source.name}", report.bytes) as advance,
    ):
        write_layout(directory)
        write_one_by_one(directory, described, make)
        copy_files(source, directory, copied)
        if replaced:  # the ids of bos, eos and pad were those of another tokenizer
            (directory / GENERATION).unlink(missing_ok=True)
            write_json(directory / "config.json", {**raw, **dict.fromkeys(TOKEN_IDS)})
        write_file(directory / STATE, _state(config, fingerprint))
        write_file(
            directory / "config.yaml", _start_yaml(config, destination, tokenized=bool(fingerprint))
        )
        files = {p.name: describe(p) for p in directory.iterdir()}
        write_manifest(directory, destination.parent, files)
    return report


def _notes(stored: int, ids: int, rows: int, *, tokenized: bool) -> tuple[str, ...]:
    """What was added to the `stored` rows: some for the `ids` of the tokenizer, some of zeros."""
    notes, used = [], max(stored, ids)
    if used > stored:
        notes.append(
            f"{used - stored} rows were added to the vocabulary for new tokens, each the mean of "
            "the others"
        )
    if rows > used:
        notes.append(f"{rows - used} rows of zeros were added to the vocabulary")
    if not tokenized:
        notes.append("no tokenizer: a run from this checkpoint has to name data.tokenizer")
    return tuple(notes)


def _tokenizer(
    source: Path, raw: Mapping[str, Any], given: str | None, rows: int
) -> tuple[str, str, int]:
    """The spec, the fingerprint and the number of ids of the tokenizer at its current path.

    Without a tokenizer the fingerprint is empty, and the spec that of a default configuration.
    """
    if given == NO_TOKENIZER:
        return Data.model_fields["tokenizer"].default, "", 0
    spec = given or tokenizer_of(source, raw)
    if spec is None:
        raise ValueError(
            f"{source}: has no tokenizer.json and no tokenizer.model: name a tokenizer, or none"
        )
    made = make_tokenizer(spec)
    check_rows(made, rows, hint="; --vocab-multiple adds rows")
    return spec, made.fingerprint, made.vocab_size


def _common_type(stored: Mapping[str, Described], wanted: str | None) -> torch.dtype:
    if wanted is not None:
        return DTYPES[wanted]
    found = {d.dtype for name, d in stored.items() if not name.endswith(COMPUTED)}
    if len(found) == 1 and found <= set(DTYPES.values()):
        return found.pop()
    names = ", ".join(sorted(str(t).removeprefix("torch.") for t in found))
    raise ValueError(f"the weights are {names}: choose the dtype to train in, bf16 or fp32")


def _shape(entry: Entry, rows: int) -> tuple[int, ...]:
    """The shape of a tensor in the checkpoint, where the vocabulary is padded to `rows`."""
    vocabulary = entry.stored.keys() & {EMBEDDING, HEAD}
    return (rows, *entry.shape[1:]) if vocabulary else entry.shape


def _state(config: Config, fingerprint: str) -> bytes:
    """The state.json of a run at step 0."""
    state = {
        "step": 0,
        "tokens": 0,
        "updates": 0,
        "skipped": 0,
        "tokenizer": fingerprint,
        "config": config.model_dump(mode="json"),
    }
    return json.dumps(state, indent=1).encode()


def _start_yaml(config: Config, destination: Path, *, tokenized: bool) -> bytes:
    """A config.yaml for runs from the checkpoint, without `data.text` or `data.paths`."""
    resolved = config.model_dump(mode="json")
    data = {name: resolved["data"][name] for name in ("tokenizer", "seq_len")}
    keys = {
        "model": resolved["model"],
        "data": data if tokenized else data | {"tokenizer": None},  # an error until one is given
        "precision": resolved["precision"],
        "checkpoint": {"resume": str(destination), "weights_only": True},
    }
    return dump_yaml(keys).encode()
