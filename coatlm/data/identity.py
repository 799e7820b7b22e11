"""The identity of the training data, computed from its content.

    identity = for each source of the blend: documents, tokens, weight, SHA-256 of the content

A copy of a dataset at another path has the same identity; an edited text, another order of sources
or another weight changes it. The hash covers the document bounds and the checksums of all tokens
(`coatlm.data.checksums`), or, for a dataset without checksums, the tokens themselves. If these take
more than HASHED_BYTES, only evenly spaced blocks are hashed, and a change between the blocks is not
detected. The checksums of a loss mask are hashed too, whatever data.loss_mask is. Adding checksums
to a dataset changes its identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from coatlm.data.indexed import Indexed

HASHED_BYTES = 1 << 28  # per source; hashing them takes some tenths of a second
BLOCK_BYTES = 1 << 20


class SourceIdentity(TypedDict):
    """The identity of one source of the blend."""

    documents: int
    tokens: int
    weight: float
    sha256: str


def identify(sources: Sequence[Indexed], weights: Sequence[float]) -> list[SourceIdentity]:
    """The identity of each source, in order."""
    return [
        SourceIdentity(
            documents=len(source.bounds_D1) - 1,
            tokens=int(source.bounds_D1[-1]),
            weight=float(weight),
            sha256=content_hash(source),
        )
        for source, weight in zip(sources, weights, strict=True)
    ]


def content_hash(source: Indexed) -> str:
    """The hexadecimal SHA-256 of dtype, document bounds, and checksums or tokens."""
    digest = hashlib.sha256(f"{source.tokens.dtype} {source.bounds_D1[-1]}\n".encode())
    digest.update(np.ascontiguousarray(source.bounds_D1).data)
    sums = source.file.sums
    for block in _blocks(source.tokens) if sums is None else [sums]:
        digest.update(np.ascontiguousarray(block).data)
    if source.mask is not None and source.mask.sums is not None:
        digest.update(np.ascontiguousarray(source.mask.sums).data)
    return digest.hexdigest()


def _blocks(tokens: NDArray[Any]) -> list[NDArray[Any]]:
    """All tokens, or evenly spaced blocks that add up to HASHED_BYTES."""
    if tokens.nbytes <= HASHED_BYTES:
        return [tokens]
    size, count = BLOCK_BYTES // tokens.itemsize, HASHED_BYTES // BLOCK_BYTES
    starts = np.linspace(0, len(tokens) - size, count).astype(np.int64)
    return [tokens[start : start + size] for start in starts]


def describe_identity(identity: Sequence[SourceIdentity]) -> str:
    """A short description of an identity, for messages."""
    parts = [f"{s['tokens']:,} tokens ({s['sha256'][:8]})" for s in identity]
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return " + ".join(parts[:3]) + more
