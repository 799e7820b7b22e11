"""ZeRO over flat buckets: each rank updates one shard of the weights and holds its states.

Stage 0 all-reduces the gradients and updates everything on every rank. Stages 1 and 2
reduce-scatter the gradients, update one shard per rank and all-gather the weights. At stage 3 each
layer all-gathers its weights for every use (`layer_gather`). The optimizer receives flat shards and
decides how their states are stored; `zero_checkpoint` saves and loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coatlm.fp8.accumulate import BlockFp8
from coatlm.fp8.formats import SCALE_BLOCK
from coatlm.parallel.buckets import Bucket, round_up
from coatlm.parallel.finalize_grads import clip_coefficient, finalize_gradients, grad_norm
from coatlm.parallel.flat_model import FlatModel
from coatlm.parallel.groups import Groups
from coatlm.parallel.regions import Region


class ZeroOptimizer:
    """Reduces and clips gradients, updates shards, starts the weight all-gather.

    `make_shard` constructs the optimizer's shard of each bucket (`optim.shards.FlatShard`), and
    `make_optimizer(shards, cut=, share=)` the optimizer that updates them. `cut` parameters lie
    across ends of shards; the optimizer shares their scales by `share`.
    """

    def __init__(
        self,
        chunks: Sequence[FlatModel],
        groups: Groups,
        *,
        clip_grad: float,
        make_optimizer: Callable[..., Any],
        make_shard: Callable[..., Any],
    ) -> None:
        self.chunks, self.groups, self.clip_grad = list(chunks), groups, clip_grad
        self.buckets = [bucket for chunk in chunks for bucket in chunk.buckets]
        self.owned = [b for b in self.buckets if b.owned[0] < b.owned[1]]
        cut = _cut_parameters(self.buckets) if chunks[0].sharded else {}
        shards = [_shard(make_shard, bucket, cut) for bucket in self.owned]
        share = partial(dist.all_reduce, op=dist.ReduceOp.MAX, group=groups.dp_cp, async_op=True)
        self.optimizer = make_optimizer(shards, cut=len(cut), share=share)
        self.regions = {b: r for chunk in chunks for b, r in chunk.regions.items()}
        self.counted = [p for b in self.buckets for p in counted(b, self.regions[b])]
        self.unshared = [list(_unshared(b, self.regions[b])) for b in self.owned]
        self.norm_group = groups.world if chunks[0].sharded else groups.model
        self.before_update: Callable[[], None] = lambda: None  # called before weights change
        self.repeats = False  # `step` has only measured the norm: run the passes again
        self.applied = torch.tensor(True)  # on the device: the last step was not skipped

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of later steps. Does not wait for the device."""
        self.optimizer.set_rate(lr)

    def begin(self) -> None:
        """Prepare for the backward passes of a step."""

    def step(
        self,
        *,
        accepts: Callable[[Tensor], Tensor] | None = None,
        observe: Callable[[Tensor], None] | None = None,
        enter: Callable[[str | None], None] = lambda phase: None,
    ) -> Tensor:
        """Update weights and states. Returns the global gradient norm, on the device.

        The update is skipped if the norm is NaN or Inf, or if `accepts(norm)`, a bool on the
        device, is False. `observe` is called with the clip coefficient before weights and states
        change. `enter` is called with "update" when that phase starts on this rank, and with None
        when it ends.
        """
        finalize_gradients(self.chunks, self.groups)
        norm = grad_norm(self.counted, self.norm_group, self.buckets[0].reduced.device)
        coefficient = clip_coefficient(norm, self.clip_grad)
        if accepts is not None:
            coefficient = torch.where(accepts(norm), coefficient, torch.nan)
        self.applied = coefficient.isfinite()
        if observe is not None:
            observe(coefficient)
        self.before_update()
        enter("update")
        self.optimizer.update(coefficient)
        for chunk in self.chunks:
            chunk.start_param_sync()
        enter(None)
        return norm

    def norm_to_save(self) -> float | None:
        """The norm that a checkpoint saves: None, as each step is clipped by its own norm."""
        return None

    def restore_norm(self, saved: float | None) -> None:
        """Restore what `norm_to_save` returned."""


def counted(bucket: Bucket, regions: Sequence[Region]) -> Iterator[Tensor | BlockFp8]:
    """The gradients of this rank's shard that the global norm counts: all but replicas."""
    begin, end = bucket.owned
    if isinstance(bucket.reduced, BlockFp8):
        for start, stop in _joined(sorted(_unshared(bucket, regions))):
            yield bucket.reduced[start:stop]
        return
    for region in regions:
        start, stop = max(region.start, begin), min(region.stop, end)
        if region.main and start < stop:
            yield bucket.reduced[start - begin : stop - begin]


def _unshared(bucket: Bucket, regions: Sequence[Region]) -> Iterator[tuple[int, int]]:
    """Ranges of this rank's shard, as multiples of 128, without replicas that others count."""
    begin, end = bucket.owned
    for start, stop in bucket.params.values():
        inside = [region for region in regions if start <= region.start < stop]
        first, last = max(start, begin), min(round_up(stop, SCALE_BLOCK), end)
        if inside[0].main and first < last:
            yield first - begin, last - begin


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Sorted ranges, those that touch as one."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            start, _ = joined.pop()
        joined.append((start, stop))
    return iter(joined)


def _cut_parameters(buckets: Sequence[Bucket]) -> dict[nn.Parameter, int]:
    """The parameters that ends of shards cut, numbered, the same on every rank of `dp_cp`."""
    found: dict[nn.Parameter, int] = {}
    for bucket in buckets:
        ends = list(accumulate(bucket.sizes))
        for param, (start, stop) in bucket.params.items():
            if any(start < end < stop for end in ends):
                found[param] = len(found)
    return found


def _shard(make_shard: Callable[..., Any], bucket: Bucket, cut: Mapping[nn.Parameter, int]) -> Any:
    """The optimizer's shard of a bucket on this rank, constructed by `make_shard`.

    `cut` are the numbers of the parameters that ends of shards cut.
    """
    begin, end = bucket.owned
    inside = [
        (param, (max(start, begin) - begin, min(stop, end) - begin))
        for param, (start, stop) in bucket.params.items()
        if max(start, begin) < min(stop, end)
    ]
    return make_shard(
        weight=bucket.shard,
        grad=bucket.reduced,
        decay=tuple(span for param, span in inside if decays(param)),
        params=tuple(span for _, span in inside),
        cut={start: cut[param] for param, (start, _) in inside if param in cut},
    )


def decays(param: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices, not to norms and biases."""
    return param.dim() > 1
