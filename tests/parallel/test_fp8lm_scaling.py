"""FP8-LM's mu is halved after saturation, grows without, and stays between its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.parallel import fp8lm_scaling
from coatlm.parallel.fp8lm_scaling import adjust_automatic_scales, adjust_mu
from coatlm.parallel.wire import Tensors

CPU, NUMEL = torch.device("cpu"), 100_000  # one sum of these is the fraction that mu tolerates
HALF, GROWN, STILL = 0.25, 0.5 * 2 ** (1 / 1000), 0.5  # a mu of 0.5 after a step


def test_mu_is_halved_by_saturation_and_grows_without() -> None:
    buckets = [Tensors.of((NUMEL,) * n, n * 782, CPU) for n in (1, 2)]
    for bucket, mu in zip(buckets, ([0.5], [0.5, 0.9999]), strict=True):
        bucket.mu.copy_(torch.tensor(mu))
        bucket.saturated.fill_(1)
    for _ in range(2):
        adjust_mu(buckets, torch.tensor([1.1e-5, 1e-5, 0.0]), torch.zeros(3, dtype=torch.bool))
    for saturated in ([0.0] * 3, [1.0] * 3):  # of sums that were not finite
        adjust_mu(buckets, torch.tensor(saturated), torch.ones(3, dtype=torch.bool))
    mu = [value for bucket in buckets for value in bucket.mu.tolist()]
    growth = 2 ** (1 / 1000)  # per step: mu doubles in a thousand
    assert mu == pytest.approx([0.125, 0.5 * growth**2, 1.0])
    assert not any(bucket.saturated.any() for bucket in buckets)


def test_mu_stays_between_2_to_the_minus_20_and_1() -> None:
    bucket = Tensors.of((128, 128), 2, CPU)
    bucket.mu.copy_(torch.tensor([1.0, 1.5 * 2.0**-20]))
    adjust_mu([bucket], torch.tensor([0.0, 1.0]), torch.zeros(2, dtype=torch.bool))
    assert bucket.mu.tolist() == [1.0, 2.0**-20]


def test_adjusting_mu_starts_new_counts() -> None:
    bucket = Tensors.of((128,), 1, CPU)
    bucket.saturated.fill_(3)
    bucket.nonfinite.fill_(True)
    adjust_mu([bucket], torch.ones(1), torch.zeros(1, dtype=torch.bool))
    assert bucket.saturated.tolist() == [0] and bucket.nonfinite.tolist() == [False]


def after_step(
    monkeypatch: pytest.MonkeyPatch,
    counts: Sequence[int],
    nonfinite: Sequence[bool] = (),
    *,
    others: dict[str, tuple[list[int], list[int]]] | None = None,
    sums: int = 1,
    dp: int = 2,
    tp: int = 1,
    sharded: bool = True,
    delayed: bool = False,
    tied: int | None = None,
    automatic: bool = True,
) -> list[float]:
    """mu of tensors a and b of one bucket and c of another, each 0.5 before the step.

    `others`: process group -> the counts and the nonfinite tensors of its one other rank.
    """

    def all_reduce(x: Tensor, op: Any = dist.ReduceOp.SUM, *, group: Any) -> None:
        other = dict.fromkeys(("dp", "tp", "embedding"), ([0] * 3, [0] * 3)) | (others or {})
        theirs = torch.tensor(other[group.name][x.dtype == torch.int32])
        theirs = theirs[x.storage_offset() :][: len(x)]
        x.copy_(x + theirs if op == dist.ReduceOp.SUM else torch.maximum(x, theirs))

    buckets = []
    for n, first in ((2, 0), (1, 2)):
        tensors = Tensors.of((NUMEL,) * n, n * 782, CPU)
        tensors.mu.fill_(0.5)
        tensors.saturated.copy_(torch.tensor(counts)[first : first + n])
        tensors.nonfinite.copy_(torch.tensor(nonfinite or [False] * 3)[first : first + n])
        tensors.amax = torch.zeros(n, dtype=torch.int32) if delayed else None
        buckets.append(SimpleNamespace(tensors=tensors, sums=sums))
    sizes = {"dp": dp, "tp": tp, "embedding": 2}
    named = {k: SimpleNamespace(name=k, size=lambda n=n: n) for k, n in sizes.items()}
    groups: Any = SimpleNamespace(dp_cp=named["dp"], tp=named["tp"], embedding=named["embedding"])
    wire = SimpleNamespace(automatic=automatic)
    chunk: Any = SimpleNamespace(wire=wire, buckets=buckets, sharded=sharded)
    found = None if tied is None else (buckets[tied], None)
    monkeypatch.setattr(fp8lm_scaling, "tied_embedding", lambda *_: found)
    monkeypatch.setattr(fp8lm_scaling.dist, "all_reduce", all_reduce)
    adjust_automatic_scales([chunk], groups)
    return [mu for bucket in buckets for mu in bucket.tensors.mu.tolist()]


def test_a_fraction_counts_all_sums_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert after_step(monkeypatch, [1, 2, 0]) == pytest.approx([GROWN, HALF, GROWN])
    assert after_step(monkeypatch, [1, 2, 3], sums=2) == pytest.approx([GROWN, GROWN, HALF])
    assert after_step(monkeypatch, [1, 2, 0], sums=0) == pytest.approx([GROWN, HALF, GROWN])


def test_shards_add_their_counts_and_copies_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"dp": ([1, 0, 0], [0, 0, 0])}
    shards = after_step(monkeypatch, [1, 1, 1], others=others)
    assert shards == pytest.approx([HALF, GROWN, GROWN])
    copies = after_step(monkeypatch, [1, 1, 1], others=others, sharded=False)
    assert copies == pytest.approx([GROWN] * 3)


def test_delayed_scaling_shares_what_was_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"dp": ([0, 0, 0], [-1, 1, 0])}  # -1: a sum in place of the maximum would be zero
    for delayed, shared in ((True, STILL), (False, GROWN)):
        mu = after_step(monkeypatch, [0] * 3, [True, False, False], others=others, delayed=delayed)
        assert mu == pytest.approx([STILL, shared, GROWN])


def test_tensor_parallel_ranks_count_the_sums_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"tp": ([1, 2, 0], [-1, 1, 0])}
    assert after_step(monkeypatch, [1, 1, 0], others=others, tp=2) == pytest.approx(
        [GROWN, STILL, GROWN]
    )
    others = {"tp": ([1, 2, 0], [-1, 0, 0])}
    mu = after_step(monkeypatch, [1, 1, 2], [True, False, False], others=others, tp=2)
    assert mu == pytest.approx([STILL, HALF, GROWN])


def test_a_tied_embedding_takes_the_larger_count_of_its_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = {"embedding": ([5, 5, 2], [0, 0, 0])}
    mu = after_step(monkeypatch, [1, 1, 1], others=others, tied=1)
    assert mu == pytest.approx([GROWN, GROWN, HALF])
    others = {"embedding": ([5, 5, 1], [1, 1, -1])}
    mu = after_step(monkeypatch, [1, 1, 1], [False, False, True], others=others, tied=1)
    assert mu == pytest.approx([GROWN, GROWN, STILL])
    others = {"embedding": ([5, 5, 5], [1, 1, 1])}
    mu = after_step(monkeypatch, [1, 1, 1], others=others, tied=1)
    assert mu == pytest.approx([GROWN, GROWN, STILL])
    others = {"embedding": ([2, 5, 5], [0, 1, 1])}
    mu = after_step(monkeypatch, [1, 1, 1], others=others, tied=0)
    assert mu == pytest.approx([HALF, GROWN, GROWN])


def test_one_rank_and_other_formats_have_no_automatic_scales(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert after_step(monkeypatch, [9] * 3, dp=1) == [STILL] * 3
    assert after_step(monkeypatch, [9] * 3, automatic=False) == [STILL] * 3
