"""Sharded, asynchronous, atomic checkpoints.

`Checkpointer.save` starts to copy this rank's shards of tensors (see `shards`) to the host and
returns; a thread writes the copies while training continues. The threads of all ranks communicate
over a gloo group of their own:

    every rank   copy (see `host_copies`) | write, hash, fsync (see `hashed_file`) |
    rank 0                                | create a directory                     | manifest,
                                                                                     rename, prune

With `upload`, the thread then copies the files to a URL: see `remote_checkpoint`.

If any rank fails, the next `poll` or `wait` raises the error on every rank, the temporary directory
is removed, and earlier checkpoints stay. A process that is killed leaves a temporary directory,
which the next start removes. An upload that fails is a warning, and the next checkpoint is uploaded
again. The writer is a thread, so no process outlives the run.
"""

from __future__ import annotations

import json
import logging
import platform
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from coatlm.console import in_bytes
from coatlm.megatron import ShardedTensor, is_main_replica
from coatlm.remote import Location
from coatlm.train.agreement import Group, together
from coatlm.train.find_checkpoint import (
    CHECKPOINTS,
    check_resume,
    find_checkpoint,
    named_checkpoint,
    read_state,
    saved_config,
    state_is,
)
from coatlm.train.hashed_file import SUFFIX
from coatlm.train.host_copies import HostCopies
from coatlm.train.manifest import (
    STATE,
    TEMPORARY,
    CheckpointError,
    File,
    LostPeerError,
    clean,
    describe,
    prune,
    publish,
    step_name,
    verify,
    write_file,
    write_manifest,
)
from coatlm.train.remote_checkpoint import upload_checkpoint
from coatlm.train.reports import error_line
from coatlm.train.shards import (
    load,
    read_tensors,
    tensor_checksum,
    tensor_checksums,
    write_layout,
    write_tensors,
)

__all__ = [
    "CHECKPOINTS",
    "CheckpointError",
    "Checkpointer",
    "LostPeerError",
    "check_resume",
    "find_checkpoint",
    "load",
    "named_checkpoint",
    "read_state",
    "read_tensors",
    "saved_config",
    "tensor_checksum",
    "tensor_checksums",
    "verify",
]

TURN_S = 2e-5  # seconds, for `short_turns`
logger = logging.getLogger("coatlm")


class SavedCheckpoint(NamedTuple):
    """A checkpoint that was written completely."""

    name: str
    bytes: int  # in the files of all ranks
    seconds: float  # from the call of `Checkpointer.save` to the rename


@contextmanager
def short_turns() -> Iterator[None]:
    """While Python threads compete for the GIL, switch between them after 20 us instead of 5 ms.

    A thread that plans a checkpoint would otherwise hold the GIL for 5 ms after each kernel that
    training launches, and the GPU would run out of work.
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


class Checkpointer:
    """Writes the checkpoints of a run to `directory` and retains the `keep` newest, and the newest
    one for whose state `needed` returns True.

    `group` is a gloo group over all ranks for this use only; None means a single process. All
    ranks construct it and call `save` at the same steps. The constructor removes what a killed run
    left behind, so only one run may write to a directory; it raises CheckpointError if it cannot.
    Finished checkpoints are copied to the URL `upload`. Their numbers in the order of writing begin
    above `after`, so that they are newer there than those of an earlier start.
    `before_commit` is called on rank 0 before a checkpoint is renamed to its final name; it may
    raise.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        async_save: bool,
        upload: str | None = None,
        after: int = 0,
        needed: Callable[[dict[str, Any]], bool] = lambda state: False,
        group: Group | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least 1, the newest checkpoint always stays")
        self._directory, self._keep, self._async, self._group = directory, keep, async_save, group
        self._rank = 0 if group is None else group.rank()
        self._before_commit, self._after, self._needed = before_commit, after, needed
        self._upload = None if upload is None else Location.of(upload)
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._no_memory = False  # that there is none for copies has been reported
        self._saved: SavedCheckpoint | None = None
        self._token = together(self._prepare, group)[0]

    def save(self, step: int, tensors: Sequence[ShardedTensor], state: dict[str, Any]) -> None:
        """Write a checkpoint of `tensors` and of rank 0's `state`, which consists of JSON values.

        Waits for the previous checkpoint. With `async_save` the tensors may change only after
        `wait_for_copies`, and errors are raised by `poll` or `wait`. Raises CheckpointError.
        """
        self.wait()
        begin = time.monotonic()
        text = json.dumps(state, indent=1)
        pieces = [tensor for tensor in tensors if is_main_replica(tensor.replica_id)]
        if not self._async:
            self._run(step, pieces, text, begin)
            self.poll()
            return
        self._copies.start([_data(piece) for piece in pieces])
        thread = threading.Thread(
            target=self._run,
            args=(step, pieces, text, begin),
            kwargs={"copy": self._copies.finish, "turns": short_turns},
            name="checkpoint",
        )
        thread.start()
        self._thread = thread

    def reserve(self, tensors: Sequence[ShardedTensor]) -> None:
        """Start to allocate the host memory that `save` of these tensors on a GPU needs."""
        if self._async and any(_data(tensor).is_cuda for tensor in tensors):
            mine = [tensor for tensor in tensors if is_main_replica(tensor.replica_id)]
            self._copies.reserve([_data(tensor) for tensor in mine])

    def wait_for_copies(self) -> None:
        """Let this thread and its current stream wait until the saved tensors may change."""
        self._copies.wait()

    def poll(self) -> None:
        """Log a finished save, or raise the CheckpointError of a failed one, once. Never blocks.
        Also raises it, on the rank concerned and once, if the memory for copies cannot be
        allocated, long before the first save.

        Different ranks may raise the error of a failed save one step apart.
        """
        failure, reported = self._copies.failure(), self._no_memory
        self._no_memory = failure is not None
        if self._error is not None:  # which that failure may have caused
            error, self._error = self._error, None
            raise error
        if failure is not None and not reported:
            raise CheckpointError(
                f"rank {self._rank} ({platform.node()}): no memory for copies of checkpoints: "
                f"{error_line(failure)}; checkpoint.async_save=false needs none"
            ) from failure
        saved, self._saved = self._saved, None
        if saved is not None and self._rank == 0:
            logger.info("saved %s: %s in %.1f s", saved.name, in_bytes(saved.bytes), saved.seconds)

    def wait(self) -> None:
        """Block until nothing is being written; then `poll`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.poll()

    def join(self) -> None:
        """Wait for a checkpoint that is being written, in a run that ends with an error of its own.

        A failure to write it is logged.
        """
        try:
            self.wait()
        except CheckpointError as error:
            logger.error("%s", error)

    def _prepare(self) -> str:
        """On rank 0, remove incomplete checkpoints and check that the directory is writable.

        Returns a random token for the names of temporary directories.
        """
        token = secrets.token_hex(4)
        if self._rank == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            clean(self._directory)
            trial = self._directory / f"{TEMPORARY}{token}"
            trial.mkdir()
            trial.rmdir()
        return token

    def _run(
        self,
        step: int,
        pieces: Sequence[ShardedTensor],
        state: str,
        begin: float,
        *,
        copy: Callable[[], Sequence[Tensor]] | None = None,
        turns: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Write a checkpoint; `poll` reports the outcome. `begin` is the time of the call of
        `save`; `copy` makes copies of `pieces`, to be written in their place; `turns()` surrounds
        all that takes long.
        """
        temporary = self._directory / f"{TEMPORARY}{step_name(step)}-{self._token}"
        missed, copied = "written", list(pieces)

        def begin_files() -> None:
            if copy is not None:
                copied[:] = [replace(p, data=c) for p, c in zip(pieces, copy(), strict=True)]
            if self._rank == 0:
                temporary.mkdir()
                write_layout(temporary)
                write_file(temporary / STATE, state.encode())

        try:
            with turns():
                together(begin_files, self._group)
                written = write_tensors(temporary, copied, self._group)
            parts = together(lambda: written | self._small_files(temporary), self._group)
            files = {name: file for part in parts for name, file in part.items()}
            together(lambda: self._commit(temporary, step, files), self._group)
            size = sum(file.bytes for file in files.values())
            self._saved = SavedCheckpoint(step_name(step), size, time.monotonic() - begin)
            missed = "uploaded"
            self._prune()
            if self._upload is not None:
                self._copy_to(self._upload / step_name(step), parts[self._rank])
        except Exception as error:  # of any type, as an exception in a thread would be lost
            if self._rank == 0:  # another rank could delete what rank 0 is about to rename
                shutil.rmtree(temporary, ignore_errors=True)
            name = self._directory / step_name(step)
            message = f"{name} was not {missed}: {error_line(error)}"
            lost = type(error) is RuntimeError or isinstance(error, dist.DistError)
            self._error = LostPeerError(message) if lost else CheckpointError(message)
            self._error.__cause__ = error

    def _copy_to(self, target: Location, files: Iterable[str]) -> None:
        """Upload the checkpoint of a step; a failure, which leaves it whole here, is logged."""
        begin = time.monotonic()
        try:
            upload_checkpoint(self._directory / target.name, files, target, self._group)
        except CheckpointError as error:  # on all ranks
            if self._rank == 0:
                logger.warning("%s was not uploaded: %s", target.url, error)
        else:
            if self._rank == 0:
                logger.info("uploaded %s in %.1f s", target.url, time.monotonic() - begin)

    def _small_files(self, temporary: Path) -> dict[str, File]:
        """The sizes and checksums of the files without tensors, on rank 0, which writes them."""
        if self._rank != 0:
            return {}
        return {p.name: describe(p) for p in temporary.iterdir() if p.suffix != SUFFIX}

    def _commit(self, temporary: Path, step: int, files: dict[str, File]) -> None:
        """Turn the temporary directory into a checkpoint, on rank 0."""
        if self._rank != 0:
            return
        for name, file in files.items():
            path = temporary / name
            if not path.exists() or path.stat().st_size != file.bytes:
                raise CheckpointError(
                    f"{name} is not the file that its rank wrote: all ranks must share "
                    f"{self._directory}"
                )
        self._before_commit()
        write_manifest(temporary, self._directory, files, after=self._after)
        publish(temporary, self._directory / step_name(step))

    def _prune(self) -> None:
        """Remove older checkpoints, on rank 0; a failure, which takes only space, is logged."""
        if self._rank != 0:
            return
        try:
            needed = partial(state_is, wanted=self._needed)
            prune(self._directory, self._keep, needed=needed)
        except OSError as error:
            logger.warning("an older checkpoint was not removed: %s", error_line(error))


def _data(piece: ShardedTensor) -> Tensor:
    assert piece.data is not None
    return piece.data
