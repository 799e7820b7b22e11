"""Microbatches through the model: megatron-core's schedules with a loss per token of the batch.

The loss of a step is sum(loss * mask) / sum(mask) over the whole global batch, so its gradient does
not depend on how the batch is cut: each microbatch contributes its sum divided by the global count,
and gradients are only ever added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.megatron import get_forward_backward_func
from coatlm.parallel.buffers import FlatModel
from coatlm.parallel.groups import Groups

Batch = dict[str, Any]  # tokens, labels, loss_mask [B, S]; attention_mask [B, 1, S, T] or None


class Kind(NamedTuple):
    """What a microbatch does besides adding up gradients."""

    first: bool  # gathers weights, which the update left with owners; writes over stale gradients
    reduces: bool  # gradients, which it completes


@dataclass(eq=False)
class Recording:
    """A microbatch as a CUDA graph; `sent` is what replaying it once sends."""

    graph: Any
    loss: Tensor
    sent: Counter[tuple[str, str]]


class MicrobatchGraph:
    """Forward and backward of one microbatch of a model without stages, as CUDA graphs.

    A step's first microbatch gathers weights while it goes forward and writes over stale gradients,
    its last one reduces gradients while it goes backward, so there are up to three kinds, each with
    a graph. The first microbatch of a kind runs as ever, which compiles kernels; the second is
    recorded; from then on a microbatch is copied into the recordings' inputs and replayed, and the
    CPU launches one graph in place of some sixty kernels a layer. Kernels and numbers are the same.
    All runs on the stream that the model was told of: autograd's accumulation nodes belong to one.
    Steps that are unlike the others are run as ever while `paused`, and nothing is recorded of
    them.
    """

    def __init__(self, model: FlatModel) -> None:
        self.model = model
        model.gather_in_forward = model.gathers and model.overlap_param_gather
        self.paused = False
        self.warm: set[Kind] = set()
        self.recordings: dict[Kind, Recording] = {}
        self.inputs: Batch = {}

    def run(self, batch: Batch, share: Tensor, *, first: bool, last: bool) -> Tensor:
        """The microbatch's part of the loss, sum(loss * mask) * share, fp32 on the device.

        `first`, `last`: of the step.
        """
        inputs, model = {**batch, "share": share}, self.model
        kind = Kind(first, last and model.group.size() > 1)
        if first and model.gather_in_forward:  # twice, after an evaluation, changes nothing
            model.gather_due = True
        with nullcontext() if kind.reduces else model.no_sync():
            if self.paused or kind not in self.warm:
                if not self.paused:
                    self.warm.add(kind)
                return self._eager(inputs)
            if kind not in self.recordings:
                sent = model.traffic.sent.copy()
                graph, loss = self._record(inputs, kind)
                self.recordings[kind] = Recording(graph, loss, model.traffic.sent - sent)
                model.traffic.sent = sent
            return self._replay(self.recordings[kind], inputs, kind)

    def close(self) -> None:
        """Forget the recordings: NCCL takes down no communicator while one has sums of it."""
        for recording in self.recordings.values():
            recording.graph.reset()
        self.recordings.clear()

    def _replay(self, recording: Recording, inputs: Batch, kind: Kind) -> Tensor:
        for name, value in self.inputs.items():
            if isinstance(value, Tensor):
                value.copy_(inputs[name])
        recording.graph.replay()
        self.model.replayed(first=kind.first, reduced=kind.reduces)
        self.model.traffic.sent.update(recording.sent)
        return recording.loss.clone()

    def _record(self, inputs: Batch, kind: Kind) -> tuple[Any, Tensor]:
        """The graph and the loss that a replay leaves; nothing has run yet."""
        if not self.inputs:
            self.inputs = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in inputs.items()
            }
        graph = torch.cuda.CUDAGraph()
        pools = [recording.graph.pool() for recording in self.recordings.values()]
        # thread_local: the watchdog of NCCL asks for its events meanwhile
        with torch.cuda.graph(
            graph,
            pool=pools[0] if pools else None,  # they never run at the same time
            stream=self.model.stream,
            capture_error_mode="thread_local",
        ):
            loss = self._work(kind)
        return graph, loss

    def _work(self, kind: Kind) -> Tensor:
        """What is recorded."""
        loss = self._forward_backward(self.inputs)
        if kind.reduces:
            self.model.finish_grad_sync()
        return loss

    def _eager(self, inputs: Batch) -> Tensor:
        stream, current = self.model.stream, torch.cuda.current_stream()
        assert stream is not None
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            loss = self._forward_backward(inputs)
        current.wait_stream(stream)
        return loss

    def _forward_backward(self, inputs: Batch) -> Tensor:
        loss_BS = self.model(inputs["tokens"], inputs["labels"], inputs["attention_mask"])
        loss = (loss_BS * inputs["loss_mask"]).sum() * inputs["share"]
        loss.backward()
        return loss.detach()


def run_microbatches(
    chunks: Sequence[FlatModel],
    batches: Sequence[Batch],
    groups: Groups,
    *,
    seq_len: int,
    forward_only: bool = False,
    enter: Callable[[str | None], None] = lambda phase: None,
    graph: MicrobatchGraph | None = None,
) -> Tensor:
    """Forward, and backward unless `forward_only`. Returns the mean loss, fp32 on the device.

    `batches` are this rank's microbatches, cut for context parallelism; gradients are left summed
    over them only (`reduce.finalize_gradients` completes them). `enter` is told where the work of
    this rank begins, and with None where it starts to wait for others.
    """
    enter(None)
    tokens = torch.stack([batch["loss_mask"].sum() for batch in batches]).sum()
    counted = dist.all_reduce(tokens, group=groups.dp_cp, async_op=True)

    @cache
    def share() -> Tensor:
        """Of a token in the loss. Waits for the count, which stands behind the gathers of weights
        that this group has under way: nothing before the loss is to wait for those.
        """
        enter(None)
        counted.wait()
        enter("forward_backward")
        return 1.0 / tokens.clamp(min=1)

    if graph is not None and not forward_only:
        ends = len(batches) - 1
        part = share()  # recorded microbatches start their gathers themselves
        losses = [graph.run(b, part, first=i == 0, last=i == ends) for i, b in enumerate(batches)]
        loss = torch.stack(losses).sum()
        enter(None)
        dist.all_reduce(loss, group=groups.dp_cp)
        return loss

    def forward_step(data: Iterator[Batch], model: FlatModel) -> tuple[Tensor, Any]:
        batch = next(data)
        output = model(batch["tokens"], batch["labels"], batch["attention_mask"])

        def loss_function(loss_BS: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss = (loss_BS * batch["loss_mask"]).sum() * share()
            return (
                loss,
                torch.zeros((), dtype=torch.int, device=loss.device),
                {"loss": loss.detach()},
            )

        return output, loss_function

    enter("forward_backward")
    _synchronise_on_last_microbatch(chunks)
    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=seq_len,
        micro_batch_size=batches[0]["tokens"].shape[0],
        decoder_seq_length=seq_len,
        forward_only=forward_only,
    )
    enter(None)
    counted.wait()  # stages without a loss have not
    loss = torch.zeros((), dtype=torch.float32, device=tokens.device)
    if groups.last_stage and results:
        loss = torch.stack([result["loss"] for result in results]).sum()
    dist.all_reduce(loss, group=groups.dp_cp)
    dist.all_reduce(loss, group=groups.pp)
    return loss


def _synchronise_on_last_microbatch(chunks: Sequence[FlatModel]) -> None:
    """Tell the schedule how to hold back reductions; it enables them for the last backward pass."""
    config = chunks[0].config
    hold = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = hold if len(hold) > 1 else hold[0]
