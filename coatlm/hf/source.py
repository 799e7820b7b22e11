"""A Hugging Face directory as the start of a run: each rank reads its slices of the weights.

A rank asks for rectangles of coatlm's global tensors. A rectangle of a fused tensor (q, k and v, or
gate and up) consists of runs of rows of Hugging Face's tensors (`layout.Entry.runs`), and of each
run only the requested columns are read. So tensor and pipeline parallelism divide the reading as
they divide the weights; data-parallel ranks read the same slices. No rank holds a tensor that it
has no part of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coatlm.config import Model, dotted, make_config
from coatlm.files import read_json
from coatlm.hf.config import check_token_ids, output_bias, read_model
from coatlm.hf.download import fetched, named
from coatlm.hf.files import Described, WeightFiles
from coatlm.hf.layout import EMBEDDING, HEAD, Entry, check_layers, entries
from coatlm.hf.new_rows import mean_row
from coatlm.hf.remote_files import RemoteWeightFiles
from coatlm.hf.stored import COMPUTED, check_stored
from coatlm.hf.tokenizer import tokenizer_of
from coatlm.megatron import ShardedTensor
from coatlm.remote import Location

NOT_COMPARED = ("spec", "init_std", "vocab")  # they do not change what the weights mean
READABLE = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def opened(place: Path | str, cache_dir: Path) -> Iterator[HfSource]:
    """The source at a path, or at a URL whose small files are downloaded to `cache_dir`.

    Errors about these, also in the body of the `with`, name the URL. Raises ValueError as
    `HfSource.open` does, and RemoteError.
    """
    directory = fetched(place, cache_dir)
    with named(place, directory):
        remote = isinstance(place, str)
        weights = RemoteWeightFiles.open_at(Location.of(str(place)), directory) if remote else None
        yield HfSource.open(directory, weights)


@dataclass(frozen=True)
class HfSource:
    """The weights of a Hugging Face directory for a model of coatlm with `vocab` rows."""

    directory: Path
    raw: Mapping[str, Any]  # config.json
    model: Model  # of this directory
    weights: WeightFiles
    stored: Mapping[str, Described]
    plan: Mapping[str, Entry]  # key of coatlm -> its parts

    @classmethod
    def open(cls, directory: Path, weights: WeightFiles | None = None) -> HfSource:
        """Read config.json and the headers; `weights` are the directory's if they are elsewhere.

        Raises ValueError with the name of what is wrong.
        """
        raw = read_json(directory / "config.json")
        model = make_config({"model": read_model(raw)}).model
        assert model.vocab is not None  # a required field of config.json
        check_token_ids(str(directory / "config.json"), raw, model.vocab)
        weights = weights or WeightFiles.open(directory)
        stored = weights.describe()
        check_layers(model, stored, str(directory / "config.json"))
        plan = {entry.key: entry for entry in entries(model, model.vocab, raw["model_type"])}
        return cls(directory, raw, model, weights, stored, plan)

    @property
    def rows(self) -> int:
        """The rows of the stored embedding."""
        assert self.model.vocab is not None
        return self.model.vocab

    def tokenizer(self) -> str | None:
        """The `data.tokenizer` of this directory; None if it has none that coatlm can use."""
        return tokenizer_of(self.directory, self.raw)

    def check(self, model: Model, vocab: int) -> None:
        """Raise ValueError with the field's name unless the weights are those of `model`.

        `vocab` is the number of rows of its embedding; it may be larger than the stored one.
        """
        mine = dict(dotted(model.model_dump(mode="json", exclude=set(NOT_COMPARED))))
        theirs = dict(dotted(self.model.model_dump(mode="json", exclude=set(NOT_COMPARED))))
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                raise ValueError(
                    f"model.{key}={mine.get(key)}: {self.directory / 'config.json'} says "
                    f"{theirs.get(key)}; remove the key to take it from there"
                )
        if vocab < self.rows:
            raise ValueError(
                f"model.vocab={vocab}: {self.directory} has {self.rows} rows; give at least as many"
            )
        for name, described in self.stored.items():
            if described.dtype not in READABLE and not name.endswith(COMPUTED):
                kind = str(described.dtype).removeprefix("torch.")
                raise ValueError(f"{self.directory}: {name} is {kind}, which no run starts from")
        biases = output_bias(self.raw)
        check_stored(self.weights, self.stored, self.plan, biases=biases, model=self.model)

    def dtypes(self) -> set[torch.dtype]:
        """The types in which the weights are stored."""
        names = [name for entry in self.plan.values() for name in entry.stored]
        return {self.stored[name].dtype for name in names}

    def fill(self, tensors: Iterable[ShardedTensor], ids: int = 0) -> int:
        """Load weights into `tensors`, converted to their types. Returns the bytes that were read.

        Of the rows that a vocabulary has beyond the stored ones, those of the tokenizer's `ids` ids
        become the mean of the stored rows, and the others zero. Raises ValueError for a file that
        cannot be read and for values beyond the range of a type.
        """
        return sum(self._fill(tensor, ids) for tensor in tensors)

    @torch.no_grad()
    def _fill(self, tensor: ShardedTensor, ids: int) -> int:
        assert tensor.data is not None and tensor.prepend_axis_num == 0
        assert tensor.global_shape[1:] == self.plan[tensor.key].shape[1:]
        corner, shape = tensor.global_offset, tensor.local_shape
        tail = tuple(slice(c, c + n) for c, n in zip(corner[1:], shape[1:], strict=True))
        parts: list[Tensor] = []
        for name, row, count in self.plan[tensor.key].runs(corner[0], corner[0] + shape[0]):
            parts.append(self.weights.read_part(name, (slice(row, row + count), *tail)))
        read = sum(part.nbytes for part in parts)
        filled = 0
        for part in parts:
            target = tensor.data[filled : filled + len(part)]
            target.copy_(part)
            if bool((target.isinf().cpu() & part.isfinite()).any()):
                kind = str(target.dtype).removeprefix("torch.")
                raise ValueError(f"{self.directory}: {tensor.key} has values beyond {kind}")
            filled += len(part)
        added = tensor.data[filled:]
        added.zero_()
        new = min(ids - corner[0], shape[0]) - filled
        if new > 0 and self.plan[tensor.key].stored.keys() & {EMBEDDING, HEAD}:
            (name,) = self.plan[tensor.key].stored
            mean = mean_row(
                lambda a, b: self.weights.read_part(name, (slice(a, b), *tail)), self.rows
            )
            added[:new] = mean.to(added.dtype)
            read += self.rows * mean.numel() * self.stored[name].dtype.itemsize
        return read
