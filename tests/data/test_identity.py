"""Data is told by its content."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from coatlm.data import identity
from coatlm.data.identity import content_hash, describe, identify
from coatlm.data.indexed import Indexed


def indexed(tokens: Sequence[int], bounds: Sequence[int], name: str = "a") -> Indexed:
    return Indexed(name, np.array(tokens, np.uint16), np.array(bounds, np.int64))


def test_the_name_does_not_matter_and_every_token_and_bound_does() -> None:
    reference = content_hash(indexed([1, 2, 3, 4], [0, 2, 4]))
    assert content_hash(indexed([1, 2, 3, 4], [0, 2, 4], "elsewhere")) == reference
    assert content_hash(indexed([1, 2, 3, 5], [0, 2, 4])) != reference
    assert content_hash(indexed([1, 2, 3, 4], [0, 3, 4])) != reference
    assert content_hash(indexed([1, 2, 3, 4, 0], [0, 2, 5])) != reference


def test_large_data_is_sampled_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "HASHED_BYTES", 1 << 12)
    monkeypatch.setattr(identity, "BLOCK_BYTES", 1 << 8)
    tokens = np.arange(40_000, dtype=np.uint16)
    reference = content_hash(Indexed("a", tokens, np.array([0, 40_000])))
    for place, seen in ((0, True), (39_999, True), (200, False)):  # 16 blocks of 128 tokens
        changed = tokens.copy()
        changed[place] += 1
        differs = content_hash(Indexed("a", changed, np.array([0, 40_000]))) != reference
        assert differs is seen


def test_sources_are_identified_in_the_order_of_the_blend() -> None:
    a, b = indexed([1, 2], [0, 2]), indexed([3, 4, 5], [0, 1, 3])
    found = identify([a, b], [1, 3])
    assert [(s["documents"], s["tokens"], s["weight"]) for s in found] == [(1, 2, 1.0), (2, 3, 3.0)]
    assert identify([b, a], [3, 1]) == found[::-1] != found
    assert describe(found) == f"2 tokens ({content_hash(a)[:8]}) + 3 tokens ({content_hash(b)[:8]})"
