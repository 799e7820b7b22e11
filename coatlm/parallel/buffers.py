"""Weights and gradients of one model chunk in flat buckets, reduced while backward runs.

Gradients are summed, not averaged: the loss is divided by the tokens of the global batch.

ZeRO stage 2 reduces the buckets of every microbatch and adds them to the rank's shard. A bucket has
memory for gradients from the moment that backward reaches its first layer until its sum is there;
at most `IN_FLIGHT` of those that are complete keep theirs, so whole gradients never exist. The
memory comes and goes under the tensors: who saved `param.main_grad` in forward still has it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from coatlm.parallel.buckets import Bucket, Cut, make_buckets
from coatlm.parallel.collectives import Comm, Traffic
from coatlm.parallel.gather import gather
from coatlm.parallel.wire import Reduction, Sum, Wire

Params = list[nn.Parameter]
IN_FLIGHT = 2  # buckets that are being reduced and hold memory, at stage 2
AHEAD = 4  # buckets that are gathered before they are needed, where gathers go with forward


class FlatModel(nn.Module):
    """A model chunk whose parameters and gradients live in flat buckets.

    `module` is the chunk, `config` its megatron TransformerConfig. Gradients accumulate in
    `param.main_grad`; after the last microbatch (at stage 2, after each) `wire` sums each bucket
    over `group`. `bucket.reduced` then holds the sums of what this rank owns.
    """

    module: Any  # megatron's modules have no types

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup,
        cut: Cut,
        wire: Wire,
        traffic: Traffic,
        overlap_grad_reduce: bool,
        overlap_param_gather: bool,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`stream`: where backward will run, if not on the current one."""
        super().__init__()
        self.module = module
        self.config: Any = self.module.config
        self.group, self.wire, self.traffic = group, wire, traffic
        self.grad_comm = Comm(group, traffic, "grad")
        self.weight_comm = Comm(group, traffic, "weights")
        self.sharded = cut.zero > 0
        self.gathers = self.sharded and group.size() > 1
        self.every_microbatch = cut.zero == 2 and group.size() > 1
        self.overlap_grad_reduce = overlap_grad_reduce
        self.overlap_param_gather = overlap_param_gather
        self.last_microbatch = True
        self.reduced = False  # this step's sums are there
        self.gather_in_forward = False  # gathers go with the next forward, not with the update
        self.gather_due = False
        self.gathering: Iterator[None] = iter(())  # each step starts one, the last one first
        self.ungathered = 0  # buckets that it has yet to start
        params = [p for p in module.parameters() if p.requires_grad]
        self.reduce_stream = None
        if params[0].is_cuda and group.size() > 1:
            self.reduce_stream = torch.cuda.Stream(priority=-1)
        self.in_flight: deque[Bucket] = deque()
        self.buckets = make_buckets(params, cut)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.stream = stream
        self.accumulation_nodes: dict[nn.Parameter, Any] = {}
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for param in params:
                self._accumulate_into_main_grad(param)
        if self.sharded and overlap_param_gather:
            self._wait_for_weights_before_use()
        if self.every_microbatch:
            self._allocate_before_backward()
        self.zero_grad_buffer()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._start_gather()
        return self.module(*args, **kwargs)

    def set_is_first_microbatch(self) -> None:
        """The schedule says that weights are new: TransformerEngine casts them to FP8 again."""
        self.module.set_is_first_microbatch()

    # gradients

    def zero_grad_buffer(self) -> None:
        """Start a step: gradients are zero or stale, and every one is awaited."""
        for bucket in self.buckets:
            if self.every_microbatch:
                bucket.reduced.zero_()
            else:
                bucket.clear()
            bucket.waiting = set(bucket.params)
            bucket.sums = 0
            assert bucket.reduction is None
        self.reduced = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients accumulate: not the last microbatch. Stage 2 reduces all the same."""
        self.last_microbatch = False
        try:
            yield
        finally:
            self.last_microbatch = True

    def finish_grad_sync(self) -> None:
        """Wait until every bucket is summed over the group, starting those not under way."""
        if self.reduced:
            return
        for bucket in self.buckets:
            bucket.settle()
            self._start_reduction(bucket)
        for bucket in self.buckets:
            self._finish_reduction(bucket)
        self.in_flight.clear()

    def _start_reduction(self, bucket: Bucket) -> None:
        if bucket.reduction is not None or self.group.size() == 1 or not bucket.allocated:
            return
        job = Sum(
            bucket.grads,
            bucket.reduced,
            bucket.sizes,
            bucket.tensors,
            whole=not self.sharded,
            add=self.every_microbatch,
        )
        bucket.reduction = Reduction(self.wire.steps(job, self.grad_comm), self.reduce_stream)
        bucket.sums += 1
        if self.every_microbatch:
            bucket.waiting = set(bucket.params)
            self.in_flight.append(bucket)
            while len(self.in_flight) > IN_FLIGHT:
                self._finish_reduction(self.in_flight.popleft())

    def _finish_reduction(self, bucket: Bucket) -> None:
        if bucket.reduction is not None:
            bucket.reduction.wait()
            bucket.reduction = None
            if self.every_microbatch:
                bucket.release()

    def _accumulate_into_main_grad(self, param: Any) -> None:
        """Move each gradient into the buffer as soon as autograd has it.

        The hook sits on autograd's accumulation node, so it also runs for functions that have added
        to `main_grad` themselves: coatlm's return None for the weight, TransformerEngine's return a
        placeholder and set `grad_added_to_main_grad`. Autograd has but a weak reference to the
        node, which holds the parameter. Its hook must not hold the model: no garbage collector sees
        what nodes hold.
        """
        param.grad_added_to_main_grad = False
        model = weakref.ref(self)

        def hook(*_: Any) -> None:
            self = model()
            assert self is not None
            if param.grad is not None:
                if not param.grad_added_to_main_grad:
                    param.main_grad.add_(param.grad)
                param.grad = None
            param.grad_added_to_main_grad = False
            if self.last_microbatch or self.every_microbatch:
                bucket = self.bucket_of[param]
                bucket.waiting.discard(param)
                if self.overlap_grad_reduce and not bucket.waiting:
                    self._start_reduction(bucket)

        node = param.expand_as(param).grad_fn.next_functions[0][0]
        node.register_hook(hook)
        self.accumulation_nodes[param] = node

    def _allocate_before_backward(self) -> None:
        """Give buckets their memory when the gradient of a unit's output arrives."""
        first, layers, last = self._units()
        if first and not self.module.share_embeddings_and_output_weights:
            units = [(self.module, last), *layers, (self.module.embedding, first)]
        else:
            units = [(self.module, [*first, *last]), *layers]
        for unit, params in units:

            def allocate(_: Tensor, buckets: Sequence[Bucket] = self._buckets_of(params)) -> None:
                for bucket in buckets:
                    self._finish_reduction(bucket)
                    bucket.allocate()

            def watch(_: Any, __: Any, output: Any, allocate: Any = allocate) -> None:
                for leaf in tree_leaves(output):
                    if isinstance(leaf, Tensor) and leaf.requires_grad:
                        leaf.register_hook(allocate)

            unit.register_forward_hook(watch)

    # weights

    def start_param_sync(self) -> None:
        """Gather the weights that the ranks have updated, in the order of their use."""
        if not self.gathers:
            return
        self.gather_due = True
        if not self.overlap_param_gather:
            self.finish_param_sync()
        elif not self.gather_in_forward:
            self._start_gather()

    def _start_gather(self) -> None:
        """Start all gathers or, where they go with forward, let it start them.

        So gathers stand between the kernels of a recording and not all in front of them, where the
        device, which has few queues for the branches of a recording, would come to them first.
        """
        if self.gather_due:
            self.gather_due = False
            self.gathering = gather(self.buckets[::-1], self.weight_comm, self.reduce_stream)
            self.ungathered = len(self.buckets)
            if not self.gather_in_forward:
                self._gather_from(0)

    def _gather_from(self, index: int) -> None:
        """Start the gathers, where they are due, of the buckets from `index` on."""
        while self.ungathered > max(index, 0):
            next(self.gathering)
            self.ungathered -= 1

    def replayed(self, *, first: bool, reduced: bool) -> None:
        """A recorded microbatch has done what its hooks did when it was recorded."""
        if first:
            self.gather_due = False
            for bucket in self.buckets:
                bucket.written()
        self.reduced = self.reduced or reduced

    def finish_param_sync(self) -> None:
        """Wait until all weights are whole."""
        self._start_gather()
        self._gather_from(0)
        for bucket in self.buckets:
            _finish_gather(bucket)

    def _wait_for_weights_before_use(self) -> None:
        """Let the embedding, each layer and what follows them wait for their own weights."""
        first, layers, last = self._units()
        end = getattr(self.module.decoder, "final_layernorm", None)
        for unit, params in [(self.module, first), *layers, (end or self.module, last)]:
            used = self._buckets_of(params)
            start = min(map(self.buckets.index, used), default=len(self.buckets))

            def wait(*_: Any, buckets: Sequence[Bucket] = used, start: int = start) -> None:
                self._gather_from(start - AHEAD)
                for bucket in buckets:
                    _finish_gather(bucket)

            unit.register_forward_pre_hook(wait)

    def _units(self) -> tuple[Params, list[tuple[nn.Module, Params]], Params]:
        """Parameters in the order of their use: the embedding's, each layer's, all others."""
        embedding = getattr(self.module, "embedding", None)
        first = [] if embedding is None else list(embedding.parameters())
        layers = [(layer, list(layer.parameters())) for layer in self.module.decoder.layers]
        found = set(first).union(*(params for _, params in layers))
        return first, layers, [p for p in self.module.parameters() if p not in found]

    def _buckets_of(self, params: Sequence[nn.Parameter]) -> list[Bucket]:
        return list(dict.fromkeys(self.bucket_of[p] for p in params if p in self.bucket_of))


def _finish_gather(bucket: Bucket) -> None:
    if bucket.gather is not None:
        bucket.gather.wait()
        bucket.gather = None
