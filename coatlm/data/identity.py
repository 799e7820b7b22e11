"""Which tokens a run trains on, told by their content.

    identity = for each source of the blend: documents, tokens, weight, SHA-256 of the content

A copy of a dataset in another place has the same identity; an edited text, another order of the
sources or another weight has not. The hash covers the document bounds and the checksums that a
dataset brings of all its tokens (`coatlm.data.checksums`). Of a dataset without checksums it covers
the tokens themselves. There is one gap: where these take more than HASHED_BYTES, only evenly spaced
blocks of them are hashed, and a change between the blocks is not noticed. Adding checksums to a
dataset changes its identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from coatlm.data.indexed import Indexed

HASHED_BYTES = 1 << 28  # per source: some tenths of a second at each start
BLOCK_BYTES = 1 << 20


class SourceIdentity(TypedDict):
    """One source of the blend."""

    documents: int
    tokens: int
    weight: float
    sha256: str


def identify(sources: Sequence[Indexed], weights: Sequence[float]) -> list[SourceIdentity]:
    """The identity of the data, source by source, in their order."""
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
    """SHA-256, in hexadecimal, of type, document bounds, and checksums or tokens."""
    digest = hashlib.sha256(f"{source.tokens.dtype} {len(source.tokens)}\n".encode())
    digest.update(np.ascontiguousarray(source.bounds_D1).data)
    sums = source.file.sums
    for block in _blocks(source.tokens) if sums is None else [sums]:
        digest.update(np.ascontiguousarray(block).data)
    return digest.hexdigest()


def _blocks(tokens: NDArray[Any]) -> list[NDArray[Any]]:
    """All tokens, or evenly spaced blocks of together HASHED_BYTES."""
    if tokens.nbytes <= HASHED_BYTES:
        return [tokens]
    size, count = BLOCK_BYTES // tokens.itemsize, HASHED_BYTES // BLOCK_BYTES
    starts = np.linspace(0, len(tokens) - size, count).astype(np.int64)
    return [tokens[start : start + size] for start in starts]


def describe_identity(identity: Sequence[SourceIdentity]) -> str:
    """An identity in a few words, for messages."""
    parts = [f"{s['tokens']:,} tokens ({s['sha256'][:8]})" for s in identity]
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return " + ".join(parts[:3]) + more
