"""All-gather of one model chunk's weights around every use: ranks hold shards (ZeRO stage 3).

Elements that a rank holds of N parameters over R ranks, beside one or a few buckets in flight:

    stage   weights                           gradients      states
    0       N                                 N              N
    1       N                                 N              N / R
    2       N                                 N / R          N / R
    3       N / R, and two whole units        N / R          N / R

A unit is the embedding, a transformer layer, or the final norm with the output layer. Its weights
are all-gathered before its forward pass and freed after it, and the same again in backward, where
they are freed bucket by bucket once the gradients are complete. While a unit computes, the next one
(in backward the previous one) is all-gathered. Two exceptions: the backward pass of an embedding
needs no weights, and the last unit's weights stay from forward to backward, which follow each
other. A tied embedding is part of the first and of the last unit. With recompute=full, the forward
pass within backward all-gathers a layer's weights, and the layer's backward pass finds them whole.

    bytes sent per microbatch = (R - 1) / R * (bytes of all weights + bytes of the layers' weights)

All-gathered weights are those of stage 1, bit by bit: this rank's shard is exact, and the others
come in BF16 or as FP8 codes (`fp8_gather`). Codes are computed for every all-gather, and the amax
of each row or tensor is all-reduced once per update.

Only the storage of `bucket.weights` is resized: what autograd has saved of a parameter aliases that
storage, and finds the weights of the same step again. On a GPU, weights are allocated and freed on
the compute stream, which waits for an all-gather before it uses or frees its result; an all-gather
in turn waits for everything that was issued before. So two units of memory are reused by all
layers. As addresses change, a CUDA graph cannot capture this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from coatlm.parallel.buckets import Bucket
from coatlm.parallel.collectives import Comm
from coatlm.parallel.fp8_gather import gather_shard
from coatlm.parallel.wire import Reduction


@dataclass(frozen=True, eq=False)
class Unit:
    """Buckets that are all-gathered together."""

    enter: nn.Module  # the unit's forward pass starts with that of this module
    leave: nn.Module  # and ends with that of this one
    buckets: Sequence[Bucket]
    backward: bool = True  # the backward pass needs the weights
    retained: bool = False  # from a forward pass to the backward pass that follows


class LayerGather:
    """All-gathers and frees the weights of `units`, which are in the order of forward.

    `overlap`: a unit is all-gathered while the one before computes. `stream`: the CUDA stream of
    the all-gathers.
    """

    def __init__(
        self, units: Sequence[Unit], comm: Comm, *, overlap: bool, stream: torch.cuda.Stream | None
    ) -> None:
        self.units, self.comm = units, comm
        self.overlap, self.stream = overlap, stream
        self.amaxes: dict[Bucket, Tensor] = {}  # of FP8 buckets all-gathered since the last update
        for index in range(len(units)):
            self._register_hooks(index)

    def start(self) -> None:
        """Discard all all-gathered weights: the ranks have updated their shards."""
        self.finish()

    def finish(self) -> None:
        """Wait for all-gathers in flight, and free the weights of all units."""
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.free_weights()
        self.amaxes.clear()

    def _register_hooks(self, index: int) -> None:
        unit = self.units[index]

        def enter(*_: Any) -> None:
            self._acquire(index, -1 if in_backward() else 1)

        def enter_backward(_: Tensor) -> None:
            self._acquire(index, -1)

        def leave(_: Any, __: Any, output: Any) -> None:
            if unit.backward and torch.is_grad_enabled():  # as in GradReduction
                for leaf in tree_leaves(output):
                    if isinstance(leaf, Tensor) and leaf.requires_grad:
                        leaf.register_hook(enter_backward)
            if not in_backward() and not (unit.retained and torch.is_grad_enabled()):
                for bucket in unit.buckets:
                    bucket.free_weights()

        unit.enter.register_forward_pre_hook(enter)
        unit.leave.register_forward_hook(leave)

    def _acquire(self, index: int, ahead: int) -> None:
        """All-gather a unit and start the one that is used next: `ahead` is 1 or -1."""
        self._start(index)
        after = index + ahead
        needed = 0 <= after < len(self.units) and (ahead > 0 or self.units[after].backward)
        if self.overlap and needed:
            self._start(after)
        for bucket in self.units[index].buckets:
            bucket.finish_gather()

    def _start(self, index: int) -> None:
        for bucket in self.units[index].buckets:
            if not bucket.gathered:
                bucket.allocate_weights()
                steps = gather_shard(bucket, self.comm, self.amaxes)
                bucket.gather = Reduction(steps, self.stream)


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread, as when a layer is recomputed."""
    return torch._C._current_graph_task_id() != -1
