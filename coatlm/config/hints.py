"""Suggest which key a user meant by an unknown one.

Candidates are tried in this order: keys of that name in any section; names that Megatron-LM,
Hugging Face, TorchTitan and PyTorch use for a key of coatlm; similar names in the same section;
similar names in all sections.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from coatlm.config.keys import keys
from coatlm.config.program import as_typed

NEAR, NEAR_ELSEWHERE = 0.66, 0.8  # least similarity by difflib, 0 to 1: same section, all sections
LEAST_PREFIX = 4  # characters; a shorter prefix of a key is not taken for the key

SYNONYMS = {  # name in another program -> key
    "accumulate_allreduce_grads_in_fp32": "parallel.main_grads",
    "activation_checkpoint": "train.recompute",
    "activation_checkpointing": "train.recompute",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "adam_eps": "optim.eps",
    "adam_epsilon": "optim.eps",
    "async_mode": "checkpoint.async_save",
    "attention_bias": "model.qkv_bias",
    "add_qkv_bias": "model.qkv_bias",
    "attn_logit_softcapping": "model.attention_softcap",
    "batch_size": "train.global_batch",
    "beta1": "optim.betas",
    "beta2": "optim.betas",
    "checkpoint_interval": "checkpoint.every",
    "checkpointing": "checkpoint",
    "context_length": "data.seq_len",
    "context_parallel": "parallel.cp",
    "context_parallel_degree": "parallel.cp",
    "context_parallel_size": "parallel.cp",
    "data_path": "data.paths",
    "dataset": "data.paths",
    "dataset_path": "data.paths",
    "dtype": "precision.recipe",
    "dump_folder": "run.dir",
    "epsilon": "optim.eps",
    "eval_interval": "train.eval_every",
    "eval_iters": "train.eval_batches",
    "eval_steps": "train.eval_every",
    "ffn_hidden_size": "model.ffn",
    "final_logit_softcapping": "model.logits_softcap",
    "fp8": "precision.recipe",
    "fp8_recipe": "precision.recipe",
    "global_batch_size": "train.global_batch",
    "grad_clip": "optim.clip_grad",
    "gradient_accumulation_steps": "train.global_batch",
    "gradient_checkpointing": "train.recompute",
    "gradient_clipping": "optim.clip_grad",
    "hidden_act": "model.activation",
    "hidden_dim": "model.hidden",
    "hidden_size": "model.hidden",
    "init_method_std": "model.init_std",
    "initial_load_path": "checkpoint.resume",
    "initializer_range": "model.init_std",
    "intermediate_size": "model.ffn",
    "keep_latest_k": "checkpoint.keep",
    "kv_channels": "model.head_dim",
    "learning_rate": "optim.lr",
    "load": "checkpoint.resume",
    "local_batch_size": "train.micro_batch",
    "log_freq": "log.every",
    "log_interval": "log.every",
    "logging": "log",
    "logging_steps": "log.every",
    "lr_decay_iters": "optim.decay_steps",
    "lr_decay_style": "optim.schedule",
    "lr_min": "optim.min_lr",
    "lr_scheduler": "optim.schedule",
    "lr_scheduler_type": "optim.schedule",
    "lr_warmup_iters": "optim.warmup_steps",
    "lr_warmup_steps": "optim.warmup_steps",
    "max_grad_norm": "optim.clip_grad",
    "max_iters": "train.steps",
    "max_lr": "optim.lr",
    "max_norm": "optim.clip_grad",
    "max_position_embeddings": "data.seq_len",
    "max_seq_len": "data.seq_len",
    "max_steps": "train.steps",
    "mbs": "train.micro_batch",
    "micro_batch_size": "train.micro_batch",
    "mixed_precision": "precision.recipe",
    "n_embd": "model.hidden",
    "n_head": "model.heads",
    "n_heads": "model.heads",
    "n_kv_heads": "model.kv_heads",
    "n_layer": "model.layers",
    "n_layers": "model.layers",
    "norm_epsilon": "model.norm_eps",
    "num_attention_heads": "model.heads",
    "num_heads": "model.heads",
    "num_hidden_layers": "model.layers",
    "num_key_value_heads": "model.kv_heads",
    "num_layers": "model.layers",
    "num_layers_per_virtual_pipeline_stage": "parallel.vpp",
    "num_query_groups": "model.kv_heads",
    "num_training_steps": "train.steps",
    "num_virtual_stages_per_pipeline_rank": "parallel.vpp",
    "optimizer": "optim",
    "output_dir": "run.dir",
    "parallelism": "parallel",
    "per_device_train_batch_size": "train.micro_batch",
    "pipeline_model_parallel_size": "parallel.pp",
    "pipeline_parallel": "parallel.pp",
    "pipeline_parallel_degree": "parallel.pp",
    "pipeline_parallel_size": "parallel.pp",
    "qk_layernorm": "model.qk_norm",
    "recompute_granularity": "train.recompute",
    "resume_from_checkpoint": "checkpoint.resume",
    "rms_norm_eps": "model.norm_eps",
    "rotary_base": "model.rope_theta",
    "save": "run.dir",
    "save_every": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "scheduler": "optim.schedule",
    "seq_length": "data.seq_len",
    "sequence_length": "data.seq_len",
    "sliding_window": "model.window.size",
    "tensor_model_parallel_size": "parallel.tp",
    "tensor_parallel": "parallel.tp",
    "tensor_parallel_degree": "parallel.tp",
    "tensor_parallel_size": "parallel.tp",
    "tie_word_embeddings": "model.tie_embeddings",
    "tokenizer_model": "data.tokenizer",
    "tokenizer_path": "data.tokenizer",
    "total_steps": "train.steps",
    "train_iters": "train.steps",
    "train_steps": "train.steps",
    "training": "train",
    "transformer_impl": "model.spec",
    "use_distributed_optimizer": "parallel.zero",
    "vocab_size": "model.vocab",
    "wandb": "log.wandb_project",
    "warmup": "optim.warmup_steps",
    "warmup_iters": "optim.warmup_steps",
    "wd": "optim.weight_decay",
    "window_size": "model.window.size",
    "zero_stage": "parallel.zero",
}


def hint(location: Sequence[str | int]) -> str:
    """The suggestion for an unknown key at `location`, a path of names and list indices."""
    *outer, last = location
    name = str(last).strip("-").replace("-", "_").lower()
    known = ["preset", *(key.name for key in keys())]
    if not outer and "." in name and name in known:
        head, _, tail = name.partition(".")
        return f"in a file, write {tail} inside the section {head}"
    found = [key for key in known if _leaf(key) == name]
    if not found and name in SYNONYMS:
        found = [SYNONYMS[name]]
    found = found or _similar(name, outer, known)
    if not found:
        section = f" {outer[0]}" if outer else ""
        return as_typed(f"coatlm train --keys{section} lists the known ones")
    return f"do you mean {' or '.join(found)}?"


def _similar(name: str, outer: Sequence[str | int], known: Sequence[str]) -> list[str]:
    """The most similar key of the same section, else of all sections; empty if none is similar."""
    pattern = "".join("[]" if isinstance(part, int) else f".{part}" for part in outer).lstrip(".")
    siblings = [_leaf(key) for key in known if key.rpartition(".")[0] == pattern]
    near = _nearest(name, siblings, NEAR)
    if near:
        return [".".join(map(str, [*outer, near]))]
    near = _nearest(name, map(_leaf, known), NEAR_ELSEWHERE)
    return [key for key in known if _leaf(key) == near]


def _nearest(name: str, names: Iterable[str], cutoff: float) -> str | None:
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    begun = [known for known in names if len(name) >= LEAST_PREFIX and known.startswith(name)]
    return next(iter([*near, *begun]), None)


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]
