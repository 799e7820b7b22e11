"""Reduction of one model chunk's gradients over its process group, overlapped with backward.

Gradients are summed, not averaged: the loss is divided by the tokens of the global batch. They
accumulate in `param.main_grad`. After the last microbatch `wire` sums each bucket over the process
group as soon as the bucket is complete; `bucket.reduced` then holds the sums that this rank owns.

ZeRO stage 2 reduces the buckets of every microbatch and adds them to the rank's shard. The gradient
memory of a bucket is allocated when backward reaches the bucket's first layer and released when its
reduction is done. At most `IN_FLIGHT` reductions run at a time, so the gradients of a whole model
never exist. Only the storage is resized: tensors that alias it, such as a `param.main_grad` that
was saved in forward, stay valid.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from coatlm.fp8.accumulate import BlockFp8
from coatlm.parallel.buckets import Bucket
from coatlm.parallel.collectives import Comm
from coatlm.parallel.wire import Reduction, Steps, Sum, Wire

IN_FLIGHT = 2  # complete buckets whose reduction holds gradient memory, at ZeRO stage 2


class GradReduction:
    """Reduces `buckets` with the gradient format `wire`; see the module's docstring.

    `sharded`: each rank receives the sums of its shard only. `every_microbatch`: ZeRO stage 2.
    `overlap`: a bucket is reduced as soon as its last gradient is ready, else after backward.
    `stream`: the CUDA stream of the reductions.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        wire: Wire,
        comm: Comm,
        *,
        sharded: bool,
        every_microbatch: bool,
        overlap: bool,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.buckets, self.wire, self.comm = buckets, wire, comm
        self.bucket_of = {p: bucket for bucket in buckets for p in bucket.params}
        self.sharded, self.every_microbatch, self.overlap = sharded, every_microbatch, overlap
        self.stream = stream
        self.last_microbatch = True
        self.done = False  # the sums of this step are complete
        self.in_flight: deque[Bucket] = deque()
        self.accumulation_nodes: dict[nn.Parameter, Any] = {}

    def start_step(self) -> None:
        """Clear the gradients (or mark them as stale), and expect one of every parameter."""
        for bucket in self.buckets:
            if self.every_microbatch:
                bucket.reduced.zero_()
            else:
                bucket.clear()
            bucket.waiting = set(bucket.params)
            bucket.sums = 0
            assert bucket.reduction is None
        self.done = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context that only accumulates gradients, for all microbatches but the last.

        ZeRO stage 2 reduces inside this context as well.
        """
        self.last_microbatch = False
        try:
            yield
        finally:
            self.last_microbatch = True

    def finish(self) -> None:
        """Start the reductions that are not in flight; wait until all buckets are reduced."""
        if self.done:
            return
        for bucket in self.buckets:
            bucket.settle()
            self._start(bucket)
        for bucket in self.buckets:
            self._finish(bucket)
        self.in_flight.clear()

    def mark_replayed(self, *, stale: bool, reduced: bool) -> None:
        """Update the bookkeeping after the replay of a CUDA graph, in which no hook runs.

        `stale`: the replayed microbatch has overwritten the stale gradients. `reduced`: it has
        reduced the gradients.
        """
        if stale:
            for bucket in self.buckets:
                bucket.mark_written()
        self.done = self.done or reduced

    def _start(self, bucket: Bucket) -> None:
        if bucket.reduction is not None or self.comm.size == 1 or not bucket.allocated:
            return
        bucket.reduction = Reduction(self._steps(bucket), self.stream)
        bucket.sums += 1
        bucket.free_weights()
        if self.every_microbatch:
            bucket.waiting = set(bucket.params)
            self.in_flight.append(bucket)
            while len(self.in_flight) > IN_FLIGHT:
                self._finish(self.in_flight.popleft())

    def _steps(self, bucket: Bucket) -> Steps:
        """Sum a bucket over the process group; one-byte gradients in temporaries."""
        grads, reduced, first = bucket.grads, bucket.reduced, bucket.sums == 0
        if isinstance(grads, BlockFp8):
            grads = grads.to(torch.bfloat16)
        out, add = reduced, self.every_microbatch
        if isinstance(out, BlockFp8):
            out, add = torch.empty(len(out), device=out.device), False
        job = Sum(grads, out, bucket.sizes, bucket.tensors, whole=not self.sharded, add=add)
        yield from self.wire.steps(job, self.comm)
        if isinstance(reduced, BlockFp8) and first:
            reduced.copy_(out)
        elif isinstance(reduced, BlockFp8):
            reduced.add_(out)

    def _finish(self, bucket: Bucket) -> None:
        if bucket.reduction is not None:
            bucket.reduction.wait()
            bucket.reduction = None
            if self.every_microbatch:
                bucket.release()

    def _allocate(self, bucket: Bucket) -> None:
        """Give a bucket memory for gradients, if it has none."""
        self._finish(bucket)
        bucket.allocate()

    def accumulate_into_main_grad(self, param: Any) -> None:
        """Add every gradient of `param` to `param.main_grad` as soon as autograd has it.

        The hook is registered on autograd's accumulation node, so it also runs for functions that
        have added to `main_grad` themselves: coatlm's return None for the weight,
        TransformerEngine's return a placeholder and set `grad_added_to_main_grad`. The node holds
        the parameter, but autograd has only a weak reference to the node, so it is stored here.
        The hook must not hold this object: the garbage collector cannot see what nodes reference.
        """
        param.grad_added_to_main_grad = False
        reduction = weakref.ref(self)

        def hook(*_: Any) -> None:
            self = reduction()
            assert self is not None
            if param.grad is not None:
                if not param.grad_added_to_main_grad:
                    self.bucket_of[param].accumulate(param, param.grad)
                param.grad = None
            param.grad_added_to_main_grad = False
            if self.last_microbatch or self.every_microbatch:
                bucket = self.bucket_of[param]
                bucket.waiting.discard(param)
                if self.overlap and not bucket.waiting:
                    self._start(bucket)

        node = param.view_as(param).grad_fn.next_functions[0][0]
        node.register_hook(hook)
        self.accumulation_nodes[param] = node

    def allocate_before_backward(self, units: Mapping[nn.Module, Sequence[Bucket]]) -> None:
        """Allocate the buckets of a module when backward reaches it: its output has a gradient.

        A forward pass without gradients, which recomputation repeats with them, gets no hooks: they
        would stay with its output, and the output of the repeated pass would have none.
        """
        for unit, used in units.items():

            def allocate(_: Tensor, buckets: Sequence[Bucket] = used) -> None:
                for bucket in buckets:
                    self._allocate(bucket)

            def watch(_: Any, __: Any, output: Any, allocate: Any = allocate) -> None:
                if not torch.is_grad_enabled():
                    return
                for leaf in tree_leaves(output):
                    if isinstance(leaf, Tensor) and leaf.requires_grad:
                        leaf.register_hook(allocate)

            unit.register_forward_hook(watch)
