"""Checkpoints at URLs: downloaded before a run resumes from one, uploaded once they are finished.

    URL/step_00000050/__0_0.distcp  .metadata  ...  state.json     as in checkpoints/
    URL/step_00000050/manifest.json                                the last to be uploaded
    RUN/downloads/step_00000050/  .step_00000050.url               until the run has resumed

A directory without manifest.json is no checkpoint, so an upload that was cut off is never taken for
one. The ranks divide the files among them, in both directions: together they transfer each byte
once, since run.dir is shared by all of them. Every downloaded file is compared with its SHA-256 in
the manifest. A download that was interrupted goes on with the files that are complete. The file
.step_00000050.url, with the URL, marks a directory as a download; any other belongs to the user.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from coatlm.config import ConfigError
from coatlm.console import progress
from coatlm.remote import AHEAD, Location, RemoteError
from coatlm.train.agreement import Group, together
from coatlm.train.manifest import (
    MANIFEST,
    STEP,
    CheckpointError,
    File,
    highest,
    intact,
    read_checkpoint_manifest,
    write_file,
)

DOWNLOADS = "downloads"  # in a run directory
UNNAMED = "checkpoint"  # the download of a checkpoint whose URL does not end with a step
MARK = ".url"  # suffix of the file that marks a download
TRIES = 2  # downloads of a file whose checksum differs
LARGEST_MANIFEST = 1 << 28  # bytes; a file of a checkpoint takes about 100


def remote_candidates(url: str) -> list[str]:
    """The URL of a checkpoint, or those of a directory's or run's checkpoints, newest first.

    Raises CheckpointError if there are none, and RemoteError.
    """
    at = Location.of(url)
    if (at / MANIFEST).exists():
        return [url]
    for directory in (at, at / "checkpoints"):
        if whole := _uploaded(directory):
            return [step for _, step in sorted(whole, reverse=True)]
    raise CheckpointError(f"{url} holds no checkpoint (no step_*/{MANIFEST})")


def download_checkpoint(
    url: str, downloads: Path, log: logging.Logger, group: Group | None = None
) -> Path:
    """Download the newest intact checkpoint at `url` to `downloads`, and return its directory.

    All ranks of a gloo `group` call it, and share `downloads`. Newer checkpoints that are damaged
    are skipped with a warning on `log`. Raises CheckpointError if none is intact, or one cannot be
    read.
    """
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    candidates = together(lambda: remote_candidates(url) if rank == 0 else [], group)[0]
    broken: list[str] = []
    for candidate in candidates:
        name = Location.of(candidate).name
        directory = downloads / (name if STEP.fullmatch(name) else UNNAMED)
        together(partial(_begin, candidate, directory, rank == 0), group)
        fetch = partial(_fetch, candidate, directory, rank, world)
        shares = together(fetch, group, hurried=False)
        problems = [problem for share in shares for problem in share]
        if not problems:
            for problem in broken if rank == 0 else ():
                log.warning("damaged checkpoint skipped: %s", problem)
            if rank == 0:
                log.info("downloaded %s to %s", candidate, directory)
            return directory
        broken.append(problems[0])
    raise CheckpointError(f"no intact checkpoint: {'; '.join(broken)}")


def discard_downloads(run_dir: Path) -> None:
    """Remove what `download_checkpoint` wrote, once the run has resumed."""
    downloads = run_dir / DOWNLOADS
    for directory in _downloaded(downloads):
        _discard(directory)
    with contextlib.suppress(OSError):  # it is missing, or has files of the user
        downloads.rmdir()


def last_uploaded(url: str) -> int:
    """The highest number of a checkpoint at `url`; 0 if there is none, or none that can be read."""
    try:
        return highest(serial for serial, _ in _uploaded(Location.of(url)))
    except RemoteError:  # whoever may write need not be allowed to read
        return 0


def _uploaded(directory: Location) -> list[tuple[float, str]]:
    """The number and the URL of each checkpoint in a directory that has a manifest."""

    def numbered(step: Location) -> list[tuple[float, str]]:
        return [(_serial(step), step.url)] if (step / MANIFEST).exists() else []

    steps = [directory / name for name in directory.names() if STEP.fullmatch(name)]
    with ThreadPoolExecutor(AHEAD) as pool:
        return [found for each in pool.map(numbered, steps) for found in each]


def check_upload(url: str, own: Path) -> None:
    """Raise ConfigError unless objects can be written at `url`.

    It must not be `own`, the directory of the run's checkpoints: a checkpoint that is uploaded
    takes the place of an older one of the same name.
    """
    try:
        at = Location.of(url)
        if url.startswith("file://") and os.path.realpath(at.path) == os.path.realpath(own):
            raise ValueError(f"must not be {own}, where the run itself saves checkpoints")
        probe = at / ".writable"
        probe.write(b"")
        with contextlib.suppress(RemoteError):  # whoever may write need not be allowed to remove
            probe.remove()
    except ValueError as error:
        raise ConfigError(f"checkpoint.upload={url}: {error}") from error


def upload_checkpoint(
    checkpoint: Path, files: Iterable[str], target: Location, group: Group | None = None
) -> None:
    """Upload `files`, which this rank wrote, and on rank 0 at last the manifest of a checkpoint.

    An older checkpoint at `target` loses its manifest first. All ranks of a gloo `group` call it.
    Raises CheckpointError on all of them if any fails.
    """
    first = group is None or group.rank() == 0
    manifest = target / MANIFEST

    def copy() -> None:
        for name in files:
            (target / name).upload(checkpoint / name)

    together(lambda: manifest.remove() if first else None, group)
    together(copy, group, hurried=False)
    together(lambda: manifest.upload(checkpoint / MANIFEST) if first else None, group)


def _serial(checkpoint: Location) -> float:
    """The number of a checkpoint in the order of writing; a damaged manifest comes first."""
    try:
        return float(json.loads(_manifest(checkpoint))["serial"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        if isinstance(error, RemoteError):
            raise
        return float("inf")


def _manifest(checkpoint: Location) -> bytes:
    at = checkpoint / MANIFEST
    if (nbytes := at.info().nbytes) > LARGEST_MANIFEST:
        raise RemoteError(f"{at.url}: {nbytes} bytes, at most {LARGEST_MANIFEST}")
    return b"".join(at.pieces(nbytes))


def _begin(url: str, directory: Path, first: bool) -> None:
    """On rank 0, write the manifest to `directory`, and remove other downloads beside it.

    Raises CheckpointError if `directory` is not a download.
    """
    if not first:
        return
    for other in _downloaded(directory.parent):
        if other != directory:
            _discard(other)
    if os.path.lexists(directory) and not _mark(directory).is_file():
        raise CheckpointError(
            f"{directory} exists and is no download of coatlm: rename it, because {url} is "
            "downloaded to it"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    write_file(_mark(directory), f"{url}\n".encode())
    directory.mkdir(exist_ok=True)
    write_file(directory / MANIFEST, _manifest(Location.of(url)))


def _mark(directory: Path) -> Path:
    """The file, beside a directory, that says that it is a download."""
    return directory.with_name(f".{directory.name}{MARK}")


def _downloaded(downloads: Path) -> Iterator[Path]:
    """The directories of downloads, complete or not."""
    for mark in sorted(downloads.glob(f".*{MARK}")):
        name = mark.name[1:].removesuffix(MARK)
        if name == UNNAMED or STEP.fullmatch(name):
            yield mark.with_name(name)


def _discard(directory: Path) -> None:
    """Remove a download; its mark goes last, so that the next start removes what remains."""
    shutil.rmtree(directory, ignore_errors=True)
    if not os.path.lexists(directory):
        _mark(directory).unlink(missing_ok=True)


def _fetch(url: str, directory: Path, rank: int, world: int) -> list[str]:
    """Download every `world`-th file from the `rank`-th on; returns one line per damaged file."""
    try:
        manifest = read_checkpoint_manifest(directory)
    except CheckpointError as error:
        return [f"{url}: {error}"]
    share = sorted(manifest.files.items())[rank::world]
    at, problems = Location.of(url), []
    total = sum(file.bytes for _, file in share)
    with progress(f"downloading {url}", total, show=rank == 0) as advance:
        for name, file in share:
            path = directory / name
            if not intact(path, file):
                problems += _fetch_file(at / name, path, file)
            advance(file.bytes)
    return problems


def _fetch_file(at: Location, path: Path, file: File) -> list[str]:
    """Download a file; returns a line if it is damaged at its URL."""
    found = at.found()
    if found is None or found.nbytes != file.bytes:
        stored = "is missing" if found is None else f"has {found.nbytes} bytes"
        return [f"{at.url} {stored}, {file.bytes} were written"]
    for _ in range(TRIES):
        with path.open("wb") as target:
            for piece in at.pieces(file.bytes):
                target.write(piece)
        if intact(path, file):
            return []
    return [f"{at.url} is damaged: its checksum differs"]


def is_uploaded(checkpoint: Path, target: Location) -> bool:
    """Whether `target` holds this very checkpoint: the manifests, which an upload ends with and
    which list the number and all checksums, are equal. Raises RemoteError."""
    manifest = (checkpoint / MANIFEST).read_bytes()
    found = (target / MANIFEST).found()
    return found is not None and found.nbytes == len(manifest) and _manifest(target) == manifest
