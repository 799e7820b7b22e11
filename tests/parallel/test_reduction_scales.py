"""Delayed scales of gradient sums, number by number; training with them is in test_reduction."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.parallel import reduction_scales
from coatlm.parallel.exchange import Fp8Exchange
from coatlm.parallel.reduction_scales import ReductionScales
from coatlm.parallel.wire import Fp8Sum, Sum, Tensors, Wire
from tests.parallel.lockstep import Group, Rank, ranks, run

CPU = torch.device("cpu")
FINITE, SKIPPED = torch.tensor(1.0), torch.tensor(torch.nan)


def scales(monkeypatch: pytest.MonkeyPatch, *, per_bucket: bool = False) -> ReductionScales:
    """The scales of a bucket with the tensors a and b, and of one with c, on a single rank."""
    monkeypatch.setattr(reduction_scales, "Comm", lambda *_: Rank(Group(1), 0))
    buckets = [SimpleNamespace(tensors=Tensors.of((128,) * n, n, CPU)) for n in (2, 1)]
    one = SimpleNamespace(size=lambda: 1)
    groups: Any = SimpleNamespace(dp_cp=None, tp=one, pp=one)
    chunk: Any = SimpleNamespace(buckets=buckets, traffic=None)
    names = dict(zip(map(id, buckets), (["a", "b"], ["c"]), strict=True))
    return ReductionScales(
        [chunk], groups, keys=lambda bucket: names[id(bucket)], per_bucket=per_bucket
    )


def step(shared: ReductionScales, amaxes: list[float], norm: Tensor = FINITE) -> list[float] | None:
    """The scales after a step in which tensors had these amaxes."""
    for each, amax in zip(shared.tensors, torch.tensor(amaxes).split(shared.sizes), strict=True):
        assert each.amax is not None and not each.amax.any()
        each.amax.copy_(amax.view(torch.int32))
    shared.update_(norm.isfinite())
    found = [each.scale for each in shared.tensors]
    return None if found[0] is None else torch.cat([s for s in found if s is not None]).tolist()


def test_a_scale_leaves_room_for_twice_the_largest_amax_of_16_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = scales(monkeypatch)
    assert step(shared, [448.0, 224.5, 0.0]) == [2.0, 2.0, 1.0]  # 1.002 is rounded up to 2
    for _ in range(15):
        assert step(shared, [7.0, 224.0, 14.0]) == [2.0, 2.0, 2.0**-4]
    assert step(shared, [7.0, 224.0, 14.0]) == [2.0**-5, 1.0, 2.0**-4]


def test_the_tensors_of_a_bucket_share_the_largest_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = scales(monkeypatch, per_bucket=True)
    assert step(shared, [0.0, 7.0, 896.0]) == [2.0**-5, 2.0**-5, 4.0]


def test_scales_are_current_until_a_step_has_a_finite_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = scales(monkeypatch)
    assert step(shared, [1.0, torch.inf, 1.0], SKIPPED) is None and shared.calibrating
    assert step(shared, [448.0] * 3) == [2.0] * 3 and not shared.calibrating


def test_a_skipped_step_changes_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = scales(monkeypatch)
    step(shared, [448.0] * 3)
    before = shared.history.clone()
    assert step(shared, [9e9] * 3, SKIPPED) == [2.0] * 3
    assert torch.equal(shared.history, before)


def test_scales_keep_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = scales(monkeypatch)
    step(shared, [448.0] * 3)
    first = shared.tensors[1].scale
    step(shared, [896.0] * 3)
    assert shared.tensors[1].scale is first and first is not None and first.tolist() == [4.0]


def test_a_tensor_without_a_saved_history_lets_all_calibrate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = scales(monkeypatch)
    saved = {key: [448.0] + [0.0] * 15 for key in "abc"}
    shared.restore(saved)
    assert not shared.calibrating and step(shared, [0.1] * 3) == [2.0] * 3
    step(shared, [10 * 448.0] * 3)
    shared.restore({key: saved[key] for key in "ab"})
    assert shared.calibrating and all(each.scale is None for each in shared.tensors)
    assert step(shared, [448.0] * 3) == [2.0] * 3  # the amaxes of before do not count


@pytest.mark.parametrize("tied", [0, 1, None])
@pytest.mark.parametrize("tp", [1, 2])
def test_amaxes_are_shared_with_tensor_parallel_ranks_and_a_tied_embedding_with_its_stage(
    monkeypatch: pytest.MonkeyPatch, tied: int | None, tp: int
) -> None:
    """The other rank of each group has seen greater values, which make the scales 4, 16 and 64."""
    greatest = {"dp": 896.0, "tp": 4 * 896.0, "embedding": 16 * 896.0}

    def all_reduce(bits: Tensor, op: Any, *, group: str) -> SimpleNamespace:
        assert op == dist.ReduceOp.MAX
        bits.copy_(torch.maximum(bits, torch.tensor(greatest[group]).view(torch.int32)))
        return SimpleNamespace(wait=lambda: None)

    def comm(group: Any, *_: Any) -> SimpleNamespace:
        name = group if isinstance(group, str) else "tp"
        return SimpleNamespace(all_reduce=lambda bits, op: all_reduce(bits, op, group=name))

    buckets = [SimpleNamespace(tensors=Tensors.of((128,), 1, CPU)) for _ in range(2)]
    found = None if tied is None else (buckets[tied], None)
    monkeypatch.setattr(reduction_scales, "Comm", comm)
    monkeypatch.setattr(reduction_scales, "tied_embedding", lambda *_: found)
    monkeypatch.setattr(reduction_scales.dist, "all_reduce", all_reduce)
    groups: Any = SimpleNamespace(
        dp_cp="dp", tp=SimpleNamespace(size=lambda: tp), embedding="embedding"
    )
    chunk: Any = SimpleNamespace(buckets=buckets, traffic=None)
    shared = ReductionScales([chunk], groups, keys=lambda b: [str(id(b))], per_bucket=False)
    expected = [4.0 if tp == 1 else 16.0] * 2
    if tied is not None:
        expected[tied] = 64.0
    assert step(shared, [1.0, 1.0]) == expected


def test_the_saved_state_has_the_history_of_every_rank_once_scales_are_delayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_gather_object(reports: list[Any], mine: dict[str, Any], group: Any) -> None:
        reports[:] = [mine, {"other": [7.0]}]
        assert group.size() == 2

    shared = scales(monkeypatch)
    shared.groups = SimpleNamespace(control=SimpleNamespace(size=lambda: 2))  # type: ignore[assignment]
    monkeypatch.setattr(reduction_scales.dist, "all_gather_object", all_gather_object)
    assert shared.state() == {"other": [7.0]}
    shared.restore({key: [448.0] + [0.0] * 15 for key in "abc"})
    assert [each.scale.tolist() for each in shared.tensors if each.scale is not None] == [
        [2.0, 2.0],
        [2.0],
    ]
    assert shared.state() == {key: [448.0] + [0.0] * 15 for key in "abc"} | {"other": [7.0]}


@pytest.mark.parametrize("sizes", [(256, 256), (384, 128)], ids=["even", "uneven"])
@pytest.mark.parametrize(
    "wire", [Fp8Sum(), Fp8Exchange(scaling="tensor"), Fp8Exchange(scaling="bucket")], ids=str
)
def test_codes_have_the_scales_of_before_and_amaxes_are_of_what_was_encoded(
    wire: Wire, sizes: tuple[int, ...]
) -> None:
    """Nothing is asked of other ranks before the codes are sent; values above 448 S saturate."""
    grads = [torch.full((512,), 3.0), torch.full((512,), 5.0)]
    grads[0][500], grads[1][7] = 1000.0, -2000.0  # each in the shard of the other rank
    found, comms = [], ranks(2)
    for rank, x in enumerate(grads):
        tensors = Tensors.of((256, 256), 4, CPU)
        tensors.scale, tensors.amax = torch.tensor([2.0, 1.0]), torch.zeros(2, dtype=torch.int32)
        found.append(Sum(x, torch.empty(sizes[rank]), sizes, tensors, whole=False))
    run([wire.steps(job, comm) for job, comm in zip(found, comms, strict=True)])
    assert comms[0].calls == ["all_to_all"]
    total = torch.cat([job.out for job in found])
    clipped = (-896.0, 448.0) if isinstance(wire, Fp8Sum) else (-893.0, 453.0)
    assert (total[7], total[500]) == clipped
    assert total[8] == 8.0 and total[499] == 8.0
    largest = torch.stack([job.tensors.amax.view(torch.float32) for job in found]).amax(0)  # type: ignore[union-attr]
    assert largest.tolist() == [2000.0, 1000.0]
    if isinstance(wire, Fp8Sum):
        counts = found[0].tensors.saturated + found[1].tensors.saturated
        assert counts.tolist() == [1, 1]
