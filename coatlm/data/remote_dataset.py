"""Open the datasets of data.paths that are at URLs.

PREFIX.json, .idx and .crc32, a few percent of the data, are downloaded whole; .bin and .mask are
read by blocks (`coatlm.data.block_cache`). Only datasets with checksums are read from URLs, so that
what a network or a store damages is never trained on.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coatlm.data.block_cache import BlockCache, RemoteFile, whole_file
from coatlm.data.checksums import DatasetError
from coatlm.data.indexed import DTYPES, Indexed, check_manifest, open_indexed, read_index
from coatlm.data.manifest import MASK, MASK_SUFFIXES, read_dataset_manifest, read_sums, suffixed
from coatlm.data.tokenizer import Tokenizer
from coatlm.remote import Location

if TYPE_CHECKING:
    from coatlm.config import Data

logger = logging.getLogger("coatlm")


def open_source(path: Path | str, data: Data, tokenizer: Tokenizer) -> Indexed:
    """Open a dataset of data.paths, at a path or at a URL, which is text.

    Raises DatasetError, or RemoteError if an object cannot be read.
    """
    if isinstance(path, Path):
        return open_indexed(path, tokenizer)
    cache = BlockCache(data.cache_dir, limit=data.remote_cache, block_bytes=data.remote_block)
    source = open_remote(path, tokenizer, cache)
    if source.file.nbytes > data.remote_cache:
        logger.warning(
            "%s: %s of tokens, more than data.remote_cache=%d: each sample that is not there "
            "downloads blocks of data.remote_block=%d bytes; smaller ones waste less",
            path,
            f"{source.file.nbytes:,} bytes",
            data.remote_cache,
            data.remote_block,
        )
    return source


def open_remote(url: str, tokenizer: Tokenizer, cache: BlockCache) -> Indexed:
    """Open the dataset with the prefix `url` for reading through `cache`.

    Its index and checksums are downloaded whole. Raises RemoteError or DatasetError.
    """
    at = Location.of(url)
    record = at.suffixed(".json")
    if (found := record.found()) is None:
        raise DatasetError(
            f"{record.url}: no such object; a dataset at a URL needs the checksums that "
            "coatlm prepare writes"
        )
    content = b"".join(record.pieces(found.nbytes))
    prefix = cache.folder(content) / "text"
    cache.write(suffixed(prefix, ".json"), content)
    try:
        manifest = read_dataset_manifest(prefix)
    except DatasetError as error:
        raise DatasetError(str(error).replace(f"{prefix}.json", record.url)) from None
    if manifest is None or manifest.version == 1:
        raise DatasetError(f"{url}: has no checksums; preprocess it again with --overwrite")
    sums = {".idx": manifest.index_crc32, ".crc32": manifest.sums_crc32}
    if manifest.masked:
        sums[MASK_SUFFIXES[1]] = manifest.mask_sums_crc32
    for suffix, crc32 in sums.items():
        whole_file(cache, suffixed(prefix, suffix), at.suffixed(suffix), crc32)

    def remote(suffix: str, nbytes: int, sums: NDArray[np.uint32]) -> RemoteFile:
        location = at.suffixed(suffix)
        if (stored := location.info().nbytes) != nbytes:
            raise DatasetError(f"{location.url}: {stored} bytes, but {url}.idx implies {nbytes}")
        base = prefix.with_name(suffix.removeprefix("."))
        return RemoteFile(location.url, nbytes, sums, location, cache, base)

    sizes = {np.dtype(kind).name: np.dtype(kind).itemsize for kind in DTYPES.values()}
    itemsize = sizes.get(manifest.dtype, 0)
    dtype, bounds_D1 = read_index(prefix, manifest, manifest.tokens * itemsize)
    check_manifest(prefix, manifest, tokenizer, dtype, bounds_D1)
    nbytes = manifest.tokens * itemsize
    file = remote(".bin", nbytes, read_sums(prefix, ".crc32", manifest.sums_crc32, nbytes))
    mask = None
    if manifest.masked:
        crc32, tokens = manifest.mask_sums_crc32, manifest.tokens
        mask = remote(MASK, tokens, read_sums(prefix, MASK_SUFFIXES[1], crc32, tokens))
    return Indexed(url, np.empty(0, dtype), bounds_D1, file, tokenizer, lambda: None, mask)
