"""Sums by the library, number by number: FP8 codes added around the ring, and plain types."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.fp8.formats import E4M3, E5M2
from coatlm.fp8.scaling import scale_ref
from coatlm.parallel.wire import Fp8Sum, Plain, Reduction, Sum, Tensors, Wire
from tests.parallel.lockstep import Rank, ranks, run

CPU = torch.device("cpu")
SIZES = (300, 128, 500)  # elements of the tensors in a bucket: 3, 1 and 4 blocks
EDGES = (0, 3 * 128, 4 * 128, 12 * 128)  # of the tensors, the last one with the padding
N = EDGES[-1]
ADDED = 0.25
MU = (1.0, 0.5, 0.25)


def gradients(size: int) -> list[Tensor]:
    """Each rank's bucket; the ranks agree on the largest values, whose codes add up beyond MAX."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, N, generator=generator).clamp(-1.5, 1.5)
    for tensor, (begin, end) in enumerate(pairwise(EDGES)):
        x[:, begin : begin + 5] = 6.0
        x[:, begin:end] *= 10.0**-tensor
    return list(x)


def job(rank: int, grads: Tensor, sizes: Sequence[int], *, whole: bool, add: bool = False) -> Sum:
    tensors = Tensors.of(SIZES, N // 128, CPU)
    tensors.mu.copy_(torch.tensor(MU))
    out = torch.full((N if whole else sizes[rank],), ADDED)
    return Sum(grads.clone(), out, tuple(sizes), tensors, whole=whole, add=add)


def summed(wire: Wire, grads: list[Tensor], sizes: Sequence[int], **options: Any) -> list[Sum]:
    """The jobs of all ranks when they are done."""
    jobs = [job(rank, x, sizes, **options) for rank, x in enumerate(grads)]
    run([wire.steps(each, rank) for each, rank in zip(jobs, members(len(grads)), strict=True)])
    return jobs


def members(size: int) -> list[Any]:
    return list[Any](ranks(size))


def codes_of_the_sum(grads: list[Tensor], fmt: Any) -> tuple[Tensor, Tensor]:
    """Values of the summed codes, and the scale of each element."""
    largest = torch.stack(grads).abs().amax(0)
    scale = torch.empty(N)
    for begin, end, mu in zip(EDGES[:-1], EDGES[1:], MU, strict=True):
        scale[begin:end] = scale_ref(largest[begin:end].amax(), fmt) / mu
    total = torch.zeros(N)
    for rank, x in enumerate(grads):
        code = fmt.decode(fmt.encode(x * (1 / scale)))
        total = code if rank == 0 else fmt.decode(fmt.encode(total + code))
    return total, scale


CUTS = {"even": (N // 3,) * 3, "uneven": (N - 384, 0, 384)}


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("add", [False, True])
def test_shards_are_codes_added_in_order_and_rounded_after_each_addition(
    fmt: Any, cut: str, add: bool
) -> None:
    grads, begin = gradients(3), 0
    total, scale = codes_of_the_sum(grads, fmt)
    for done in summed(Fp8Sum(fmt), grads, CUTS[cut], whole=False, add=add):
        here = slice(begin, begin + len(done.out))
        expected = (total * scale)[here]
        assert torch.equal(done.out, expected + ADDED if add else expected)
        full = (total.abs() == fmt.max)[here]
        counts = torch.zeros(3).long().index_add_(0, owner()[here], full.long())
        assert torch.equal(done.tensors.saturated, counts)
        begin += len(done.out)


def owner() -> Tensor:
    """The tensor of each element."""
    return torch.arange(3).repeat_interleave(torch.tensor(EDGES).diff())


@pytest.mark.parametrize("cut", CUTS)
def test_without_shards_all_ranks_get_all_sums_and_count_all(cut: str) -> None:
    grads = gradients(3)
    total, scale = codes_of_the_sum(grads, E4M3)
    counts = torch.zeros(3).long().index_add_(0, owner(), (total.abs() == 448).long())
    assert counts.tolist() == [5, 5, 0]  # mu = 1/4 leaves room for three ranks, 1/2 does not
    for done in summed(Fp8Sum(), grads, CUTS[cut], whole=True):
        assert torch.equal(done.out, total * scale)
        assert torch.equal(done.tensors.saturated, counts)


def test_saturated_codes_are_counted_on_top_of_those_of_earlier_sums() -> None:
    grads = gradients(2)
    done = job(0, grads[0], (N // 2,) * 2, whole=True), job(1, grads[1], (N // 2,) * 2, whole=True)
    for _ in range(2):
        run([Fp8Sum().steps(j, c) for j, c in zip(done, members(2), strict=True)])
    assert done[0].tensors.saturated.tolist() == [10, 10, 0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_spoils_its_tensor_on_all_ranks_and_is_remembered(
    bad: float,
) -> None:
    grads = gradients(2)
    grads[1][EDGES[1] + 7] = bad
    for done in summed(Fp8Sum(), grads, (N // 2,) * 2, whole=True):
        spoiled = ~done.out.isfinite()
        assert spoiled[EDGES[1] : EDGES[2]].all() and int(spoiled.sum()) == 128
        assert done.tensors.nonfinite.tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_plain_sums_are_those_of_the_type(dtype: torch.dtype, add: bool, whole: bool) -> None:
    grads = gradients(2)
    total = (grads[0].to(dtype) + grads[1].to(dtype)).float()
    for rank, done in enumerate(summed(Plain(dtype), grads, (512, 1024), whole=whole, add=add)):
        begin = 0 if whole else 512 * rank
        part = total[begin : begin + len(done.out)]
        assert torch.equal(done.out, part + ADDED if add else part)


def test_a_sum_that_stands_where_it_is_wanted_is_not_copied() -> None:
    grads = gradients(2)
    jobs = []
    for rank, x in enumerate(grads):
        whole = job(rank, x, (N // 2,) * 2, whole=True)
        jobs.append(Sum(whole.grads, whole.grads, whole.sizes, whole.tensors, whole=True))
    versions = [each.grads._version for each in jobs]
    plain = Plain(torch.float32)
    run([plain.steps(j, c) for j, c in zip(jobs, members(2), strict=True)])
    assert [each.grads._version for each in jobs] == [v + 1 for v in versions]  # the all-reduce
    assert torch.equal(jobs[0].out, grads[0] + grads[1])


def test_tensors_are_numbered_by_blocks_and_the_last_one_has_the_padding() -> None:
    tensors = Tensors.of((300, 128, 1), 7, CPU)
    assert tensors.owner.tolist() == [0, 0, 0, 1, 2, 2, 2]
    assert tensors.owner.dtype == torch.int32
    assert tensors.values.tolist() == [300, 128, 1]
    assert tensors.mu.tolist() == [1.0] * 3
    assert tensors.saturated.tolist() == [0] * 3 and tensors.nonfinite.tolist() == [False] * 3


def test_only_the_format_that_scales_automatically_says_so() -> None:
    assert Fp8Sum().automatic and Fp8Sum().fmt is E4M3
    assert not Plain(torch.float32).automatic


def test_a_reduction_starts_at_once_and_ends_when_it_is_waited_for() -> None:
    grads, comms = gradients(2), list[Rank](ranks(2))
    wire: Any = Fp8Sum()
    jobs = [job(rank, x, (N // 2,) * 2, whole=False) for rank, x in enumerate(grads)]
    first = Reduction(wire.steps(jobs[0], comms[0]), None)
    assert len(comms[0].calls) == 1 and (jobs[0].out == ADDED).all()
    steps = wire.steps(jobs[1], comms[1])
    next(steps)
    first.pending.wait()
    assert first.pending is not None and first.done is None


def test_a_reduction_waits_for_each_collective_once_and_then_for_nothing() -> None:
    waits: list[int] = []

    class Work:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            waits.append(self.number)

    reduction = Reduction((Work(number) for number in range(3)), None)
    assert waits == []
    for _ in range(2):
        reduction.wait()
    assert waits == [0, 1, 2]
    Reduction((Work(0) for _ in ()), None).wait()
