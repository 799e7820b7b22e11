"""Checkpoints that megatron-core itself writes and reads, for tests: its own model and optimizer.

Nothing of coatlm is involved but the hook by which megatron-core runs on a CPU. `run_all` is called
in each process of a group and runs a list of jobs.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from coatlm import megatron  # noqa: F401 # the hook comes before megatron.core

from megatron.core import (  # isort: skip
    dist_checkpointing,
    parallel_state,
    tensor_parallel,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject  # isort: skip
from megatron.core.distributed import (  # isort: skip
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # isort: skip
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # isort: skip
from megatron.core.transformer.enums import AttnBackend  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

VOCAB, STEPS = 384, 3
SIZES = {
    **{"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2},
    **{"kv_channels": 24, "ffn_hidden_size": 96},
}
ARGUMENTS = {  # of Megatron-LM, for the same model
    **SIZES,
    **{"norm_epsilon": 1e-3, "rotary_base": 500, "normalization": "RMSNorm", "swiglu": True},
    **{"group_query_attention": True, "position_embedding_type": "rope", "add_bias_linear": False},
    **{"seq_length": 32, "lr": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.95, "num_experts": None},
    **{"train_iters": 9, "global_batch_size": 2, "micro_batch_size": 2, "lr_warmup_iters": 1},
    **{"consumed_train_samples": 6, "attention_dropout": 0.1, "lr_decay_style": "constant"},
    **{"min_lr": 0.0, "lr_decay_iters": 9, "lr_warmup_init": 0.0, "weight_decay": 0.02},
    **{"start_weight_decay": 0.02, "end_weight_decay": 0.02},
    **{"weight_decay_incr_style": "constant"},
}
FUSIONS = (
    *("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"),
    *("persist_layer_norm", "apply_rope_fusion", "gradient_accumulation_fusion"),
)


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (2, 32), generator=torch.Generator().manual_seed(7))


def build(job: dict[str, Any]) -> list[Any]:
    """The chunks of this stage."""
    bf16, pp = job["bf16"], parallel_state.get_pipeline_model_parallel_world_size()
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        **SIZES,
        **dict.fromkeys(FUSIONS, False),
        normalization="RMSNorm",
        layernorm_epsilon=1e-3,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=job["bias"],
        qk_layernorm=job["norm"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.2,
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=job["vpp"],
        use_cpu_initialization=True,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=job["norm"])
    stage, chunks = parallel_state.get_pipeline_model_parallel_rank(), job["vpp"] or 1
    return [
        GPTModel(
            config,
            spec,
            vocab_size=VOCAB,
            max_sequence_length=64,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == pp - 1 and chunk == chunks - 1,
            position_embedding_type="rope",
            rotary_base=500,
            share_embeddings_and_output_weights=job["tied"],
            vp_stage=chunk if job["vpp"] else None,
        ).to(dtype)
        for chunk in range(chunks)
    ]


def forward(model: Any, labels: Tensor | None = None) -> Tensor:
    positions = torch.arange(32)[None].expand(2, -1)
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool).triu(1)
    return model(tokens(), positions, mask, labels=labels)


def trained(chunks: list[Any], job: dict[str, Any]) -> Any:
    """Megatron's optimizer after STEPS steps of the model, which has one chunk.

    With `load`, after one step with gradients of zero, which allocates the states to load into.
    """
    sharded = job["optimizer"] != "plain"
    models = [
        DistributedDataParallel(
            chunk.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=sharded,
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=job["bucket"] is not None,
                bucket_size=job["bucket"],
            ),
            chunk,
            disable_bucketing=number > 0,  # as Megatron-LM does
        )
        for number, chunk in enumerate(chunks)
    ]
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        min_lr=0.0,  # the default of Megatron-LM; 0.19 tells groups of parameters apart by it
        bf16=job["bf16"],
        params_dtype=torch.bfloat16 if job["bf16"] else torch.float32,
        use_distributed_optimizer=sharded,
    )
    optimizer = get_megatron_optimizer(config, models)
    for _ in range(1 if job["load"] else STEPS):
        for ddp in models:
            ddp.zero_grad_buffer()
        optimizer.zero_grad()
        if not job["load"]:
            (ddp,) = models
            forward(ddp, tokens().roll(-1, 1)).float().mean().backward()
            ddp.finish_grad_sync()
        optimizer.step()
    return optimizer


def schedule(optimizer: Any, arguments: argparse.Namespace) -> OptimizerParamScheduler:
    """Megatron's schedule of a run with these arguments, which counts samples."""
    a, batch = arguments, arguments.global_batch_size
    decay = getattr(a, "lr_wsd_decay_iters", None)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=a.lr_warmup_init,
        max_lr=a.lr,
        min_lr=a.min_lr,
        lr_warmup_steps=a.lr_warmup_iters * batch,
        lr_decay_steps=a.lr_decay_iters * batch,
        lr_decay_style=a.lr_decay_style,
        start_wd=a.start_weight_decay,
        end_wd=a.end_weight_decay,
        wd_incr_steps=a.train_iters * batch,
        wd_incr_style=a.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=False,  # a checkpoint must have the same values
        wsd_decay_steps=None if decay is None else decay * batch,
        lr_wsd_decay_style=getattr(a, "lr_wsd_decay_style", None),
    )


def random_states(*, sharded: bool) -> Any:
    """The states of random generators, in the form that a format of Megatron-LM has."""
    states = {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}
    states |= {"torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {}}
    if not sharded:
        return [states]
    tp = parallel_state.get_tensor_model_parallel_rank()
    pp = parallel_state.get_pipeline_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", [states], layout()[::-1], (pp, tp), replica_id=replica)


def layout() -> tuple[int, int]:
    """The sizes of tensor and pipeline parallelism."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    return tp, parallel_state.get_pipeline_model_parallel_world_size()


def metadata_of(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "non_homogeneous_layers": job["layers"] == "separate",
        "singleton_local_shards": job["layers"] == "halves",
        "chained_optim_avoid_prefix": True,
    }
    if job["optimizer"] not in (None, "plain"):
        found["distrib_optim_sharding_type"] = job["optimizer"]
    return found


def state_of(chunks: list[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    return {n: c.sharded_state_dict(metadata=metadata) for n, c in zip(names, chunks, strict=True)}


def load(chunks: list[Any], optimizer: Any, scheduler: Any, source: str) -> None:
    """Load a checkpoint as Megatron-LM does: its metadata and arguments say what to ask for."""
    common = dist_checkpointing.load_common_state_dict(source)
    metadata, arguments = common["content_metadata"], common["args"]
    model = state_of(chunks, metadata)
    state = dict(model)
    release = Path(source).name == "release"
    sizes = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
    resumed = sizes == layout() and not release and not getattr(arguments, "no_save_rng", False)
    if resumed:
        state["rng_state"] = random_states(sharded=True)
    if optimizer is not None:
        assert not release and not getattr(arguments, "no_save_optim", False)
        state["optimizer"] = optimizer.sharded_state_dict(
            model.copy(), is_loading=True, metadata=metadata
        )
    found = dist_checkpointing.load(state, source)
    for name, chunk in zip(model, chunks, strict=True):
        chunk.load_state_dict(found[name], strict=True)
    if optimizer is not None:
        take_step(optimizer.chained_optimizers[0], found["optimizer"])
        optimizer.load_state_dict(found["optimizer"])
        scheduler.load_state_dict(found["opt_param_scheduler"])
    if resumed:
        random.setstate(found["rng_state"][0]["random_rng_state"])


def take_step(optimizer: Any, state: dict[str, Any]) -> None:
    """Let a distributed optimizer without TransformerEngine load this format.

    torch's Adam has a step per parameter, which megatron-core 0.16 neither saves nor expects here.
    """
    original = optimizer._set_main_param_and_optimizer_states
    step = torch.tensor(float(state["optimizer"]["param_groups"][0]["step"]))
    optimizer._set_main_param_and_optimizer_states = lambda param, tensors: original(
        param, {**tensors, "step": step}
    )


def save(chunks: list[Any], optimizer: Any, scheduler: Any, job: dict[str, Any]) -> None:
    """A torch_dist checkpoint, or pickles of ranks with `pickles`."""
    directory = Path(job["save"])
    arguments = ARGUMENTS | {"add_qkv_bias": job["bias"], "qk_layernorm": job["norm"]}
    arguments |= {"untie_embeddings_and_output_weights": not job["tied"]}
    arguments |= {"attention_backend": AttnBackend.auto, "params_dtype": torch.bfloat16}
    sizes = zip(("tensor", "pipeline"), layout(), strict=True)
    arguments |= {f"{name}_model_parallel_size": size for name, size in sizes}
    common: dict[str, Any] = {"args": argparse.Namespace(**arguments), "iteration": STEPS}
    if scheduler is not None:
        common["opt_param_scheduler"] = scheduler.state_dict()
    common["rng_state"] = random_states(sharded=not job["pickles"])
    if job["pickles"]:
        tp = parallel_state.get_tensor_model_parallel_rank()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        pp = parallel_state.get_pipeline_model_parallel_world_size()
        name = f"mp_rank_{tp:02d}" + (f"_{stage:03d}" if pp > 1 else "")
        names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
        states = [chunk.state_dict_for_save_checkpoint() for chunk in chunks]
        (directory / name).mkdir(parents=True)
        content = common | dict(zip(names, states, strict=True))
        torch.save(content, directory / name / "model_optim_rng.pt")
        return
    metadata = metadata_of(job)
    state = state_of(chunks, metadata)
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state.copy(), metadata=metadata)
    directory.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state | common, str(directory), content_metadata=metadata)


DEFAULTS: dict[str, Any] = {
    **{"bf16": True, "bias": True, "norm": False, "tied": False, "layers": "separate"},
    **{"optimizer": None, "load": None, "save": None, "pickles": False, "logits": None},
    **{"tp": 1, "pp": 1, "vpp": None, "bucket": None},
}


def run_all(rank: int, size: int, jobs: list[dict[str, Any]]) -> None:
    """Build, train or load, save, compute logits: whatever each job asks for."""
    torch.distributed.init_process_group("gloo")
    for given in jobs:
        job = DEFAULTS | given
        parallel_state.initialize_model_parallel(
            job["tp"], job["pp"], virtual_pipeline_model_parallel_size=job["vpp"]
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        torch.manual_seed(1)
        chunks = build(job)
        optimizer = trained(chunks, job) if job["optimizer"] else None
        given_arguments = argparse.Namespace(**ARGUMENTS)
        scheduler = schedule(optimizer, given_arguments) if optimizer is not None else None
        if job["load"]:
            load(chunks, optimizer, scheduler, job["load"])
        elif scheduler is not None:
            scheduler.step(STEPS * given_arguments.global_batch_size)
        if job["save"]:
            save(chunks, optimizer, scheduler, job)
        if job["logits"]:
            with torch.no_grad():
                torch.save(forward(chunks[0].eval()).float(), job["logits"])
        parallel_state.destroy_model_parallel()
