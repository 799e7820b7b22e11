"""Tensors of random bits and the ways they lie over ranks, for tests of checkpoints.

A rectangle of a tensor is (corner, shape, whether this rank writes it). All comparisons are of
bits: a checkpoint copies, it does not compute.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem

from coatlm.parallel.regions import rectangles
from coatlm.train import hashed_file
from coatlm.train.checkpoint import CheckpointError
from coatlm.train.shards import ShardedTensor

SPECS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "weight": ((7, 13), torch.float32),
    "wide": ((3, 40), torch.bfloat16),
    "bias": ((11,), torch.bfloat16),
    "m.codes": ((8, 16), torch.float8_e4m3fn),
    "v.codes": ((8, 16), torch.float8_e5m2),
    "remainder": ((6, 10), torch.uint8),
    "step": ((), torch.int64),
}
Rectangle = tuple[tuple[int, ...], tuple[int, ...], bool]


def tensors_of(seed: int) -> dict[str, Tensor]:
    """Random bits, NaN payloads among them."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for key, (shape, dtype) in SPECS.items():
        count = torch.Size(shape).numel() * dtype.itemsize
        bits = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
        made[key] = bits.view(dtype).view(shape)
    return made


def cut(axis: int, shape: tuple[int, ...], rank: int, world: int) -> Iterator[Rectangle]:
    """Uneven parts along an axis: the last rank has the rest, and some may have none."""
    if axis >= len(shape):
        yield (0,) * len(shape), shape, rank == 0
        return
    size = -(-shape[axis] // world)
    begin, end = min(rank * size, shape[axis]), min((rank + 1) * size, shape[axis])
    if begin < end:
        corner = tuple(begin if i == axis else 0 for i in range(len(shape)))
        yield corner, tuple(end - begin if i == axis else n for i, n in enumerate(shape)), True


def flat(shape: tuple[int, ...], rank: int, world: int) -> Iterator[Rectangle]:
    """Equal flat ranges, as ZeRO shards are: up to three rectangles each."""
    if not shape:
        yield (), (), rank == 0
        return
    size = -(-torch.Size(shape).numel() // world)
    stop = min((rank + 1) * size, torch.Size(shape).numel())
    for corner, rectangle, _ in rectangles(shape, rank * size, stop):
        yield corner, rectangle, True


LAYOUTS: Mapping[str, Callable[[tuple[int, ...], int, int], Iterator[Rectangle]]] = {
    "rows": lambda shape, rank, world: cut(0, shape, rank, world),
    "columns": lambda shape, rank, world: cut(max(len(shape) - 1, 0), shape, rank, world),
    "flat": flat,
    "copies": lambda shape, rank, world: iter([((0,) * len(shape), shape, rank == 0)]),
}


def sharded(key: str, data: Tensor, shape: tuple[int, ...], rectangle: Rectangle) -> ShardedTensor:
    corner, size, main = rectangle
    return ShardedTensor(
        key, data.view(size), data.dtype, size, shape, corner, None, replica_id=int(not main)
    )


def pieces_of(
    whole: Mapping[str, Tensor], layout: str, rank: int = 0, world: int = 1
) -> list[ShardedTensor]:
    """This rank's rectangles of `whole`."""
    return [
        sharded(key, region(tensor, *rectangle[:2]).contiguous(), tuple(tensor.shape), rectangle)
        for key, tensor in whole.items()
        for rectangle in LAYOUTS[layout](tuple(tensor.shape), rank, world)
    ]


def targets_of(layout: str, rank: int = 0, world: int = 1) -> tuple[list[ShardedTensor], Tensor]:
    """Rectangles to fill, as views into one buffer of 0xA5 with gaps between them."""
    wanted = [
        (key, shape, dtype, rectangle)
        for key, (shape, dtype) in SPECS.items()
        for rectangle in LAYOUTS[layout](shape, rank, world)
    ]
    buffer = torch.full((4096,), 0xA5, dtype=torch.uint8)
    pieces, start = [], 8
    for key, shape, dtype, rectangle in wanted:
        size = torch.Size(rectangle[1]).numel() * dtype.itemsize
        data = buffer[start : start + size].view(dtype)
        pieces.append(sharded(key, data, shape, rectangle))
        start += -(-size // 8) * 8 + 8
    return pieces, buffer


def region(tensor: Tensor, corner: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(corner, size, strict=True))]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def differing(pieces: list[ShardedTensor], whole: Mapping[str, Tensor]) -> list[str]:
    """Keys of rectangles that are not, bit by bit, what `whole` has there."""
    return [
        piece.key
        for piece in pieces
        if not torch.equal(
            bits(piece.data),
            bits(region(whole[piece.key], piece.global_offset, piece.local_shape)),
        )
    ]


def outside(pieces: list[ShardedTensor], buffer: Tensor) -> bool:
    """Whether anything between the rectangles was written to."""
    expected = torch.full_like(buffer, 0xA5)
    for piece in pieces:
        start = piece.data.data_ptr() - buffer.data_ptr()
        expected[start : start + piece.data.nbytes] = bits(piece.data)
    return not torch.equal(expected, buffer)


def message(function: Callable[[], object]) -> str:
    """The message of the CheckpointError that `function` raises."""
    try:
        function()
    except CheckpointError as error:
        assert len(str(error).splitlines()) == 1
        return str(error)
    return "nothing raised"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def flip(path: Path, at: int | None = None) -> None:
    """One bit in byte `at`, or in the middle, of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


def edit_manifest(path: Path, changes: dict[str, Any]) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@contextmanager
def full_disk() -> Iterator[None]:
    """Every file that DCP opens for writing is on a full disk."""
    original, hashed = FileSystem.create_stream, hashed_file.HashedFile

    @contextmanager
    def create_stream(self: Any, path: Path, mode: str) -> Iterator[Any]:
        with original(self, "/dev/full" if "w" in mode else path, mode) as stream:
            yield stream

    def full_file(file: io.FileIO) -> hashed_file.HashedFile:
        file.close()
        return hashed(open("/dev/full", "wb", buffering=0))

    FileSystem.create_stream = create_stream  # type: ignore[method-assign]
    hashed_file.HashedFile = full_file  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        FileSystem.create_stream = original  # type: ignore[method-assign]
        hashed_file.HashedFile = hashed  # type: ignore[misc]
