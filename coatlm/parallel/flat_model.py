"""A model chunk whose weights and gradients live in flat buckets, as ZeRO needs them.

`grad_reduction` sums the gradients while backward runs, `weight_gather` all-gathers the updated
weights while the next forward runs; at ZeRO stage 3 `layer_gather` does so for every use. With
`update_in_backward` each bucket is also updated and released in backward (`grad_release`). The
methods are those that megatron-core's schedules expect of a DistributedDataParallel model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from coatlm.parallel.arena import Lifetime
from coatlm.parallel.buckets import Bucket, Cut, make_buckets
from coatlm.parallel.collectives import Comm, Traffic
from coatlm.parallel.grad_reduction import GradReduction
from coatlm.parallel.grad_release import GradRelease
from coatlm.parallel.groups import Groups
from coatlm.parallel.layer_gather import LayerGather, Unit
from coatlm.parallel.regions import Region, regions_of
from coatlm.parallel.weight_gather import WeightGather
from coatlm.parallel.wire import Wire
from coatlm.platform import device

Params = list[nn.Parameter]


class FlatModel(nn.Module):
    """A model chunk in flat buckets.

    `module` is the chunk, `config` its megatron TransformerConfig, `group` the data- and
    context-parallel process group, `wire` the gradient format.
    """

    module: Any  # megatron's modules have no types
    weights: WeightGather | LayerGather

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
        update_in_backward: bool = False,
        stream: torch.cuda.Stream | None = None,
        initial: Callable[[Region, Tensor], None] | None = None,
    ) -> None:
        """Move the parameters into buckets. `stream`: where backward runs; None: the current.

        `initial(region, weight)` writes the weights of a region if the parameters of `module` are
        on the meta device. So at ZeRO stage 3 no more than one bucket is whole at a time.
        """
        super().__init__()
        self.module = module
        self.config: Any = self.module.config
        self.group, self.wire, self.traffic, self.stream = group, wire, traffic, stream
        self.sharded = cut.zero > 0
        every_microbatch = cut.zero >= 2 and group.size() > 1 and not update_in_backward
        params = [p for p in module.parameters() if p.requires_grad]
        regions = regions_of(module)
        if initial is not None:
            move_from_meta(params)
        comm_stream = None
        if params[0].is_cuda and group.size() > 1:
            comm_stream = torch.cuda.Stream(priority=-1)
        if cut.zero == 3:
            cut = replace(cut, unit=self._unit_numbers())
        if update_in_backward:
            cut = replace(cut, reached=self._reached())
        fill = None if initial is None else partial(_fill, regions, initial)
        self.buckets = make_buckets(params, cut, fill)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.regions: dict[Bucket, list[Region]] = {bucket: [] for bucket in self.buckets}
        for param, region in regions:
            bucket = self.bucket_of[param]
            start = bucket.params[param][0] + region.start
            self.regions[bucket].append(replace(region, start=start))
        make_grads = GradRelease if update_in_backward else GradReduction
        self.grads = make_grads(
            self.buckets,
            wire,
            Comm(group, traffic, "grad"),
            sharded=self.sharded,
            every_microbatch=every_microbatch,
            overlap=overlap_grad_reduce,
            stream=comm_stream,
        )
        comm = Comm(group, traffic, "weights")
        if cut.zero == 3 and group.size() > 1:
            self.weights = LayerGather(
                self._gathered_units(), comm, overlap=overlap_param_gather, stream=comm_stream
            )
        else:
            self.weights = WeightGather(
                self.buckets,
                comm,
                enabled=self.sharded and group.size() > 1,
                overlap=overlap_param_gather,
                stream=comm_stream,
            )
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for param in params:
                self.grads.accumulate_into_main_grad(param)
        transient = every_microbatch or update_in_backward
        self._register_hooks(transient, self.sharded and overlap_param_gather)
        self.grads.start_step()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def set_is_first_microbatch(self) -> None:
        """Tell the layers that weights have changed: FP8 layers must cast them again."""
        self.module.set_is_first_microbatch()

    def zero_grad_buffer(self) -> None:
        """Clear the gradients (or mark them as stale) at the start of a step."""
        self.grads.start_step()

    def no_sync(self) -> AbstractContextManager[None]:
        """A context that only accumulates gradients, for all microbatches but the last."""
        return self.grads.no_sync()

    def finish_grad_sync(self) -> None:
        """Wait until all gradients are reduced."""
        self.grads.finish()

    def start_param_sync(self) -> None:
        """Start to all-gather the updated weights."""
        self.weights.start()

    def finish_param_sync(self) -> None:
        """Wait until all weights are all-gathered."""
        self.weights.finish()

    def _register_hooks(self, allocate: bool, gather: bool) -> None:
        module = self.module
        first, layers, last = self._units()
        if gather and isinstance(self.weights, WeightGather):
            units = [(module, first), *layers, (self._last_module(), last)]
            self.weights.wait_before_use([(u, self._buckets_of(params)) for u, params in units])
        if allocate:
            if first and not module.share_embeddings_and_output_weights:
                units = [(module, last), *layers, (module.embedding, first)]
            else:
                units = [(module, [*first, *last]), *layers]
            self.grads.allocate_before_backward({u: self._buckets_of(p) for u, p in units})

    def _units(self) -> tuple[Params, list[tuple[nn.Module, Params]], Params]:
        """Parameters in the order of forward: the embedding's, each layer's, all others."""
        embedding = getattr(self.module, "embedding", None)
        first = [] if embedding is None else list(embedding.parameters())
        layers = [(layer, list(layer.parameters())) for layer in self.module.decoder.layers]
        found = set(first).union(*(params for _, params in layers))
        return first, layers, [p for p in self.module.parameters() if p not in found]

    def _last_module(self) -> nn.Module:
        """The module with which the forward pass of all other parameters starts."""
        return getattr(self.module.decoder, "final_layernorm", None) or self.module

    def _unit_numbers(self) -> dict[nn.Parameter, int]:
        """The unit of `layer_gather` that each parameter is sharded with."""
        first, layers, last = self._units()
        units = [first, *(params for _, params in layers), last]
        return {param: number for number, params in enumerate(units) for param in params}

    def _reached(self) -> dict[nn.Parameter, Lifetime]:
        """The first and the last unit of backward that adds to each parameter's gradient."""
        first, layers, last = self._units()
        units = [last, *(params for _, params in reversed(layers)), first]
        reached = {param: (at, at) for at, params in enumerate(units) for param in params}
        if first and self.module.share_embeddings_and_output_weights:
            reached[self.module.shared_embedding_or_output_weight()] = (0, len(units) - 1)
        return reached

    def _gathered_units(self) -> list[Unit]:
        module = self.module
        first, layers, last = self._units()
        if first and module.post_process and module.share_embeddings_and_output_weights:
            last.append(module.shared_embedding_or_output_weight())
        units = [Unit(layer, layer, self._buckets_of(params)) for layer, params in layers]
        if first:
            embedding = module.embedding
            units.insert(0, Unit(embedding, embedding, self._buckets_of(first), backward=False))
        if last:
            buckets = self._buckets_of(last)
            units.append(Unit(self._last_module(), module, buckets, retained=True))
        return units

    def _buckets_of(self, params: Sequence[nn.Parameter]) -> list[Bucket]:
        return list(dict.fromkeys(self.bucket_of[p] for p in params if p in self.bucket_of))


def move_from_meta(params: Sequence[nn.Parameter]) -> None:
    """Move parameters from the meta device to this rank's, with storages of 0 bytes.

    They stay the same objects, with their attributes, and `data` is to be assigned.
    """
    for param in params:
        empty = nn.Parameter(torch.empty_like(param, device=device()))
        empty.untyped_storage().resize_(0)
        empty.__dict__.update(param.__dict__)
        torch.utils.swap_tensors(param, empty)


def _fill(
    regions: Sequence[tuple[nn.Parameter, Region]],
    initial: Callable[[Region, Tensor], None],
    param: nn.Parameter,
    view: Tensor,
) -> None:
    """Write the initial weights of `param` to `view`, which has its shape."""
    for owner, region in regions:
        if owner is param:
            initial(region, region.of(view))


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
