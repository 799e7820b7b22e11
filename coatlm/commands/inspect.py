"""Show the content of a checkpoint, verify it, or compare two of them.

    coatlm inspect runs/quickstart                       # its newest checkpoint
    coatlm inspect runs/quickstart --tensors --verify
    coatlm inspect --diff runs/a/checkpoints/step_00000100 runs/b

A PATH is a checkpoint, or a run directory, whose newest checkpoint is used. Without options, the
step, the tokens seen, the model, the layout that wrote it, and the bytes per kind of tensor are
printed, without reading tensors. --verify reads every byte and compares sizes and checksums with
the manifest. --diff reads one tensor of each checkpoint at a time, so that any model fits in
memory, and prints for each tensor that differs

    differing   the share of the elements whose bits differ
    max abs     max |a - b|
    relative    ||a - b|| / ||a||

The last two are for floating point only: the difference of uint8 codes has no meaning.

Exit code: 0 intact or equal; 1 damaged or different; 2 for an error, which one line explains.
"""

from __future__ import annotations

from coatlm import process

if __name__ == "__main__":  # before the imports that take seconds
    process.listen()

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coatlm.config.errors import printable
from coatlm.console import Parser, fail, in_bytes, local_path
from coatlm.files import STATE_PREFIX
from coatlm.train.checkpoint import CHECKPOINTS, read_state
from coatlm.train.manifest import (
    MANIFEST,
    STATE,
    STEP,
    CheckpointError,
    newest_first,
    read_checkpoint_manifest,
    verify,
)
from coatlm.train.shards import StoredTensors

WEIGHTS = "weights"
RANK_FILE = re.compile(r"__\d+_.*\.distcp")  # __RANK_0, __RANK_PART_0
CHUNK = 1 << 24  # elements compared at once, which limits the size of fp64 copies


@dataclass(frozen=True)
class TensorKind:
    """Tensors of one role and format."""

    name: str
    dtype: torch.dtype
    tensors: int
    elements: int

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Change:
    """The difference of a tensor."""

    differing: float  # share of the elements
    max_abs: float | None  # None for codes
    relative: float | None


def find(path: Path) -> Path:
    """The checkpoint at a path, or a run's newest one. Raises ValueError if there is none."""
    if not path.is_dir():
        raise ValueError(f"{path}: no such directory")
    ours = (MANIFEST, STATE)
    if STEP.fullmatch(path.name) or any((path / name).exists() for name in ours):
        return path
    if (path / ".metadata").exists():
        raise ValueError(
            f"{path}: has .metadata but neither {' nor '.join(ours)}, so it is no checkpoint of "
            "coatlm; coatlm convert --from megatron reads those of Megatron"
        )
    found = newest_first(path / CHECKPOINTS) or newest_first(path)
    if not found:
        raise ValueError(f"{path}: no checkpoint here, and none in {CHECKPOINTS}/")
    return found[0]


def kinds(described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> list[TensorKind]:
    """Sum up the tensors by kind and format: the weights, then each optimizer state."""
    weights = {key for key in described if not key.startswith(STATE_PREFIX)}
    grouped: dict[tuple[str, torch.dtype], list[int]] = {}
    for key, (dtype, shape) in described.items():
        name = WEIGHTS if key in weights else _state_name(key, weights)
        grouped.setdefault((name, dtype), []).append(math.prod(shape))
    found = [TensorKind(name, t, len(sizes), sum(sizes)) for (name, t), sizes in grouped.items()]
    return sorted(found, key=lambda kind: (kind.name != WEIGHTS, kind.name))


def _state_name(key: str, weights: set[str]) -> str:
    """The state's name: `exp_avg.scale` for `optimizer.state.exp_avg.scale.WEIGHT`."""
    parts = key.removeprefix(STATE_PREFIX).split(".")
    for i in range(1, len(parts)):
        if ".".join(parts[i:]) in weights:
            return ".".join(parts[:i])
    return parts[0]


def describe(checkpoint: Path, *, tensors: bool) -> Iterator[str]:
    """Yield the lines of the report. Raises CheckpointError if the checkpoint is unreadable."""
    manifest, state = read_checkpoint_manifest(checkpoint), read_state(checkpoint)
    described = StoredTensors(checkpoint).described
    found = kinds(described)
    config = _mapping(state, "config")
    m, p = _mapping(config, "model"), _mapping(config, "parallel")
    ranks = {name.split("_")[2] for name in manifest.files if RANK_FILE.fullmatch(name)}
    parameters = sum(kind.elements for kind in found if kind.name == WEIGHTS)
    rows = [
        ("checkpoint", f"{checkpoint} (the {_ordinal(manifest.serial)} of its run)"),
        ("step", f"{state.get('step')}, {_count(state.get('tokens', 0))} tokens seen"),
        ("updates", f"{state.get('updates')}, {state.get('skipped')} steps skipped"),
        ("model", _join(m, "layers", "hidden", "heads", "kv_heads", "ffn")),
        ("parameters", f"{parameters:,}"),
        ("layout", f"{_join(p, 'tp', 'pp', 'vpp', 'cp', 'zero')}; files of {len(ranks)} ranks"),
        ("precision", _mapping(config, "precision").get("recipe", "unknown")),
        ("optimizer", _mapping(config, "optim").get("recipe", "unknown")),
        ("tokenizer", f"{_mapping(config, 'data').get('tokenizer', '')} {state.get('tokenizer')}"),
        (
            "files",
            f"{len(manifest.files)}, {in_bytes(sum(f.bytes for f in manifest.files.values()))}",
        ),
    ]
    yield from (f"{name:<12}{printable(str(text))}" for name, text in rows)
    yield from ("", f"{'kind':<24}{'format':<16}{'tensors':>8}{'elements':>18}{'bytes':>14}")
    for kind in found:
        name = str(kind.dtype).removeprefix("torch.")
        yield (
            f"{printable(kind.name):<24}{name:<16}{kind.tensors:>8}{kind.elements:>18,}"
            f"{in_bytes(kind.bytes):>14}"
        )
    total = sum(kind.bytes for kind in found)
    yield f"{'all':<24}{'':<16}{len(described):>8}{'':>18}{in_bytes(total):>14}"
    if tensors:
        yield ""
        for key, (dtype, shape) in described.items():
            yield f"{printable(key)}  {str(dtype).removeprefix('torch.')} {list(shape)}"


def difference(a: Tensor, b: Tensor) -> Change | None:
    """The difference of two tensors of one shape; None if their dtypes and bits are equal."""
    codes = not (a.is_floating_point() and b.is_floating_point())
    same_type, unlike, largest, squares, norm = a.dtype == b.dtype, 0, 0.0, 0.0, 0.0
    for x, y in zip(a.flatten().split(CHUNK), b.flatten().split(CHUNK), strict=True):
        if same_type:
            rows = [t.view(torch.uint8).view(t.numel(), t.element_size()) for t in (x, y)]
            unlike += int((rows[0] != rows[1]).any(1).sum())
        if codes:
            if not same_type:
                unlike += x.numel()
            continue
        x, y = x.double(), y.double()
        if not same_type:
            unlike += int((x != y).sum())
        gap = (x - y).abs()
        largest = max(largest, float(gap.max())) if gap.isfinite().all() else math.nan
        squares, norm = squares + float(gap.square().sum()), norm + float(x.square().sum())
    if same_type and not unlike:
        return None
    share = unlike / max(a.numel(), 1)
    if codes:
        return Change(share, None, None)
    return Change(share, largest, math.sqrt(squares / norm) if norm else math.inf)


def compare(a: Path, b: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, difference) of every tensor that differs, reading one pair at a time."""
    left, right = StoredTensors(a), StoredTensors(b)
    for key in sorted(left.described.keys() | right.described.keys()):
        if key not in right.described:
            yield key, "only in A"
        elif key not in left.described:
            yield key, "only in B"
        else:
            types = [stored.described[key] for stored in (left, right)]
            names = [f"{str(t).removeprefix('torch.')} {list(shape)}" for t, shape in types]
            if types[0][1] != types[1][1]:
                yield key, f"{names[0]} in A, {names[1]} in B"
            elif change := difference(left.read(key), right.read(key)):
                other = "" if types[0] == types[1] else f"{names[0]} in A, {names[1]} in B; "
                yield key, other + _words(change)


def _words(change: Change) -> str:
    words = f"differing {100 * change.differing:.4g} %"
    if change.max_abs is None or change.relative is None:
        return words
    return f"{words}, max abs {change.max_abs:.4g}, relative {change.relative:.4g}"


def diff(a: Path, b: Path) -> int:
    """Print the differences of two checkpoints; returns the exit code."""
    for name, path in (("A", a), ("B", b)):
        state = read_state(path)
        step = printable(str(state.get("step")))
        print(f"{name} {path}: step {step}, {_count(state.get('tokens', 0))} tokens")
    count = len(StoredTensors(a).described.keys() | StoredTensors(b).described.keys())
    found = 0
    for key, what in compare(a, b):
        print(f"{printable(key)}: {what}")
        found += 1
    print(f"{count - found} of {count} tensors are equal")
    return 1 if found else 0


def _mapping(section: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of the saved state, empty if it is not a mapping."""
    found = section.get(name)
    return found if isinstance(found, Mapping) else {}


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else repr(value)


def _join(section: Mapping[str, Any], *names: str) -> str:
    return ", ".join(f"{name} {section[name]}" for name in names if name in section) or "unknown"


def _ordinal(number: int) -> str:
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number}{last or 'th'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Parser(__doc__, "inspect")
    parser.add_argument("paths", type=local_path, nargs="+", metavar="PATH")
    parser.add_argument("--verify", action="store_true", help="compare sizes and checksums")
    parser.add_argument("--diff", action="store_true", help="compare two, tensor by tensor")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    options = parser.parse(arguments)
    try:
        if len(options.paths) != (2 if options.diff else 1):
            raise ValueError(f"{len(options.paths)} paths: one, or two with --diff")
        paths = [find(path) for path in options.paths]
    except (ValueError, OSError) as error:
        return fail(error)
    try:
        problems = [line for path in paths for line in verify(path)] if options.verify else []
        if problems:
            raise CheckpointError("\n".join(problems))
        if options.verify:
            print(f"intact: {' and '.join(map(str, paths))}, by every size and checksum")
        if options.diff:
            return diff(*paths)
        print("\n".join(describe(paths[0], tensors=options.tensors)))
        return 0
    except PermissionError as error:
        return fail(error)
    except (RuntimeError, OSError) as error:  # a CheckpointError, or what torch says of a torn file
        return fail(error, 1, label="damaged")


if __name__ == "__main__":
    process.run(main)
