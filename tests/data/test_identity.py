"""Data is told by its content."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from coatlm.data import identity
from coatlm.data.checksums import CheckedFile
from coatlm.data.identity import content_hash, describe_change, identify, same_identity
from coatlm.data.indexed import Indexed
from coatlm.data.tokenizer import make_tokenizer

BYTE = make_tokenizer("byte")


def indexed(
    tokens: Sequence[int] | NDArray[np.uint16],
    bounds: Sequence[int],
    name: str = "a",
    sums: Sequence[int] | None = None,
) -> Indexed:
    """A dataset whose .bin nobody reads: the null device stands for it."""
    ids = np.array(tokens, np.uint16)
    checksums = None if sums is None else np.array(sums, np.uint32)
    null = Path(os.devnull)
    file = CheckedFile(null, ids.nbytes, checksums, io.FileIO(null))
    return Indexed(name, ids, np.array(bounds, np.int64), file, BYTE, lambda: None)


def test_the_name_does_not_matter_and_every_token_and_bound_does() -> None:
    reference = content_hash(indexed([1, 2, 3, 4], [0, 2, 4]))
    assert content_hash(indexed([1, 2, 3, 4], [0, 2, 4], "elsewhere")) == reference
    assert content_hash(indexed([1, 2, 3, 5], [0, 2, 4])) != reference
    assert content_hash(indexed([1, 2, 3, 4], [0, 3, 4])) != reference
    assert content_hash(indexed([1, 2, 3, 4, 0], [0, 2, 5])) != reference


def test_checksums_stand_for_all_tokens() -> None:
    reference = content_hash(indexed([1, 2, 3, 4], [0, 4], sums=[7, 8]))
    assert content_hash(indexed([1, 2, 3, 4], [0, 4], sums=[7, 9])) != reference
    assert content_hash(indexed([1, 2, 3, 4], [0, 1, 4], sums=[7, 8])) != reference


def test_large_data_is_sampled_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "HASHED_BYTES", 1 << 12)
    monkeypatch.setattr(identity, "BLOCK_BYTES", 1 << 8)
    tokens = np.arange(40_000, dtype=np.uint16)
    reference = content_hash(indexed(tokens, [0, 40_000]))
    for place, seen in ((0, True), (39_999, True), (200, False)):  # 16 blocks of 128 tokens
        changed = tokens.copy()
        changed[place] += 1
        differs = content_hash(indexed(changed, [0, 40_000])) != reference
        assert differs is seen


def test_sources_are_identified_in_the_order_of_the_blend() -> None:
    a, b = indexed([1, 2], [0, 2]), indexed([3, 4, 5], [0, 1, 3])
    found = identify([a, b], [1, 3])
    assert [(s["documents"], s["tokens"], s["weight"]) for s in found] == [(1, 2, 1.0), (2, 3, 3.0)]
    assert identify([b, a], [3, 1]) == found[::-1] != found


def test_identities_are_the_same_if_the_order_of_samples_is() -> None:
    a, b = indexed([1, 2], [0, 2]), indexed([3, 4, 5], [0, 1, 3])
    found = identify([a, b], [3, 1])
    for weights in ([6, 2], [0.3, 0.1], [0.75, 0.25]):
        assert same_identity(found, identify([a, b], weights))
    assert not same_identity(found, identify([a, b], [3, 1.01]))
    assert not same_identity(found, identify([a, a], [3, 1]))
    assert not same_identity(found, found[:1])
    assert same_identity(identify([a], [1]), identify([a], [2]))


def test_a_change_is_described_by_the_first_source_that_differs() -> None:
    a, b = indexed([1, 2], [0, 2]), indexed([3, 4, 5], [0, 1, 3])
    hash_a, hash_b = content_hash(a)[:8], content_hash(b)[:8]
    old = identify([a, b, b], [3, 1, 1])
    assert describe_change(old, identify([a, b, b], [3, 1, 2])) == (
        f"source 3 of 3: 3 tokens ({hash_b}), weight 1",
        f"3 tokens ({hash_b}), weight 2",
    )
    assert describe_change(old, identify([a, a, a], [3, 1, 1])) == (
        f"source 2 of 3: 3 tokens ({hash_b}), weight 1",
        f"2 tokens ({hash_a}), weight 1, and 1 more",
    )
    assert describe_change(old, identify([a, b, a], [6, 2, 2])) == (  # the same weights
        f"source 3 of 3: 3 tokens ({hash_b}), weight 1",
        f"2 tokens ({hash_a}), weight 2",
    )
    assert describe_change(old, old[:1]) == ("8 tokens of 3 sources", "2 tokens of 1 source")
    assert describe_change(old[:1], old[1:2]) == (f"2 tokens ({hash_a})", f"3 tokens ({hash_b})")
