"""The trainer: a model in flat buckets, its optimizer, and the training step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.config import Config
from coatlm.config.obstacles import step_obstacles
from coatlm.data import context_parallel
from coatlm.data.batches import Microbatch
from coatlm.model import numerics
from coatlm.model.builder import build_model
from coatlm.model.coat_layer import change_layers, flows_of
from coatlm.model.scales import Histories
from coatlm.model.traffic import step_traffic
from coatlm.optim import edq
from coatlm.optim.adamw import AdamW
from coatlm.optim.shards import FlatShard
from coatlm.parallel.backward_update import BackwardOptimizer
from coatlm.parallel.collectives import Traffic
from coatlm.parallel.cuda_graphs import Batch, MicrobatchGraphs, StepGraph, captures
from coatlm.parallel.finalize_grads import tensor_parallel_sums
from coatlm.parallel.groups import Groups
from coatlm.parallel.pipeline import run_microbatches
from coatlm.parallel.reduction_scales import ReductionScales
from coatlm.parallel.zero import ZeroOptimizer
from coatlm.parallel.zero_checkpoint import ZeroCheckpoint
from coatlm.platform import device, gpu_memory
from coatlm.train.chunks import GRAD_DTYPES, delayed_scales, gradient_noise, make_chunks, sum_noise
from coatlm.train.guard import make_guard
from coatlm.train.spikes import SpikeGuard
from coatlm.train.stragglers import PhaseTimer
from coatlm.train.tuning import tune_attention, tune_gemms, tunes_attention


class Trainer:
    """All state that a training step changes. `vocab` is the padded vocabulary size.

    `config` is the same on all ranks, with what `model.fits.with_fitting` decides; logits that are
    still auto are recomputed, as on a CPU. `memory` is the smallest of the ranks' GPUs in bytes, 0
    on CPUs; None: that of this rank's. `lap` is called with the name of each part of the set-up
    when it is done. `whole_steps`: True for one CUDA graph per step (ValueError if steps do not fit
    one); False for graphs of microbatches; None: as `Config.captures_steps` decides.
    """

    def __init__(
        self,
        config: Config,
        groups: Groups,
        vocab: int,
        *,
        memory: int | None = None,
        lap: Callable[[str], None] = lambda part: None,
        whole_steps: bool | None = None,
    ) -> None:
        self.config, self.groups = config, groups
        p, o = config.parallel, config.optim
        cuda_graphs = captures(config)
        self.traffic = Traffic()
        # the last step's bytes over tp and cp: computed when they are logged, not in every step
        self.model_traffic: Callable[..., Traffic] = Traffic
        self.repeated_traffic: Callable[[], Traffic] = Traffic  # of passes that ran once more
        sharded = p.zero == 3 and groups.dp_cp.size() > 1  # `make_chunks` computes the weights
        modules = build_model(config, groups, vocab, allocate=not sharded)
        self.sum_noise = sum_noise(config, len(modules), groups)
        self.chunks = make_chunks(
            config, modules, groups, self.traffic, self.sum_noise, cuda_graphs=cuda_graphs
        )
        grad_dtype = GRAD_DTYPES[p.main_grads]
        self.tp_sums = tensor_parallel_sums(self.chunks, groups)
        self.timer = PhaseTimer(cuda=device().type == "cuda")
        t = config.train
        self.spikes = (
            SpikeGuard(t.spike_sigma, t.spike_window, device=device(), group=groups.world)
            if t.spike_sigma
            else None
        )
        lap("model")
        if config.precision.tune_gemms and config.precision.flow and device().type == "cuda":
            tune_gemms(config, self._layers(), grad_dtype, groups.control)
            lap("GEMM algorithms")
        if tunes_attention(config) and device().type == "cuda":
            tune_attention(config, self._layers(), groups.control)
            lap("attention backends")
        self.graphs = MicrobatchGraphs(self.chunks[0]) if cuda_graphs else None
        self.step_graph = None
        if whole_steps is None:
            whole_steps = config.captures_steps(groups.dp.size())
        if cuda_graphs and whole_steps:
            if obstacle := next(step_obstacles(config, groups.dp.size()), None):
                raise ValueError(f"one CUDA graph of a step with {obstacle}")
            self.step_graph = StepGraph(self.chunks[0], groups.control)
        self.scales = delayed_scales(config, modules, groups)
        self.noise = gradient_noise(config, modules, groups)
        self.logits = numerics.LogitsWatch()
        self.guard = make_guard(
            config,
            vocab,
            groups.dp.size(),
            memory=gpu_memory() if memory is None else memory,
            change=self.change_layers,
        )
        backward = t.update == "backward"
        make_zero = BackwardOptimizer if backward else ZeroOptimizer
        self.optimizer: ZeroOptimizer = make_zero(
            self.chunks,
            groups,
            clip_grad=o.clip_grad,
            make_shard=FlatShard,
            make_optimizer=partial(
                AdamW,
                recipe=o.recipe,
                betas=o.betas,
                eps=o.eps,
                weight_decay=o.weight_decay,
                offload=o.offload == "states",
                by_shard=backward,
                device_rate=self.step_graph is not None,
            ),
        )
        self.zero_checkpoint = ZeroCheckpoint(self.optimizer)
        self.reduction_scales: ReductionScales | None = None
        if p.grad_comm_scaling == "delayed" and groups.dp_cp.size() > 1:
            per_bucket, keys = p.grad_comm_scale == "bucket", self.zero_checkpoint.keys
            self.reduction_scales = ReductionScales(
                self.chunks, groups, keys=keys, per_bucket=per_bucket
            )
        lap("optimizer states")

    def close(self) -> None:
        """Release CUDA graphs before the process groups: NCCL blocks on captured communicators."""
        for graphs in (self.step_graph, self.graphs):
            if graphs is not None:
                graphs.close()

    @property
    def spike(self) -> Tensor:
        """Whether the last step was skipped as a spike: bool on the device."""
        guard = self.spikes
        if guard is None:
            return torch.zeros((), dtype=torch.bool, device=device())
        return guard.spike.clone()

    def train_step(
        self,
        batches: Sequence[Batch],
        lr: float,
        *,
        observe: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Train on one global batch. Returns loss and gradient norm, fp32 on the device.

        Both are the same on all ranks. `observe` is called with the clip coefficient when the
        gradients are complete. `comm_bytes` then has the bytes that this rank sent in the step.
        """
        if self.config.train.update == "backward" and len(batches) > 1:
            raise ValueError(f"{len(batches)} microbatches with train.update=backward: must be 1")
        self.timer.enter(None)
        self.traffic.sent.clear()
        calibrating = self.scales is not None and self.scales.calibrating
        shared = self.reduction_scales
        eager = calibrating or (shared is not None and shared.calibrating)
        if self.graphs is not None:
            self.graphs.paused = eager or self.step_graph is not None
        self.model_traffic = partial(
            step_traffic,
            self.config,
            stage=self.groups.pp.rank(),
            microbatches=len(batches),
            cp_rank=self.groups.cp.rank(),
            calibrating=calibrating,
            fallen=self.fallen,
            once=self.tp_sums,
        )
        self.repeated_traffic = Traffic
        for noise in (self.noise, self.sum_noise):
            if noise is not None:
                noise.begin_()
        self.optimizer.set_rate(lr)
        if self.step_graph is None:
            return self._step(batches, observe=observe, enter=self.timer.enter)
        assert self.graphs is not None
        self.optimizer.before_update()  # a replay runs no Python between backward and update
        eager = eager or self.graphs.observed or observe is not None
        loss, norm = self.step_graph.run(
            partial(self._step, observe=observe, enter=self.timer.enter), batches, eager=eager
        )
        if self.step_graph.replayed:
            self.timer.count_replay()
        return loss, norm

    def _step(
        self,
        batches: Sequence[Batch],
        *,
        observe: Callable[[Tensor], None] | None,
        enter: Callable[[str | None], None],
    ) -> tuple[Tensor, Tensor]:
        """The work of a step on the device, at the rate that is set, which a graph can capture."""
        loss, norm = self._passes(batches, observe=observe, enter=enter)
        if self.optimizer.repeats:
            if self.noise is not None:
                self.noise.repeat_()
            once = self.tp_sums._replace(mus=0)  # which only an update adjusts
            self.repeated_traffic = partial(self.model_traffic, once=once)
            loss, norm = self._passes(batches, observe=observe, enter=enter)
        measured = self.optimizer.applied & (norm > 0)  # no token counted: amaxes say nothing
        for scales in (self.scales, self.reduction_scales):
            if scales is not None:
                scales.update_(measured)
        return loss, norm

    def _passes(
        self,
        batches: Sequence[Batch],
        *,
        observe: Callable[[Tensor], None] | None,
        enter: Callable[[str | None], None],
    ) -> tuple[Tensor, Tensor]:
        """Forward, backward and the update, wherever it takes place. Returns loss and norm."""
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.begin()
        loss = self._run(batches, forward_only=False, enter=enter)
        accepts = partial(self.spikes.accepts, loss) if self.spikes is not None else None
        return loss, self.optimizer.step(accepts=accepts, observe=observe, enter=enter)

    @property
    def comm_bytes(self) -> dict[str, int]:
        """`Traffic.summary` of the bytes that this rank sent in the last step."""
        computed = self.model_traffic().sent + self.repeated_traffic().sent
        return Traffic(self.traffic.sent + computed).summary()

    def gradient_amaxes(self) -> Histories:
        """The amaxes of delayed scaling in all layers, for a checkpoint. A collective call."""
        if self.scales is None:
            return {}
        reports: list[Histories] = [{}] * self.groups.control.size()
        dist.all_gather_object(reports, self.scales.state(), group=self.groups.control)
        return {number: layer for report in reports for number, layer in report.items()}

    def measure_states(self, lr: float, clip_coefficient: Tensor) -> dict[str, float]:
        """The rounding errors of the states in this step, by `edq.to_metrics`; same on all ranks.

        Collective over `norm_group`; waits for the device.
        """
        zero = self.optimizer
        sums = edq.local_sums(
            zero.optimizer, lr=lr, clip_coefficient=clip_coefficient, counted=zero.unshared
        )
        flat = torch.cat(list(sums.values()))
        dist.all_reduce(flat, group=zero.norm_group)
        parts = flat.split([part.numel() for part in sums.values()])
        return edq.to_metrics(zero.optimizer.recipe, dict(zip(sums, parts, strict=True)))

    @property
    def fallen(self) -> frozenset[int]:
        """The layers that precision.guard lets compute in BF16 as a whole, by number, from 1."""
        return frozenset() if self.guard is None else self.guard.fallen.layers

    def change_layers(self, in_bf16: Collection[int], tensors: Collection[str] = ()) -> None:
        """Let the FP8 layers with these numbers, and no others, compute in BF16 in later steps.

        In the others the `tensors`, keys LAYER/TENSOR, and no others are in BF16.
        """
        change_layers(self._layers(), in_bf16, tensors)
        for graphs in (self.step_graph, self.graphs):
            if graphs is not None:
                graphs.reset()

    def _layers(self) -> list[Any]:
        """The layers of this rank's stage."""
        return [layer for chunk in self.chunks for layer in chunk.module.decoder.layers]

    @contextmanager
    def watch_numerics(self, *, sampled: bool = False) -> Iterator[dict[int, numerics.Probe]]:
        """Probe the layers of this rank in a step; no probes where dp > 0.

        `sampled`: no residual stream, only some rows. Weights that were gathered as codes have no
        error left to measure. With CUDA graphs the first microbatch, or step, is eager everywhere.
        """
        exact = self.config.parallel.weight_gather != "fp8" or self.groups.dp_cp.size() == 1
        layers = [] if self.groups.dp.rank() else self._layers()
        inputs = {} if sampled else {layer.layer_number: layer for layer in layers}
        if self.graphs is not None:
            self.graphs.observed = True
        try:
            probed: dict[int, numerics.Probed] = {**flows_of(layers)}
            if layers and self.groups.last_stage:
                probed[self.config.model.output_number] = self.chunks[-1].module
            with numerics.watched(probed, inputs, sampled=sampled, weights=exact) as probes:
                yield probes
        finally:
            if self.graphs is not None:
                self.graphs.observed = False

    def measure_numerics(
        self, probes: Mapping[int, numerics.Probe]
    ) -> list[numerics.NumericsRecord]:
        """The quantization errors by `numerics.report`; a collective call of ranks with dp rank 0.

        Empty on ranks with another dp rank.
        """
        if self.groups.dp.rank():
            return []
        layers, where = self.config.model.output_number, device()
        found = numerics.collect(probes, self.groups, layers=layers, device=where)
        return self.logits.observe(numerics.report(*found))

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """The mean loss per token over `batches`, fp32 on the device."""
        for chunk in self.chunks:
            chunk.eval()
        return self._run(batches, forward_only=True, enter=ignore)

    def place(self, batches: Sequence[Microbatch]) -> list[Batch]:
        """This rank's context-parallel slice of each microbatch."""
        cp, zigzag = self.groups.cp, self.config.context_comm != "a2a"
        cp_slice = partial(context_parallel.cp_slice, zigzag=zigzag)
        return [{**cp_slice(batch, cp.rank(), cp.size())} for batch in batches]

    def _run(
        self,
        batches: Sequence[Batch],
        *,
        forward_only: bool,
        enter: Callable[[str | None], None],
    ) -> Tensor:
        return run_microbatches(
            self.chunks,
            batches,
            self.groups,
            seq_len=self.config.data.seq_len,
            forward_only=forward_only,
            enter=enter,
            graphs=self.graphs,
        )


def ignore(phase: str | None) -> None:
    """A phase that is not timed: of an evaluation."""
