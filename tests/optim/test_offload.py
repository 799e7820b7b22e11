"""States in host memory: the same bits as without, for every recipe, however they are cut."""

from __future__ import annotations

import gc

import pytest
import torch

from coatlm.optim.adamw import AdamW
from coatlm.optim.convert import convert_states_, optimizer_on_host
from coatlm.optim.offload import BUFFERS, Piece, StateOffload, cut_pieces, host_zeros
from coatlm.optim.recipes import RECIPES
from tests.optim.toy import NAMES, equal, optimizer, shard_of, snapshot, train, weights

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
    assert plain.state_bytes() == offloaded.state_bytes()


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
    per_parameter = offloaded.state_bytes() / sum(SIZES)
    assert sum(storages.values()) == BUFFERS * longest * per_parameter


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
    for number, states in enumerate(passes.passes()):
        assert not states["m"].any() and not states["k"].any()
        states["m"] += number
        states["k"] += number
    assert host["k"].tolist() == list(range(8))
    assert torch.equal(host["m"], torch.arange(8.0).repeat_interleave(128))


def test_host_memory_outlives_its_allocation_for_as_long_as_a_view() -> None:
    view = host_zeros(1 << 20, torch.uint8)[5:7]
    gc.collect()
    view += 1
    assert view.tolist() == [1, 1]


@pytest.mark.parametrize("recipe", ("coat-lean", "fp8lm", "collage-plus"))
def test_states_of_another_recipe_are_converted_in_host_memory(recipe: str) -> None:
    plain, offloaded = pair(recipe)
    source = optimizer_on_host(plain, "adamw-fp32")
    train(source, range(2))
    for opt in (plain, offloaded):
        convert_states_(opt, source)
        train(opt, range(2, 4))
    assert equal(snapshot(plain), snapshot(offloaded))
