"""Documents -> tokens on disk: PREFIX.bin, PREFIX.idx (Megatron's indexed dataset), PREFIX.json.

    inputs -> segments -> shards -> PREFIX

Shards are made by any number of processes and joined in the order of the input. Hence the result
does not depend on the number of processes, nor on interruptions: finished shards are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coatlm.data.documents import Segment, expand_inputs, plan_segments
from coatlm.data.indexed import Manifest, read_manifest, suffixed, token_dtype, write_json
from coatlm.data.shards import Options, Shard, fingerprint, plan_shards, tokenise
from coatlm.data.tokenizer import Tokenizer, make_tokenizer

if TYPE_CHECKING:
    from coatlm.config import Data


def preprocess(
    inputs: Sequence[str],
    prefix: Path,
    options: Options,
    *,
    workers: int = 0,
    overwrite: bool = False,
) -> Manifest:
    """Tokenise files, globs or `python-stdlib` into PREFIX.bin, .idx and .json.

    An interrupted call leaves PREFIX.shards behind, from which the same call goes on. If PREFIX is
    already what is asked for, nothing is done. `workers`: processes, 0 for one a core.
    Raises ValueError, one line that names the file, and OSError where writing fails.
    """
    tokenizer = make_tokenizer(options.tokenizer)
    segments = plan_segments(expand_inputs(inputs), options.shard_bytes)
    key = fingerprint(segments, options, tokenizer)
    done = _existing(prefix, key, segments, overwrite)
    directory = suffixed(prefix, ".shards")
    if done is not None:
        shutil.rmtree(directory, ignore_errors=True)  # of a run that ended just before removing it
        return done
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        shards = plan_shards(segments, options, tokenizer, directory)
        tokenise(shards, options, workers)
        manifest = _describe(shards, options, tokenizer, key)
        if manifest.documents:
            _join(shards, _joined(prefix), token_dtype(tokenizer.vocab_size))
            _publish(prefix, manifest)
        shutil.rmtree(directory)
    if not manifest.documents:
        raise ValueError(f"{_shortened(inputs)}: the input holds no text")
    return manifest


def prepare_text(data: Data) -> Path:
    """The prefix of `data.text`, tokenised in `data.cache_dir` unless it is there already.

    Each process works in a directory of its own and renames it last, so that several may start at
    once; of equal results one stays.
    """
    options = Options(tokenizer=data.tokenizer)
    segments = plan_segments(expand_inputs(data.text), options.shard_bytes)
    key = fingerprint(segments, options, make_tokenizer(data.tokenizer))
    home = data.cache_dir / key[:32]
    if not home.is_dir():
        data.cache_dir.mkdir(parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(prefix=f"{key[:32]}.", dir=data.cache_dir))
        try:
            preprocess(data.text, own / "text", options, workers=data.workers)
            own.chmod(0o755)  # mkdtemp's is for one user
            try:
                own.rename(home)
            except OSError:
                if not home.is_dir():  # else another process was first
                    raise
        finally:
            shutil.rmtree(own, ignore_errors=True)
    return home / "text"


def _shortened(inputs: Sequence[str]) -> str:
    return ", ".join(inputs[:3]) + (f" and {len(inputs) - 3} more" if len(inputs) > 3 else "")


def _existing(
    prefix: Path, key: str, segments: Sequence[Segment], overwrite: bool
) -> Manifest | None:
    """The manifest if PREFIX is what is asked for. Raises ValueError where it must not be."""
    targets = [suffixed(prefix, suffix) for suffix in (".bin", ".idx", ".json")]
    inputs = {segment.path for segment in segments}
    for target in targets:
        if str(target.absolute()) in inputs:
            raise ValueError(f"{target}: would overwrite an input; choose another output prefix")
    manifest = read_manifest(prefix)
    present = [target for target in targets if target.exists()]
    if manifest is not None and manifest.inputs == key and len(present) == len(targets):
        return manifest
    joined = _joined(prefix)
    publishing = suffixed(joined, ".idx").exists() and not suffixed(joined, ".bin").exists()
    for target in targets[:2]:
        if target.exists() and not overwrite and not publishing:
            raise ValueError(
                f"{target}: exists, made from other inputs or options; see --overwrite"
            )
    return None


def _joined(prefix: Path) -> Path:
    """Where the joined files lie until they get their names, .bin first and .idx last."""
    return suffixed(prefix, ".shards") / "joined"


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other runs out of `directory`; the lock ends with the process."""
    with open(directory / "lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{directory}: another run is writing here") from None
        yield


def _join(shards: Sequence[Shard], base: Path, dtype: type[np.number[Any]]) -> None:
    """Write the documents of all shards, in order, to BASE.bin and BASE.idx, and onto the disk."""
    from coatlm.platform import enable_cpu  # imports torch, which workers do without

    enable_cpu()
    with warnings.catch_warnings():  # about GPU packages, which this does not need
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    binary, index = suffixed(base, ".bin"), suffixed(base, ".idx")
    builder = IndexedDatasetBuilder(str(binary), dtype=dtype)
    for shard in shards:
        lengths = np.load(suffixed(shard.base, ".lengths.npy"))
        tokens = np.fromfile(suffixed(shard.base, ".bin"), dtype=dtype)
        start = 0
        for length in lengths.tolist():
            builder.add_document(tokens[start : start + length], [length])
            start += length
    builder.finalize(str(index))
    for path in (binary, index):
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def _publish(prefix: Path, manifest: Manifest) -> None:
    """Give the joined files their names; PREFIX.idx, without which there is no dataset, last."""
    base = _joined(prefix)
    suffixed(prefix, ".idx").unlink(missing_ok=True)
    os.replace(suffixed(base, ".bin"), suffixed(prefix, ".bin"))
    write_json(suffixed(prefix, ".json"), dataclasses.asdict(manifest))
    os.replace(suffixed(base, ".idx"), suffixed(prefix, ".idx"))


def _describe(
    shards: Sequence[Shard], options: Options, tokenizer: Tokenizer, key: str
) -> Manifest:
    """The manifest of finished shards."""
    records = [shard.record() for shard in shards]

    def total(name: str) -> int:
        return sum(record[name] for record in records if record is not None)

    return Manifest(
        tokenizer=options.tokenizer,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        append_eod=options.append_eod,
        dtype=np.dtype(token_dtype(tokenizer.vocab_size)).name,
        documents=total("documents"),
        tokens=total("tokens"),
        replaced_utf8=total("replaced_utf8"),
        empty_documents=total("empty_documents"),
        inputs=key,
    )
