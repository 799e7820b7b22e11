"""The identity of the training data, computed from its content.

    identity = for each source of the blend: documents, tokens, weight, SHA-256 of the content

A copy of a dataset at another path has the same identity; an edited text or another order of
sources changes it. So do other weights, unless the blend takes equally many samples of each source
with them (`coatlm.data.order.quotas`), as with 3 : 1 and 6 : 2.

The hash covers the document bounds and the checksums of all tokens (`coatlm.data.checksums`), or,
for a dataset without checksums, the tokens themselves. If these take more than HASHED_BYTES, only
evenly spaced blocks are hashed, and a change between the blocks is not detected. The checksums of a
loss mask are hashed too, whatever data.loss_mask is. Adding checksums to a dataset changes its
identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from coatlm.data.indexed import Indexed
from coatlm.data.order import quotas

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


def same_identity(a: Sequence[SourceIdentity], b: Sequence[SourceIdentity]) -> bool:
    """Whether two identities have the same sources, blended into the same order of samples."""
    return [_content(s) for s in a] == [_content(s) for s in b] and _quotas(a) == _quotas(b)


def describe_change(
    old: Sequence[SourceIdentity], new: Sequence[SourceIdentity]
) -> tuple[str, str]:
    """Short descriptions of two identities that differ: of the first source in which they do."""
    if len(old) != len(new):
        return _describe_all(old), _describe_all(new)
    weighed = _quotas(old) != _quotas(new)
    changed = [
        i
        for i, (a, b) in enumerate(zip(old, new, strict=True))
        if _content(a) != _content(b) or (weighed and a["weight"] != b["weight"])
    ]
    more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
    of = f"source {changed[0] + 1} of {len(new)}: " if len(new) > 1 else ""
    before, after = (_describe(side[changed[0]], blended=len(new) > 1) for side in (old, new))
    return of + before, after + more


def _content(source: SourceIdentity) -> tuple[int, int, str]:
    return source["documents"], source["tokens"], source["sha256"]


def _quotas(identity: Sequence[SourceIdentity]) -> list[int]:
    """The samples per period of each source; empty for weights that no blend can have."""
    try:
        return quotas([source["weight"] for source in identity])
    except ValueError:
        return []


def _describe(source: SourceIdentity, *, blended: bool) -> str:
    weight = f", weight {source['weight']:.10g}" if blended else ""
    return f"{source['tokens']:,} tokens ({source['sha256'][:8]}){weight}"


def _describe_all(identity: Sequence[SourceIdentity]) -> str:
    tokens = sum(source["tokens"] for source in identity)
    return f"{tokens:,} tokens of {len(identity)} source{'s' if len(identity) > 1 else ''}"
