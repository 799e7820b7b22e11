"""Read and write safetensors files with one tensor in memory at a time.

A file has 8 bytes with the length of a JSON header, the header (name -> type, shape, byte range)
and the bytes of the tensors. The library writes a file from a dict of all tensors. This writer
knows types and shapes beforehand, so it writes the header first and then computes one tensor at a
time. Reading uses the library and opens the file for each tensor, because pages that a mapping has
read count as memory of this process until it is closed.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coatlm.files import check_regular, read_json
from coatlm.remote import Info

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
NAMES = {  # torch dtype -> name in the header
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
}
TYPES = {name: dtype for dtype, name in NAMES.items()}
ALIGNMENT = 8  # bytes, of the first tensor in a file


class Described(NamedTuple):
    """The dtype and shape of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Report:
    """The result of a conversion."""

    tensors: int
    bytes: int  # of all tensors
    notes: tuple[str, ...] = ()  # messages for the user

    @classmethod
    def of(cls, written: Sequence[Described], notes: tuple[str, ...]) -> Report:
        return cls(len(written), sum(described.nbytes for described in written), notes)


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a directory, in one file or in several with an index."""

    directory: Path
    files: Mapping[str, str]  # tensor -> file

    @classmethod
    def open(cls, directory: Path) -> WeightFiles:
        """Open a directory. Raises ValueError if it has no safetensors or an invalid index."""
        files = indexed(directory)
        if files is None and not (directory / SINGLE).exists():
            raise ValueError(f"{directory}: has neither {SINGLE} nor {INDEX}")
        if files is None:
            files = dict.fromkeys(_header(directory / SINGLE), SINGLE)
        return cls(directory, files)

    def describe(self) -> dict[str, Described]:
        """The dtype and shape of every tensor. Raises ValueError with the name of a damaged
        file."""
        headers = {file: self.header(file) for file in sorted(set(self.files.values()))}
        for name, file in self.files.items():
            if name not in headers[file]:
                raise ValueError(f"{self.directory / file}: has no {name}, which {INDEX} lists")
        return {name: headers[file][name] for name, file in self.files.items()}

    def header(self, file: str) -> dict[str, Described]:
        """The dtype and shape of each tensor in a file. Raises ValueError with its name."""
        return _header(self.directory / file)

    def versions(self) -> dict[str, Info]:
        """The versions of the files that are at a URL, by which ranks compare what they read."""
        return {}

    def read(self, name: str) -> Tensor:
        """Read a tensor into memory."""
        with self._opened(name) as file:
            return file.get_tensor(name).clone()

    def read_part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Read a rectangle of a tensor into memory; only its bytes are read from the file."""
        with self._opened(name) as file:
            return file.get_slice(name)[part].clone()

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        """The open file of a tensor. Raises ValueError with the file's name."""
        path = self.directory / self.files[name]
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: {name} cannot be read: {error}") from None


def indexed(directory: Path) -> dict[str, str] | None:
    """The file of each tensor by the index of a directory; None without an index.

    Raises ValueError if it is invalid.
    """
    path = directory / INDEX
    if not path.exists():
        return None
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
        raise ValueError(f"{path}: has no weight_map of file names")
    if not files:
        raise ValueError(f"{path}: weight_map is empty: must name the file of every tensor")
    if foreign := [file for file in files.values() if not _is_name(file)]:
        raise ValueError(f"{path}: {foreign[0]!r} is not a file's name")
    return files


def write_weights(
    directory: Path,
    tensors: Mapping[str, Described],
    make: Callable[[str], Tensor],
    *,
    shard_bytes: int,
) -> None:
    """Write `make(name)` for each name, in order, to files of at most `shard_bytes`.

    A larger tensor gets a larger file. Several files get an index.
    """
    shards: list[dict[str, Described]] = [{}]
    for name, described in tensors.items():
        filled = sum(d.nbytes for d in shards[-1].values())
        if shards[-1] and filled + described.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = described
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    if count == 1:
        names = [SINGLE]
    for file, shard in zip(names, shards, strict=True):
        _write_file(directory / file, shard, make)
    if count > 1:
        total = sum(d.nbytes for d in tensors.values())
        files = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": files})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with the indentation that Hugging Face uses."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_file(
    path: Path, tensors: Mapping[str, Described], make: Callable[[str], Tensor]
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, described in tensors.items():
        stop = start + described.nbytes
        header[name] = {
            "dtype": NAMES[described.dtype],
            "shape": list(described.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, described in tensors.items():
            _write_tensor(file, make(name), described)
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: IO[bytes], tensor: Tensor, described: Described) -> None:
    assert (tensor.dtype, tuple(tensor.shape)) == described
    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _is_name(text: str) -> bool:
    """Whether `text` names a file of the directory itself."""
    return Path(text).name == text and text not in ("", "..") and "\0" not in text


def _header(path: Path) -> dict[str, Described]:
    """The dtype and shape of each tensor in a file."""
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not a safetensors file: {error}") from None
    for name, (dtype, _) in found.items():
        if dtype not in TYPES:
            raise ValueError(f"{path}: {name} is {dtype}: one of {', '.join(TYPES)}")
    return {name: Described(TYPES[dtype], shape) for name, (dtype, shape) in found.items()}
