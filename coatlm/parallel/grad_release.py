"""Gradients of train.update=backward: each bucket is reduced, used and released in backward.

A step has one microbatch, so a bucket is complete as soon as backward has passed its last
parameter. Nothing in the step reads the bucket's weights after that: autograd runs the accumulation
node of a parameter after all nodes that contribute to its gradient, both uses of a tied embedding
included, and these nodes are the only ones of backward that read the weight.

    backward reaches a unit    the buckets that begin there get their part of the arena; buckets
                               that had this memory before are reduced and used first
    a bucket is complete       its reduction starts, and the bucket before it is used; with one
                               rank the bucket itself is used
    `use(bucket)`              the optimizer updates weights by the sums in `bucket.reduced`

The arena (`arena`) has room for the buckets that fill at the same time and for one that is being
reduced, so gradients of the whole model never exist at once. Its addresses do not change, which the
optimizer's kernels rely on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from coatlm.parallel.buckets import Bucket
from coatlm.parallel.grad_reduction import GradReduction

IN_REDUCTION = 1  # complete buckets that are reduced while the next one fills


class GradRelease(GradReduction):
    """Reduces and uses up each bucket in backward; see the module's docstring.

    `use` is called once per step with every bucket, whose `reduced` is then valid, in the same
    order on all ranks.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.overlap and not self.every_microbatch
        self.use: Callable[[Bucket], None] = lambda bucket: None
        self.held: list[Bucket] = []  # buckets with memory, in the order of allocation
        self.missing: set[Bucket] = set()  # buckets that had no memory in this step yet

    def start_step(self) -> None:
        """Expect one gradient of every parameter. No bucket has memory yet."""
        assert not self.held
        for bucket in self.buckets:
            bucket.waiting = set(bucket.params)
            bucket.sums = 0
        self.missing = set(self.buckets)
        self.done = False

    def finish(self) -> None:
        """Use the buckets that are left, such as those that backward has not completed."""
        if self.done:
            return
        for bucket in self.buckets:
            self._allocate(bucket)
        while self.held:
            self._finish(self.held[0])
        self.done = True

    def _allocate(self, bucket: Bucket) -> None:
        if bucket not in self.missing:
            return
        for other in [each for each in self.held if _overlap(each, bucket)]:
            self._finish(other)
        self.missing.remove(bucket)
        self.held.append(bucket)
        bucket.clear()

    def _start(self, bucket: Bucket) -> None:
        if self.comm.size == 1:
            self._finish(bucket)
            return
        bucket.settle()
        super()._start(bucket)
        self.in_flight.append(bucket)
        while len(self.in_flight) > IN_REDUCTION:
            self._finish(self.in_flight[0])

    def _finish(self, bucket: Bucket) -> None:
        """Wait until a bucket is reduced, then use it. Gradients that backward owes are zero."""
        bucket.settle()
        if bucket.reduction is None and self.comm.size > 1:
            super()._start(bucket)
        super()._finish(bucket)
        if bucket in self.in_flight:
            self.in_flight.remove(bucket)
        self.held.remove(bucket)
        self.use(bucket)


def _overlap(a: Bucket, b: Bucket) -> bool:
    """Whether two buckets have memory of the arena in common."""
    assert isinstance(a.grads, Tensor) and isinstance(b.grads, Tensor)
    first, second = a.grads.storage_offset(), b.grads.storage_offset()
    return first < second + b.grads.numel() and second < first + a.grads.numel()
