"""The bytes of building a model; tests/parallel/test_layer_gather.py compares them with a peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coatlm.model import memory as mem
from tests.model.shapes import config

VOCAB, LAYERS, RANKS = 2560, 4, 4
LAYER, NORMS, TABLE = 32 * (64 + 2 * 32) + 64 * 32 + 3 * 32 * 64, 2 * 32, VOCAB * 32
LAYERS_OF_STAGE = LAYERS // 2 * (LAYER + NORMS)


def initial(zero: int, stage: int, *, update: str = "step", **parallel: Any) -> int:
    model = {"vocab": VOCAB, "ffn": 64, "layers": LAYERS}
    parallel |= {"zero": zero, "main_grads": "bf16"}
    train = {"update": update, "micro_batch": 1, "global_batch": RANKS}
    c = config(model, parallel=parallel, train=train, precision={"recipe": "coat"})
    return mem.rank_bytes(c, VOCAB, stage=stage, data_parallel=RANKS).initial


def test_below_stage_3_all_weights_are_built() -> None:
    assert initial(2, 0, pp=2) == 2 * (LAYERS_OF_STAGE + TABLE)


def test_at_stage_3_shards_one_bucket_and_the_tensor_that_is_drawn() -> None:
    """BF16 weights and gradients: 4 bytes per element of a shard, 2 of a bucket and of the shard of
    its gradients, 4 drawn.
    """
    table = (2 + 4) * TABLE + 2 * TABLE // RANKS
    assert initial(3, 0, pp=2) == 4 * LAYERS_OF_STAGE // RANKS + table
    widest = 4 * 2 * 64 * 32  # gate and up of the MLP, in fp32
    last = 4 * (LAYERS_OF_STAGE + 32 + TABLE - LAYER) // RANKS + 2 * LAYER + widest
    last += 2 * LAYER // RANKS
    head = 2 * (TABLE + 32) + 4 * TABLE + 2 * (TABLE + 32) // RANKS  # is filled first
    assert initial(3, 1, pp=2) == max(last, head)
    whole = LAYERS * (LAYER + NORMS) + 32 + TABLE  # with the output layer and the final norm
    assert initial(3, 0) == 4 * whole // RANKS + table


def test_tensor_parallel_ranks_draw_whole_tensors() -> None:
    norms = LAYERS // 2 * NORMS
    layers = (LAYERS_OF_STAGE - norms) // 2 + norms
    assert initial(3, 0, pp=2, tp=2) == 4 * layers // RANKS + (1 + 4) * TABLE + TABLE // RANKS


def test_with_update_in_backward_all_gradients_exist_from_the_beginning() -> None:
    whole = LAYERS * (LAYER + NORMS) + 32 + TABLE
    grads = initial(3, 0, update="backward") - 2 * whole // RANKS - (2 + 4) * TABLE
    assert 2 * TABLE < grads < 2 * (whole + TABLE)  # BF16, those of the tables one after the other


def test_a_peak_of_building_above_that_of_a_step_is_the_peak() -> None:
    rank = mem.rank_bytes(config({"vocab": VOCAB}), VOCAB, stage=0, data_parallel=1)
    step = rank.total
    assert step > rank.initial
    assert replace(rank, initial=step + 1).total == step + 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_single_rank_has_no_shards(ranks: int) -> None:
    c = config({"vocab": VOCAB}, parallel={"zero": 3})
    rank = mem.rank_bytes(c, VOCAB, stage=0, data_parallel=ranks)
    two = config({"vocab": VOCAB}, parallel={"zero": 2})
    whole = mem.rank_bytes(two, VOCAB, stage=0, data_parallel=ranks).initial
    assert (rank.initial == whole) == (ranks == 1)
