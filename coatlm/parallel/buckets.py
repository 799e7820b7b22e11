"""Flat buckets: the units in which gradients are reduced and weights are all-gathered.

Parameters are laid out in the order in which backward finishes them, each aligned to 128 elements;
a bucket is closed once it holds `bucket_size` elements. Each rank of the process group has one
shard of every bucket, which it updates under ZeRO. Shards are of equal size, with the bucket padded
to a multiple of 128 * ranks; or, with `owner`, a shard consists of the whole parameters of one
rank, which are contiguous. Shards start on multiples of 128, so the blocks of 128 consecutive
elements of a parameter do not depend on the number of ranks: values quantized in such blocks can be
resharded exactly.

A weight that two pipeline stages share gets a bucket of its own, so that both stages shard it in
the same way. Weights that are all-gathered in FP8 share buckets only with each other. At ZeRO stage
3 a bucket holds parameters of one layer only, and its weights are allocated only while that layer
needs them (`layer_gather`); views of them, such as the parameters, stay valid.

Gradients are zeroed at the start of a step, except those of parameters with an attribute
`main_grad_stale`: their wgrad GEMM reads that attribute and overwrites the stale gradient instead
of adding to it. While such a parameter has `main_grad_accumulates`, because a layer that fell back
to BF16 has another wgrad GEMM, its gradient is zeroed as well.

One-byte gradients (`fp8.accumulate`) have no `main_grad`: autograd returns each gradient, and
`Bucket.accumulate` adds it. Where buckets exist only while they fill and are reduced, at ZeRO stage
2 and 3, they are BF16, and the sums of the rank's shard are one byte.

With `train.update=backward` (`Cut.reached`) the gradients of all buckets are in one arena, in which
buckets that are never needed at the same time overlap (`arena`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coatlm.fp8.accumulate import BlockFp8
from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.fp8.weight_rows import Rows
from coatlm.parallel.arena import Lifetime, place, with_reductions
from coatlm.parallel.collectives import Pending
from coatlm.parallel.wire import Reduction, Tensors

Fill = Callable[[nn.Parameter, Tensor], None] | None  # of (parameter, its view in a bucket)
SMALLEST, MOST = 40_000_000, 48  # defaults: elements per bucket, buckets per model


@dataclass(frozen=True)
class Cut:
    """How parameters are cut into buckets and shards, for one rank."""

    rank: int  # this rank, of `ranks`
    ranks: int
    zero: int  # stage: 0 | 1 | 2 | 3
    grad_dtype: torch.dtype  # fp32 or BF16; of one-byte gradients, BF16 where they are transient
    bucket_size: int  # elements; 0: the default of `bucket_elements`
    owner: Mapping[nn.Parameter, int] | None = None  # None: equal shards
    fp8_weights: AbstractSet[nn.Parameter] = frozenset()  # all-gathered in FP8
    fp8_rows: bool = False  # scales of `fp8_weights` are row-wise, else tensor-wise
    unit: Mapping[nn.Parameter, int] = field(default_factory=dict)  # only equals share buckets
    noise: Tensor | None = None  # of one-byte gradients; None: gradients are of `grad_dtype`
    reached: Mapping[nn.Parameter, Lifetime] | None = None  # gradients share an arena; None: none


@dataclass(eq=False)
class Bucket:
    """A contiguous buffer of parameters and their gradients, and the state of its reduction."""

    params: dict[nn.Parameter, tuple[int, int]]  # parameter -> [start, end) in the bucket
    weights: Tensor  # [n] in the model's dtype
    shard: Tensor  # [end - begin]: the weights of `owned`; below stage 3 a part of `weights`
    grads: Tensor | BlockFp8  # [n]: the main gradients that backward adds to
    sizes: tuple[int, ...]  # elements of each rank's shard
    owned: tuple[int, int]  # [begin, end) that this rank updates: all at stage 0, else its shard
    reduced: Tensor | BlockFp8  # [end - begin]: gradients of `owned`, summed over the process group
    tensors: Tensors
    fp8: bool  # weights are all-gathered in FP8
    rows: Rows | None = None  # rows with one scale each; None: tensor-wise scales
    overwritten: tuple[nn.Parameter, ...] = ()  # parameters that need no zeroed gradient
    zeroed: list[Tensor] = field(default_factory=list)  # all other parts of `grads`
    stale: set[nn.Parameter] = field(default_factory=set)  # one-byte gradients to be overwritten
    waiting: set[nn.Parameter] = field(default_factory=set)  # gradients that backward still owes
    reduction: Reduction | None = None
    sums: int = 0  # reductions in this step: one, or at ZeRO stage 2 one per microbatch
    gather: Pending | None = None
    weights_sharded: bool = False  # ZeRO stage 3: `shard` is no part of `weights`

    @property
    def gathered(self) -> bool:
        """Whether `weights` are allocated, and gathered or being gathered."""
        return bool(self.weights.untyped_storage().nbytes())

    def allocate_weights(self) -> None:
        """Allocate `weights`, without values."""
        self.weights.untyped_storage().resize_(self.weights.nbytes)

    def free_weights(self) -> None:
        """At stage 3, return the memory of `weights` to the allocator."""
        if self.weights_sharded:
            self.finish_gather()
            self.weights.untyped_storage().resize_(0)

    def finish_gather(self) -> None:
        """Wait for the all-gather in flight, if there is one."""
        if self.gather is not None:
            self.gather.wait()
            self.gather = None

    @property
    def allocated(self) -> bool:
        return isinstance(self.grads, BlockFp8) or bool(self.grads.untyped_storage().nbytes())

    def allocate(self) -> None:
        """Allocate and clear `grads`. Views of it, such as `param.main_grad`, stay valid."""
        if isinstance(self.grads, Tensor) and not self.allocated:
            self.grads.untyped_storage().resize_(self.grads.nbytes)
            self.clear()

    def accumulate(self, param: nn.Parameter, grad: Tensor) -> None:
        """Add a gradient that autograd has returned, or overwrite a stale one."""
        assert self.allocated, "a bucket without memory for gradients"
        if isinstance(self.grads, Tensor):
            param.main_grad.add_(grad)  # type: ignore[attr-defined]
        elif param in self.stale:
            self.stale.discard(param)
            self._part(param, self.grads).copy_(grad)
        else:
            self._part(param, self.grads).add_(grad)

    def clear(self) -> None:
        """Discard all gradients: mark those that are overwritten as stale and zero the others."""
        if isinstance(self.grads, BlockFp8):
            self.stale = set(self.params)
        for param in self.overwritten:
            accumulates = getattr(param, "main_grad_accumulates", False)
            param.main_grad_stale = not accumulates  # type: ignore[attr-defined]
            if accumulates:
                param.main_grad.zero_()  # type: ignore[attr-defined]
        if self.zeroed:
            torch._foreach_zero_(self.zeroed)

    def settle(self) -> None:
        """Zero the gradients that are still stale: backward has not reached their parameters."""
        for param in self.overwritten:
            if param.main_grad_stale:  # type: ignore[attr-defined]
                param.main_grad.zero_()  # type: ignore[attr-defined]
        if isinstance(self.grads, BlockFp8):
            for param in self.stale:
                self._part(param, self.grads).zero_()
        self.mark_written()

    def mark_written(self) -> None:
        """Mark every gradient as written: none is stale any more."""
        for param in self.overwritten:
            param.main_grad_stale = False  # type: ignore[attr-defined]
        self.stale.clear()

    def release(self) -> None:
        """Return the memory of dense `grads` to the allocator."""
        if isinstance(self.grads, Tensor):
            self.grads.untyped_storage().resize_(0)

    def _part(self, param: nn.Parameter, grads: BlockFp8) -> BlockFp8:
        """The one-byte gradient of `param`, with the padding of its last block."""
        start, end = self.params[param]
        return grads[start : round_up(end, SCALE_BLOCK)]

    def summed(self, param: nn.Parameter) -> Tensor | BlockFp8:
        """The part of `param`'s reduced gradient in `owned`, flat; empty if there is none.

        A one-byte gradient ends with the padding of its last block.
        """
        (start, end), (first, last) = self.params[param], self.owned
        if isinstance(self.reduced, BlockFp8):
            end = round_up(end, SCALE_BLOCK)
        begin = min(max(start, first), last)
        return self.reduced[begin - first : max(min(end, last), begin) - first]


class BucketPlan(NamedTuple):
    """What a bucket will contain."""

    ranges: dict[nn.Parameter, tuple[int, int]]  # those of `Bucket.params`
    sizes: tuple[int, ...]
    fp8: bool

    @property
    def numel(self) -> int:
        return sum(self.sizes)


def make_buckets(params: Sequence[nn.Parameter], cut: Cut, fill: Fill = None) -> list[Bucket]:
    """Plan the buckets, allocate them, and make the parameters views of them.

    `fill` writes the weights, one bucket after the other; None: those of the parameters are copied.
    """
    spans = plan_buckets(params, cut)
    if cut.reached is None:
        return [_make_bucket(span, cut, None, fill) for span in spans]
    starts, size = arena_layout(spans, cut)
    arena = torch.zeros(size, dtype=cut.grad_dtype, device=params[0].device)
    grads = [arena[at : at + span.numel] for at, span in zip(starts, spans, strict=True)]
    return [_make_bucket(span, cut, part, fill) for span, part in zip(spans, grads, strict=True)]


def arena_layout(spans: Sequence[BucketPlan], cut: Cut) -> tuple[list[int], int]:
    """Where the gradients of each bucket start in their arena, and its size, in elements."""
    assert cut.reached is not None
    lives = []
    for span in spans:
        firsts, lasts = zip(*(cut.reached[param] for param in span.ranges), strict=True)
        lives.append((min(firsts), max(lasts)))
    if cut.ranks > 1:
        lives = with_reductions(lives)
    return place([span.numel for span in spans], lives)


def plan_buckets(params: Sequence[nn.Parameter], cut: Cut) -> list[BucketPlan]:
    """Which parameters share a bucket, in the order of backward, and where they lie in it."""
    spans: list[BucketPlan] = []
    enough = bucket_elements(cut.bucket_size, sum(p.numel() for p in params))
    pending: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    held = {False: 0, True: 0}  # elements of `pending`
    unit = None

    def close(fp8: bool) -> None:
        if pending[fp8]:
            spans.append(_span(pending[fp8], fp8, cut))
            pending[fp8], held[fp8] = [], 0

    for param in reversed(params):
        fp8 = param in cut.fp8_weights
        if cut.unit.get(param) != unit:
            unit = cut.unit.get(param)
            close(True)
            close(False)
        if getattr(param, "shared_embedding", False):
            close(fp8)
            pending[fp8].append(param)
            close(fp8)
            continue
        pending[fp8].append(param)
        held[fp8] += param.numel()
        if held[fp8] >= enough:
            close(fp8)
    close(True)
    close(False)
    return spans


def _span(params: Sequence[nn.Parameter], fp8: bool, cut: Cut) -> BucketPlan:
    params = list(params) if cut.owner is None else sorted(params, key=cut.owner.__getitem__)
    ranges, end = {}, 0
    for param in params:
        start = round_up(end, SCALE_BLOCK)
        end = start + param.numel()
        ranges[param] = (start, end)
    return BucketPlan(ranges, _sizes(ranges, round_up(end, SCALE_BLOCK), cut), fp8)


def _make_bucket(span: BucketPlan, cut: Cut, grads: Tensor | BlockFp8 | None, fill: Fill) -> Bucket:
    """Allocate a bucket. `grads`: its part of an arena; None: gradients of its own."""
    (ranges, sizes, fp8), numel = span, span.numel
    params = list(ranges)
    first = params[0]
    assert all(p.dtype == first.dtype for p in params), "parameters of one dtype"
    transient = cut.zero >= 2 and cut.ranks > 1 and grads is None
    if grads is None:
        grads = _zero_grads(numel, cut, first.device, one_byte=not transient)
    weights = torch.zeros(numel, dtype=first.dtype, device=first.device)
    if isinstance(grads, Tensor):
        for param, (start, end) in ranges.items():
            param.main_grad = grads[start:end].view(param.shape)  # type: ignore[attr-defined]
    begin = sum(sizes[: cut.rank])
    owned = (begin, begin + sizes[cut.rank]) if cut.zero else (0, numel)
    tensors = Tensors.of([p.numel() for p in params], numel // SCALE_BLOCK, first.device)
    tensors.mu.fill_(1.0 / cut.ranks)  # FP8-LM: no sum over this many ranks saturates
    rows = None
    if fp8 and cut.fp8_rows:
        rows = Rows.of([(start, *p.shape) for p, (start, _) in ranges.items()], first.device)
    overwritten: tuple[nn.Parameter, ...] = ()
    zeroed: list[Tensor] = []
    if isinstance(grads, Tensor):
        overwritten = tuple(p for p in params if hasattr(p, "main_grad_stale"))
        zeroed = _between(grads, [ranges[p] for p in overwritten])
    bucket = Bucket(
        *(ranges, weights, weights[slice(*owned)], grads, sizes, owned, grads[slice(*owned)]),
        *(tensors, fp8, rows),
        overwritten=overwritten,
        zeroed=zeroed,
    )
    if transient:
        bucket.reduced = _zero_grads(sizes[cut.rank], cut, first.device, one_byte=True)
        bucket.release()
    for param, (start, end) in ranges.items():
        view = weights[start:end].view(param.shape)
        if fill is None:
            view.copy_(param.detach())
        else:
            fill(param, view)
        param.data = view
    if cut.zero == 3 and cut.ranks > 1:
        bucket.shard, bucket.weights_sharded = bucket.shard.clone(), True
        bucket.free_weights()
    return bucket


def _zero_grads(numel: int, cut: Cut, device: torch.device, *, one_byte: bool) -> Tensor | BlockFp8:
    """Zero gradients; in one byte if those of the run are and `one_byte` ones fit here."""
    if one_byte and cut.noise is not None:
        return BlockFp8.zeros(numel, cut.noise)
    return torch.zeros(numel, dtype=cut.grad_dtype, device=device)


def _between(flat: Tensor, spans: Iterable[tuple[int, int]]) -> list[Tensor]:
    """The parts of `flat` outside of `spans`, which do not overlap."""
    left, end = [], 0
    for start, stop in [*sorted(spans), (len(flat), 0)]:
        if end < start:
            left.append(flat[end:start])
        end = stop
    return left


def _sizes(ranges: Mapping[nn.Parameter, tuple[int, int]], end: int, cut: Cut) -> tuple[int, ...]:
    """Elements of each rank's shard."""
    if cut.owner is None:
        return (round_up(end, SCALE_BLOCK * cut.ranks) // cut.ranks,) * cut.ranks
    sizes = [0] * cut.ranks
    for param, (start, stop) in ranges.items():
        sizes[cut.owner[param]] += round_up(stop - start, SCALE_BLOCK)
    return tuple(sizes)


def bucket_elements(asked: int, parameters: int) -> int:
    """The elements at which a bucket is closed: `asked`, or if it is 0, 40M or more.

    Every bucket costs some tenths of a millisecond on the host and a network latency, several times
    per step, so large models get larger buckets, about 48 of them. The communication of the last
    bucket is exposed.
    """
    return asked or max(SMALLEST, parameters // MOST)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= `value`."""
    return -(-value // multiple) * multiple
