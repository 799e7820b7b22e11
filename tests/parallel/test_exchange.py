"""FP8 all-to-all, number by number: every bit of what a rank gets, whatever way a bucket is cut.

Expected is what the docstring of the format says, computed of whole tensors: values of others are
rounded to FP8 once, this rank's own are not, and sums are taken in fp32 in the order of the ranks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from coatlm.fp8.formats import E4M3, E5M2
from coatlm.fp8.scaling import scale_ref
from coatlm.parallel.exchange import PIECE, Fp8Exchange, Levels, _pieces
from coatlm.parallel.wire import Sum, Tensors
from tests.parallel.lockstep import Group, Rank, ranks, run

CPU = torch.device("cpu")
SIZES = (700, 128, 900)  # elements of the tensors in a bucket
N = 4 * 4 * 128  # of the bucket, with padding
ADDED = 0.25


def gradients(size: int, seed: int = 0) -> list[Tensor]:
    """Each rank's bucket; tensors and blocks differ in size by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, N // 128, 128, generator=generator)
    x *= torch.exp(2 * torch.randn(size, N // 128, 1, generator=generator))
    return list(x.view(size, N))


def jobs(
    grads: list[Tensor], sizes: tuple[int, ...], *, whole: bool = False, add: bool = False
) -> list[Sum]:
    found = []
    for rank, x in enumerate(grads):
        out = torch.full((N if whole else sizes[rank],), ADDED)
        tensors = Tensors.of(SIZES, N // 128, CPU)
        found.append(Sum(x.clone(), out, sizes, tensors, whole=whole, add=add))
    return found


def exchange(
    wire: Fp8Exchange,
    grads: list[Tensor],
    sizes: tuple[int, ...] | None = None,
    **options: Any,
) -> list[Tensor]:
    """What the ranks end with."""
    found = jobs(grads, sizes or (N // len(grads),) * len(grads), **options)
    run([wire.steps(job, rank) for job, rank in zip(found, ranks(len(grads)), strict=True)])
    for job, x in zip(found, grads, strict=True):
        assert job.whole or torch.equal(job.grads, x), "gradients of the rank have changed"
    return [job.out for job in found]


def rounded(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """E4M3 codes by a scale per 128 elements, or by `scale`, times that scale."""
    if scale is None:
        scale = scale_ref(x.view(-1, 128).abs().amax(1), E4M3)
    scale = scale.view(-1, 1)
    codes = E4M3.encode(x.view(-1, 128) * (1 / scale))
    return (E4M3.decode(codes) * scale).flatten()


def summed(grads: list[Tensor], own: int, scale: Tensor | None = None) -> Tensor:
    """Values of others rounded, in order, and this rank's as they are."""
    total = torch.zeros_like(grads[own])
    for rank, x in enumerate(grads):
        total = total if rank == own else total + rounded(x, scale)
    return total + grads[own]


def close(actual: Tensor, expected: Tensor) -> None:
    """Assert equality but for the order of sums: shared scales multiply sums, not each value."""
    torch.testing.assert_close(actual, expected, rtol=2**-21, atol=2**-24)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("piece", [PIECE, 1024, 128, 1])
def test_each_rank_adds_the_rounded_parts_of_others_to_its_own_in_any_pieces(
    size: int, piece: int
) -> None:
    grads = gradients(size)
    part = N // size
    for rank, out in enumerate(exchange(Fp8Exchange(piece=piece), grads)):
        here = slice(rank * part, (rank + 1) * part)
        assert torch.equal(out, summed(grads, rank)[here])


@pytest.mark.parametrize("piece", [PIECE, 512])
def test_sums_are_added_to_what_a_shard_holds(piece: int) -> None:
    grads = gradients(2)
    for rank, out in enumerate(exchange(Fp8Exchange(piece=piece), grads, add=True)):
        assert torch.equal(out, summed(grads, rank).view(2, -1)[rank] + ADDED)


def test_parts_of_different_sizes_and_none_are_summed_and_added() -> None:
    grads, sizes = gradients(3), (N - 384, 0, 384)
    outs = exchange(Fp8Exchange(), grads, sizes, add=True)
    begin = 0
    for rank, (out, size) in enumerate(zip(outs, sizes, strict=True)):
        expected = summed(grads, rank)[begin : begin + size] + ADDED
        assert torch.equal(out, expected)
        begin += size


@pytest.mark.parametrize("piece", [PIECE, 512])
@pytest.mark.parametrize("add", [False, True])
def test_without_shards_sums_are_rounded_once_more_and_all_ranks_get_them(
    piece: int, add: bool
) -> None:
    grads = gradients(2)
    sums = torch.cat([summed(grads, rank).view(2, -1)[rank] for rank in range(2)])
    for out in exchange(Fp8Exchange(piece=piece), grads, whole=True, add=add):
        assert torch.equal(out, rounded(sums))


def owner_scales(grads: list[Tensor], fmt: Any, *, bucket: bool) -> Tensor:
    """A scale per 128 elements: that of the tensor they belong to, or of the bucket."""
    largest = torch.stack(grads).abs().amax(0).view(-1, 128).amax(1)
    edges = [0, 6, 7, N // 128]  # 700 elements end in the sixth block; the last has the padding
    for begin, end in pairwise(edges):
        largest[begin:end] = largest[begin:end].amax()
    return scale_ref(largest.amax().expand(len(largest)) if bucket else largest, fmt)


@pytest.mark.parametrize("scaling", ["tensor", "bucket"])
@pytest.mark.parametrize("sizes", [(N // 2, N // 2), (N - 384, 384)], ids=["even", "uneven"])
def test_a_shared_scale_is_that_of_the_largest_magnitude_on_any_rank(
    scaling: Any, sizes: tuple[int, int]
) -> None:
    grads = gradients(2)
    scale = owner_scales(grads, E4M3, bucket=scaling == "bucket")
    outs = exchange(Fp8Exchange(scaling=scaling, piece=512), grads, sizes)
    for rank, (out, begin) in enumerate(zip(outs, (0, sizes[0]), strict=True)):
        close(out, summed(grads, rank, scale)[begin : begin + sizes[rank]])


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_a_format_is_that_of_the_codes(fmt: Any) -> None:
    grads = [torch.zeros(N), torch.zeros(N)]
    grads[1][:2] = torch.tensor([fmt.max, 2.3])
    out = exchange(Fp8Exchange(fmt=fmt), grads)[0]
    assert out[1] == {"e4m3": 2.25, "e5m2": 2.5}[fmt.name]


def exchange_over_nodes(wire: Any, grads: list[Tensor], nodes: int, **options: Any) -> Any:
    """The outputs, and each rank's two communicators. Ranks are numbered node by node."""
    local = len(grads) // nodes
    insides, acrosses = [Group(local) for _ in range(nodes)], [Group(nodes) for _ in range(local)]
    found = jobs(grads, (N // len(grads),) * len(grads), **options)
    steps, comms = [], []
    for rank, (job, comm) in enumerate(zip(found, ranks(len(grads)), strict=True)):
        node, place = divmod(rank, local)
        levels = Levels(Rank(insides[node], place), Rank(acrosses[place], node))
        comms.append(levels)
        steps.append(wire(levels=levels).steps(job, comm))
    run(steps)
    return [job.out for job in found], comms


def summed_over_nodes(
    grads: list[Tensor], rank: int, nodes: int, scale: Tensor | None = None
) -> Tensor:
    """Sums inside each node, those of other nodes rounded once more."""
    local = len(grads) // nodes
    node, place = divmod(rank, local)
    sums = [summed(grads[n * local : (n + 1) * local], place, scale) for n in range(nodes)]
    return summed(sums, node)


@pytest.mark.parametrize(("size", "nodes"), [(4, 2), (8, 2), (8, 4)])
@pytest.mark.parametrize("piece", [PIECE, 512])
@pytest.mark.parametrize("add", [False, True])
def test_over_nodes_the_sums_of_other_nodes_are_rounded_once_more(
    size: int, nodes: int, piece: int, add: bool
) -> None:
    grads = gradients(size)

    def wire(**levels: Any) -> Fp8Exchange:
        return Fp8Exchange(piece=piece, **levels)

    outs, comms = exchange_over_nodes(wire, grads, nodes, add=add)
    for rank, out in enumerate(outs):
        expected = summed_over_nodes(grads, rank, nodes).view(size, -1)[rank]
        assert torch.equal(out, expected + ADDED if add else expected)
        assert len(comms[rank].inside.calls) == len(comms[rank].across.calls)


@pytest.mark.parametrize("piece", [PIECE, 512])
def test_over_nodes_without_shards_all_ranks_get_the_rounded_sums(piece: int) -> None:
    grads = gradients(4)

    def wire(**levels: Any) -> Fp8Exchange:
        return Fp8Exchange(piece=piece, **levels)

    sums = [summed_over_nodes(grads, rank, 2).view(4, -1)[rank] for rank in range(4)]
    for out in exchange_over_nodes(wire, grads, 2, whole=True)[0]:
        assert torch.equal(out, rounded(torch.cat(sums)))


def test_over_nodes_a_shared_scale_is_used_inside_and_new_ones_across() -> None:
    grads = gradients(4)
    scale = owner_scales(grads, E4M3, bucket=False)

    def wire(**levels: Any) -> Fp8Exchange:
        return Fp8Exchange(scaling="tensor", piece=512, **levels)

    for rank, out in enumerate(exchange_over_nodes(wire, grads, 2)[0]):
        # a sum in another order may round to another code across nodes: one spacing, 2^-3
        expected = summed_over_nodes(grads, rank, 2, scale).view(4, -1)[rank]
        assert ((out - expected).abs() > 1e-5 * expected.abs()).float().mean() < 0.01
        torch.testing.assert_close(out, expected, rtol=2**-3, atol=2**-6)


def test_a_bucket_is_cut_into_equal_pieces_on_multiples_of_128() -> None:
    assert list(_pieces(0, 1024)) == []
    assert list(_pieces(1024, 1024)) == [(0, 1024)]
    assert list(_pieces(1152, 1024)) == [(0, 640), (640, 1152)]
    assert list(_pieces(2176, 1024)) == [(0, 768), (768, 1536), (1536, 2176)]


def test_a_piece_is_of_all_ranks_together() -> None:
    grads = gradients(4)
    found, comms = jobs(grads, (N // 4,) * 4), ranks(4)
    wire = Fp8Exchange(piece=N // 2)
    run([wire.steps(job, comm) for job, comm in zip(found, comms, strict=True)])
    assert comms[0].calls == ["all_to_all"] * 2
    assert PIECE == 134_217_728  # 128 MiB of codes: a few pieces for the buckets of a large model


def test_the_next_piece_is_sent_before_the_one_before_has_landed() -> None:
    grads = gradients(2)
    found, comms = jobs(grads, (N // 2,) * 2), ranks(2)
    steps = [
        Fp8Exchange(piece=512).steps(job, comm) for job, comm in zip(found, comms, strict=True)
    ]
    for each in steps:
        next(each)
    assert [len(comm.calls) for comm in comms] == [2, 2]
    assert (found[0].out == ADDED).all()


def test_blocks_scaled_each_by_its_own_ask_nothing_of_other_ranks_first() -> None:
    wire = Fp8Exchange()
    assert wire.scaling == "block" and wire.fmt is E4M3 and not wire.automatic
    found, comms = jobs(gradients(2), (N // 2,) * 2), ranks(2)
    run([wire.steps(job, comm) for job, comm in zip(found, comms, strict=True)])
    assert comms[0].calls == ["all_to_all"]
