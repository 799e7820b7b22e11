"""Collectives of tensor-parallel FP8 layers on four ranks, bit by bit against whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.parallel.tensor import TensorParallel
from tests.distributed import run_ranks
from tests.parallel.test_exchange import rounded

RANKS = 4
TOKENS, HIDDEN = 3, 256  # tokens per rank: payloads of one chunk of 128 columns end in padding


def partial_sums() -> list[Tensor]:
    """x [T, H] of each rank. Blocks of 128 columns differ in size by orders of magnitude."""
    generator = torch.Generator().manual_seed(1)
    shape = RANKS, RANKS * TOKENS, HIDDEN // 128
    x = torch.randn(*shape, 128, generator=generator)
    x *= torch.exp(3 * torch.randn(*shape, 1, generator=generator))
    return list(x.view(RANKS, RANKS * TOKENS, HIDDEN).bfloat16())


def expected_sum(parts: list[Tensor], own: int) -> Tensor:
    """The rows of rank `own`: those of others rounded to E4M3, in order, then its own, in fp32."""
    rows = slice(own * TOKENS, (own + 1) * TOKENS)
    total = torch.zeros(TOKENS, HIDDEN)
    for rank, x in enumerate(parts):
        if rank != own:
            total += rounded(x[rows].float().flatten()).view(TOKENS, HIDDEN)
    return (total + parts[own][rows].float()).bfloat16()


def collectives(rank: int, size: int, _: None) -> dict[str, Any]:
    """What this rank finds, as booleans."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    parts, found = partial_sums(), {}
    for chunks in (1, 2):
        codes = TensorParallel(group, True, chunks, "fp8")
        x = parts[rank].clone()
        summed = codes.sum_columns(lambda columns, x=x: x[:, columns].contiguous(), HIDDEN)()
        found[f"sum in {chunks}"] = torch.equal(summed, expected_sum(parts, rank))
    x = parts[rank].clone()
    if rank == 0:
        x[RANKS * TOKENS - 1, 130] = torch.nan  # a token of the last rank
    summed = codes.sum_partial(x)()
    row, lost = summed[TOKENS - 1].isnan(), 128 if rank == RANKS - 1 else 0
    found["NaN"] = bool(row[128:].sum() == lost and summed.isnan().sum() == lost)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(RANKS, f"{__name__}:collectives")


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_sum_of_codes_rounds_the_parts_of_others_once_and_the_result_once(
    found: Any, chunks: int
) -> None:
    assert [rank[f"sum in {chunks}"] for rank in found] == [True] * RANKS


def test_a_nan_makes_its_block_of_128_columns_nan_where_it_is_received(found: Any) -> None:
    assert [rank["NaN"] for rank in found] == [True] * RANKS
