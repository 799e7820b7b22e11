"""States in host memory: the same bits as without, for every recipe, however they are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coatlm.optim.adamw import AdamW
from coatlm.optim.convert import convert_states_, optimizer_on_host
from coatlm.optim.host_memory import host_zeros
from coatlm.optim.offload import BUFFERS, Piece, StateOffload, cut_pieces, make_pieces
from coatlm.optim.recipes import RECIPES
from coatlm.optim.shards import FlatShard
from tests.optim.toy import (
    NAMES,
    equal,
    fill,
    optimizer,
    shard_of,
    snapshot,
    state_bytes,
    train,
    weights,
)

SIZES = (128 * 7, 128, 128, 128 * 20)
PARAMS = (  # of each shard; fp8lm needs them whole, one is longer than a piece, padding follows
    ((0, 300), (384, 890)),
    ((0, 128),),
    ((0, 100),),
    ((0, 128 * 12), (128 * 12, 128 * 18 + 5)),
)


def pair(recipe: str, piece: int = 640) -> list[AdamW]:
    made = []
    for options in ({}, {"offload": True, "piece": piece}):
        shards = [
            shard_of(weights(n, seed=i), decay=params[:1], params=params)
            for i, (n, params) in enumerate(zip(SIZES, PARAMS, strict=True))
        ]
        made.append(optimizer(shards, recipe, **options))
    return made


def ranges(shard: FlatShard) -> dict[str, Any]:
    return {"decay": shard.decay, "params": shard.params}


@pytest.mark.parametrize("recipe", NAMES)
def test_states_that_pass_in_pieces_get_the_same_bits(recipe: str) -> None:
    plain, offloaded = pair(recipe)
    assert len(plain.pieces) == 1 and len(offloaded.pieces) > BUFFERS
    for opt in (plain, offloaded):
        train(opt, range(3))
        train(opt, range(3, 4), clip=float("nan"))
        train(opt, range(4, 6), clip=None)
    assert plain.step_count.item() == 5
    assert equal(snapshot(plain), snapshot(offloaded))
    assert state_bytes(plain) == state_bytes(offloaded)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("recipe", NAMES)
def test_shards_that_are_updated_one_by_one_get_the_same_bits(recipe: str, offload: bool) -> None:
    plain, _ = pair(recipe)
    options = {"offload": True, "piece": 640} if offload else {}
    shards = [shard_of(s.weight.clone(), **ranges(s)) for s in plain.shards]
    single = optimizer(shards, recipe, by_shard=True, **options)
    for clip in (0.7, float("nan"), 0.3):
        for opt in (plain, single):
            fill(list(opt.shards), 5)
            opt.set_rate(1e-3)
        coefficient = torch.tensor(clip)
        plain.update(coefficient)
        for i in (2, 0, 3, 1):
            single.update_shard(i, coefficient)
        single.count_update(coefficient)
    assert plain.step_count.item() == 2
    assert equal(snapshot(plain), snapshot(single))


@pytest.mark.parametrize("recipe", NAMES)
def test_buffers_have_room_for_three_pieces_and_no_more(recipe: str) -> None:
    _, offloaded = pair(recipe)
    longest = max(piece.stop - piece.start for piece in offloaded.pieces)
    assert longest == (128 * 12 if RECIPES[recipe].tensor_scaled else 640)
    assert offloaded.offload is not None
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for states in offloaded.offload.device
        for tensor in states.values()
    }
    per_parameter = state_bytes(offloaded) / sum(SIZES)
    assert sum(storages.values()) == BUFFERS * longest * per_parameter


def test_pieces_of_single_shards_end_where_these_do() -> None:
    spans = [(0, 0, 256), (0, 256, 384), (1, 0, 128), (2, 0, 256)]
    starts = [0, 384, 512, 768]
    assert make_pieces(spans, starts, None, by_shard=False) == [Piece(0, 768, tuple(spans))]
    each = [Piece(0, 384, tuple(spans[:2])), Piece(384, 512, (spans[2],))]
    assert make_pieces(spans, starts, None, by_shard=True) == [*each, Piece(512, 768, (spans[3],))]
    assert make_pieces(spans, starts, 512, by_shard=True)[:2] == each


def test_pieces_join_spans_and_a_long_span_is_one_piece() -> None:
    spans = [(0, 0, 256), (0, 256, 384), (1, 0, 128), (2, 128, 1024), (2, 1024, 1152)]
    assert cut_pieces(spans, [0, 384, 512, 1664], 512) == [
        Piece(0, 512, tuple(spans[:3])),
        Piece(640, 1536, (spans[3],)),
        Piece(1536, 1664, (spans[4],)),
    ]


def test_a_piece_is_copied_back_before_its_buffer_takes_another() -> None:
    """Whatever is written to a piece's buffer is in host memory, and only there, afterwards."""
    host = {"m": host_zeros(1024, torch.float32), "k": host_zeros(8, torch.uint8)}
    pieces = [Piece(at, at + 128, ((0, at, at + 128),)) for at in range(0, 1024, 128)]
    passes = StateOffload(host, pieces, 1024, torch.device("cpu"))
    for number, states in enumerate(passes.passes(range(8))):
        assert not states["m"].any() and not states["k"].any()
        states["m"] += number
        states["k"] += number
    assert host["k"].tolist() == list(range(8))
    assert torch.equal(host["m"], torch.arange(8.0).repeat_interleave(128))


@pytest.mark.parametrize("recipe", ("coat-lean", "fp8lm", "collage-plus"))
def test_states_of_another_recipe_are_converted_in_host_memory(recipe: str) -> None:
    plain, offloaded = pair(recipe)
    source = optimizer_on_host(plain, "adamw-fp32")
    train(source, range(2))
    for opt in (plain, offloaded):
        convert_states_(opt, source)
        train(opt, range(2, 4))
    assert equal(snapshot(plain), snapshot(offloaded))
