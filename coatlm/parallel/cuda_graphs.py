"""CUDA graphs of steps and of microbatches: capture once, replay in every step.

A microbatch launches some sixty kernels per layer; the replay of a graph is a single launch of the
same kernels, with the same results. Models with pipeline stages are not supported.

Whole steps (`StepGraph`). A graph holds all microbatches of a step and the update. What differs
between steps is on the device, at fixed addresses: tokens, the learning rate, the count of updates,
the clip coefficient, delayed scales, the counters of random numbers. So is the decision to skip an
update. The first step runs eagerly, which compiles its kernels; the second is captured and
replayed. Steps that the host takes part in, for a calibration or a measurement, run eagerly. With
several processes the graph also holds their collectives; updated weights are all-gathered during
the forward pass of the next step. NCCL's watchdog does not see the collectives of a replay, so an
all-reduce outside of the graph follows each: if a replay hangs, that one ends by its timeout.

Microbatches (`MicrobatchGraphs`). By default (`Config.captures_steps`) runs with several processes,
states in host memory, layers in fp32 or many microbatches per step replay each microbatch, and the
update runs eagerly. Microbatches of a step differ: the first all-gathers weights during forward and
overwrites stale gradients, the last reduces gradients during backward. So there are up to three
kinds of microbatches, with one graph per kind. The first microbatch of a kind runs eagerly, which
compiles its kernels; the second is captured and replayed.

Every later step or microbatch is copied into the static inputs of its graph, which is replayed. If
document bounds are wider than the static ones, because a sample has more documents than any before
it, all ranks capture again: an eager microbatch issues its collectives in another order than a
graph.

Eager microbatches, capture and replay use the one stream that the model was built for, because
autograd's accumulation nodes belong to a stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.config import Config
from coatlm.parallel.collectives import Traffic
from coatlm.parallel.flat_model import FlatModel
from coatlm.parallel.weight_gather import WeightGather
from coatlm.platform import device

Batch = dict[str, Any]  # tokens, labels, loss_mask [B, S]; document_bounds [B, n + 1] or None
T = TypeVar("T")


class MicrobatchKind(NamedTuple):
    """What a microbatch does besides accumulating gradients."""

    first: bool  # all-gathers the updated weights and overwrites stale gradients
    reduces: bool  # reduces the gradients, which are complete after it


@dataclass(eq=False)
class CapturedMicrobatch:
    """A graph, the tensor in which a replay leaves the loss, and the bytes that a replay sends."""

    graph: Any
    loss: Tensor
    sent: Counter[tuple[str, str]]


def captures(config: Config) -> bool:
    """Whether microbatches run as CUDA graphs on this device.

    Raises ValueError for train.cuda_graphs=true without a GPU; auto then means false.
    """
    on_gpu = device().type == "cuda"
    if config.train.cuda_graphs is True and not on_gpu:
        raise ValueError("train.cuda_graphs=true needs a GPU: use auto or false")
    return config.cuda_graphs and on_gpu


class StepGraph:
    """Runs the steps of `model` as one CUDA graph; see the module's docstring.

    `control`: the gloo group of all ranks, which run, capture and replay the same steps.
    """

    def __init__(self, model: FlatModel, control: dist.ProcessGroup) -> None:
        self.model, self.control = model, control
        self.weights = cast(WeightGather, model.weights)  # zero=3 has no fixed addresses
        self.graph: Any = None
        self.results: tuple[Tensor, ...] = ()  # in the graph's memory, written by each replay
        self.sent = Counter[tuple[str, str]]()  # bytes that a replay sends
        self.inputs: list[Batch] = []
        self.width = 0  # of the static document bounds
        self.warm = self.replayed = False  # has run eagerly; the last step was a replay
        self.ended = torch.ones((), device=device())  # ranks of `model.group` that ended a replay

    def run(
        self,
        work: Callable[[Sequence[Batch]], tuple[Tensor, ...]],
        batches: Sequence[Batch],
        *,
        eager: bool,
    ) -> tuple[Tensor, ...]:
        """Return the results of `work(batches)`, a step: eagerly, or by capture and replay.

        A replay repeats the kernels of the captured call and none of its Python.
        """
        width = agreed_width(batches, self.control)
        if self.graph is not None and (len(batches) != len(self.inputs) or width > self.width):
            self.reset()
        self.width = max(width, self.width)
        self.replayed = self.warm and not eager
        if not self.replayed:
            self.warm = self.warm or not eager
            return self._eager(work, batches)
        if self.graph is None:
            self.inputs = [_static_copy(batch, self.width) for batch in batches]
            traffic = self.model.traffic
            (self.graph, self.results), self.sent = _counted(traffic, lambda: self._capture(work))
        else:
            for static, batch in zip(self.inputs, batches, strict=True):
                _fill_(static, batch)
        self.graph.replay()
        if self.model.group.size() > 1:
            dist.all_reduce(self.ended.fill_(1), group=self.model.group)
        self.model.traffic.sent.update(self.sent)
        self.weights.mark_updated()
        return tuple(result.clone() for result in self.results)

    def reset(self) -> None:
        """Capture again: layers compute otherwise, and their new kernels have to be compiled."""
        _synchronize()
        self.close()
        self.warm = False

    def close(self) -> None:
        """Release the graph and its memory."""
        if self.graph is not None:
            self.graph.reset()
        self.graph, self.results, self.inputs = None, (), []

    def _eager(
        self, work: Callable[[Sequence[Batch]], tuple[Tensor, ...]], batches: Sequence[Batch]
    ) -> tuple[Tensor, ...]:
        return _on_stream(self.model.stream, lambda: work(batches))

    def _capture(
        self, work: Callable[[Sequence[Batch]], tuple[Tensor, ...]]
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """Capture a step. Returns the graph and its results, not yet computed."""
        return _captured(self.model.stream, lambda: work(self.inputs))


class MicrobatchGraphs:
    """Runs microbatches as CUDA graphs; see the module's docstring.

    While `paused`, microbatches run eagerly and nothing is captured, for steps that differ from the
    others, such as the calibration of delayed scales. While `observed`, that holds for the first
    microbatch of a step, whose numerics are measured.
    """

    def __init__(self, model: FlatModel) -> None:
        self.model = model
        self.weights = cast(WeightGather, model.weights)  # zero=3 has no fixed addresses
        self.weights.in_forward = self.weights.enabled and self.weights.overlap
        self.paused = self.observed = False
        self.warm: set[MicrobatchKind] = set()
        self.graphs: dict[MicrobatchKind, CapturedMicrobatch] = {}
        self.inputs: Batch = {}
        self.width = 0  # of the static document bounds

    def fit(self, width: int) -> None:
        """Make room for document bounds [B, width]. All ranks call it with the same width."""
        if width > self.width and self.inputs:
            self.reset()
        self.width = max(width, self.width)

    def run(self, batch: Batch, share: Tensor, *, first: bool, last: bool) -> Tensor:
        """Run forward and backward of a microbatch: eagerly, or by capture and replay.

        Returns its part of the loss, sum(loss * mask) * share, fp32 on the device. `first`, `last`:
        whether it is the first or the last microbatch of the step.
        """
        inputs, model = {**batch, "share": share}, self.model
        kind = MicrobatchKind(first, last and model.group.size() > 1)
        if first and self.weights.in_forward:
            # also after an evaluation's all-gather: the graph has its own
            self.weights.due = True
        with nullcontext() if kind.reduces else model.no_sync():
            eager = self.paused or (first and self.observed)
            if eager or kind not in self.warm:
                if not eager:
                    self.warm.add(kind)
                return self._eager(inputs)
            if kind not in self.graphs:
                captured, sent = _counted(model.traffic, lambda: self._capture(inputs, kind))
                self.graphs[kind] = CapturedMicrobatch(*captured, sent)
            return self._replay(self.graphs[kind], inputs, kind)

    def reset(self) -> None:
        """Capture again: layers compute otherwise, and their new kernels have to be compiled."""
        _synchronize()
        self.close()
        self.warm.clear()

    def close(self) -> None:
        """Release the graphs: NCCL does not destroy communicators that a graph has captured."""
        for captured in self.graphs.values():
            captured.graph.reset()
        self.graphs.clear()
        self.inputs = {}

    def _replay(self, captured: CapturedMicrobatch, inputs: Batch, kind: MicrobatchKind) -> Tensor:
        _fill_(self.inputs, inputs)
        captured.graph.replay()
        if kind.first:
            self.weights.mark_replayed()
        self.model.grads.mark_replayed(stale=kind.first, reduced=kind.reduces)
        self.model.traffic.sent.update(captured.sent)
        return captured.loss.clone()

    def _capture(self, inputs: Batch, kind: MicrobatchKind) -> tuple[Any, Tensor]:
        """Capture a microbatch of this kind. Returns the graph and its loss, not yet computed."""
        if not self.inputs:
            self.inputs = _static_copy(inputs, self.width)
        # one pool for all graphs, as they never run at the same time
        pools = [captured.graph.pool() for captured in self.graphs.values()]
        pool = pools[0] if pools else None
        return _captured(self.model.stream, lambda: self._captured_work(kind), pool)

    def _captured_work(self, kind: MicrobatchKind) -> Tensor:
        """The work that a graph captures; returns the loss."""
        loss = self._forward_backward(self.inputs)
        if kind.reduces:
            self.model.finish_grad_sync()
        return loss

    def _eager(self, inputs: Batch) -> Tensor:
        return _on_stream(self.model.stream, lambda: self._forward_backward(inputs))

    def _forward_backward(self, inputs: Batch) -> Tensor:
        loss_BS = self.model(inputs["tokens"], inputs["labels"], inputs["document_bounds"])
        loss = (loss_BS * inputs["loss_mask"]).sum() * inputs["share"]
        loss.backward()
        return loss.detach()


def _synchronize() -> None:
    """Wait for the GPU, if there is one: the memory of a graph that runs must not be reused."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _on_stream(stream: torch.cuda.Stream | None, work: Callable[[], T]) -> T:
    """Run `work` on a stream, between what precedes and what follows on the current one."""
    assert stream is not None
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = work()
    current.wait_stream(stream)
    return result


def _captured(
    stream: torch.cuda.Stream | None, work: Callable[[], T], pool: Any = None
) -> tuple[Any, T]:
    """Capture `work` in a CUDA graph. Returns the graph and the result, not yet computed."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: the watchdog of NCCL queries its events during the capture
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        result = work()
    return graph, result


def _counted(traffic: Traffic, capture: Callable[[], T]) -> tuple[T, Counter[tuple[str, str]]]:
    """What `capture` returns, and the bytes that each replay sends; the capture sends none."""
    before = traffic.sent.copy()
    captured = capture()
    sent, traffic.sent = traffic.sent - before, before
    return captured, sent


def agreed_width(batches: Sequence[Batch], control: dist.ProcessGroup) -> int:
    """The entries per sample of the widest document bounds of any rank; 0 without bounds.

    All ranks of the gloo group `control` call it, so that they capture again together.
    """
    bounds = [batch["document_bounds"] for batch in batches]
    width = max((b.shape[1] for b in bounds if b is not None), default=0)
    if control.size() == 1 or not width:
        return width
    widest = torch.tensor(width)
    dist.all_reduce(widest, dist.ReduceOp.MAX, group=control)
    return int(widest)


def _static_copy(batch: Batch, width: int) -> Batch:
    """The static inputs of a graph, with document bounds of `width` entries per sample."""
    static = {k: x.clone() if isinstance(x, Tensor) else x for k, x in batch.items()}
    if (bounds := batch["document_bounds"]) is not None:
        static["document_bounds"] = bounds.new_empty(len(bounds), width)
        _fill_(static, batch)
    return static


def _fill_(static: Batch, batch: Batch) -> None:
    """Copy a batch into static inputs; the last of its document bounds fills wider static ones."""
    for name, value in static.items():
        if name == "document_bounds" and value is not None:
            bounds = batch[name]
            value[:, : bounds.shape[1]] = bounds
            value[:, bounds.shape[1] :] = bounds[:, -1:]
        elif isinstance(value, Tensor):
            value.copy_(batch[name])
