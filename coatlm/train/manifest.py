"""Checkpoint directories: a manifest lists every file with its size and SHA-256.

Files above 64 MiB have a SHA-256 of every 64 MiB instead, which threads and ranks compute and
compare at the same time.

    checkpoints/step_00000050/__0_0.distcp  .metadata  metadata.json  common.pt    megatron's layout
    checkpoints/step_00000050/state.json                                           coatlm's own
    checkpoints/step_00000050/manifest.json                                        written last
    checkpoints/step_00000050/damaged.txt                        only if a start found it damaged
    checkpoints/latest                                                             step_00000050

A checkpoint is written under a temporary name and renamed once its manifest is on disk, so a
directory with its final name is complete. The manifest also numbers the checkpoints of a directory
in the order of writing, and a rollback gives the one that it loads a new highest number. That
number, not the step, decides which one is newest: after a run goes back to an earlier step, its new
checkpoints are newer than those of later steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coatlm.console import progress
from coatlm.files import check_regular

FORMAT = 1  # version of the manifest; readers refuse any other
MANIFEST = "manifest.json"
DAMAGED = "damaged.txt"
STATE = "state.json"
LATEST = "latest"
REQUIRED = frozenset({".metadata", "metadata.json", "common.pt", STATE})
TEMPORARY = ".tmp-"
BUFFER = 1 << 20  # bytes read at a time for a checksum
PART = 1 << 26  # bytes with a checksum of their own, which threads compare at the same time
THREADS = 16  # that read a checkpoint: disks answer several requests at once
REPLACED = ".replaced-"  # prefix of an older checkpoint of a step that is written again
STEP = re.compile(r"step_(\d{8,})")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read, or does not fit this run."""


class LostPeerError(CheckpointError):
    """A checkpoint was not written because another rank exited; a restart may help."""


@dataclass(frozen=True)
class File:
    """The expected size and checksums of a checkpoint's file."""

    bytes: int
    sha256: str | None  # hexadecimal, of the whole file; None if it has parts
    parts: tuple[str, ...] = ()  # of every PART bytes; empty: a small file, or an older checkpoint

    @classmethod
    def of(cls, size: int, sums: Sequence[str]) -> File:
        """A file of `size` bytes with the checksum of each PART of it."""
        return cls(size, sums[0]) if size <= PART else cls(size, None, tuple(sums))

    def sums(self) -> Iterator[tuple[int, int, str]]:
        """Yield (start, stop, SHA-256) of ranges that together are the file."""
        if self.sha256 is not None:
            yield 0, self.bytes, self.sha256
            return
        for number, part in enumerate(self.parts):
            yield number * PART, min((number + 1) * PART, self.bytes), part


@dataclass(frozen=True)
class CheckpointManifest:
    """The files of a checkpoint by name, and its number in the order of writing."""

    serial: int
    files: Mapping[str, File]


def step_name(step: int) -> str:
    """The name of the directory of a step's checkpoint: `step_00000050`."""
    return f"step_{step:08d}"


def read_checkpoint_manifest(checkpoint: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint. Raises CheckpointError if it is missing or damaged."""
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} is not a directory")
    path = checkpoint / MANIFEST
    try:
        check_regular(path)
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format"]
        if version != FORMAT:
            raise CheckpointError(f"{path}: format {version!r}, this version reads {FORMAT}")
        files = {name: _file(file) for name, file in content["files"].items()}
        manifest = CheckpointManifest(int(content["serial"]), files)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is damaged (nested too deeply)") from error
    if foreign := sorted(name for name in files if Path(name).name != name):
        raise CheckpointError(f"{path} lists {foreign[0]!r}, which is not a file's name")
    for name, file in files.items():
        if file.sha256 is None and len(file.parts) != -(-file.bytes // PART):
            raise CheckpointError(f"{path} is damaged ({len(file.parts)} parts of {name})")
    if missing := sorted(REQUIRED - files.keys()):
        raise CheckpointError(f"{path} does not list {missing[0]}")
    return manifest


def _file(content: Mapping[str, Any]) -> File:
    """A file of a manifest. Older ones also have the SHA-256 of a file with parts."""
    parts = tuple(content.get("parts", ()))
    return File(int(content["bytes"]), None if parts else str(content["sha256"]), parts)


def verify(checkpoint: Path, *, rank: int = 0, world: int = 1, checksums: bool = True) -> list[str]:
    """List the problems of a checkpoint, one line per problem; empty if it is intact.

    Checks that every file exists with its size, and every `world`-th checksum starting at the
    `rank`-th, so that `world` ranks together read each byte once. Rank 0 shows progress.
    """
    try:
        manifest = read_checkpoint_manifest(checkpoint)
    except CheckpointError as error:
        return [str(error)]
    problems: dict[str, str] = {}  # by file
    ranges: list[tuple[str, int, int, str]] = []
    for name, expected in sorted(manifest.files.items()):
        path = checkpoint / name
        try:
            check_regular(path)
            size = path.stat().st_size
            if size != expected.bytes:
                problems[name] = f"{path} has {size} bytes, {expected.bytes} were written"
        except FileNotFoundError:
            problems[name] = f"{path} is missing"
        except OSError as error:
            problems[name] = f"{path}: {error.strerror}"
        ranges += [(name, *found) for found in expected.sums()]
    share = [found for found in ranges[rank::world] if checksums and found[0] not in problems]

    def problem(name: str, start: int, stop: int, expected: str) -> str | None:
        path = checkpoint / name
        try:
            differs = sha256(path, start, stop) != expected
        except OSError as error:
            return f"{path}: {error.strerror}"
        return f"{path} is damaged: its checksum differs" if differs else None

    total = sum(stop - start for _, start, stop, _ in share)
    with (
        progress(f"verifying {checkpoint.name}", total, show=rank == 0) as advance,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        found = pool.map(lambda arguments: problem(*arguments), share)
        for (name, start, stop, _), line in zip(share, found, strict=True):
            advance(stop - start)
            if line is not None:
                problems[name] = line
    return [problems[name] for name in sorted(problems)]


def newest_first(directory: Path) -> list[Path]:
    """The checkpoints of a directory, intact or not, in reverse order of writing.

    Those without a readable manifest have no number and come first.
    """
    order = {path: (_serial(path), step) for path, step in _steps(directory)}
    return sorted(order, key=order.__getitem__, reverse=True)


def last_serial(directory: Path) -> int:
    """The highest number of a checkpoint in a directory; 0 without a readable manifest."""
    return highest(_serial(path) for path, _ in _steps(directory))


def highest(serials: Iterable[float]) -> int:
    """The highest number that is one, not Inf as that of a damaged manifest; 0 without any."""
    return int(max((s for s in serials if s < math.inf), default=0))


def describe(path: Path) -> File:
    """The size and the checksums of a file, which is read once."""
    size = path.stat().st_size
    if size <= PART:
        return File.of(size, [sha256(path)])
    with ThreadPoolExecutor(THREADS) as pool:
        starts = range(0, size, PART)
        return File.of(size, [*pool.map(lambda s: sha256(path, s, s + PART), starts)])


def intact(path: Path, expected: File) -> bool:
    """Whether a file has the expected size and checksums."""
    if not path.is_file() or path.stat().st_size != expected.bytes:
        return False
    with ThreadPoolExecutor(THREADS) as pool:
        return all(pool.map(lambda s: sha256(path, s[0], s[1]) == s[2], expected.sums()))


def sha256(path: Path, start: int = 0, stop: int | None = None) -> str:
    """The hexadecimal SHA-256 of bytes [start, stop) of a file, up to its end if it is shorter."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BUFFER))
    left = math.inf if stop is None else stop - start
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while count := file.readinto(buffer[: int(min(BUFFER, left))]):
            digest.update(buffer[:count])
            left -= count
    return digest.hexdigest()


def write_file(path: Path, content: bytes) -> None:
    """Write a file and fsync it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_manifest(
    temporary: Path, directory: Path, files: Mapping[str, File], *, after: int = 0
) -> None:
    """Write the manifest of a complete checkpoint with these files, the newest of `directory`.

    Its number is above `after`.
    """
    serial = 1 + max(last_serial(directory), after)
    content = {
        "format": FORMAT,
        "serial": serial,
        "files": {name: asdict(file) for name, file in sorted(files.items())},
    }
    write_file(temporary / MANIFEST, json.dumps(content, indent=1).encode())


def publish(temporary: Path, final: Path) -> None:
    """Rename a complete checkpoint to `final` and update `latest`. An older one of that name is
    renamed, for `prune` to remove.
    """
    replaced = final.with_name(REPLACED + final.name)
    _sync_directory(temporary)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    latest = final.with_name(TEMPORARY + LATEST)
    write_file(latest, f"{final.name}\n".encode())
    latest.replace(final.with_name(LATEST))
    _sync_directory(final.parent)


def prune(
    directory: Path, keep: int, *, needed: Callable[[Path], bool] = lambda path: False
) -> None:
    """Remove all but the `keep` newest intact checkpoints and the newest one that is `needed`, and
    those that were replaced. Damaged ones are left to the user. Checksums are not compared: those
    that differ are known from `mark_damaged`.
    """
    recover(directory)
    found = (path for path in newest_first(directory) if not os.path.exists(path / DAMAGED))
    whole = [path for path in found if not verify(path, checksums=False)]
    stays = next(filter(needed, whole), None)
    for path in whole[keep:]:
        if path != stays:
            _remove(path)


def mark_damaged(checkpoint: Path, problem: str | None) -> None:
    """Write into a checkpoint what is wrong with it, or with None remove that file.

    If the file cannot be written, `prune` takes the checkpoint for intact.
    """
    mark = checkpoint / DAMAGED
    with contextlib.suppress(OSError):
        mark.unlink(missing_ok=True)
        if problem is not None:
            mark.write_text(f"{problem}\n", encoding="utf-8")


def recover(directory: Path) -> None:
    """Restore the older checkpoint if a `publish` that replaced it was killed between renames."""
    for replaced in directory.glob(REPLACED + "*"):
        final = replaced.with_name(replaced.name.removeprefix(REPLACED))
        if final.exists():
            _remove(replaced)
        else:
            replaced.rename(final)


def clean(directory: Path) -> None:
    """Remove what a killed process left incomplete. No other process may be writing here."""
    recover(directory)
    for path in directory.glob(TEMPORARY + "*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _steps(directory: Path) -> Iterator[tuple[Path, int]]:
    """The checkpoint directories and their steps, according to their names."""
    for path in directory.iterdir() if directory.is_dir() else ():
        match = STEP.fullmatch(path.name)
        if match and path.is_dir():
            yield path, int(match[1])


def _serial(checkpoint: Path) -> float:
    with contextlib.suppress(CheckpointError):
        return read_checkpoint_manifest(checkpoint).serial
    return math.inf


def _remove(path: Path) -> None:
    """Delete a directory after renaming it, so that no partial checkpoint is ever visible.

    Files that a network file system holds open remain under a temporary name until the next start.
    """
    if path.exists():
        doomed = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _sync_directory(directory: Path) -> None:
    """fsync a directory, and with it the names of its files."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
