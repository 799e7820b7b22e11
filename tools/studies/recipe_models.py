"""One Llama under several FP8 recipes in one process: the same weights, each recipe's gradients.

The models have untied embeddings: a checkpoint with tied ones is loaded into both. Weights and
gradients are dictionaries from the keys of a checkpoint to fp32 tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coatlm.config import Config, make_config
from coatlm.config.recipes import TE_RECIPES
from coatlm.data.batches import Microbatch
from coatlm.files import STATE_PREFIX
from coatlm.model.builder import build_model
from coatlm.parallel.buckets import Cut
from coatlm.parallel.collectives import Traffic
from coatlm.parallel.flat_model import FlatModel
from coatlm.parallel.groups import Groups, make_groups, release_groups
from coatlm.parallel.regions import sharded_tensors
from coatlm.parallel.wire import Plain
from coatlm.train.setup import Launch, start_processes
from coatlm.train.shards import StoredTensors
from tools.studies.outliers import EMBEDDING, FINAL, OUTPUT, Activations, Weights
from tools.studies.smoothing import smooth_layers

SETTLED = 1e-3  # relative change of a gradient between equal microbatches


@dataclass(frozen=True)
class Result:
    """What a model computes from one microbatch."""

    losses: Tensor  # fp32 [tokens that count]
    gradients: Weights  # of their mean, fp32


class RecipeModel:
    """A model whose layers follow one `precision.recipe`, with fp32 main gradients."""

    def __init__(self, config: Config, groups: Groups, vocab: int, *, smooth: bool = False) -> None:
        """`smooth`: the FP8 layers smooth their down projections (smoothing.py)."""
        (self.module,) = build_model(config, groups, vocab)
        if smooth:
            smooth_layers(self.module)
        cut = Cut(
            rank=0,
            ranks=1,
            zero=0,
            grad_dtype=torch.float32,
            bucket_size=config.parallel.bucket_size,
        )
        self.flat = FlatModel(
            self.module,
            group=groups.dp_cp,
            cut=cut,
            wire=Plain(torch.float32),
            traffic=Traffic(),
            overlap_grad_reduce=False,
            overlap_param_gather=False,
        )
        named = dict(self.module.named_parameters())
        self.parameters = {item.key: named[name] for name, item in sharded_tensors(self.module)}
        self.delayed = config.precision.recipe == "te-delayed"

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Copy `weights` into the model. Raises ValueError if keys or shapes do not fit."""
        if weights.keys() != self.parameters.keys():
            differing = sorted(weights.keys() ^ self.parameters.keys())
            raise ValueError(f"{differing[0]}: in the checkpoint or in the model, but not in both")
        for key, parameter in self.parameters.items():
            if weights[key].shape != parameter.shape:
                raise ValueError(
                    f"{key}: {list(weights[key].shape)} in the checkpoint, "
                    f"{list(parameter.shape)} in the model"
                )
            parameter.copy_(weights[key])

    def run(self, batch: Microbatch) -> Result:
        """Forward and backward of one microbatch, whose weights may be new."""
        flat = self.flat
        flat.train()
        flat.zero_grad_buffer()
        flat.set_is_first_microbatch()
        with flat.no_sync():
            losses = flat(batch["tokens"], batch["labels"], batch["document_bounds"])
            losses = losses[batch["loss_mask"] > 0]
            losses.mean().backward()
        gradients = {key: p.main_grad.clone() for key, p in self.parameters.items()}
        return Result(losses.detach().float(), gradients)

    def settle(self, batch: Microbatch) -> None:
        """Repeat a microbatch until the delayed scales, which earlier ones determine, stay.

        Gradients below the first scales become zero, so each repetition reaches one GEMM further.
        It ends after as many as there are GEMMs: gradients that overflow never settle.
        """
        key = "decoder.layers.0.self_attention.linear_qkv.weight"
        before = torch.zeros_like(self.parameters[key], dtype=torch.float32)
        for _ in range(8 * len(self.module.decoder.layers) + 2):
            now = self.run(batch).gradients[key]
            # attention's backward may add in another order each time
            if now.any() and (now - before).norm() < SETTLED * now.norm():
                return
            before = now

    @torch.no_grad()
    def activations(self, batches: Sequence[Microbatch]) -> Activations:
        """The inputs of the norms over the residual stream, and of linears.

        For recipes whose layers consist of modules: fp32 and bf16.
        """
        stream: dict[str, list[Tensor]] = {}
        linear: dict[str, list[Tensor]] = {}
        hooks = []

        def watch(module: nn.Module, into: dict[str, list[Tensor]], key: str) -> None:
            into[key] = []

            def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                into[key].append(inputs[0].flatten(0, -2).float().clone())

            hooks.append(module.register_forward_pre_hook(keep))

        for number, layer in enumerate(self.module.decoder.layers):
            prefix, attention, mlp = f"decoder.layers.{number}", layer.self_attention, layer.mlp
            first, second = f"{prefix}.self_attention.linear_", f"{prefix}.mlp.linear_"
            watch(layer.input_layernorm, stream, f"{first}qkv.layer_norm_weight")
            watch(layer.pre_mlp_layernorm, stream, f"{second}fc1.layer_norm_weight")
            watch(attention.linear_proj, linear, f"{first}proj.weight")
            watch(mlp.linear_fc1, linear, f"{second}fc1.weight")
            watch(mlp.linear_fc2, linear, f"{second}fc2.weight")
        watch(self.module.decoder.final_layernorm, stream, FINAL)
        try:
            for batch in batches:
                self.module(batch["tokens"], batch["labels"], batch["document_bounds"])
        finally:
            for hook in hooks:
                hook.remove()
        return Activations(
            {key: torch.cat(parts) for key, parts in stream.items()},
            {key: torch.cat(parts) for key, parts in linear.items()},
            eps=self.module.config.layernorm_epsilon,
        )


@contextmanager
def one_process() -> Iterator[Groups]:
    """The process groups of a run of one process."""
    start_processes(Launch())
    try:
        yield make_groups(make_config({"data": {"text": "python-stdlib"}}).parallel)
    finally:
        release_groups()
        torch.distributed.destroy_process_group()


def config_of(saved: Config, recipe: str, **precision: Any) -> Config:
    """The configuration of the saved model under another recipe. Raises ConfigError.

    `precision`: other keys of that section.
    """
    config = saved.model_dump(mode="json")
    spec = "te" if recipe in TE_RECIPES else "local"
    size = saved.train.micro_batch
    return make_config(
        {
            "model": {**config["model"], "spec": spec, "tie_embeddings": False},
            "data": config["data"],
            "precision": {"recipe": recipe, **precision},
            "train": {"micro_batch": size, "global_batch": size},
        }
    )


def is_layer_matrix(key: str, x: Tensor) -> bool:
    """Whether a tensor of a checkpoint is a weight matrix of a layer."""
    return key.startswith("decoder.layers.") and x.dim() == 2


def described(checkpoint: Path, step: int, batches: Sequence[Microbatch]) -> dict[str, Any]:
    """What a study's result says of the checkpoint, the device and the data."""
    return {
        "checkpoint": str(checkpoint),
        "step": step,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "batches": len(batches),
        "tokens_per_batch": batches[0]["tokens"].numel(),
    }


def read_weights(checkpoint: Path, device: torch.device) -> Weights:
    """Read the weights of a checkpoint to `device`. Raises ValueError, CheckpointError."""
    stored = StoredTensors(checkpoint)
    if EMBEDDING not in stored.described:
        raise ValueError(f"{checkpoint}: {EMBEDDING} is missing")
    weights = {
        key: stored.read(key).float().to(device)
        for key in stored.described
        if not key.startswith(STATE_PREFIX)
    }
    weights.setdefault(OUTPUT, weights[EMBEDDING].clone())
    return weights
