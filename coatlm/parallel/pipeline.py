"""Microbatches through the model: megatron-core's schedules with a loss per token of the batch.

The loss of a step is sum(loss * mask) / sum(mask) over the whole global batch, so its gradient does
not depend on how the batch is cut: each microbatch contributes its sum divided by the global count,
and gradients are only ever added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.parallel.buffers import FlatModel
from coatlm.parallel.groups import Groups
from coatlm.platform import enable_cpu

enable_cpu()

from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

Batch = dict[str, Any]  # tokens, labels, loss_mask [B, S]; attention_mask [B, 1, S, T] or None


class MicrobatchGraph:
    """Forward and backward of one microbatch of a model without stages, as one CUDA graph.

    The first microbatch runs as ever, which compiles kernels; the second is recorded; from then on
    a microbatch is copied into the recording's inputs and replayed, and the CPU launches one graph
    in place of some sixty kernels a layer. Kernels and numbers are the same. Gradients accumulate;
    their reduction starts after the last microbatch, not during it. All runs on the stream that the
    model was told of: autograd's accumulation nodes belong to one. Steps that are unlike the others
    are run as ever while `paused`, and nothing is recorded of them.
    """

    def __init__(self, model: FlatModel) -> None:
        self.model = model
        self.warm = False
        self.paused = False
        self.graph: Any = None
        self.inputs: Batch = {}
        self.loss: Tensor | None = None

    def run(self, batch: Batch, share: Tensor) -> Tensor:
        """The microbatch's part of the loss, sum(loss * mask) * share, fp32 on the device."""
        inputs = {**batch, "share": share}
        self.model.finish_param_sync()
        with self.model.no_sync():
            if self.paused or not self.warm:
                self.warm = not self.paused
                return self._eager(inputs)
            if self.graph is None:
                self._record(inputs)
        for name, value in self.inputs.items():
            if isinstance(value, Tensor):
                value.copy_(inputs[name])
        assert self.loss is not None
        self.graph.replay()
        return self.loss.clone()

    def _record(self, inputs: Batch) -> None:
        self.inputs = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: the watchdog of NCCL asks for its events meanwhile
        with torch.cuda.graph(
            self.graph, stream=self.model.stream, capture_error_mode="thread_local"
        ):
            self.loss = self._forward_backward(self.inputs)

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
    dist.all_reduce(tokens, group=groups.dp_cp)
    share = 1.0 / tokens.clamp(min=1)
    enter("forward_backward")
    if graph is not None and not forward_only:
        loss = torch.stack([graph.run(batch, share) for batch in batches]).sum()
        enter(None)
        dist.all_reduce(loss, group=groups.dp_cp)
        return loss

    def forward_step(data: Iterator[Batch], model: FlatModel) -> tuple[Tensor, Any]:
        batch = next(data)
        output = model(batch["tokens"], batch["labels"], batch["attention_mask"])

        def loss_function(loss_BS: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss = (loss_BS * batch["loss_mask"]).sum() * share
            return (
                loss,
                torch.zeros((), dtype=torch.int, device=loss.device),
                {"loss": loss.detach()},
            )

        return output, loss_function

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
