"""What completes gradients after a step, with groups whose other ranks have what this one has.

An all-reduce then multiplies by the size of its group, so a value tells which groups it was summed
over: sizes are distinct primes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from coatlm.parallel.buckets import Bucket
from coatlm.parallel.finalize_grads import clip_coefficient, finalize_gradients, grad_norm
from coatlm.parallel.wire import Fp8Sum, Plain, Tensors

CPU = torch.device("cpu")
WIDTH = 128  # elements of each parameter
GROWTH = 2 ** (1 / 1000)


@dataclass(eq=False)
class Group:
    """A process group by its size."""

    members: int
    place: int = 0

    def size(self) -> int:
        return self.members

    def rank(self) -> int:
        return self.place


def groups(tp: int = 1, pp: int = 1, dp_cp: int = 1, first: bool = True, tied: bool = True) -> Any:
    return SimpleNamespace(
        tp=Group(tp),
        pp=Group(pp),
        dp_cp=Group(dp_cp),
        embedding=Group(2) if tied else None,
        first_stage=first,
    )


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """The group and operation of each all-reduce."""
    found: list[tuple[Any, Any]] = []

    def all_reduce(x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        found.append((group, op))
        if op == dist.ReduceOp.SUM:
            x.mul_(group.size())

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return found


class Model(nn.Module):
    """Weights whose names and marks say what they are."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.share_embeddings_and_output_weights = tied
        for name in ("embedding", "q_layernorm", "k_layernorm", "norm", "matrix"):
            self.register_parameter(name, nn.Parameter(torch.zeros(WIDTH)))
        self.norm.sequence_parallel = True

    def shared_embedding_or_output_weight(self) -> nn.Parameter:
        return self.embedding  # type: ignore[return-value]


class Chunk:
    """A model with a bucket for each parameter, all owned, and gradients of ones."""

    def __init__(self, *, tied: bool = False, wire: Any = None, owned: int = WIDTH) -> None:
        self.module, self.wire, self.sharded = Model(tied), wire or Plain(torch.float32), True
        self.buckets = [self.bucket(param, owned) for param in self.module.parameters()]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.finished = 0

    def bucket(self, param: nn.Parameter, owned: int) -> Bucket:
        tensors = Tensors.of((WIDTH,), 1, CPU)
        tensors.mu.fill_(0.5)
        reduced, flat = torch.ones(owned), torch.zeros(WIDTH)
        return Bucket(
            {param: (0, WIDTH)},
            weights=flat,
            shard=flat[:owned],
            grads=flat,
            sizes=(WIDTH,),
            owned=(0, owned),
            reduced=reduced,
            tensors=tensors,
            fp8=False,
        )

    def finish_grad_sync(self) -> None:
        self.finished += 1

    def sums(self) -> dict[str, float]:
        """The one value of each parameter's summed gradient."""
        values = {}
        for name, param in self.module.named_parameters():
            (values[name],) = set(self.bucket_of[param].reduced.tolist())
        return values

    def named(self, name: str) -> Tensors:
        return self.bucket_of[getattr(self.module, name)].tensors


def test_norms_are_summed_over_tensor_parallel_ranks_and_matrices_are_not(calls: Any) -> None:
    chunks, split = [Chunk(), Chunk()], groups(tp=3)
    finalize_gradients(chunks, split)  # type: ignore[arg-type]
    for chunk in chunks:
        norms = dict.fromkeys(("q_layernorm", "k_layernorm", "norm"), 3.0)
        assert chunk.sums() == {"embedding": 1.0, "matrix": 1.0} | norms
        assert chunk.finished == 1
    assert calls == [(split.tp, dist.ReduceOp.SUM)]  # one for all


@pytest.mark.parametrize(("tp", "owned"), [(1, WIDTH), (3, 0)])
def test_nothing_is_sent_where_no_other_rank_or_no_part_is(calls: Any, tp: int, owned: int) -> None:
    finalize_gradients([Chunk(owned=owned, tied=True)], groups(tp=tp, pp=2))  # type: ignore
    assert [group.size() for group, _ in calls] == ([2] if owned else [])


@pytest.mark.parametrize("first", [True, False])
def test_a_tied_weight_is_summed_over_the_two_stages_that_have_it(calls: Any, first: bool) -> None:
    chunks, split = [Chunk(tied=True), Chunk(tied=True)], groups(pp=5, first=first)
    finalize_gradients(chunks, split)  # type: ignore[arg-type]
    assert [chunk.sums()["embedding"] for chunk in chunks] == ([2.0, 1.0] if first else [1.0, 2.0])
    assert calls == [(split.embedding, dist.ReduceOp.SUM)]


@pytest.mark.parametrize(
    ("tied", "split"),
    [
        (True, groups(pp=1)),
        (True, groups(pp=5, tied=False)),  # a stage between
        (False, groups(pp=5)),
    ],
    ids=["one stage", "a stage between", "own weights"],
)
def test_a_weight_that_no_other_stage_has_is_left_alone(calls: Any, tied: bool, split: Any) -> None:
    chunk = Chunk(tied=tied)
    finalize_gradients([chunk], split)  # type: ignore[list-item]
    assert set(chunk.sums().values()) == {1.0} and calls == []


def automatic(**options: Any) -> Chunk:
    """4 saturated codes in `matrix`, of 1e6 values: 4e-6 as one rank sees it."""
    chunk = Chunk(wire=Fp8Sum(), **options)
    matrix = chunk.named("matrix")
    matrix.values.fill_(1_000_000)
    matrix.saturated.fill_(4)
    return chunk


@pytest.mark.parametrize(
    ("split", "sharded", "sums", "factor"),
    [
        (groups(dp_cp=2), True, 0, GROWTH),  # 8e-6
        (groups(dp_cp=3), True, 0, 0.5),  # 1.2e-5: the counts of the ranks' parts add up
        (groups(dp_cp=3), True, 1, 0.5),
        (groups(dp_cp=3), True, 2, GROWTH),  # of two sums' values
        (groups(dp_cp=3), False, 0, GROWTH),  # every rank has counted everything
        (groups(dp_cp=3, tp=2), True, 0, 0.5),  # twice as many counts of twice as many values
        (groups(dp_cp=2, tp=3), True, 0, GROWTH),
    ],
)
def test_mu_follows_the_share_of_saturated_sums_over_all_ranks_and_sums_of_a_step(
    split: Any, sharded: bool, sums: int, factor: float
) -> None:
    chunks = [automatic(), automatic()]
    for chunk in chunks:
        chunk.sharded = sharded
        for bucket in chunk.buckets:
            bucket.sums = sums
    finalize_gradients(chunks, split)  # type: ignore[arg-type]
    for chunk in chunks:
        assert chunk.named("matrix").mu.item() == pytest.approx(0.5 * factor)
        assert chunk.named("norm").mu.item() == pytest.approx(0.5 * GROWTH)
        assert not chunk.named("matrix").saturated.any()


def test_counts_are_summed_over_the_group_of_the_gradients_alone_without_tensor_parallelism(
    calls: Any,
) -> None:
    split = groups(dp_cp=3)
    finalize_gradients([automatic()], split)  # type: ignore[list-item]
    assert calls == [(split.dp_cp, dist.ReduceOp.SUM)]


def test_a_tensor_that_was_not_finite_keeps_mu_on_all_tensor_parallel_ranks(calls: Any) -> None:
    chunk, split = automatic(), groups(dp_cp=3, tp=2)
    chunk.named("norm").nonfinite.fill_(True)
    finalize_gradients([chunk], split)  # type: ignore[list-item]
    assert chunk.named("norm").mu.item() == 0.5
    assert not chunk.named("norm").nonfinite.any()
    assert calls[1:] == [
        (split.dp_cp, dist.ReduceOp.SUM),
        (split.tp, dist.ReduceOp.SUM),
        (split.tp, dist.ReduceOp.MAX),
    ]


@pytest.mark.parametrize("chunk_count", [1, 2])
def test_both_stages_take_the_larger_count_of_a_tied_weight(
    monkeypatch: pytest.MonkeyPatch, chunk_count: int
) -> None:
    """The other stage saw it saturate or not finite, this one did not; other weights are not told.

    This is the last stage, so the weight is the first of the last chunk.
    """
    chunks = [automatic(tied=True) for _ in range(chunk_count)]
    split = groups(pp=2, dp_cp=3, first=False)
    seen: list[int] = []

    def all_reduce(x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if group is split.embedding and op == dist.ReduceOp.MAX:
            seen.append(len(x))
            x.fill_(1 if len(seen) == 2 else WIDTH)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    finalize_gradients(chunks, split)  # type: ignore[arg-type]
    mus = [float(bucket.tensors.mu) for chunk in chunks for bucket in chunk.buckets]
    expected = [0.5 * GROWTH] * len(mus)
    expected[5 * (chunk_count - 1)] = 0.5  # NaN there: neither halved nor grown
    assert mus == pytest.approx(expected, rel=1e-5)
    assert seen == [1, 1]


def test_a_tied_weight_that_saturates_elsewhere_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, split = automatic(tied=True), groups(pp=2, dp_cp=3)

    def all_reduce(x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if group is split.embedding and x.dtype == torch.int64:
            x.fill_(WIDTH)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    finalize_gradients([chunk], split)  # type: ignore[list-item]
    assert chunk.named("embedding").mu.item() == 0.25
    assert chunk.named("q_layernorm").mu.item() == pytest.approx(0.5 * GROWTH)


@pytest.mark.parametrize("wire", [Plain(torch.float32), Fp8Sum()], ids=["plain", "alone"])
def test_mu_stays_where_nothing_is_summed_in_fp8(calls: Any, wire: Any) -> None:
    chunk = Chunk(wire=wire)
    finalize_gradients([chunk], groups(dp_cp=1 if wire.automatic else 2))  # type: ignore
    assert chunk.named("matrix").mu.item() == 0.5 and calls == []


def test_the_norm_is_of_all_values_of_all_ranks() -> None:
    group: Any = Group(4)
    parts = [torch.tensor([3.0, -4.0]), torch.tensor([12.0]).bfloat16(), torch.zeros(0)]
    norm = grad_norm(parts, group, CPU)
    assert norm.item() == 2 * 13.0 and norm.dtype == torch.float32
    assert grad_norm([], group, CPU).item() == 0.0
    assert not grad_norm([*parts, torch.tensor([torch.nan])], group, CPU).isfinite()


@pytest.mark.parametrize("norm", [0.0, 0.5, 0.9999, 1.0, 1.0001, 3.0, 1e20])
def test_gradients_are_clipped_as_torch_clips_them(norm: float) -> None:
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([norm])
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    assert torch.equal(norm * clip_coefficient(torch.tensor(norm), 1.0), weight.grad[0])


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_a_norm_that_is_not_finite_makes_every_gradient_nan(max_norm: float) -> None:
    for norm in (torch.nan, torch.inf):
        assert clip_coefficient(torch.tensor(norm), max_norm).isnan()
    assert clip_coefficient(torch.tensor(0.5), max_norm).item() == 1.0
    assert clip_coefficient(torch.tensor(8.0), 0.0).item() == 1.0
