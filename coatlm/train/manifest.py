"""A whole checkpoint: a directory whose manifest lists every file with its size and SHA-256.

    checkpoints/step_00000050/__0_0.distcp  .metadata  metadata.json  common.pt    megatron's layout
    checkpoints/step_00000050/state.json                                           coatlm's own
    checkpoints/step_00000050/manifest.json                                        written last
    checkpoints/latest                                                             step_00000050

A checkpoint is filled under a temporary name and renamed once its manifest is on disk, so that it
is whole under its own name or not there. The manifest also numbers the checkpoints of a directory
in the order of writing. That order, not the step, says which one is newest: what a run writes after
it went back to an earlier step is newer than what it had written before.
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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from coatlm.console import Advance, progress
from coatlm.files import check_regular

FORMAT = 1  # of the manifest; a reader refuses any other
MANIFEST = "manifest.json"
STATE = "state.json"
LATEST = "latest"
REQUIRED = frozenset({".metadata", "metadata.json", "common.pt", STATE})
TEMPORARY = ".tmp-"
BUFFER = 1 << 20  # bytes read at a time for a checksum
REPLACED = ".replaced-"  # an older checkpoint of a step that is being written again
STEP = re.compile(r"step_(\d{8,})")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is not one that this run can continue from."""


class LostPeerError(CheckpointError):
    """A checkpoint was not written because another rank has gone: to start again may help."""


@dataclass(frozen=True)
class File:
    """What a file of a checkpoint must be."""

    bytes: int
    sha256: str  # hexadecimal


@dataclass(frozen=True)
class CheckpointManifest:
    """The files of a checkpoint, by name, and its place in the order of writing."""

    serial: int
    files: Mapping[str, File]


def step_name(step: int) -> str:
    """The directory of a step's checkpoint: `step_00000050`."""
    return f"step_{step:08d}"


def read_checkpoint_manifest(checkpoint: Path) -> CheckpointManifest:
    """The manifest of a checkpoint. Raises CheckpointError where there is none to rely on."""
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} is not a directory")
    path = checkpoint / MANIFEST
    try:
        check_regular(path)
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format"]
        if version != FORMAT:
            raise CheckpointError(f"{path}: format {version!r}, this version reads {FORMAT}")
        files = {
            name: File(int(file["bytes"]), str(file["sha256"]))
            for name, file in content["files"].items()
        }
        manifest = CheckpointManifest(int(content["serial"]), files)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is damaged (nested too deeply)") from error
    if foreign := sorted(name for name in files if Path(name).name != name):
        raise CheckpointError(f"{path} lists {foreign[0]!r}, which is not a file's name")
    if missing := sorted(REQUIRED - files.keys()):
        raise CheckpointError(f"{path} does not list {missing[0]}")
    return manifest


def verify(checkpoint: Path, *, rank: int = 0, world: int = 1, checksums: bool = True) -> list[str]:
    """What is wrong with a checkpoint, one line a problem; empty if it is whole.

    The presence and size of every file are checked, and the checksum of every `world`-th file from
    the `rank`-th on: together, `world` ranks read each byte once. Rank 0 shows its progress.
    """
    try:
        manifest = read_checkpoint_manifest(checkpoint)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    files = sorted(manifest.files.items())
    share = dict(files[rank::world]) if checksums else {}
    total = sum(expected.bytes for expected in share.values())
    with progress(f"verifying {checkpoint.name}", total, show=rank == 0) as advance:
        for name, expected in files:
            path = checkpoint / name
            try:
                check_regular(path)
                size = path.stat().st_size
                if size != expected.bytes:
                    problems.append(f"{path} has {size} bytes, {expected.bytes} were written")
                elif name in share and sha256(path, advance) != expected.sha256:
                    problems.append(f"{path} is not what was written: its checksum differs")
            except FileNotFoundError:
                problems.append(f"{path} is missing")
            except OSError as error:
                problems.append(f"{path}: {error.strerror}")
    return problems


def newest_first(directory: Path) -> list[Path]:
    """The checkpoints of a directory, whole or not, in reverse order of writing.

    One without a readable manifest cannot be placed in that order and comes first.
    """
    order = {path: (_serial(path), step) for path, step in _steps(directory)}
    return sorted(order, key=order.__getitem__, reverse=True)


def sha256(path: Path, advance: Advance | None = None) -> str:
    """The hexadecimal SHA-256 of a file's content; `advance` is told the bytes read."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BUFFER))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if advance is not None:
                advance(count)
    return digest.hexdigest()


def write_file(path: Path, content: bytes) -> None:
    """Write a file and see it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_manifest(temporary: Path, directory: Path, files: Mapping[str, File]) -> None:
    """Declare a directory whole: its files are as given, and it is the newest of `directory`."""
    serials = [_serial(path) for path, _ in _steps(directory)]
    serial = 1 + int(max((s for s in serials if s < math.inf), default=0))
    content = {
        "format": FORMAT,
        "serial": serial,
        "files": {name: asdict(file) for name, file in sorted(files.items())},
    }
    write_file(temporary / MANIFEST, json.dumps(content, indent=1).encode())


def publish(temporary: Path, final: Path) -> None:
    """Give a finished directory its name, in place of an older one, and make `latest` say so."""
    replaced = final.with_name(REPLACED + final.name)
    _sync_directory(temporary)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    latest = final.with_name(TEMPORARY + LATEST)
    write_file(latest, f"{final.name}\n".encode())
    latest.replace(final.with_name(LATEST))
    _sync_directory(final.parent)
    _remove(replaced)


def prune(directory: Path, keep: int) -> None:
    """Remove all but the `keep` newest whole checkpoints; what is not whole is left to the user."""
    whole = [path for path in newest_first(directory) if not verify(path, checksums=False)]
    for path in whole[keep:]:
        _remove(path)


def recover(directory: Path) -> None:
    """Give a checkpoint its name back if a process was killed between the renames of `publish`."""
    for replaced in directory.glob(REPLACED + "*"):
        final = replaced.with_name(replaced.name.removeprefix(REPLACED))
        if final.exists():
            _remove(replaced)
        else:
            replaced.rename(final)


def clean(directory: Path) -> None:
    """Clear away what a killed process left half done. No other process may be writing here."""
    recover(directory)
    for path in directory.glob(TEMPORARY + "*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _steps(directory: Path) -> Iterator[tuple[Path, int]]:
    """The checkpoint directories and their steps, by name alone."""
    for path in directory.iterdir() if directory.is_dir() else ():
        match = STEP.fullmatch(path.name)
        if match and path.is_dir():
            yield path, int(match[1])


def _serial(checkpoint: Path) -> float:
    with contextlib.suppress(CheckpointError):
        return read_checkpoint_manifest(checkpoint).serial
    return math.inf


def _remove(path: Path) -> None:
    """Delete a directory such that no part of it is ever seen under its own name.

    What a network file system still holds open stays under a temporary name until the next start.
    """
    if path.exists():
        doomed = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _sync_directory(directory: Path) -> None:
    """See the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
