"""The files of a Megatron checkpoint as global tensors with the names that coatlm gives them.

    torch_dist      iter_0001000/.metadata, *.distcp, common.pt     TorchDist
                    (megatron-core 0.19 stores it in *.distcp instead)
    pickles         iter_0001000/mp_rank_TP[_PP]/model_optim_rng.pt RankFiles

coatlm has megatron-core's names, with one tensor per layer. A torch_dist checkpoint may stack the
layers of a tensor along a new first axis, and may store the halves of linear_fc1.weight apart (`_w`
is gate, `_v` is up). Optimizer states have the prefixes of STATES; `param`, the name in Megatron's
`fully_reshardable` format, is the fp32 weight that others call `fp32_param`. States in flat buckets
(`dp_reshardable`, Megatron's default) are found by `megatron_buckets` on request, because that
reads all weights.

A pickle has the tensors of one tensor- and pipeline-parallel rank, with layers counted from 0 in
each chunk; the first of all stages come before the second of all stages, and each may have another
number of layers. The tensors are joined along the axis that Megatron splits; its gate|up is split
within each rank.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coatlm.convert.megatron_bridge import LATEST_STATE, read_counter
from coatlm.convert.megatron_buckets import BUCKETED, BucketStates, find_states
from coatlm.convert.megatron_split import GATE_UP, join, split_axis
from coatlm.convert.pickles import is_plain, load_pickle
from coatlm.files import STATE_PREFIX, read_json
from coatlm.hf.files import Described
from coatlm.optim.recipes import MASTER, M, V
from coatlm.train.shards import StoredTensors

LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # in LATEST, and the directory that it names
STATES = {"fp32_param": MASTER, "param": MASTER, "exp_avg": M, "exp_avg_sq": V}
STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
LONGEST = 100  # bytes of LATEST that are read
BUCKETS = "optimizer.distributed."
NO_LAYOUT = (
    "in flat buckets for which no layout, or more than one, has fp32 weights that round to the "
    "weights"
)
NO_STEPS = "in flat buckets, without the optimizer's number of steps"
PREFIXES = ("module.", "model.")  # NeMo and Megatron-Bridge wrap the model
NORMS = {  # names in the state of a model without TransformerEngine -> in a checkpoint
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
COMMON = "common_state/shard_0_1"  # what common.pt holds, from megatron-core 0.19 on
RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")


@dataclass
class Header:
    """What a checkpoint says besides its tensors."""

    arguments: Mapping[str, Any] = field(default_factory=dict)  # those of the program that wrote it
    iteration: int = 0
    updates: int = 0  # steps of the optimizer

    @classmethod
    def of(cls, common: Any, path: Path) -> Header:
        """The header in `common`: the content of common.pt, or of a rank's pickle.

        Raises ValueError for wrong types.
        """
        if not isinstance(common, Mapping):
            raise ValueError(f"{path}: holds a {type(common).__name__}, not a checkpoint")
        arguments = common.get("args")
        iteration = common.get("iteration", 0)
        if type(iteration) is not int or iteration < 0:
            raise ValueError(f"{path}: iteration={iteration!r}: a whole number")
        if not isinstance(arguments, argparse.Namespace | None):
            raise ValueError(f"{path}: args is a {type(arguments).__name__}, not a Namespace")
        found = {} if arguments is None else vars(arguments)
        # no argument is a tensor; one that compares elementwise would be true and false at once
        given = {k: "a tensor" if isinstance(v, Tensor) else v for k, v in found.items()}
        return cls(given, iteration, _updates(common.get("optimizer"), path) or iteration)


def find_iteration(source: Path) -> Path:
    """The directory of the newest iteration if `source` has several, else `source`.

    Megatron-LM writes LATEST, early versions of Megatron-Bridge LATEST_STATE, later ones both.
    """
    latest, state = source / LATEST, source / LATEST_STATE
    steps = [read_counter(state, "step")] if state.is_file() else []
    if latest.is_file():
        name = latest.read_bytes()[:LONGEST].decode(errors="replace").strip()
        if name.isascii() and name.isdecimal():
            steps.append(int(name))
        elif name != RELEASE:
            raise ValueError(f"{latest}: {name[:40]!r}: a number, or release")
        elif not steps:
            return source / name
    return source / f"iter_{max(steps):07d}" if steps else source


def open_megatron(source: Path) -> TorchDist | RankFiles:
    """Open a checkpoint of Megatron. Raises ValueError for other files and formats, and
    CheckpointError for a damaged file.
    """
    directory = find_iteration(source)
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory")
    if (directory / "metadata.json").is_file():
        backend = read_json(directory / "metadata.json").get("sharded_backend")
        if backend != "torch_dist":
            raise ValueError(f"{directory}: sharded_backend={backend!r}: only 'torch_dist'")
        return TorchDist(directory)
    if any(RANK.fullmatch(path.name) for path in directory.iterdir()):
        return RankFiles(directory)
    raise ValueError(f"{directory}: has neither metadata.json nor mp_rank_*")


class TorchDist:
    """A `torch_dist` checkpoint. `unread` says why it has optimizer states that are not read."""

    unread = ""

    def __init__(self, directory: Path) -> None:
        files = {path.name for path in directory.glob("*.distcp") if path.is_file()}
        self._directory = directory
        self._stored = StoredTensors(directory, files)
        self.header = self._header(directory)
        self._buckets: BucketStates | None = None
        self._bucketed: dict[str, tuple[str, str]] = {}  # our key -> the state and key in buckets
        # coatlm's key -> what is stored, and the layer in it if layers are stacked
        self._parts: dict[str, list[tuple[str, int | None]]] = {}
        for key in self._stored.described:
            if not key.startswith(BUCKETS):
                self._add(key)
        self.described = {key: self._describe(parts) for key, parts in self._parts.items()}

    def _header(self, directory: Path) -> Header:
        """Read the header from common.pt, or from where megatron-core 0.19 and later put it."""
        path = directory / "common.pt"
        if path.is_file():
            return Header.of(load_pickle(path), path)
        content = self._stored.read_object(COMMON)
        if content is None:
            return Header()
        path = directory / COMMON
        common = load_pickle(path, content)
        if not isinstance(common, list) or len(common) != 1:
            raise ValueError(f"{path}: holds a {type(common).__name__}, not a list of one")
        return Header.of(common[0], path)

    def find_bucketed(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Enter states in flat buckets, if there are any, for weights of these shapes.

        Reads all weights. Otherwise `unread` says why the states were not found.
        """
        if not any(key.startswith(BUCKETS) for key in self._stored.described):
            return
        found = {key: d.shape for key, d in self.described.items()}
        if any(found.get(key) != shape for key, shape in shapes.items()):
            return  # of another model: the caller compares and names them
        updates = self._bucketed_updates()
        self._buckets = find_states(self._stored, shapes, self.read) if updates else None
        if self._buckets is None:
            self.unread = NO_LAYOUT if updates else NO_STEPS
            return
        self.header.updates = updates
        for state in BUCKETED:
            for key, shape in shapes.items():
                ours = f"{STATE_PREFIX}{STATES[state]}.{key}"
                self._bucketed[ours] = state, key
                self.described[ours] = Described(torch.float32, shape)

    def _bucketed_updates(self) -> int:
        """The steps of an optimizer with states in buckets; 0 if that is not known."""
        name = f"{BUCKETS}dp_group_idx_0.optimizer/shard_0_1"
        content = self._stored.read_object(name)
        if content is None:
            return 0
        path = self._directory / name
        try:
            groups = load_pickle(path, content)
            return _updates(groups[0], path) if isinstance(groups, list) and groups else 0
        except ValueError:
            return 0

    def read(self, key: str) -> Tensor:
        """Read one tensor to the host."""
        if self._buckets is not None and key in self._bucketed:
            return self._buckets.read(*self._bucketed[key])
        parts = [
            self._stored.read(name) if layer is None else self._stored.read_layer(name, layer)
            for name, layer in self._parts[key]
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _add(self, key: str) -> None:
        """Enter a stored tensor, or each layer of a stacked one, under coatlm's names."""
        state = STATE.fullmatch(key)
        known = state is not None and state[1] in STATES
        prefix = f"{STATE_PREFIX}{STATES[state[1]]}." if state is not None and known else ""
        name = state[2] if state is not None and known else key
        for wrapper in PREFIXES:
            name = name.removeprefix(wrapper)
        half = name.removesuffix("_w").removesuffix("_v")
        halves = half.endswith(GATE_UP) and half != name
        name = half if halves else name
        if name.startswith("decoder.layers.") and not LAYER.fullmatch(name):
            inside = name.removeprefix("decoder.layers.")
            shape = self._stored.described[key][1]
            if len(shape) < 2 or 0 in shape:  # an empty one could claim any number of layers
                raise ValueError(f"{key} has the shape {list(shape)}: not a stack of layers")
            for layer in range(shape[0]):
                self._enter(
                    f"{prefix}decoder.layers.{layer}.{NORMS.get(inside, inside)}", key, layer
                )
            return
        if found := LAYER.fullmatch(name):
            name = f"decoder.layers.{found[1]}.{NORMS.get(found[2], found[2])}"
        self._enter(prefix + name, key, None)

    def _enter(self, ours: str, stored: str, layer: int | None) -> None:
        parts = self._parts.setdefault(ours, [])
        parts.append((stored, layer))
        parts.sort(key=lambda part: part[0].endswith("_v"))  # gate comes before up

    def _describe(self, parts: list[tuple[str, int | None]]) -> Described:
        dtype, shape = self._stored.described[parts[0][0]]
        shape = shape if parts[0][1] is None else shape[1:]
        rows = sum(self._rows(*part) for part in parts)
        return Described(dtype, (rows, *shape[1:]) if len(parts) > 1 else shape)

    def _rows(self, name: str, layer: int | None) -> int:
        shape = self._stored.described[name][1]
        return shape[0 if layer is None else 1]


class RankFiles:
    """The pickles of all tensor- and pipeline-parallel ranks, without their optimizer states."""

    unread = "in pickles, which are not read"

    def __init__(self, directory: Path) -> None:
        found = [path for path in directory.iterdir() if RANK.fullmatch(path.name)]
        paths = {_rank(path.name): path / "model_optim_rng.pt" for path in found}
        self._tp = 1 + max(tp for tp, _ in paths)
        stages = 1 + max(pp for _, pp in paths)
        missing = {(tp, pp) for tp in range(self._tp) for pp in range(stages)} - paths.keys()
        if missing:
            raise ValueError(f"{directory}: mp_rank_%02d_%03d is missing" % min(missing))
        self._parts: dict[str, list[Tensor]] = {}
        for tp in range(self._tp):
            chunks: dict[tuple[int, int], tuple[Path, Mapping[str, Any]]] = {}
            for stage in range(stages):
                path = paths[tp, stage]
                content = load_pickle(path)
                self.header = Header.of(content, path)
                for number, chunk in enumerate(_chunks(content, path)):
                    chunks[number, stage] = path, chunk
            first = 0
            for place in sorted(chunks):
                first += self._enter(*chunks[place], first)
        self.described = {key: self._describe(key, parts) for key, parts in self._parts.items()}

    def read(self, key: str) -> Tensor:
        """Join the parts of one tensor."""
        return join(key, self._parts[key])

    def _enter(self, path: Path, chunk: Mapping[str, Any], first: int) -> int:
        """Enter the tensors of a chunk whose first layer is `first`; returns its layers."""
        layers = 0
        for key, value in chunk.items():
            name = str(key)
            if name.endswith("_extra_state"):  # of TransformerEngine: amaxes and scales
                continue
            if not is_plain(value) or name.startswith("language_model"):
                raise ValueError(f"{path}: {name} is not a tensor of megatron-core's GPTModel")
            if match := LAYER.fullmatch(name):
                layers = max(layers, int(match[1]) + 1)
                name = f"decoder.layers.{first + int(match[1])}.{NORMS.get(match[2], match[2])}"
            self._parts.setdefault(name, []).append(value)
        return layers

    def _describe(self, key: str, parts: list[Tensor]) -> Described:
        if len(parts) != self._tp:
            raise ValueError(f"{key}: {len(parts)} parts of {self._tp} tensor-parallel ranks")
        axis = split_axis(key)
        shape, dtype = parts[0].shape, parts[0].dtype
        if any(p.shape != shape or p.dtype != dtype for p in parts) or len(shape) <= (axis or 0):
            raise ValueError(
                f"{key}: parts of {[list(p.shape) for p in parts]} are not of one kind"
            )
        rows = (size * len(parts) if axis == i else size for i, size in enumerate(shape))
        return Described(dtype, tuple(rows))


def _chunks(content: Mapping[str, Any], path: Path) -> list[Mapping[str, Any]]:
    """The chunks in a pickle: `model`, or with virtual stages `model0`, `model1` and so on."""
    chunks = [content["model"]] if "model" in content else []
    while f"model{len(chunks)}" in content:
        chunks.append(content[f"model{len(chunks)}"])
    if not chunks or not all(isinstance(chunk, Mapping) for chunk in chunks):
        raise ValueError(f"{path}: has no model")
    return chunks


def _rank(name: str) -> tuple[int, int]:
    match = RANK.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _updates(optimizer: Any, path: Path) -> int:
    """The number of steps of an optimizer, from its state or its groups; 0 if there is none.

    Raises ValueError for one that is not a whole number.
    """
    if not isinstance(optimizer, Mapping):
        return 0
    inner = optimizer.get("optimizer", optimizer)
    if not isinstance(inner, Mapping):
        return 0
    state, groups = inner.get("state"), inner.get("param_groups")
    found = [state.get("common_step")] if isinstance(state, Mapping) else []
    groups = groups if isinstance(groups, list | tuple) else []
    found += [g.get("step") for g in groups if isinstance(g, Mapping)]
    values = [step for step in found if step is not None]
    steps = [s.item() if isinstance(s, Tensor) and s.numel() == 1 else s for s in values]
    for step in steps:
        if not isinstance(step, int | float) or step != step // 1 or not 0 <= step < 2**40:
            raise ValueError(f"{path}: the optimizer's step is {step!r}: a whole number")
    return int(max(steps, default=0))
