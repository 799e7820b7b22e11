"""The tokens of each context-parallel rank."""

from __future__ import annotations

import pytest
import torch

from coatlm.data.context_parallel import cp_slice, rank_positions, zigzag_positions
from tests.data.test_batches import batch_of


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_zigzag_gives_every_position_once_and_every_rank_the_same_work(cp_size: int) -> None:
    positions = [zigzag_positions(32, rank, cp_size) for rank in range(cp_size)]
    assert sorted(torch.cat(positions).tolist()) == list(range(32))
    assert len({int((p + 1).sum()) for p in positions}) == 1  # keys that causal queries attend to


def test_zigzag_takes_chunks_r_and_2n_1_r() -> None:
    assert zigzag_positions(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, 1, 2).tolist() == [2, 3, 4, 5]


def test_a_sequence_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(ValueError, match="seq_len=10 is not a multiple of 2"):
        zigzag_positions(10, 0, 2)


def test_ranks_that_exchange_heads_hold_one_chunk_each() -> None:
    assert rank_positions(8, 0, 2, zigzag=False).tolist() == [0, 1, 2, 3]
    assert rank_positions(8, 1, 2, zigzag=False).tolist() == [4, 5, 6, 7]
    with pytest.raises(ValueError, match="seq_len=9 is not a multiple of cp_size=2"):
        rank_positions(9, 0, 2, zigzag=False)


@pytest.mark.parametrize("zigzag", [False, True])
def test_cp_slices_put_together_are_the_batch(zigzag: bool) -> None:
    rows = [list(range(9)), [3, 0, 1, 0, 5, 6, 0, 8, 9]]
    batch = batch_of(rows, eod_mask_loss=True, reset_attention_mask=True)
    assert cp_slice(batch, 0, 1, zigzag=zigzag) is batch
    slices = [cp_slice(batch, rank, 2, zigzag=zigzag) for rank in range(2)]
    order = torch.cat([rank_positions(8, rank, 2, zigzag=zigzag) for rank in range(2)]).argsort()
    for key in ("tokens", "labels", "loss_mask"):
        joined = torch.cat([s[key] for s in slices], 1)[:, order]  # type: ignore[literal-required]
        assert torch.equal(joined, batch[key])  # type: ignore[literal-required]
    assert all(s["document_bounds"] is batch["document_bounds"] for s in slices)
