"""The cache of tokenized `data.text`, shared by all runs with the same text and tokenizer.

    cache_dir/KEY/text.{bin,idx,json,crc32}   a dataset; KEY hashes everything it depends on
    cache_dir/KEY/damaged                     a read found damage, so the next start replaces it
    cache_dir/KEY.XXXXXXXX/                   a dataset that is being built
    cache_dir/KEY.XXXXXXXX/owner              locked by the process that builds it
    cache_dir/KEY.damaged.XXXXXXXX/           a damaged dataset that is being removed

Each process builds in its own folder and renames it at the end. If several processes build the same
dataset, the first rename wins and the other folders are discarded. A start takes over the folder of
a killed process that was building the same dataset, with the shards finished so far, and removes
folders of other datasets that killed processes left.

The kernel releases an owner's lock when the owner dies. Some file systems do not share locks
between machines, so the owner also writes the boot id of its machine into the file and renews the
file's mtime. A folder of another machine is abandoned once its mtime is older than
ABANDONED_SECONDS.

Every start verifies all checksums of a dataset of at most VERIFIED_BYTES, which takes less than a
second; a larger one is verified block by block when it is read. After damage is found, the next
start tokenizes data.text again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from coatlm.data.checksums import CacheFullError, DatasetError
from coatlm.data.documents import expand_inputs, plan_segments
from coatlm.data.indexed import Indexed, open_indexed
from coatlm.data.manifest import DatasetManifest
from coatlm.data.preprocess import preprocess, verify_small
from coatlm.data.shards import LostWorkerError, fingerprint
from coatlm.data.streams import Limits, some
from coatlm.data.token_shard import Options
from coatlm.data.tokenizer import Tokenizer, make_tokenizer
from coatlm.files import open_locked
from coatlm.platform import boot_id

if TYPE_CHECKING:
    from coatlm.config import Data

ABANDONED_SECONDS = 3600.0
RENEWED_SECONDS = 60.0
DAMAGED = "damaged"
OWNER = "owner"
FOLDER = re.compile(r"[0-9a-f]{32}\.[a-z0-9_]{8}")  # name while a dataset is being built
DOOMED = re.compile(rf"[0-9a-f]{{32}}\.{DAMAGED}\.[0-9a-f]{{8}}")  # of a damaged one

logger = logging.getLogger("coatlm")


def open_text_dataset(data: Data, tokenizer: Tokenizer) -> Indexed:
    """Open the dataset of `data.text`, tokenizing it if needed.

    Raises ValueError, or CacheFullError if the disk is full.
    """
    prefix = prepare_text(data, tokenizer)
    label = f"data.text={some(data.text)}"
    return open_indexed(prefix, tokenizer, name=label, on_damage=lambda: _mark(prefix.parent))


def prepare_text(data: Data, tokenizer: Tokenizer | None = None) -> Path:
    """Tokenize `data.text` unless it is cached; returns the prefix of the dataset."""
    tokenizer = tokenizer or make_tokenizer(data.tokenizer)
    options = Options(tokenizer=data.tokenizer)
    segments = plan_segments(expand_inputs(data.text), options.shard_bytes)
    key = fingerprint(segments, options, tokenizer)[:32]
    home = data.cache_dir / key
    limits = Limits(data.max_expansion, data.max_record)
    with _errors_of(data.cache_dir):
        found = home.exists()
        damage = _damage(home, tokenizer) if found else None
        if damage is not None:
            logger.warning("data.cache_dir: %s; it is tokenized again", damage)
        if not found or damage is not None:
            data.cache_dir.mkdir(parents=True, exist_ok=True)
            with _own_folder(data.cache_dir, key) as own:
                made = preprocess(
                    data.text, own / "text", options, limits=limits, workers=data.workers
                )
                _publish(own, home, tokenizer)
            _warn_of_replaced(data, made)
    return home / "text"


def _warn_of_replaced(data: Data, made: DatasetManifest) -> None:
    """Log how many characters of the text were not UTF-8, if any."""
    if made.replaced_utf8:
        logger.warning(
            "data.text=%s: %s characters were not UTF-8 and became U+FFFD, %.3g per 1,000 tokens",
            some(data.text),
            f"{made.replaced_utf8:,}",
            1000 * made.replaced_utf8 / made.tokens,
        )


def _damage(home: Path, tokenizer: Tokenizer) -> str | None:
    """A description of the damage to a cached dataset; None if it is intact."""
    try:
        if (home / DAMAGED).exists():
            return f"{home}: was found damaged by a run"
        opened = open_indexed(home / "text", tokenizer)
        if opened.file.sums is None:
            return f"{home}: has no checksums"
        verify_small(opened)
    except DatasetError as error:
        return str(error)
    return None


def _mark(home: Path) -> None:
    """Make the next start replace a damaged dataset, unless the cache is read-only."""
    with contextlib.suppress(OSError):
        (home / DAMAGED).touch()


def _publish(own: Path, home: Path, tokenizer: Tokenizer) -> None:
    """Rename a finished folder to `home`, unless another process has done so before.

    A damaged `home` is replaced. It is looked at again here, since another process may have
    replaced it while this one tokenized.
    """
    umask = os.umask(0o077)
    os.umask(umask)
    own.chmod(0o777 & ~umask)  # mkdtemp ignores the umask and admits only the user
    (own / OWNER).unlink()
    doomed: Path | None = None
    if home.exists() and _damage(home, tokenizer) is not None:
        doomed = home.with_name(f"{home.name}.{DAMAGED}.{secrets.token_hex(4)}")
        doomed.mkdir()
        with contextlib.suppress(FileNotFoundError):  # another process was first
            home.rename(doomed / "text")  # which may be a file
    try:
        own.rename(home)
    except OSError:
        if not home.is_dir():  # else another process was first
            raise
        shutil.rmtree(own)
    if doomed is not None:
        shutil.rmtree(doomed, ignore_errors=True)


@contextlib.contextmanager
def _errors_of(cache_dir: Path) -> Iterator[None]:
    """Turn file-system errors into a one-line error that names the option."""
    try:
        yield
    except OSError as error:
        reason = f"data.cache_dir={cache_dir}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            full = CacheFullError(f"{reason}; the same command reuses finished shards")
            full.errno = error.errno
            raise full from None
        raise ValueError(f"{reason}; it must be a directory that can be written to") from None


@contextlib.contextmanager
def _own_folder(cache_dir: Path, key: str) -> Iterator[Path]:
    """A folder for building a dataset: a new one, or that of a killed process.

    It is left for the next start if the process is interrupted or the disk is full.
    """
    own = _take_over(cache_dir, key)
    if own is None:
        folder = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=cache_dir))
        own = folder, open_locked(folder / OWNER)
    folder, owner = own
    done = threading.Event()

    def renew() -> None:
        while not done.wait(RENEWED_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(owner.fileno())

    with owner:
        owner.truncate(0)
        owner.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "boot": _boot()}))
        owner.flush()
        thread = threading.Thread(target=renew, daemon=True, name="cache owner")
        thread.start()
        try:
            yield folder
        except LostWorkerError:
            raise
        except ValueError:  # invalid input, which would fail again
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            done.set()
            thread.join()


def _take_over(cache_dir: Path, key: str) -> tuple[Path, IO[str]] | None:
    """Lock and return an abandoned folder of `key`; abandoned folders of other keys are removed."""
    found: tuple[Path, IO[str]] | None = None
    for folder in sorted(cache_dir.iterdir()):
        if DOOMED.fullmatch(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
        if not FOLDER.fullmatch(folder.name):
            continue
        with contextlib.suppress(OSError):  # another process has just removed or finished it
            owner = _lock_abandoned(folder)
            if owner is None:
                continue
            if found is None and folder.name.startswith(key):
                logger.info("data.cache_dir: continuing in %s, whose process has ended", folder)
                found = folder, owner
            else:
                shutil.rmtree(folder, ignore_errors=True)
                owner.close()
    return found


def _lock_abandoned(folder: Path) -> IO[str] | None:
    """Lock the owner file of a folder whose process has ended; None if it may be alive."""
    path = folder / OWNER
    age = time.time() - (path if path.exists() else folder).stat().st_mtime
    if not path.exists() and age < ABANDONED_SECONDS:
        return None  # its process is about to lock it
    try:
        owner = open_locked(path, wait=False)
    except BlockingIOError:
        return None
    try:
        owner.seek(0)
        here = f'"boot": "{_boot()}"' in owner.read()
        same = os.path.samestat(os.fstat(owner.fileno()), path.stat())  # not replaced meanwhile
        if same and (here or age >= ABANDONED_SECONDS):
            return owner
    except OSError:
        pass
    owner.close()
    return None


def _boot() -> str:
    return boot_id() or socket.gethostname()
