"""Weights and gradients of one model chunk in flat buffers, cut into buckets for reduction.

Layout (elements). Parameters stand in the order in which backward finishes them, each on a multiple
of 128; a bucket is closed once it holds `bucket_size` elements and padded to a multiple of
128 * ranks, so that its equal shards start on multiples of 128 too. Groups of 128 consecutive
elements of a parameter therefore never move when the number of ranks changes: what is quantised by
such groups can be resharded exactly. A weight that two pipeline stages share gets its own bucket,
so that both stages cut it alike.

Gradients are summed, not averaged: the loss is divided by the tokens of the global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALIGNMENT = 128  # elements; the group size of quantised states


@dataclass(eq=False)
class Bucket:
    """A run of the buffers that is reduced, and gathered, in one collective."""

    params: dict[nn.Parameter, tuple[int, int]]  # -> [start, end) inside the bucket
    weights: Tensor  # [n] in the model's dtype
    grads: Tensor  # [n] fp32 or bf16
    waiting: set[nn.Parameter] = field(default_factory=set)  # gradients still to come
    reduction: dist.Work | None = None
    gather: dist.Work | None = None

    def shard(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """This rank's equal part of `weights` or `grads`."""
        return tensor.view(group.size(), -1)[group.rank()]


class FlatModel(nn.Module):
    """A model chunk whose parameters and gradients live in flat buckets.

    `module` is the chunk, `config` its megatron TransformerConfig. Gradients accumulate in
    `param.main_grad`; after the last microbatch each bucket is summed over `group`: scattered with
    `shard=True` (every rank keeps its part), else reduced whole.
    """

    module: Any  # megatron's modules have no types

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup,
        shard: bool,
        grad_dtype: torch.dtype,
        bucket_size: int,
        overlap_grad_reduce: bool,
        overlap_param_gather: bool,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`stream`: where backward will run, if not on the current one."""
        super().__init__()
        self.module = module
        self.config: Any = self.module.config
        self.group = group
        self.sharded = shard
        self.overlap_grad_reduce = overlap_grad_reduce
        self.overlap_param_gather = overlap_param_gather
        self.last_microbatch = True
        params = [p for p in module.parameters() if p.requires_grad]
        self.buckets = _fill_buckets(params, group.size() if shard else 1, grad_dtype, bucket_size)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.stream = stream
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for param in params:
                self._accumulate_into_main_grad(param)
        if shard and overlap_param_gather:
            self._wait_for_weights_before_use()
        self.zero_grad_buffer()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def set_is_first_microbatch(self) -> None:
        """The schedule says that weights are new: TransformerEngine casts them to FP8 again."""
        self.module.set_is_first_microbatch()

    # gradients

    def zero_grad_buffer(self) -> None:
        """Start a step: gradients are zero and every one is awaited."""
        for bucket in self.buckets:
            bucket.grads.zero_()
            bucket.waiting = set(bucket.params)
            assert bucket.reduction is None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients accumulate and nothing is reduced: not the last microbatch."""
        self.last_microbatch = False
        try:
            yield
        finally:
            self.last_microbatch = True

    def finish_grad_sync(self) -> None:
        """Wait until every bucket is summed over the group, starting those not under way."""
        for bucket in self.buckets:
            self._start_reduction(bucket)
        for bucket in self.buckets:
            if bucket.reduction is not None:
                bucket.reduction.wait()
                bucket.reduction = None

    def _start_reduction(self, bucket: Bucket) -> None:
        if bucket.reduction is not None or self.group.size() == 1:
            return
        if self.sharded:
            part = bucket.shard(bucket.grads, self.group)
            bucket.reduction = dist.reduce_scatter_tensor(
                part, bucket.grads, group=self.group, async_op=True
            )
        else:
            bucket.reduction = dist.all_reduce(bucket.grads, group=self.group, async_op=True)

    def _accumulate_into_main_grad(self, param: Any) -> None:
        """Move each gradient into the buffer as soon as autograd has it.

        The hook sits on autograd's accumulation node, so it also runs for functions that have added
        to `main_grad` themselves: coatlm's return None for the weight, TransformerEngine's return a
        placeholder and set `grad_added_to_main_grad`.
        """
        param.grad_added_to_main_grad = False

        def hook(*_: Any) -> None:
            if param.grad is not None:
                if not param.grad_added_to_main_grad:
                    param.main_grad.add_(param.grad)
                param.grad = None
            param.grad_added_to_main_grad = False
            if self.last_microbatch:
                bucket = self.bucket_of[param]
                bucket.waiting.discard(param)
                if self.overlap_grad_reduce and not bucket.waiting:
                    self._start_reduction(bucket)

        node = param.expand_as(param).grad_fn.next_functions[0][0]
        node.register_hook(hook)
        param.accumulation_node = node  # autograd keeps only a weak reference

    # weights

    def start_param_sync(self) -> None:
        """Gather the weights that the ranks have updated, in the order of their use."""
        if not self.sharded or self.group.size() == 1:
            return
        for bucket in reversed(self.buckets):
            part = bucket.shard(bucket.weights, self.group)
            bucket.gather = dist.all_gather_into_tensor(
                bucket.weights, part, group=self.group, async_op=True
            )
        if not self.overlap_param_gather:
            self.finish_param_sync()

    def finish_param_sync(self) -> None:
        """Wait until all weights are whole."""
        for bucket in self.buckets:
            _finish_gather(bucket)

    def _wait_for_weights_before_use(self) -> None:
        """Let each transformer layer wait for its own weights, and the model for all others."""
        layers = list(self.module.decoder.layers)
        inside = {p for layer in layers for p in layer.parameters()}
        outside = [p for p in self.module.parameters() if p not in inside]
        for unit, params in [(self.module, outside), *((x, list(x.parameters())) for x in layers)]:
            buckets = list(dict.fromkeys(self.bucket_of[p] for p in params if p in self.bucket_of))

            def wait(*_: Any, buckets: Sequence[Bucket] = buckets) -> None:
                for bucket in buckets:
                    _finish_gather(bucket)

            unit.register_forward_pre_hook(wait)


def _finish_gather(bucket: Bucket) -> None:
    if bucket.gather is not None:
        bucket.gather.wait()
        bucket.gather = None


def _fill_buckets(
    params: Sequence[nn.Parameter], ranks: int, grad_dtype: torch.dtype, bucket_size: int
) -> list[Bucket]:
    """Plan the layout, allocate it, and move the parameters in."""
    buckets: list[Bucket] = []
    pending: list[nn.Parameter] = []

    def close() -> None:
        if pending:
            buckets.append(_make_bucket(pending, ranks, grad_dtype))
            pending.clear()

    for param in reversed(params):
        if getattr(param, "shared_embedding", False):
            close()
            pending.append(param)
            close()
            continue
        pending.append(param)
        if sum(p.numel() for p in pending) >= bucket_size:
            close()
    close()
    return buckets


def _make_bucket(params: Sequence[nn.Parameter], ranks: int, grad_dtype: torch.dtype) -> Bucket:
    ranges, end = {}, 0
    for param in params:
        start = round_up(end, ALIGNMENT)
        end = start + param.numel()
        ranges[param] = (start, end)
    numel = round_up(end, ALIGNMENT * ranks)
    first = params[0]
    assert all(p.dtype == first.dtype for p in params), "one dtype a model"
    weights = torch.zeros(numel, dtype=first.dtype, device=first.device)
    grads = torch.zeros(numel, dtype=grad_dtype, device=first.device)
    for param, (start, end) in ranges.items():
        view = weights[start:end].view(param.shape)
        view.copy_(param.detach())
        param.data = view
        param.main_grad = grads[start:end].view(param.shape)  # type: ignore[attr-defined]
    return Bucket(ranges, weights, grads)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= `value`."""
    return -(-value // multiple) * multiple
