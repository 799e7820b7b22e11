"""The small files of a Hugging Face directory at a URL, `checkpoint.resume=hf:URL`.

    data.cache_dir/models/KEY/   config.json, generation_config.json, the index of the weights and
                                 the files of the tokenizer; KEY hashes the URL and the size and
                                 the version of each file

They are downloaded whole, and looked up by their names, since not every server lists a directory.
The weights are not: see `coatlm.hf.remote_files`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coatlm.files import whole_file
from coatlm.remote import Location, RemoteError

MODELS = "models"  # in data.cache_dir
LARGEST = 1 << 28  # bytes of a file; tokenizers have some 10 MB


def fetched(place: Path | str, cache_dir: Path) -> Path:
    """A directory with the small files of `place`; a path is returned as it is.

    Raises RemoteError if a file at a URL cannot be read, MissingError without a config.json, and
    ValueError if `cache_dir` cannot be written.
    """
    if isinstance(place, Path):
        return place
    from coatlm.hf.files import CONFIG, INDEX  # these import torch
    from coatlm.hf.tokenizer import GENERATION, TOKENIZER_FILES

    at = Location.of(place)
    found = {CONFIG: (at / CONFIG).info()}
    for name in (GENERATION, INDEX, *TOKENIZER_FILES):
        if (info := (at / name).found()) is not None:
            found[name] = info
    for name, info in found.items():
        if info.nbytes > LARGEST:
            raise RemoteError(f"{at.url}/{name}: {info.nbytes} bytes, at most {LARGEST}")
    key = hashlib.sha256(repr((at.url, sorted(found.items()))).encode()).hexdigest()[:32]
    directory = cache_dir / MODELS / key
    for name, info in found.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != info.nbytes:
            content = b"".join((at / name).pieces(info.nbytes))
            with whole_file(path) as temporary:
                temporary.write_bytes(content)
    return directory


@contextmanager
def named(place: Path | str, directory: Path) -> Iterator[None]:
    """Let the ValueErrors about what was downloaded to `directory` name the URL `place`."""
    try:
        yield
    except ValueError as error:
        if isinstance(place, Path) or str(directory) not in str(error):
            raise
        raise ValueError(str(error).replace(str(directory), place)) from error
