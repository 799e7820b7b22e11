"""Microbatches through the pipeline: megatron-core's schedules, with a per-token mean loss.

The loss of a step is sum(loss * mask) / sum(mask) over the global batch, so its gradient does not
depend on how the batch is split: each microbatch contributes its sum divided by the number of
tokens in the global batch, and gradients are only ever added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.megatron import get_forward_backward_func
from coatlm.parallel.collectives import Pending, Several, all_reduce
from coatlm.parallel.cuda_graphs import Batch, MicrobatchGraphs, agreed_width
from coatlm.parallel.flat_model import FlatModel
from coatlm.parallel.groups import Groups


def run_microbatches(
    chunks: Sequence[FlatModel],
    batches: Sequence[Batch],
    groups: Groups,
    *,
    seq_len: int,
    forward_only: bool = False,
    enter: Callable[[str | None], None] = lambda phase: None,
    graphs: MicrobatchGraphs | None = None,
) -> Tensor:
    """Run forward, and backward unless `forward_only`. Returns the mean loss, fp32 on the device.

    It is the mean over the tokens of the global batch that count: NaN, with gradients of 0, where
    none does.

    `batches` are this rank's microbatches, sliced for context parallelism. Gradients are summed
    over them only; `finalize_grads.finalize_gradients` completes them. `enter` is called with the
    name of a phase where this rank starts to work, and with None where it starts to wait for other
    ranks.
    """
    tokens = torch.stack([batch["loss_mask"].sum() for batch in batches]).sum()
    counted: Pending = Several(())
    if groups.dp_cp.size() > 1:
        counted = dist.all_reduce(tokens, group=groups.dp_cp, async_op=True)

    @cache
    def share() -> Tensor:
        """The weight of each token in the loss: 1 / tokens of the global batch.

        The all-reduce of that count is queued behind the weight all-gathers in flight on the same
        process group. Nothing before the loss may wait for it, so it is waited for on first use.
        """
        enter(None)
        counted.wait()
        enter("forward_backward")
        return 1.0 / tokens.clamp(min=1)

    if graphs is not None and not forward_only:
        graphs.fit(agreed_width(batches, groups.control))
        ends = len(batches) - 1
        part = share()  # no all-gathers are in flight: captured microbatches start their own
        losses = [graphs.run(b, part, first=i == 0, last=i == ends) for i, b in enumerate(batches)]
        loss = torch.stack(losses).sum()
        enter(None)
        all_reduce(loss, groups.dp_cp)
        return loss.masked_fill_(tokens == 0, torch.nan)

    enter("forward_backward")
    losses = _run_training(chunks, batches, share, seq_len=seq_len, forward_only=forward_only)
    enter(None)
    counted.wait()  # stages without a loss have not waited for it
    loss = torch.zeros((), dtype=torch.float32, device=tokens.device)
    if groups.last_stage and losses:
        loss = torch.stack(losses).sum()
    dist.all_reduce(loss, group=groups.dp_cp)
    dist.all_reduce(loss, group=groups.pp)
    return loss.masked_fill_(tokens == 0, torch.nan)


def predict_microbatches(
    chunks: Sequence[Any], batches: Sequence[Batch], *, seq_len: int
) -> list[Tensor]:
    """The predictions of a model for each microbatch, [2, B, S]; empty on all but the last stage.

    `chunks` are of `model.builder.Llama`, bare or in a `FlatModel`; its `forward` says what
    predictions are. `batches` are sliced for context parallelism, `seq_len` is the length of their
    whole samples.
    """

    def forward_step(data: Iterator[Batch], model: Any) -> tuple[Tensor, None]:
        batch = next(data)
        return model(batch["tokens"], batch["labels"], predictions=True), None

    samples = batches[0]["tokens"].shape[0]
    return _run_schedule(
        chunks, batches, forward_step, samples=samples, seq_len=seq_len, forward_only=True
    )


def _run_training(
    chunks: Sequence[FlatModel],
    batches: Sequence[Batch],
    share: Callable[[], Tensor],
    *,
    seq_len: int,
    forward_only: bool,
) -> list[Tensor]:
    """Run a step's microbatches. Returns their losses on the last stage."""

    def forward_step(data: Iterator[Batch], model: FlatModel) -> tuple[Tensor, Any]:
        batch = next(data)
        output = model(batch["tokens"], batch["labels"], batch["document_bounds"])

        def loss_function(loss_BS: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss = (loss_BS * batch["loss_mask"]).sum() * share()
            return (
                loss,
                torch.zeros((), dtype=torch.int, device=loss.device),
                {"loss": loss.detach()},
            )

        return output, loss_function

    samples = batches[0]["tokens"].shape[0]
    if batches[0]["document_bounds"] is not None:  # they lie one behind the other
        samples, seq_len = 1, samples * seq_len
    _synchronise_on_last_microbatch(chunks)
    results = _run_schedule(
        chunks,
        batches,
        forward_step,
        samples=samples,
        seq_len=seq_len,
        forward_only=forward_only,
    )
    return [result["loss"] for result in results]


def _run_schedule(
    chunks: Sequence[Any],
    batches: Sequence[Batch],
    forward_step: Callable[..., tuple[Tensor, Any]],
    *,
    samples: int,
    seq_len: int,
    forward_only: bool,
) -> list[Any]:
    """Run megatron-core's schedule. Returns the results of the microbatches on the last stage.

    Hidden states are [seq_len, samples, H] before sequence and context parallelism divide them.
    """
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=seq_len,
        micro_batch_size=samples,
        decoder_seq_length=seq_len,
        forward_only=forward_only,
    )
    return results


def _synchronise_on_last_microbatch(chunks: Sequence[FlatModel]) -> None:
    """Give the schedule `no_sync`, with which it defers reductions to the last microbatch."""
    config = chunks[0].config
    no_sync = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
