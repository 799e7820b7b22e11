"""The model, its buffers and its optimizer, and one training step of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from coatlm.config import Config
from coatlm.data import dataset
from coatlm.model import numerics
from coatlm.model.builder import build_model, token_positions
from coatlm.model.coat_layer import flows_of, tune_layers
from coatlm.optim import edq
from coatlm.optim.adamw import AdamW, Shard
from coatlm.parallel.buffers import FlatModel
from coatlm.parallel.groups import Groups
from coatlm.parallel.pipeline import Batch, MicrobatchGraph, run_microbatches
from coatlm.parallel.zero import ZeroOptimizer
from coatlm.platform import device
from coatlm.train.spikes import SpikeGuard
from coatlm.train.stragglers import PhaseTimer

GRAD_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Trainer:
    """Everything that a step changes. `vocab` is the padded vocabulary."""

    def __init__(self, config: Config, groups: Groups, vocab: int) -> None:
        self.config, self.groups = config, groups
        p, o = config.parallel, config.optim
        recorded = config.train.cuda_graphs
        if recorded and device().type != "cuda":
            raise ValueError("train.cuda_graphs=true needs a GPU")
        self.chunks = [
            FlatModel(
                chunk,
                group=groups.dp_cp,
                shard=p.zero > 0,
                grad_dtype=GRAD_DTYPES[p.main_grads],
                bucket_size=p.bucket_size,
                overlap_grad_reduce=p.overlap_grad_reduce,
                overlap_param_gather=p.overlap_param_gather,
                stream=torch.cuda.Stream() if recorded else None,
            )
            for chunk in build_model(config, groups, vocab)
        ]
        self.timer = PhaseTimer(cuda=device().type == "cuda")
        t = config.train
        self.spikes = (
            SpikeGuard(t.spike_sigma, t.spike_window, device=device(), group=groups.world)
            if t.spike_sigma
            else None
        )
        if config.precision.tune_gemms:
            tokens = config.train.micro_batch * config.data.seq_len // p.cp
            for chunk in self.chunks:
                tune_layers(chunk.module.decoder.layers, tokens, GRAD_DTYPES[p.main_grads])
        self.graph = MicrobatchGraph(self.chunks[0]) if recorded else None
        self.optimizer = ZeroOptimizer(
            self.chunks,
            groups,
            clip_grad=o.clip_grad,
            make_shard=Shard,
            make_optimizer=partial(
                AdamW, recipe=o.recipe, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay
            ),
        )

    @property
    def spike(self) -> Tensor:
        """Whether the last step was skipped as a spike: bool on the device."""
        guard = self.spikes
        return torch.zeros((), dtype=torch.bool, device=device()) if guard is None else guard.spike

    def train_step(
        self,
        batches: Sequence[Batch],
        lr: float,
        *,
        observe: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One update. Returns loss and gradient norm, fp32 on the device, the same on all ranks.

        `observe` is called with the clip coefficient when gradients are complete.
        """
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        loss = self._run(batches, forward_only=False)
        accepts = partial(self.spikes.accepts, loss) if self.spikes is not None else None
        return loss, self.optimizer.step(
            lr, accepts=accepts, observe=observe, enter=self.timer.enter
        )

    def measure_states(self, lr: float, clip_coefficient: Tensor) -> dict[str, float]:
        """`edq.report` of the step under way, the same on all ranks; waits for the device."""
        zero = self.optimizer
        sums = edq.collect(
            zero.optimizer, lr=lr, clip_coefficient=clip_coefficient, owned=zero.owned
        )
        flat = torch.cat(list(sums.values()))
        dist.all_reduce(flat, group=zero.norm_group)
        parts = flat.split([part.numel() for part in sums.values()])
        return edq.report(zero.optimizer.recipe, dict(zip(sums, parts, strict=True)))

    def watch_numerics(self) -> AbstractContextManager[dict[int, numerics.Probe]]:
        """Probes in the FP8 layers of this rank, for a step inside; none but on dp rank 0."""
        chunks = [] if self.groups.dp.rank() else self.chunks
        layers = [layer for chunk in chunks for layer in chunk.module.decoder.layers]
        return numerics.watched(flows_of(layers))

    def measure_numerics(self, probes: Mapping[int, numerics.Probe]) -> list[numerics.Record]:
        """`numerics.report` of the probes of all ranks, on those of dp rank 0; waits for them."""
        if self.groups.dp.rank():
            return []
        layers, where = self.config.model.layers, device()
        return numerics.report(*numerics.collect(probes, self.groups, layers=layers, device=where))

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """Mean loss a token over `batches`, fp32 on the device."""
        for chunk in self.chunks:
            chunk.eval()
        return self._run(batches, forward_only=True)

    def place(self, batches: Sequence[dataset.Batch]) -> list[Batch]:
        """This rank's part of microbatches of whole samples, with attention masks where needed."""
        cp = self.groups.cp
        placed: list[Batch] = []
        for batch in batches:
            part: Batch = {**dataset.cp_slice(batch, cp.rank(), cp.size()), "attention_mask": None}
            ids = batch["document_ids"]
            if ids is not None:
                positions = token_positions(self.config.data.seq_len, self.groups)
                part["attention_mask"] = dataset.attention_mask(ids, positions)
            placed.append(part)
        return placed

    def _run(self, batches: Sequence[Batch], *, forward_only: bool) -> Tensor:
        return run_microbatches(
            self.chunks,
            batches,
            self.groups,
            seq_len=self.config.data.seq_len,
            forward_only=forward_only,
            enter=ignore if forward_only else self.timer.enter,
            graph=self.graph,
        )


def ignore(phase: str | None) -> None:
    """Evaluations are not timed."""
