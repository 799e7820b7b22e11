"""The inputs of each target: a good file of its kind changed, in bytes or in what it says.

`inputs(target, good)` is a strategy of hypothesis that gives the files to put in the place of the
good ones.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import struct
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from tests.fuzz.mutations import JSON, LINES, NUMBERS, TEXT, Change, damaged, whole_number
from tests.fuzz.sandbox import CANARY
from tests.fuzz.targets import CHECKPOINT

SHOWN = 200  # bytes of a file in messages


class Files(dict[str, bytes | None]):
    """The bytes of files by path, None if a file is missing. Its repr is short, for long files."""

    def __repr__(self) -> str:
        parts = {
            n: c if c is None or len(c) <= SHOWN else f"{len(c)} bytes" for n, c in self.items()
        }
        return f"Files({parts})"


class Planted:
    """An object whose pickle creates the canary when it is loaded by a reader that trusts it."""

    def __reduce__(self) -> Any:
        return (Path.mkdir, (Path(CANARY),))


def metadata(draw: DrawFn, good: bytes) -> bytes:
    """`.metadata`: another pickle, or sizes, offsets and names that do not fit the files."""
    kind = draw(st.sampled_from(("edit", "edit", "edit", "bytes", "planted", "other")))
    if kind == "bytes":
        return damaged(draw, good)
    if kind == "planted":
        return pickle.dumps({"state_dict_metadata": Planted()})
    if kind == "other":
        return pickle.dumps(draw(st.sampled_from((None, [], {}, "x", 1, b"", (1, 2)))))
    content = pickle.loads(good)  # our own
    for _ in range(draw(st.integers(1, 3))):
        tensors = content.state_dict_metadata
        names = sorted(tensors)
        if names:
            _edit_tensor(draw, content, names[whole_number(draw, len(names))])
    return pickle.dumps(content)


def _edit_tensor(draw: DrawFn, content: Any, name: str) -> None:
    """Change what metadata says of one tensor."""
    import torch

    tensors, stored = content.state_dict_metadata, content.storage_data
    tensor = tensors[name]
    places = sorted((index for index in stored if index.fqn == name), key=str)
    kind = draw(st.sampled_from(("size", "chunk", "place", "dtype", "name", "type", "missing")))
    number = draw(st.sampled_from((*NUMBERS, -5, None, "x", 0.5)))
    if not hasattr(tensor, "size") and kind in ("size", "chunk", "dtype"):
        kind = "missing"
    if kind == "size":
        numbers = [*tensor.size[:-1], number]
        valid = isinstance(number, int) and number < 2**63
        tensor.size = torch.Size(numbers) if valid else tuple(numbers)
    elif kind == "chunk" and tensor.chunks:
        chunk = tensor.chunks[0]
        field = draw(st.sampled_from(("sizes", "offsets")))
        object.__setattr__(chunk, field, (number, *tuple(getattr(chunk, field))[1:]))
    elif kind == "place" and places:
        field = draw(st.sampled_from(("offset", "length", "relative_path")))
        setattr(stored[places[0]], field, number if field != "relative_path" else "../text.txt")
    elif kind == "dtype":
        types = (torch.float64, torch.complex64, torch.bool, torch.float8_e5m2)
        tensor.properties.dtype = draw(st.sampled_from(types))
    elif kind == "name":
        tensors[draw(st.sampled_from(("\x1b[31m", "", "x" * 3000, "optimizer.state.")))] = tensor
    elif kind == "type":
        tensors[name] = draw(st.sampled_from((None, 1, "x", [])))
    elif kind == "missing":
        if draw(st.booleans()):
            del tensors[name]
        else:
            for index in places:
                del stored[index]


def distcp(draw: DrawFn, good: bytes) -> bytes:
    """A file of tensors: damaged, or one whose first tensor is a pickle that runs code."""
    if draw(st.integers(0, 4)):
        return damaged(draw, good)
    planted = io.BytesIO()
    with zipfile.ZipFile(planted, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Planted(), 2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return planted.getvalue().ljust(len(good), b"\0")


def common(draw: DrawFn, good: bytes) -> bytes:
    """common.pt: another argument, iteration or step of the optimizer, or as a .distcp file."""
    import argparse

    import torch

    if draw(st.booleans()):
        return distcp(draw, good)
    values = st.sampled_from((None, True, -1, 0, 1.5, 2**70, "x", [], {}, [1], {"a": 1}, 10**6))
    content = torch.load(io.BytesIO(good), weights_only=False)  # our own
    name = draw(st.sampled_from(("args", "iteration", "optimizer", "argument", "argument")))
    if name == "argument":
        arguments = vars(content["args"])
        arguments[draw(st.sampled_from(sorted(arguments)))] = draw(values)
        content["args"] = argparse.Namespace(**arguments)
    elif name == "optimizer":
        content[name] = {"state": {"common_step": draw(values)}, "param_groups": draw(values)}
    else:
        content[name] = draw(values)
    changed = io.BytesIO()
    torch.save(content, changed)
    return changed.getvalue()


def counters(draw: DrawFn, good: bytes) -> bytes:
    """train_state.pt: a counter of another value, type or shape, or as a .distcp file."""
    import torch

    if draw(st.booleans()):
        return distcp(draw, good)
    content = torch.load(io.BytesIO(good), weights_only=True)
    values = st.sampled_from((0, 1, -1, 2**31, 2**63 - 1, True, 1.5, [], [1, 2], [[3]]))
    value = torch.tensor(draw(values))
    content[draw(st.sampled_from(sorted(content)))] = draw(
        st.sampled_from((value, value.expand(2, *value.shape), value.to("meta"), "x", None))
    )
    changed = io.BytesIO()
    torch.save(content, changed)
    return changed.getvalue()


def safetensors(draw: DrawFn, good: bytes) -> bytes:
    """The header's JSON changed, its length, or the bytes."""
    if draw(st.booleans()):
        return damaged(draw, good)
    size = struct.unpack("<Q", good[:8])[0]
    header = JSON(draw, good[8 : 8 + size])
    length = draw(st.sampled_from((len(header), len(header), len(header), *NUMBERS)))
    return struct.pack("<Q", length % 2**64) + header + good[8 + size :]


def compressed(kind: str, draw: DrawFn, good: bytes) -> bytes:
    """.gz or .zst: damaged outside or inside, or several, or a lot from little."""
    import zstandard

    pack = partial(gzip.compress, mtime=0) if kind == "gz" else zstandard.compress
    content = gzip.decompress(good) if kind == "gz" else zstandard.decompress(good)
    how = draw(st.sampled_from(("outside", "inside", "two", "large")))
    if how == "outside":
        return damaged(draw, good)
    if how == "inside":
        return pack(TEXT(draw, content))
    if how == "two":
        return good + damaged(draw, good)
    return pack(content + b" " * draw(st.sampled_from((1 << 10, 1 << 20, 1 << 24))))


def parquet(draw: DrawFn, good: bytes) -> bytes:
    """Damaged bytes, or a sound file of other columns."""
    import pyarrow
    import pyarrow.parquet

    if draw(st.booleans()):
        return damaged(draw, good)
    columns: dict[str, list[Any]] = {
        "text": draw(
            st.sampled_from(
                (["a", None], [], [1, 2], [b"\xff", b"a"], [["x"]], [{"a": 1}], [None], [True])
            )
        )
    }
    table = pyarrow.table(columns)
    if draw(st.booleans()):
        table = table.rename_columns([draw(st.sampled_from(("", "x", "te\x1bxt", "n" * 3000)))])
    file = io.BytesIO()
    codec = draw(st.sampled_from(("none", "snappy", "zstd", "gzip")))
    pyarrow.parquet.write_table(table, file, compression=codec)
    return file.getvalue()


CHECKPOINT_FILES: dict[str, Change] = {
    "manifest.json": JSON,
    "state.json": JSON,
    ".metadata": metadata,
    "__0_0.distcp": distcp,
    "metadata.json": JSON,
    "common.pt": distcp,
}
RUN_FILES: dict[str, Change] = {
    "metrics.jsonl": LINES,
    "states.jsonl": LINES,
    "numerics.jsonl": LINES,
    "config.yaml": TEXT,
    "env.json": JSON,
}
IN_CHECKPOINT = {f"{CHECKPOINT}/{name}": change for name, change in CHECKPOINT_FILES.items()}
IN_CHECKPOINTS = IN_CHECKPOINT | {"run/checkpoints/latest": TEXT}
IN_RUN = {f"run/{name}": change for name, change in RUN_FILES.items()}
CACHED = {".bin": damaged, ".idx": damaged, ".json": JSON}
HUGGINGFACE_FILES: dict[str, Change] = {
    "model/config.json": JSON,
    "model/generation_config.json": JSON,
    "model/tokenizer.json": JSON,
    "model/tokenizer_config.json": JSON,
    "model/model.safetensors.index.json": JSON,
    "00001-of-00002.safetensors": safetensors,
}
CHANGES: dict[str, dict[str, Change]] = {  # by target, by the end of a file's path
    "start": IN_CHECKPOINTS | IN_RUN | {f"text{name}": change for name, change in CACHED.items()},
    "inspect": IN_CHECKPOINTS,
    "export": IN_CHECKPOINT,
    "evaluate": IN_CHECKPOINT | {"text.txt": TEXT},
    "huggingface": HUGGINGFACE_FILES,
    "remote_model": HUGGINGFACE_FILES,
    "megatron": {
        ".metadata": metadata,
        "__0_0.distcp": distcp,
        "metadata.json": JSON,
        "common.pt": common,
        "latest_checkpointed_iteration.txt": TEXT,
        "model_optim_rng.pt": common,
        "run_config.yaml": JSON,
        "/train_state.pt": counters,
        "latest_train_state.pt": counters,
    },
    "indexed": {f"data{name}": change for name, change in CACHED.items()},
    "masked": {".bin": damaged, ".mask": damaged, ".mask.crc32": damaged, ".json": JSON},
    "conversations": {"talks.jsonl": LINES, "tokenizer_config.json": JSON, "tokenizer.json": JSON},
    "texts": {
        "text.txt": TEXT,
        "text.jsonl": LINES,
        "text.txt.gz": partial(compressed, "gz"),
        "text.jsonl.gz": partial(compressed, "gz"),
        "text.txt.zst": partial(compressed, "zst"),
        "text.jsonl.zst": partial(compressed, "zst"),
        "text.parquet": parquet,
    },
    "interrupted": {".bin": damaged, ".lengths.npy": damaged, ".json": JSON, "text.txt": TEXT},
    "plots": IN_RUN,
    "comparison": IN_RUN,
}


def inputs(target: str, good: dict[str, bytes]) -> SearchStrategy[Files]:
    """Files in the place of those of `good` that a target reads."""
    from tests.fuzz import options

    if target == "config":
        return options.configurations(good)
    if target == "launch":
        return options.environments()
    if target == "tokenizers":
        return tokenizers(good)
    return changed(good, CHANGES[target])


@st.composite
def changed(draw: DrawFn, good: dict[str, bytes], changes: dict[str, Change]) -> Files:
    """One file changed or missing, sometimes two; most checkpoints are sealed again."""
    files = Files()
    for _ in range(draw(st.sampled_from((1, 1, 1, 2)))):
        end = draw(st.sampled_from(sorted(changes)))
        name = next(name for name in sorted(good, reverse=True) if name.endswith(end))
        missing = draw(st.integers(0, 20)) == 20
        files[name] = None if missing else changes[end](draw, good[name])
    if draw(st.integers(0, 9)) > 0:
        seal(files, good)
    return files


def seal(files: Files, good: dict[str, bytes]) -> None:
    """Give a changed checkpoint the manifest of whole files, so that they are read."""
    own = {Path(n).name: c for n, c in files.items() if n.startswith(f"{CHECKPOINT}/")}
    if not own or "manifest.json" in own:
        return
    manifest = json.loads(good[f"{CHECKPOINT}/manifest.json"])
    for name, content in own.items():
        if content is None:
            del manifest["files"][name]
        else:
            digest = hashlib.sha256(content).hexdigest()
            manifest["files"][name] = {"bytes": len(content), "sha256": digest}
    files[f"{CHECKPOINT}/manifest.json"] = json.dumps(manifest, indent=1).encode()


@st.composite
def tokenizers(draw: DrawFn, good: dict[str, bytes]) -> Files:
    """A tokenizer's file changed, and the spec that names it."""
    from tests.fuzz.good import SPECS

    name = draw(st.sampled_from(sorted(SPECS)))
    change = {"tokenizer.json": JSON, "ranks.tiktoken": TEXT}.get(name, damaged)
    files = Files({"spec.txt": SPECS[name].encode(), name: change(draw, good[name])})
    if draw(st.integers(0, 5)) == 5:
        files["spec.txt"] = TEXT(draw, SPECS[name].encode())
    return files
