"""The safetensors files of a Hugging Face directory at a URL.

They are not copied: headers are read when the directory is opened, and of a tensor the rows that a
rank asks for, by range requests, some at a time. Nothing says what the checksums of such files are,
so what arrives is compared with the length asked for, and a file whose size or version (its ETag)
changes while it is read is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coatlm.hf.files import INDEX, SINGLE, TYPES, Described, WeightFiles, indexed
from coatlm.remote import AHEAD, RANGE_BYTES, Info, Location, RemoteError

LARGEST_HEADER = 100_000_000  # bytes, as in the safetensors library


class PlacedTensor(NamedTuple):
    """A tensor of a file, and the first of its bytes there."""

    described: Described
    begin: int


class RemoteHeader(NamedTuple):
    """A file at a URL: its size and version when it was opened, and its tensors."""

    info: Info
    tensors: Mapping[str, PlacedTensor]


@dataclass(frozen=True)
class RemoteWeightFiles(WeightFiles):
    """The tensors of a directory at a URL."""

    at: Location
    headers: Mapping[str, RemoteHeader]  # by file

    @classmethod
    def open_at(cls, at: Location, directory: Path) -> RemoteWeightFiles:
        """Read the headers of the files at a URL, whose small files are in `directory`.

        Raises RemoteError, or ValueError if there are no safetensors or a file is damaged.
        """
        files = indexed(directory)
        if files is None and not (at / SINGLE).exists():
            raise ValueError(f"{at.url}: has neither {SINGLE} nor {INDEX}")
        names = [SINGLE] if files is None else sorted(set(files.values()))
        with ThreadPoolExecutor(AHEAD) as pool:
            found = list(pool.map(lambda name: read_header(at / name), names))
        if files is None:
            files = dict.fromkeys(found[0].tensors, SINGLE)
        return cls(directory, files, at, dict(zip(names, found, strict=True)))

    def header(self, file: str) -> dict[str, Described]:
        tensors = self.headers[file].tensors
        return {name: stored.described for name, stored in tensors.items()}

    def read(self, name: str) -> Tensor:
        stored = self.headers[self.files[name]].tensors[name]
        return self._rows(name, 0, math.prod(stored.described.shape[:1]))

    def read_part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Read a rectangle of a tensor; whole rows are requested."""
        stored = self.headers[self.files[name]].tensors[name]
        start, stop, _ = part[0].indices(stored.described.shape[0])
        return self._rows(name, start, stop)[(slice(None), *part[1:])].clone()

    def versions(self) -> dict[str, Info]:
        """The sizes and versions of the files. Raises RemoteError if one has changed since."""
        for file, header in self.headers.items():
            if (self.at / file).info() != header.info:
                raise RemoteError(f"{self.at.url}/{file}: has changed while it was read")
        return {file: header.info for file, header in self.headers.items()}

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor; a tensor without dimensions has one."""
        file = self.files[name]
        (dtype, shape), first = self.headers[file].tensors[name]
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        begin, nbytes = first + start * row_bytes, (stop - start) * row_bytes
        raw = bytearray(nbytes)

        def request(offset: int) -> None:
            until = min(offset + RANGE_BYTES, nbytes)
            raw[offset:until] = (self.at / file).read(begin + offset, begin + until)

        with ThreadPoolExecutor(AHEAD) as pool:
            list(pool.map(request, range(0, nbytes, RANGE_BYTES)))
        if not nbytes:
            return torch.empty(stop - start, *shape[1:], dtype=dtype)
        rows = (stop - start, *shape[1:]) if shape else ()
        return torch.frombuffer(raw, dtype=dtype).reshape(rows)


def read_header(at: Location) -> RemoteHeader:
    """Read the header of a file. Raises RemoteError, or ValueError for one that is damaged."""
    info = at.info()
    size = int.from_bytes(at.read(0, 8), "little") if info.nbytes >= 8 else LARGEST_HEADER
    if size > min(LARGEST_HEADER, info.nbytes - 8):
        raise ValueError(f"{at.url}: not a safetensors file: its header does not end")
    try:
        raw = json.loads(at.read(8, 8 + size))
        entries = {n: _entry(e) for n, e in raw.items() if n != "__metadata__"}
    except RemoteError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{at.url}: not a safetensors file: its header is damaged") from None
    tensors = {}
    for name, (kind, shape, begin, end) in entries.items():
        if kind not in TYPES:
            raise ValueError(f"{at.url}: {name} is {kind}: one of {', '.join(TYPES)}")
        nbytes = math.prod(shape) * TYPES[kind].itemsize
        if end - begin != nbytes or 8 + size + end > info.nbytes:
            raise ValueError(f"{at.url}: not a safetensors file: {name} does not fit it")
        tensors[name] = PlacedTensor(Described(TYPES[kind], shape), 8 + size + begin)
    return RemoteHeader(info, tensors)


def _entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape, and the range of bytes. Raises TypeError, KeyError or ValueError."""
    kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not isinstance(kind, str) or any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
        raise TypeError
    return kind, shape, begin, end
