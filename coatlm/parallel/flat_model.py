"""A model chunk whose weights and gradients live in flat buckets, as ZeRO needs them.

`grad_reduction` sums the gradients while backward runs, `weight_gather` all-gathers the updated
weights while the next forward runs. The methods are those that megatron-core's schedules expect of
a DistributedDataParallel model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from coatlm.parallel.buckets import Bucket, Cut, make_buckets
from coatlm.parallel.collectives import Comm, Traffic
from coatlm.parallel.grad_reduction import GradReduction
from coatlm.parallel.groups import Groups
from coatlm.parallel.weight_gather import WeightGather
from coatlm.parallel.wire import Wire

Params = list[nn.Parameter]


class FlatModel(nn.Module):
    """A model chunk in flat buckets.

    `module` is the chunk, `config` its megatron TransformerConfig, `group` the data-parallel (and
    context-parallel) process group, `wire` the format in which gradients travel.
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
        """`stream`: the CUDA stream on which backward will run, if it is not the current one."""
        super().__init__()
        self.module = module
        self.config: Any = self.module.config
        self.group, self.wire, self.traffic, self.stream = group, wire, traffic, stream
        self.sharded = cut.zero > 0
        every_microbatch = cut.zero == 2 and group.size() > 1
        params = [p for p in module.parameters() if p.requires_grad]
        comm_stream = None
        if params[0].is_cuda and group.size() > 1:
            comm_stream = torch.cuda.Stream(priority=-1)
        self.buckets = make_buckets(params, cut)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.grads = GradReduction(
            self.buckets,
            wire,
            Comm(group, traffic, "grad"),
            sharded=self.sharded,
            every_microbatch=every_microbatch,
            overlap=overlap_grad_reduce,
            stream=comm_stream,
        )
        self.weights = WeightGather(
            self.buckets,
            Comm(group, traffic, "weights"),
            enabled=self.sharded and group.size() > 1,
            overlap=overlap_param_gather,
            stream=comm_stream,
        )
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for param in params:
                self.grads.accumulate_into_main_grad(param)
        self._register_hooks(every_microbatch, self.sharded and overlap_param_gather)
        self.grads.start_step()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.weights.start_due()
        return self.module(*args, **kwargs)

    def set_is_first_microbatch(self) -> None:
        """Tell the layers that weights are new: FP8 layers have to cast them again."""
        self.module.set_is_first_microbatch()

    def zero_grad_buffer(self) -> None:
        """Clear the gradients (or mark them as stale) at the start of a step."""
        self.grads.start_step()

    def no_sync(self) -> AbstractContextManager[None]:
        """Only accumulate gradients: for all microbatches but the last."""
        return self.grads.no_sync()

    def finish_grad_sync(self) -> None:
        """Wait until all gradients are reduced."""
        self.grads.finish()

    def start_param_sync(self) -> None:
        """Start to all-gather the updated weights."""
        self.weights.start()

    def finish_param_sync(self) -> None:
        """Wait until all weights are gathered."""
        self.weights.finish()

    def _register_hooks(self, allocate: bool, gather: bool) -> None:
        module = self.module
        first, layers, last = self._units()
        if gather:
            end = getattr(module.decoder, "final_layernorm", None)
            units = [(module, first), *layers, (end or module, last)]
            self.weights.wait_before_use([(u, self._buckets_of(params)) for u, params in units])
        if allocate:
            if first and not module.share_embeddings_and_output_weights:
                units = [(module, last), *layers, (module.embedding, first)]
            else:
                units = [(module, [*first, *last]), *layers]
            self.grads.allocate_before_backward({u: self._buckets_of(p) for u, p in units})

    def _units(self) -> tuple[Params, list[tuple[nn.Module, Params]], Params]:
        """Parameters in the order of their use: the embedding's, each layer's, all others."""
        embedding = getattr(self.module, "embedding", None)
        first = [] if embedding is None else list(embedding.parameters())
        layers = [(layer, list(layer.parameters())) for layer in self.module.decoder.layers]
        found = set(first).union(*(params for _, params in layers))
        return first, layers, [p for p in self.module.parameters() if p not in found]

    def _buckets_of(self, params: Sequence[nn.Parameter]) -> list[Bucket]:
        return list(dict.fromkeys(self.bucket_of[p] for p in params if p in self.bucket_of))


def tied_embedding(
    chunks: Sequence[FlatModel], groups: Groups
) -> tuple[Bucket, nn.Parameter] | None:
    """The tied embedding that this rank's pipeline stage shares with another, and its bucket."""
    if groups.pp.size() == 1 or groups.embedding is None:
        return None
    chunk = chunks[0 if groups.first_stage else -1]
    if not chunk.module.share_embeddings_and_output_weights:
        return None
    weight = chunk.module.shared_embedding_or_output_weight()
    return chunk.bucket_of[weight], weight
