"""Collectives of tensor-parallel FP8 layers on four ranks, bit by bit against whole tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.fp8.formats import E4M3
from coatlm.fp8.qtensor import ROW, TENSOR, Granularity, QTensor, block
from coatlm.parallel.tensor import TensorParallel
from tests.distributed import run_ranks
from tests.parallel.test_exchange import rounded

RANKS = 4
ROWS = 16  # per rank, of an operand
GRANULARITIES = {"tensor": TENSOR, "row": ROW, "1 x 128": block(1, 128)}
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


def operand(granularity: Granularity) -> QTensor:
    """An operand [T, H] of all ranks, with scales that differ."""
    generator = torch.Generator().manual_seed(2)
    shape = RANKS * ROWS, HIDDEN
    codes = E4M3.encode(torch.randn(shape, generator=generator))
    scale = torch.rand(granularity.scale_shape(shape), generator=generator)
    return QTensor(codes, scale, granularity, E4M3)


def gathered(parallel: TensorParallel, granularity: Granularity) -> list[Any]:
    """First row of each piece, and whether it and finally all rows are those of `operand`."""
    expected, found = operand(granularity), []
    rank = parallel.group.rank()
    mine = expected.rows(slice(rank * ROWS, (rank + 1) * ROWS))
    pieces = parallel.gather_pieces(mine)
    for rows, wait in pieces:
        found.append([rows.start, same(wait().rows(rows), expected.rows(rows))])
    return [*found, same(pieces[0][1](), expected)]


def same(a: QTensor, b: QTensor) -> bool:
    codes = [x.codes.view(torch.uint8) for x in (a, b)]
    return torch.equal(*codes) and torch.equal(a.scale, b.scale)


def columns_of(x: Tensor, columns: slice) -> Tensor:
    """A chunk, as a GEMM of its own would compute it."""
    return x[:, columns].contiguous()


def collectives(rank: int, size: int, _: None) -> dict[str, Any]:
    """What this rank finds, by case."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    parts, found = partial_sums(), dict[str, Any]()
    for chunks in (1, 2):
        codes = TensorParallel(group, True, chunks, "fp8")
        summed = codes.sum_columns(partial(columns_of, parts[rank].clone()), HIDDEN)()
        found[f"sum in {chunks}"] = torch.equal(summed, expected_sum(parts, rank))
    for name, granularity in GRANULARITIES.items():
        found[name] = gathered(TensorParallel(group, True, 2), granularity)
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


@pytest.mark.parametrize("name", GRANULARITIES)
def test_rows_arrive_rank_by_rank_from_the_next_one_on(found: Any, name: str) -> None:
    for rank, pieces in enumerate(row[name] for row in found):
        order = [(rank + step) % RANKS * ROWS for step in range(RANKS)]
        assert pieces == [*([first, True] for first in order), True]
