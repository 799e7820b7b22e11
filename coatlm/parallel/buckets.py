"""Buckets: runs of the flat buffers that are reduced, and gathered, together.

Layout (elements). Parameters stand in the order in which backward finishes them, each on a multiple
of 128; a bucket is closed once it holds `bucket_size` elements. Every rank of the group has a part
of it, its shard, which it updates under ZeRO. Either the bucket is padded to a multiple of 128 *
ranks and cut into equal parts, or (`owner`) the parameters of one owner stand together and are its
part. Parts start on multiples of 128, so groups of 128 consecutive elements of a parameter never
move when the number of ranks changes: what is quantised by such groups can be resharded exactly.

A weight that two pipeline stages share gets its own bucket, so that both stages cut it alike, and
weights that are gathered as FP8 get buckets without others.

Gradients start a step as zeros, but for parameters with an attribute `main_grad_stale`: the GEMM
that makes their gradient looks at it and writes over what is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.fp8.weight_rows import Rows
from coatlm.parallel.collectives import Pending
from coatlm.parallel.wire import Reduction, Tensors

SMALLEST, MOST = 40_000_000, 48  # elements of a bucket, and buckets of a model, unless told


@dataclass(frozen=True)
class Cut:
    """How buckets are made; `rank` is this one of `ranks`."""

    rank: int
    ranks: int
    zero: int  # stage: 0 | 1 | 2
    grad_dtype: torch.dtype
    bucket_size: int  # elements; 0: `bucket_elements`
    owner: Mapping[nn.Parameter, int] | None = None  # None: equal parts
    fp8_weights: AbstractSet[nn.Parameter] = frozenset()  # gathered as FP8
    fp8_rows: bool = False  # with a scale a row, as the FP8 flow casts them; else one a tensor


@dataclass(eq=False)
class Bucket:
    """A run of the buffers."""

    params: dict[nn.Parameter, tuple[int, int]]  # -> [start, end) inside the bucket
    weights: Tensor  # [n] in the model's dtype
    grads: Tensor  # [n] fp32 or bf16, what backward adds to
    sizes: tuple[int, ...]  # elements of each rank's part
    owned: tuple[int, int]  # what this rank updates: all of it at stage 0, else its part
    reduced: Tensor  # [end - begin] sums over the group of what is owned
    tensors: Tensors
    fp8: bool  # weights are gathered as FP8
    rows: Rows | None = None  # with scales of these, if not of tensors
    overwritten: tuple[nn.Parameter, ...] = ()  # whose first gradient of a step needs no zeros
    zeroed: list[Tensor] = field(default_factory=list)  # the parts of `grads` that need them
    waiting: set[nn.Parameter] = field(default_factory=set)  # gradients still to come
    reduction: Reduction | None = None
    sums: int = 0  # reductions in this step: one, at ZeRO stage 2 one per microbatch
    gather: Pending | None = None

    @property
    def allocated(self) -> bool:
        return bool(self.grads.untyped_storage().nbytes())

    def allocate(self) -> None:
        """Give `grads` its memory, cleared. Views of it, such as `param.main_grad`, stay valid."""
        if not self.allocated:
            self.grads.untyped_storage().resize_(self.grads.nbytes)
            self.clear()

    def clear(self) -> None:
        """Forget all gradients: those that can be are marked as stale, the rest is zeroed."""
        for param in self.overwritten:
            param.main_grad_stale = True  # type: ignore[attr-defined]
        if self.zeroed:
            torch._foreach_zero_(self.zeroed)

    def settle(self) -> None:
        """Zero the gradients that are still stale: those of parameters that took no part."""
        for param in self.overwritten:
            if param.main_grad_stale:  # type: ignore[attr-defined]
                param.main_grad.zero_()  # type: ignore[attr-defined]
        self.written()

    def written(self) -> None:
        """No gradient is stale any more."""
        for param in self.overwritten:
            param.main_grad_stale = False  # type: ignore[attr-defined]

    def release(self) -> None:
        """Give the memory of `grads` back to the allocator."""
        self.grads.untyped_storage().resize_(0)

    def summed(self, param: nn.Parameter) -> Tensor:
        """The part of `param`'s summed gradient that this rank owns, flat; it may be empty."""
        (start, end), (first, last) = self.params[param], self.owned
        begin = min(max(start, first), last)
        return self.reduced[begin - first : max(min(end, last), begin) - first]


def make_buckets(params: Sequence[nn.Parameter], cut: Cut) -> list[Bucket]:
    """Plan the layout, allocate it, and move the parameters in."""
    buckets: list[Bucket] = []
    enough = bucket_elements(cut.bucket_size, sum(p.numel() for p in params))
    pending: dict[bool, list[nn.Parameter]] = {False: [], True: []}

    def close(fp8: bool) -> None:
        if pending[fp8]:
            buckets.append(_make_bucket(pending[fp8], fp8, cut))
            pending[fp8] = []

    for param in reversed(params):
        fp8 = param in cut.fp8_weights
        if getattr(param, "shared_embedding", False):
            close(fp8)
            pending[fp8].append(param)
            close(fp8)
            continue
        pending[fp8].append(param)
        if sum(p.numel() for p in pending[fp8]) >= enough:
            close(fp8)
    close(True)
    close(False)
    return buckets


def _make_bucket(params: Sequence[nn.Parameter], fp8: bool, cut: Cut) -> Bucket:
    params = list(params)
    if cut.owner is not None:
        params.sort(key=cut.owner.__getitem__)
    ranges, end = {}, 0
    for param in params:
        start = round_up(end, SCALE_BLOCK)
        end = start + param.numel()
        ranges[param] = (start, end)
    sizes = _sizes(ranges, round_up(end, SCALE_BLOCK), cut)
    numel, first = sum(sizes), params[0]
    assert all(p.dtype == first.dtype for p in params), "one dtype a model"
    weights = torch.zeros(numel, dtype=first.dtype, device=first.device)
    grads = torch.zeros(numel, dtype=cut.grad_dtype, device=first.device)
    for param, (start, end) in ranges.items():
        view = weights[start:end].view(param.shape)
        view.copy_(param.detach())
        param.data = view
        param.main_grad = grads[start:end].view(param.shape)  # type: ignore[attr-defined]
    begin = sum(sizes[: cut.rank])
    owned = (begin, begin + sizes[cut.rank]) if cut.zero else (0, numel)
    tensors = Tensors.of([p.numel() for p in params], numel // SCALE_BLOCK, first.device)
    tensors.mu.fill_(1.0 / cut.ranks)  # from where no sum saturates
    rows = None
    if fp8 and cut.fp8_rows:
        rows = Rows.of([(start, *p.shape) for p, (start, _) in ranges.items()], first.device)
    overwritten = tuple(p for p in params if hasattr(p, "main_grad_stale"))
    bucket = Bucket(
        *(ranges, weights, grads, sizes, owned, grads[slice(*owned)], tensors, fp8, rows),
        overwritten=overwritten,
        zeroed=_between(grads, [ranges[p] for p in overwritten]),
    )
    if cut.zero == 2 and cut.ranks > 1:
        bucket.reduced = torch.zeros(sizes[cut.rank], dtype=cut.grad_dtype, device=first.device)
        bucket.release()
    return bucket


def _between(flat: Tensor, spans: Iterable[tuple[int, int]]) -> list[Tensor]:
    """What is left of `flat` without `spans`, which do not overlap."""
    left, end = [], 0
    for start, stop in [*sorted(spans), (len(flat), 0)]:
        if end < start:
            left.append(flat[end:start])
        end = stop
    return left


def _sizes(ranges: Mapping[nn.Parameter, tuple[int, int]], end: int, cut: Cut) -> tuple[int, ...]:
    """Elements of each rank's part."""
    if cut.owner is None:
        return (round_up(end, SCALE_BLOCK * cut.ranks) // cut.ranks,) * cut.ranks
    sizes = [0] * cut.ranks
    for param, (start, stop) in ranges.items():
        sizes[cut.owner[param]] += round_up(stop - start, SCALE_BLOCK)
    return tuple(sizes)


def bucket_elements(asked: int, parameters: int) -> int:
    """From how many elements on a bucket is full; `asked` = 0: 40M, more for large models.

    A bucket costs the host some tenths of a millisecond and the wire a latency, several times a
    step, so their number is bounded; what is exposed, at the ends, is one of them.
    """
    return asked or max(SMALLEST, parameters // MOST)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= `value`."""
    return -(-value // multiple) * multiple
