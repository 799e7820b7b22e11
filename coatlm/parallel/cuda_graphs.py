"""CUDA graphs of microbatches: capture forward and backward once, replay them in every step.

A microbatch launches some sixty kernels per layer; its replay is a single launch of the same
kernels, with the same results. Models with pipeline stages are not supported.

Microbatches of a step differ: the first all-gathers weights during forward and overwrites stale
gradients, the last reduces gradients during backward. So there are up to three kinds of
microbatches, with one graph per kind. The first microbatch of a kind runs eagerly, which compiles
its kernels; the second is captured and replayed; for all later ones, the inputs are copied into the
static inputs of the graphs and the graph is replayed. Document bounds that are wider than the
static ones, because a sample has more documents than any before it, let all ranks capture again:
an eager microbatch issues its collectives in another order than a graph.

Eager microbatches, capture and replay use the one stream that the model was built for, because
autograd's accumulation nodes belong to a stream.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from coatlm.config import Config
from coatlm.parallel.flat_model import FlatModel
from coatlm.parallel.weight_gather import WeightGather
from coatlm.platform import device

Batch = dict[str, Any]  # tokens, labels, loss_mask [B, S]; document_bounds [B, n + 1] or None


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
            # also after an evaluation has gathered: the graph gathers again
            self.weights.due = True
        with nullcontext() if kind.reduces else model.no_sync():
            eager = self.paused or (first and self.observed)
            if eager or kind not in self.warm:
                if not eager:
                    self.warm.add(kind)
                return self._eager(inputs)
            if kind not in self.graphs:
                sent = model.traffic.sent.copy()
                graph, loss = self._capture(inputs, kind)
                self.graphs[kind] = CapturedMicrobatch(graph, loss, model.traffic.sent - sent)
                model.traffic.sent = sent
            return self._replay(self.graphs[kind], inputs, kind)

    def reset(self) -> None:
        """Capture again: layers compute otherwise, and their new kernels have to be compiled."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the memory of a graph that still runs must not be reused
        self.close()
        self.warm.clear()

    def close(self) -> None:
        """Release the graphs: NCCL does not destroy communicators that a graph has captured."""
        for captured in self.graphs.values():
            captured.graph.reset()
        self.graphs.clear()
        self.inputs = {}

    def _replay(self, captured: CapturedMicrobatch, inputs: Batch, kind: MicrobatchKind) -> Tensor:
        for name, value in self.inputs.items():
            if name == "document_bounds" and value is not None:
                bounds = inputs[name]
                value[:, : bounds.shape[1]] = bounds
                value[:, bounds.shape[1] :] = bounds[:, -1:]
            elif isinstance(value, Tensor):
                value.copy_(inputs[name])
        captured.graph.replay()
        if kind.first:
            self.weights.mark_replayed()
        self.model.grads.mark_replayed(stale=kind.first, reduced=kind.reduces)
        self.model.traffic.sent.update(captured.sent)
        return captured.loss.clone()

    def _capture(self, inputs: Batch, kind: MicrobatchKind) -> tuple[Any, Tensor]:
        """Capture a microbatch of this kind. Returns the graph and its loss, not yet computed."""
        if not self.inputs:
            self.inputs = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in inputs.items()
            }
            if (bounds := inputs["document_bounds"]) is not None:
                self.inputs["document_bounds"] = bounds[:, -1:].repeat(1, self.width)
        graph = torch.cuda.CUDAGraph()
        pools = [captured.graph.pool() for captured in self.graphs.values()]
        # thread_local: the watchdog of NCCL queries its events during the capture
        with torch.cuda.graph(
            graph,
            pool=pools[0] if pools else None,  # shared, as graphs never run at the same time
            stream=self.model.stream,
            capture_error_mode="thread_local",
        ):
            loss = self._captured_work(kind)
        return graph, loss

    def _captured_work(self, kind: MicrobatchKind) -> Tensor:
        """The work that a graph captures; returns the loss."""
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
        loss_BS = self.model(inputs["tokens"], inputs["labels"], inputs["document_bounds"])
        loss = (loss_BS * inputs["loss_mask"]).sum() * inputs["share"]
        loss.backward()
        return loss.detach()
