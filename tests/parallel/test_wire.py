"""Wire formats over gloo: errors, what they send, NaN seen by all, equal results, a rank that dies.

Bounds. E4M3 rounds a normal number by at most 2^-4 of it, on average over a spacing by 0.027 in the
root of squares; a sum of R independent values has that relative error too, times sqrt((R - 1) / R)
where a rank does not round its own. A second rounding (the gathering leg, the second level) adds in
squares. NCCL's sum in FP8 rounds R times.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.fp8.formats import E3M4, E5M2
from coatlm.parallel.collectives import Comm, Traffic
from coatlm.parallel.exchange import Fp8Exchange, Levels
from coatlm.parallel.wire import (
    Fp8Sum,
    Plain,
    Reduction,
    Sum,
    Tensors,
    Wire,
)
from tests.distributed import run_ranks

ONCE = 0.027  # relative error of one rounding to E4M3
SIZES = (5000, 128, 3001)  # elements of the tensors in a bucket
N = 128 * 12 * 7  # of the bucket, with padding: equal parts for 2, 3 and 4 ranks
UNEVEN = {2: (N - 1280, 1280), 4: (5120, 0, 128, N - 5248)}
WIRES: dict[str, Wire] = {
    "fp32": Plain(torch.float32),
    "bf16": Plain(torch.bfloat16),
    "fp8-nccl": Fp8Sum(),
    "fp8-a2a": Fp8Exchange(piece=1 << 11),
    "fp8-a2a whole": Fp8Exchange(),
    "fp8-a2a e5m2": Fp8Exchange(fmt=E5M2),
    "fp8-a2a e3m4": Fp8Exchange(fmt=E3M4, piece=1 << 11),
    "fp8-a2a tensor": Fp8Exchange(scaling="tensor", piece=1 << 11),
    "fp8-a2a bucket": Fp8Exchange(scaling="bucket"),
}
BOUND = {  # of ||sum - exact|| / ||exact|| when sharded; gathering adds a rounding
    "fp32": 1e-6,
    "bf16": 0.004,
    "fp8-nccl": 2.2 * ONCE,
    "fp8-a2a": ONCE,
    "fp8-a2a whole": ONCE,
    "fp8-a2a e5m2": 2 * ONCE,
    "fp8-a2a e3m4": ONCE / 2,
    "fp8-a2a tensor": 1.05 * ONCE,  # values far below the largest are subnormal
    "fp8-a2a bucket": 1.05 * ONCE,
    "levels e3m4": 1.05 * ONCE / 2,
}
LEVELS = ("levels", "levels e3m4", "levels tensor")
ADDED = 1e-3  # what a sum is added to
KINDS = ("scattered", "added", "whole", "bf16", "uneven")


def gradients(rank: int, seed: int = 0) -> Tensor:
    """A bucket of this rank: zero in the padding."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.zeros(N)
    start = 0
    for size in SIZES:
        x[start : start + size] = torch.randn(size, generator=generator) * 1e-3
        start += -(-size // 128) * 128
    return x


def job(rank: int, size: int, kind: str, grads: Tensor) -> Sum:
    """What is to be summed in the manner of `kind`."""
    tensors = Tensors.of(SIZES, N // 128, grads.device)
    tensors.mu.fill_(1.0 / size)
    sizes = UNEVEN[size] if kind == "uneven" else (N // size,) * size
    if kind == "whole":
        return Sum(grads, grads, sizes, tensors, whole=True)
    begin = sum(sizes[:rank])
    out = grads[begin : begin + sizes[rank]]
    if kind == "added":
        out = torch.full_like(out, ADDED, dtype=torch.float32)
    return Sum(grads, out, sizes, tensors, whole=False, add=kind == "added")


def reduce(rank: int, size: int, wire: Wire, kind: str, grads: Tensor, traffic: Traffic) -> Tensor:
    """Sum `grads` over the ranks: on the GPU of this rank if each rank has one."""
    assert dist.group.WORLD is not None
    on_gpu = torch.cuda.device_count() >= size
    task = job(rank, size, kind, grads.cuda() if on_gpu else grads)
    stream = torch.cuda.Stream() if on_gpu else None
    Reduction(wire.steps(task, Comm(dist.group.WORLD, traffic, "grad")), stream).wait()
    return task.out.cpu()


def sums(rank: int, size: int, _: Any) -> dict[str, Any]:
    """Error, bytes, NaN and repetition of every wire and kind; on four ranks two levels too."""
    on_gpu = torch.cuda.device_count() >= size
    if on_gpu:
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    exact = torch.stack([gradients(r).double() for r in range(size)]).sum(0)
    wires = dict(WIRES)
    traffic = Traffic()
    if size == 4:
        groups = [dist.new_group(g) for g in ([0, 1], [2, 3], [0, 2], [1, 3])]
        inside, across = groups[rank // 2], groups[2 + rank % 2]
        levels = Levels(Comm(inside, traffic, "inside"), Comm(across, traffic, "across"))
        wires["levels"] = Fp8Exchange(levels=levels, piece=1 << 11)
        wires["levels e3m4"] = Fp8Exchange(fmt=E3M4, levels=levels)
        wires["levels tensor"] = Fp8Exchange(scaling="tensor", levels=levels)
    found: dict[str, Any] = {}
    for name, wire in wires.items():
        for kind in KINDS:
            if kind == "uneven" and name.startswith("levels"):
                continue
            found[f"{name}/{kind}"] = measure(rank, size, wire, kind, exact, traffic)
    found["remembered"] = remembered(rank, size)
    return found


def remembered(rank: int, size: int) -> list[list[bool]]:
    """Which tensors of a bucket had NaN, after a sum with one and after another one without."""
    assert dist.group.WORLD is not None
    comm = Comm(dist.group.WORLD, Traffic(), "grad")
    grads = gradients(rank)
    grads[5300] += torch.nan if rank == size - 1 else 0.0  # in the third tensor
    task = job(rank, size, "scattered", grads)
    states = []
    for clean in (False, True):
        if clean:
            task.grads.copy_(gradients(rank))
        Reduction(Fp8Sum().steps(task, comm), None).wait()
        states.append(task.tensors.nonfinite.tolist())
    return states


def measure(
    rank: int, size: int, wire: Wire, kind: str, exact: Tensor, traffic: Traffic
) -> dict[str, Any]:
    """One wire and kind, judged by all ranks together."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    traffic.sent.clear()
    out = reduce(rank, size, wire, kind, gradients(rank).to(dtype), traffic)
    sent = {f"{what} {form}": n for (what, form), n in traffic.sent.items()}
    again = reduce(rank, size, wire, kind, gradients(rank).to(dtype), traffic)
    sizes = UNEVEN[size] if kind == "uneven" else (N // size,) * size
    begin = 0 if kind == "whole" else sum(sizes[:rank])
    wanted = exact[begin : begin + len(out)] + (ADDED if kind == "added" else 0.0)
    error = torch.stack([(out.double() - wanted).square().sum(), exact.square().sum()])
    if kind == "whole":
        error[0] /= size
    dist.all_reduce(error[0])
    spoiled = []
    for bad in (torch.nan, torch.inf):
        grads = gradients(rank).to(dtype)
        if rank == size - 1:
            grads[3] = bad  # in the part of rank 0
        norm = reduce(rank, size, wire, kind, grads, traffic).float().square().sum()
        dist.all_reduce(norm)
        spoiled.append(not bool(norm.isfinite()))
    checksums: list[Any] = [None] * size
    dist.all_gather_object(checksums, float(out.double().sum()))
    return {
        "error": float((error[0] / error[1]).sqrt()),
        "sent": sent,
        "repeats": torch.equal(out, again),
        "spoiled": all(spoiled),
        "same": len(set(checksums)) == 1,
        "elements": len(out),
    }


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, Any]]]:
    return {n: run_ranks(n, "tests.parallel.test_wire:sums") for n in (2, 4)}


SIZED = [(n, name, kind) for n in (2, 4) for name in WIRES for kind in KINDS]
SIZED += [(4, name, kind) for name in LEVELS for kind in KINDS[:-1]]


@pytest.mark.parametrize(("size", "name", "kind"), SIZED)
def test_sums_are_right_and_repeat(found: Any, size: int, name: str, kind: str) -> None:
    result = found[size][0][f"{name}/{kind}"]
    bound = BOUND.get(name, 1.05 * ONCE)
    if name.startswith(("fp8-a2a", "levels")):
        roundings = (size - 1) / size  # of R contributions, all but the rank's own
        if name.startswith("levels"):
            roundings = 1 / 2 + 1 / 2  # one of two inside a node, one of two nodes
        bound *= (roundings + (kind == "whole")) ** 0.5
    if kind == "bf16":  # gradients and sums are rounded to BF16
        bound = (bound**2 + 0.004**2) ** 0.5
    assert result["error"] <= bound
    if name not in ("fp32", "bf16"):
        least = 0.005 if "e3m4" in name else 0.01
        assert result["error"] > least, "nothing was rounded to FP8"
    assert all(rank[f"{name}/{kind}"]["repeats"] for rank in found[size])


@pytest.mark.parametrize(("size", "name", "kind"), SIZED)
def test_nan_and_infinity_on_one_rank_reach_the_norm_of_all(
    found: Any, size: int, name: str, kind: str
) -> None:
    assert all(rank[f"{name}/{kind}"]["spoiled"] for rank in found[size])


@pytest.mark.parametrize("name", [*WIRES, *LEVELS])
def test_without_shards_all_ranks_get_the_same_bits(found: Any, name: str) -> None:
    assert all(rank[f"{name}/whole"]["same"] for rank in found[4])


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_per_element_and_leg(found: Any, size: int) -> None:
    share = (size - 1) / size

    def sent(case: str, form: str = "grad fp8") -> float:
        return float(found[size][0][case]["sent"][form]) / (N * share)

    assert sent("fp32/scattered", "grad fp32") == 4 and sent("bf16/scattered", "grad bf16") == 2
    # pieces as small as here are padded to 16 bytes
    assert sent("fp8-a2a/scattered") == pytest.approx(132 / 128, rel=0.005)
    assert sent("fp8-a2a/scattered") <= 1.04 and sent("fp8-a2a/whole") <= 2 * 1.04
    assert sent("fp8-a2a tensor/scattered") == 1.0
    assert found[size][0]["fp8-a2a tensor/scattered"]["sent"]["grad amax"] < 0.01 * N
    assert sent("fp32/whole", "grad fp32") == 8


def test_two_levels_send_less_between_nodes(found: Any) -> None:
    sent = found[4][0]["levels/scattered"]["sent"]
    assert sent["inside fp8"] == pytest.approx(N / 2 * 132 / 128, rel=0.01)
    assert sent["across fp8"] == pytest.approx(N / 2 / 2 * 132 / 128, rel=0.01)


@pytest.mark.parametrize("size", [2, 4])
def test_a_sum_with_nan_is_remembered_until_mu_is_adjusted(found: Any, size: int) -> None:
    for rank in found[size]:
        assert rank["remembered"] == [[False, False, True]] * 2


def die(rank: int, size: int, wire: str) -> dict[str, Any]:
    """Rank 1 leaves (or, in the name, hangs) instead of taking part; what the others see."""
    name, how = wire.split("/")
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    reduce(rank, size, WIRES[name], "scattered", gradients(rank), Traffic())
    dist.barrier()
    started = time.monotonic()
    found: dict[str, Any] = {"error": "left"}
    if rank == 1:
        time.sleep(14 if how == "hangs" else 0)
    else:
        try:
            reduce(rank, size, WIRES[name], "scattered", gradients(rank), Traffic())
            found = {"error": None}
        except RuntimeError as error:
            found = {"error": type(error).__name__, "seconds": time.monotonic() - started}
    return found


@pytest.mark.parametrize("case", ["fp8-nccl/leaves", "fp8-a2a/hangs"])
def test_a_rank_that_fails_is_an_error_on_all_others_within_the_timeout(case: str) -> None:
    results = run_ranks(3 if case.endswith("hangs") else 2, "tests.parallel.test_wire:die", case)
    for result in (r for r in results if r["error"] != "left"):
        assert result["error"] is not None and result["seconds"] < 12
